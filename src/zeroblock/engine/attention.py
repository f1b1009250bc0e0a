"""Attention over a packed row, which transformers' models find in its registry of attention functions.

The function needs no mask: the row that is being run says which tokens see which.  Every layer
keeps its own sliding window, soft cap and grouping of heads.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import family
from ..exclusive import refusal
from ..interrupt import uninterrupted
from ..ops.attention.reference import dense
from .pack import Row

NAME = "zeroblock"
DENSE_TOKENS = 512
"""On the CPU, rows of up to this many tokens get one mask; longer rows run this many queries at a time."""


class _Pass(NamedTuple):
    """The row that is being run, and the windows that layers have asked for in it."""

    rows: dict[torch.device, Row]
    """The row on each device that layers run on; a model may lie on several."""
    windows: set[int]

    def row(self, device: torch.device) -> Row:
        """The row on the device of a layer."""
        if device not in self.rows:
            self.rows[device] = next(iter(self.rows.values())).to(device)
        return self.rows[device]


_running: contextvars.ContextVar[_Pass] = contextvars.ContextVar("running")


def configs(model: nn.Module) -> list[Any]:
    """The configurations in which a model's layers look up their attention."""
    from transformers import PreTrainedConfig

    by_id: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            by_id[id(config)] = config
    return list(by_id.values())


@contextlib.contextmanager
def attending(configs: Sequence[Any], row: Row, windows: set[int] | None = None) -> Iterator[None]:
    """A context in which models with these configurations attend within this row.

    Args:
        configs: the configurations of the model's modules.
        row: the packed row that will run.
        windows: a set that collects the lengths of the windows that layers ask for.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    before = [config._attn_implementation for config in configs]
    with uninterrupted() as shield:
        token = _running.set(_Pass({row.tokens.device: row}, set() if windows is None else windows))
        try:
            for config in configs:
                config._attn_implementation = NAME
            with shield.opened():
                yield
        finally:
            for config, name in zip(configs, before, strict=True):
                config._attn_implementation = name
            _running.reset(token)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row, in the signature of transformers.

    Args:
        module: the layer that calls.
        query: (R, H, S, d).
        key: (R, K, S, d), K dividing H.
        value: (R, K, S, d).
        attention_mask: not used; the row says which tokens see which.
        scaling: factor on the scores; 1/√d by default.
        dropout: must be zero.
        sliding_window: keys at least this many positions away are not seen.
        softcap: c·tanh(score/c).
        others: further arguments of the model; attention sinks are refused.

    Returns:
        (R, S, H, d), and None in place of the probabilities.
    """
    if dropout:
        raise ValueError("dropout must be off in a measured forward pass")
    if family.sinks(others):
        raise ValueError("attention sinks are not supported in packed rows")
    running = _running.get(None)
    if running is None:  # the pass is another thread's
        raise refusal(module)
    row = running.row(query.device)
    if sliding_window is not None:
        running.windows.add(sliding_window)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and not torch.is_grad_enabled():
        from ..ops.attention.triton import packed

        return packed(query, key, value, row, scale, sliding_window, softcap), None
    if query.is_cuda or query.shape[2] <= DENSE_TOKENS:  # with gradients on a GPU: some 30 fewer launches per layer
        return dense(query, key, value, row.sees(sliding_window), scale, softcap).transpose(1, 2), None
    parts = []
    for a, b, keys in _pieces(row):
        mask = row.sees(sliding_window, slice(a, b), keys)
        parts.append(dense(query[:, :, a:b], key[:, :, keys], value[:, :, keys], mask, scale, softcap))
    return torch.cat(parts, 2).transpose(1, 2), None


def _pieces(row: Row) -> Iterator[tuple[int, int, slice | Tensor]]:
    """First query and end of every piece of a row, with the keys that its queries may see.

    A piece lies within one example, so a thousand options of one context cost a thousand
    times the context and their own tokens, not the square of them all.
    """
    root = int(row.root)
    edges = [0, *(torch.nonzero(row.start[1:] != row.start[:-1]).flatten() + 1).tolist(), len(row.start)]
    for start, end in itertools.pairwise(edges):
        for a in range(start, end, DENSE_TOKENS):
            b = min(a + DENSE_TOKENS, end)
            trunk, branch = int(row.trunk[a:b].max()), int(row.branch[a:b].min())
            stop = int(row.until[a:b].max()) + 1
            seen = torch.arange(start, stop)
            if branch > trunk:
                seen = seen[(seen < trunk) | (seen >= branch)]
            shared = torch.arange(min(root, start))
            whole = branch <= trunk and not len(shared)
            yield a, b, slice(start, stop) if whole else torch.cat([shared, seen])
