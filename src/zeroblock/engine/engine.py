"""From encoded examples to losses: which rows to run, how, and what to read off them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..direction import Point, visit
from ..errors import ZeroBlockError, ZeroBlockWarning
from ..optimizer import ZeroOrder, compiled, evaluation, value_of
from ..task.encoding import Encoded
from .attention import attending, configs, windows
from .fork import Anatomy, ForkError, forking
from .graph import Graphs, launch
from .pack import Padded, Row, cost, pack, pad, split

Over = Literal["options", "answer"]
LOGITS = 1 << 26
"""Logits that are normalised at a time, in fp32: 256 MiB."""


class Score(NamedTuple):
    """Log-probability of an option: that of all its tokens together, and their number."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Log-probability a token."""
        return self.total / self.tokens


class Engine:
    """Scores examples with a causal language model of transformers.

    A batch becomes one row of tokens in which options share their context; the points of a
    zeroth-order step run in one forked pass.  Both are exact.  A model that cannot be packed
    (its attention is not told what to see, or its layers carry state from token to token) is
    found out by a trial and evaluated on padded rows, one point after another.

    Args:
        model: its weights are only read.
        fork: False measures one point after another.
        max_tokens: of a row; longer batches are split, with the same losses.  No limit on the
            CPU, 4,096 on a GPU unless given.
        graphs: capture steps as CUDA graphs; where it pays, unless given.
    """

    def __init__(
        self, model: nn.Module, *, fork: bool = True, max_tokens: int | None = None, graphs: bool | None = None
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ZeroBlockError(f"max_tokens must be at least 1, got {max_tokens}")
        self.model = model
        self.device, self.dtype = next((p.device, p.dtype) for p in model.parameters())
        if graphs and self.device.type != "cuda":
            raise ZeroBlockError(f"graphs are captured on a CUDA device, the model is on {self.device}; leave them out")
        self.max_tokens = max_tokens or (4096 if self.device.type == "cuda" else None)
        self.why = ""
        """Why the model is not packed or not forked; empty where it is."""
        self.weights = sum(p.numel() for p in model.parameters())
        self.anatomy = Anatomy(model)
        self._configs = configs(model)
        self.graphs: Graphs | None = None
        self._watched: set[tuple[tuple[int, type], ...]] = set()
        """Blocks that were seen to be read where they can be shown."""
        self.reach: float = math.inf
        """Tokens of an example that packed rows are right for: a model may keep its window of attention to its mask."""
        self.packed = self._try()
        self.forked = fork and self.packed
        """Whether the points of a step run in one pass."""
        capture = self.device.type == "cuda" if graphs is None else graphs
        self.graphs = Graphs() if capture and self.forked else None
        """Captured steps, where steps are captured."""
        if self.why:
            warnings.warn(
                f"{type(model).__name__} is evaluated on padded rows, one point after another: {self.why}",
                ZeroBlockWarning,
                stacklevel=2,
            )

    def unfork(self, why: str) -> None:
        """Measure one point after another from here on, and say why."""
        self.forked, self.graphs, self.why = False, None, why
        warnings.warn(
            f"{type(self.model).__name__} is measured one point after another: {why}", ZeroBlockWarning, stacklevel=6
        )

    def objective(self, batch: Sequence[Encoded], labels: Sequence[int], over: Over = "options") -> Objective:
        """The mean loss of a batch, to be called or to be handed to ``ZeroOrder.step``.

        Args:
            batch: examples with their options.
            labels: index of each example's right option.
            over: ``"options"``: cross-entropy over an example's options, the logit of each the mean
                log-probability of its tokens.  ``"answer"``: the mean negative log-probability of
                the right option's tokens.
        """
        if not batch:
            raise ZeroBlockError("an objective needs at least one example")
        if over == "answer":
            batch = [Encoded(one.context, (one.options[k],), one.cut) for one, k in zip(batch, labels, strict=True)]
            labels = [0] * len(batch)
        return Objective(self, self._rows(batch, labels), len(batch), over)

    @torch.no_grad()
    def scores(self, batch: Sequence[Encoded]) -> list[tuple[Score, ...]]:
        """Log-probabilities of every option of every example, at the weights as they are."""
        found: list[tuple[Score, ...]] = []
        with evaluation(self.model):
            for row, _ in self._rows(batch, [0] * len(batch)):
                totals, lengths = self.totals(row.to(self.device))[0].tolist(), row.lengths.tolist()
                for slots in row.slots.tolist():
                    found.append(tuple(Score(totals[o], lengths[o]) for o in slots if o < len(lengths)))
        return found

    def _rows(self, batch: Sequence[Encoded], labels: Sequence[int]) -> list[tuple[Row | Padded, Tensor]]:
        """Rows of the batch with the labels of their examples, on the host."""
        if not all(one.context for one in batch):
            raise ZeroBlockError("an example has no context to predict its options from: begin it with a BOS token")
        rows: list[tuple[Row | Padded, Tensor]] = []
        for some in split(batch, self.max_tokens):
            examples = [batch[i] for i in some]
            packed = self.packed and (self.reach == math.inf or max(map(_length, examples)) <= self.reach)
            row = pack(examples, *self._multiples(sum(map(cost, examples)))) if packed else pad(examples)
            rows.append((row, torch.tensor([labels[i] for i in some])))
        return rows

    def _multiples(self, tokens: int) -> tuple[int, int]:
        """What a row's lengths are rounded up to: those of captured rows to few different ones, a sixteenth apart."""
        if self.graphs is None or not self.graphs.pays(tokens, self.weights):
            return (16 if self.device.type == "cuda" else 1), 1  # tensor cores want multiples of 8
        return max(32, 1 << max(0, tokens.bit_length() - 5)), 16

    def totals(self, row: Row | Padded, points: Sequence[Point] = ()) -> Tensor:
        """(R, O): the log-probability of each option at each point, or once at the weights as they are."""
        if isinstance(row, Padded):
            if points:
                raise ForkError(f"an example of more than {self.reach:,} tokens, where it looks no further back")
            logits = self.model(input_ids=row.tokens, attention_mask=row.mask, use_cache=False).logits
            return _totals(logits.flatten(0, 1)[None], row)
        fork: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        block = tuple((id(m.param), type(m.basis)) for m in points[0].direction.members) if points else ()
        if points:
            fork = forking(self.anatomy, points, len(row.tokens), watch=block not in self._watched)
        mask = None if self._told else _additive(row, self.dtype)
        with fork, attending(self._configs, row) if self._told else contextlib.nullcontext():
            logits = self.model(
                input_ids=row.tokens[None], position_ids=row.positions[None], attention_mask=mask,
                logits_to_keep=row.keep, use_cache=False,
            ).logits  # fmt: skip
        self._watched.add(block)
        if points and len(logits) != len(points):
            if len(logits) != 1:
                raise ForkError(f"it returns {len(logits)} rows for {len(points)} points")
            logits = logits.expand(len(points), -1, -1)  # no weight of the block was read
        return _totals(logits, row)

    @functools.cached_property
    def _told(self) -> bool:
        """Whether the model's attention is looked up in transformers' registry; else it is given a mask."""
        return any(getattr(module, "_supports_attention_backend", False) for module in self.model.modules())

    @property
    def _precise(self) -> bool:
        """Whether products have the precision of fp32 at least; TF32 has that of 16 bits."""
        if self.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(self.device.type):
            return False
        tf32 = torch.backends.cuda.matmul.allow_tf32 or os.environ.get("NVIDIA_TF32_OVERRIDE") == "1"
        return not (tf32 and self.device.type == "cuda")

    @torch.no_grad()
    def _try(self) -> bool:
        """Whether packed examples score as they do alone."""
        examples = self._specimens()
        with evaluation(self.model):
            try:
                alone = torch.cat([self.totals(pad([one]).to(self.device))[0] for one in examples])
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model of any family may raise
                raise ZeroBlockError(
                    f"{type(self.model).__name__} does not run on a short text ({_line(error)})"
                ) from error
            if compiled(self.model):
                self.why = "it is compiled; give the plain model, whose steps are captured as graphs on a GPU"
                return False
            if not self._told and any(map(_counts_places, self._configs)):
                self.why = "it has a window or a bias of attention of its own, which counts the places of a row"
                return False
            try:
                row = pack(examples, *self._multiples(sum(map(cost, examples)))).to(self.device)
                windows.clear()
                together = self.totals(row)[0]
                self.reach = min((size for c in self._configs for size in _windows(c) - windows), default=math.inf)
            except Exception as error:  # whatever a model of any family may raise on a packed row
                self.why = f"it cannot run a packed row ({_line(error)})"
                return False
        off = float(((alone - together) / row.lengths).abs().max())  # a token
        if not off <= (1e-3 if self._precise else 0.3):
            self.why = (
                f"packed examples do not score as they do alone (by {off:.2g} a token): its layers carry something "
                "from token to token, or count the places of a row"
            )
            return False
        return True

    def _specimens(self) -> list[Encoded]:
        """Examples that a model scores otherwise in a row than alone, unless it looks where it is told to.

        The last one's options lie far from what they follow, so that a wrong distance is a large one.
        """
        words = min((c.vocab_size for c in self._configs if getattr(c, "vocab_size", None)), default=10)
        ids = (words // 4 + 37 * i % (words // 2 + 1) for i in itertools.count())  # no special tokens, as a rule

        def some(count: int) -> tuple[int, ...]:
            return tuple(itertools.islice(ids, count))

        stem = some(1)
        return [
            Encoded(some(5), (stem + some(1), stem + some(2))),
            Encoded(some(2), (some(1), some(1))),
            Encoded(some(3), (some(4),)),
            Encoded(some(3), (some(24), some(24), some(5))),
        ]


@dataclass(frozen=True)
class Objective:
    """The mean loss of a batch.

    Args:
        engine: runs the rows.
        rows: each with the labels of its examples.
        examples: how many there are in all rows.
        over: see :meth:`Engine.objective`.
    """

    engine: Engine
    rows: Sequence[tuple[Row | Padded, Tensor]]
    examples: int
    over: Over

    def __call__(self) -> Tensor:
        """The loss at the weights as they are: a scalar in fp32, differentiable where gradients are on."""
        with evaluation(self.engine.model):
            return self.losses(())[0]

    @torch.no_grad()
    def at(self, points: Sequence[Point]) -> list[float]:
        """The loss at each point."""
        if self.engine.forked:
            try:
                losses: list[float] = self.losses(points).tolist()
                return losses
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever a model of any family may raise on the rows of several points
                self.engine.unfork(str(error) if isinstance(error, ForkError) else _line(error))
        return visit(points, functools.partial(value_of, self))

    def submit(self, optimizer: ZeroOrder) -> Tensor | None:
        """Take a whole step on the device without waiting for it, captured or not; None where that is not possible.

        Returns:
            (1 + points + probes,) in fp64: the loss, the losses, the coefficients.
        """
        graphs = self.engine.graphs
        if graphs is None:
            return None
        with torch.cuda.device_of(next(self.engine.model.parameters())):
            captured = graphs.step(optimizer, self)
            return launch(optimizer, self) if captured is None else captured

    def losses(self, points: Sequence[Point]) -> Tensor:
        """(R,) in fp32: the loss at each point, or one at the weights as they are."""
        parts = []
        for row, labels in self._placed:
            parts.append(_losses(self.engine.totals(row, points), row, labels, self.over).sum(-1))
        return torch.stack(parts).sum(0) / self.examples

    @functools.cached_property
    def _placed(self) -> list[tuple[Row | Padded, Tensor]]:
        """The rows on the device."""
        device = self.engine.device
        return [(row.to(device), _sent(labels, device)) for row, labels in self.rows]


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """The same on a device, by a copy that does not wait."""
    if device.type == "cuda" and not x.is_cuda:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def _counts_places(config: Any) -> bool:
    """Whether a model measures distances by places of the row, where it is not told what to see."""
    alibi = getattr(config, "alibi", False) or getattr(getattr(config, "attn_config", None), "alibi", False)
    return bool(getattr(config, "window_size", None) or alibi)


def _length(one: Encoded) -> int:
    return len(one.context) + max(map(len, one.options))


def _windows(config: Any) -> set[int]:
    """Sizes of the windows and chunks of attention that a configuration speaks of."""
    found = {getattr(config, "attention_chunk_size", None)}
    if getattr(config, "use_sliding_window", True):
        found.add(getattr(config, "sliding_window", None))
    return {size for size in found if isinstance(size, int)}


def _line(error: Exception) -> str:
    """An error in a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _totals(logits: Tensor, row: Row | Padded) -> Tensor:
    """Sums of log-probabilities by option: (R, P, V) → (R, O), in fp32, in an order that no device changes."""
    count, _, words = logits.shape
    at_once = max(1, LOGITS // (count * words))
    norms = torch.cat([part.float().logsumexp(-1) for part in logits.split(at_once, 1)], 1)
    scored = logits[:, row.source, row.target].float() - norms[:, row.source]
    return torch.cat([scored, scored.new_zeros(count, 1)], 1)[:, row.spans].sum(-1)


def _losses(totals: Tensor, row: Row | Padded, labels: Tensor, over: Over) -> Tensor:
    """(R, O) → the loss of each example, (R, E)."""
    means = totals / row.lengths
    logits = torch.cat([means, means.new_full((len(means), 1), -torch.inf)], 1)[:, row.slots]  # (R, E, most options)
    right = logits.gather(2, labels.expand(len(means), -1)[:, :, None])[:, :, 0]
    return -right if over == "answer" else logits.logsumexp(-1) - right


def _additive(row: Row, dtype: torch.dtype) -> Tensor:
    """The mask as numbers to be added to scores: (1, 1, S, S)."""
    seen = row.sees()
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)[
        None, None
    ]
