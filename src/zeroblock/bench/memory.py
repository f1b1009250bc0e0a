"""The paper's theoretical table of peak memory, for any model and every method of the library.

It counts parameters: the weights, and the tensors that a step holds in addition.  W_ℓ is one tensor, since
perturbations are drawn, used and dropped one tensor at a time.

    MeZO         Σ|W_ℓ| + max|W_ℓ|
    SparseMeZO   Σ|W_ℓ| + max|W_ℓ| (noise) + max|W_ℓ| (mask)
    LOZO         Σ|W_ℓ| + max m_ℓ·r (U) + Σ n_ℓ·r (V)
    MeZO-BCD     Σ|W_ℓ| + max over the block's |W_ℓ|
    HiZOO        Σ|W_ℓ| + max|W_ℓ| + Σ|W_ℓ| (diagonal of the Hessian)
    ConMeZO      Σ|W_ℓ| + max|W_ℓ| + Σ|W_ℓ| (momentum)
    SubZero      Σ|W_ℓ| + max|W_ℓ| + Σ(m_ℓ + n_ℓ)·r (U and V)
    ZO-Muon      Σ|W_ℓ| + max|W_ℓ| + Σ m_ℓ·r (U) + q·Σ r·n_ℓ (z of every query)
    EGGROLL      Σ|W_ℓ| + max (m_ℓ + n_ℓ)·r (A and B of one member), r = 1
    MeZO-SVRG    2·Σ|W_ℓ| + max|W_ℓ|

The last six are not in the paper: they count what the authors' codes hold, in the dtype of the weights.  zeroblock
keeps the states of HiZOO and ConMeZO, momenta and frames in fp32.  It draws LOZO's V and z again instead of keeping
them, and keeps the sum of a folded run's steps in coordinates: see :attr:`Need.kept_here`.

FZOO, MeZO-Greedy, AdaMeZO and the sign need as much as MeZO; LeZO, AdaLeZO and adaptive blocks as much as MeZO-BCD.
Adam adds two moments for every weight, or with MeZO-BCD for the weights of the largest block.  Momentum adds one number
per weight, or m_ℓ·r per matrix for LOZO-M.  The table leaves activations out; :func:`forward` gives the size of the two
largest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ..block import layers
from ..quantise import elements, stored_bytes
from .row import BenchRow

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Need:
    """Number of parameters that a method needs at its peak.

    Args:
        method: the library's name of it.
        weights: weights of the model.
        held: noise, mask and factors that exist only for a moment.
        kept: factors and moments that stay from step to step.
        bytes_each: bytes per weight.
        own_bytes: bytes that `zeroblock train` keeps from step to step; None if it keeps the same.
        stored_bytes: bytes of the model's weights, where some are stored as integers; None where none are.
    """

    method: str
    weights: int
    held: int
    kept: int
    bytes_each: int
    own_bytes: int | None = None
    stored_bytes: int | None = None

    @property
    def weights_bytes(self) -> int:
        """Bytes of the model's weights as they are stored."""
        return self.weights * self.bytes_each if self.stored_bytes is None else self.stored_bytes

    @property
    def kept_here(self) -> int:
        """Bytes that zeroblock keeps from step to step."""
        return self.kept * self.bytes_each if self.own_bytes is None else self.own_bytes

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.held + self.kept

    @property
    def total_bytes(self) -> int:
        """The sum in bytes, all but integers in the dtype of the weights."""
        return self.weights_bytes + (self.held + self.kept) * self.bytes_each

    @property
    def over_weights(self) -> float:
        """The sum as a multiple of the weights."""
        return self.total / self.weights


@dataclasses.dataclass(frozen=True)
class Forward:
    """Bytes of the two largest activations in a forward pass of padded rows; the table leaves them out.

    Args:
        rows: number of rows, one per option.
        length: tokens per row.
        logits: one copy, at every position; the published loss makes two more.
        cache: keys and values of all layers, which transformers keeps by default.
    """

    rows: int
    length: int
    logits: int
    cache: int


FRAME_RANK, QUERIES = 64, 4
"""Rank of SubZero's and ZO-Muon's frames, and queries of a step of ZO-Muon, as in their authors' examples."""


def table(model: nn.Module, bytes_each: int, rank: int = 2) -> list[Need]:
    """The memory that the methods need as published, one row per method of the library.

    Args:
        model: it needs no weights and may be on the meta device.
        bytes_each: bytes per weight.
        rank: LOZO's r.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    sizes = {name: elements(param) for name, param in params.items()}
    weights, largest = sum(map(elements, model.parameters())), max(sizes.values())
    stored = stored_bytes(model, bytes_each)
    matrices = [(p.shape[0], p[0].numel()) for p in params.values() if p.dim() >= 2]
    blocks = [block.params for block in layers(model)]
    # every block has its turn, so some step holds the largest tensor of all
    in_block = max(max(sizes[n] for n in names) for names in blocks)
    block = max(sum(sizes[n] for n in names) for names in blocks)

    trained = sum(sizes.values())
    vectors = trained - sum(m * n for m, n in matrices)
    framed = [(m, n, min(FRAME_RANK, m, n)) for m, n in matrices]
    rows, columns = sum(m * r for m, _, r in framed), sum(n * r for _, n, r in framed)
    squares = sum(r * r for *_, r in framed)
    us, vs = rank * sum(m for m, _ in matrices), rank * sum(n for _, n in matrices)
    u = rank * max(m for m, _ in matrices)

    def need(method: str, held: int, kept: int = 0, own: int | None = None) -> Need:
        return Need(method, weights, held, kept, bytes_each, own, stored if stored < weights * bytes_each else None)

    return [
        need("mezo", largest),
        need("mezo_adam", largest, 2 * trained),
        need("mezo_bcd", in_block),
        need("mezo_bcd_adaptive", in_block),
        need("mezo_bcd_adam", in_block, 2 * block),
        need("lozo", u, vs, 4 * us),
        need("lozo_m", u, vs + us + vectors, 4 * (us + us + vectors)),
        need("sparse_mezo", 2 * largest),
        need("zo_sign", largest),
        need("zo_momentum", largest, trained, 4 * trained),
        need("lezo", in_block),
        need("adalezo", in_block),
        need("fzoo", largest),
        need("fzoo_bcd", in_block),
        need("eggroll", max(m + n for m, n in matrices)),
        need("mezo_greedy", largest),
        need("adamezo", largest),
        need("mezo_svrg", largest, trained),
        need("hizoo", largest, trained, 4 * trained),
        need("conmezo", largest, trained, 4 * trained),
        need("subzero", largest, rows + columns, 4 * (rows + columns + squares)),
        need("zo_muon", largest, rows + QUERIES * columns, 4 * rows),
    ]


def forward(config: Any, bytes_each: int, rows: int, length: int) -> Forward:
    """The memory of a forward pass of padded rows.

    Args:
        config: the config of a transformers model.
        bytes_each: bytes per activation.
        rows: number of rows.
        length: tokens per row.
    """
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    grouped = getattr(config, "num_key_value_heads", None) or heads
    tokens = rows * length
    cache = 2 * config.num_hidden_layers * grouped * width * tokens * bytes_each
    return Forward(rows, length, tokens * config.vocab_size * bytes_each, cache)


def document(needs: Sequence[Need], forward: Forward | None, peaks: Sequence[BenchRow]) -> dict[str, Any]:
    """The table, the forward and the measured peaks as plain values."""
    return {
        "theory": [
            dataclasses.asdict(n)
            | {name: getattr(n, name) for name in ("total", "total_bytes", "over_weights", "kept_here")}
            for n in needs
        ],
        "forward": None if forward is None else dataclasses.asdict(forward),
        "measured": [dataclasses.asdict(row) for row in peaks],
    }


def show(title: str, needs: Sequence[Need], forward: Forward | None, peaks: Sequence[BenchRow]) -> None:
    """Print the table, a line per method; and the peaks, a line per method and engine, a column per task."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    sheet = Table(title=f"Peak memory of {title}, GB")
    sheet.add_column("method", no_wrap=True)
    for name in ("weights", "held", "kept", "total", "× weights", "kept here"):
        sheet.add_column(name, justify="right")
    for need in needs:
        numbers = (gigabytes(n * need.bytes_each) for n in (need.weights, need.held, need.kept, need.total))
        sheet.add_row(need.method, *numbers, f"{need.over_weights:.3f}", gigabytes(need.kept_here))
    console.print(sheet)
    if peaks:
        console.print(_measured(title, peaks))
    if forward is not None:
        console.print(
            f"A forward pass of {forward.rows} rows of {forward.length} tokens also holds: logits at every "
            f"position {gigabytes(forward.logits)} GB per copy, keys and values {gigabytes(forward.cache)} GB."
        )


def _measured(title: str, peaks: Sequence[BenchRow]) -> Table:
    from rich.table import Table

    several = len({(row.device, row.batch_size) for row in peaks}) > 1
    tasks = list(dict.fromkeys(row.task for row in peaks))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in peaks:
        engine = "published" if row.engine == "reference" else row.engine
        where = (row.device, str(row.batch_size)) if several else ()
        line = lines.setdefault((row.method.removesuffix("-reference"), engine, *where), {})
        line[row.task] = "" if row.peak_bytes is None else gigabytes(row.peak_bytes)
    sheet = Table(title=f"Measured peaks of {title}, activations included, GB")
    for name in ("method", "engine", *(("device", "batch") if several else ())):
        sheet.add_column(name, no_wrap=True)
    for task in tasks:
        sheet.add_column(task, justify="right")
    order = list(dict.fromkeys(names[0] for names in lines))
    for names, line in sorted(lines.items(), key=lambda item: order.index(item[0][0])):
        sheet.add_row(*names, *(line.get(task, "") for task in tasks))
    return sheet


def gigabytes(nbytes: float) -> str:
    """About four digits.

    >>> gigabytes(25_706_000_000), gigabytes(51_000_000)
    ('25.71', '0.051')
    """
    return f"{nbytes / 1e9:.2f}" if nbytes >= 1e9 else f"{nbytes / 1e9:.3f}"
