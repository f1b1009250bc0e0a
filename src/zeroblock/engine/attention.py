"""Attention over a packed row, handed to transformers' models by its registry of attention functions.

The function needs no mask: it reads which tokens see which from the row that is being
run.  So a layer's own sliding window, soft cap and grouping of heads stay the model's.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.attention.reference import dense
from .pack import Row

NAME = "zeroblock"
DENSE = 512
"""On the CPU rows up to this length are masked whole; longer ones run example by example."""

windows: set[int] = set()
"""Those that layers have told :func:`attend` of."""

_row: contextvars.ContextVar[Row] = contextvars.ContextVar("row")


def configs(model: nn.Module) -> list[Any]:
    """The configurations in which a model's layers look up their attention."""
    from transformers import PreTrainedConfig

    found: dict[int, Any] = {}
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            found[id(config)] = config
    return list(found.values())


@contextlib.contextmanager
def attending(configs: Sequence[Any], row: Row) -> Iterator[None]:
    """Models of these configurations attend within this row inside."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    before = [config._attn_implementation for config in configs]
    token = _row.set(row)
    try:
        for config in configs:
            config._attn_implementation = NAME
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name
        _row.reset(token)


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
        module: the layer that asks; not used.
        query: (R, H, S, d).
        key: (R, K, S, d), K dividing H.
        value: (R, K, S, d).
        attention_mask: not used; the row says what is seen.
        scaling: of the scores; 1/√d unless given.
        dropout: must be nought.
        sliding_window: keys at least so many positions back are not seen.
        softcap: c·tanh(score/c).
        others: whatever else a model passes along; sinks are refused.

    Returns:
        (R, S, H, d), and None in place of the probabilities.
    """
    if dropout:
        raise ValueError("dropout in a forward that is measured")
    if others.get("s_aux") is not None:
        raise ValueError("attention sinks are not packed")
    if sliding_window is not None:
        windows.add(sliding_window)
    row = _row.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda and not torch.is_grad_enabled():
        from ..ops.attention.triton import packed

        return packed(query, key, value, row, scale, sliding_window, softcap), None
    if query.is_cuda or query.shape[2] <= DENSE:  # with gradients on a GPU: some thirty launches a layer less
        return dense(query, key, value, row.sees(sliding_window), scale, softcap).transpose(1, 2), None
    parts = []
    for a, b in _examples(row):
        some = slice(a, b)
        mask = row.sees(sliding_window, a, b)
        parts.append(dense(query[:, :, some], key[:, :, some], value[:, :, some], mask, scale, softcap))
    return torch.cat(parts, 2).transpose(1, 2), None


def _examples(row: Row) -> list[tuple[int, int]]:
    """First token and end of every run of tokens that see each other; padding is one."""
    edges = [0, *(torch.nonzero(row.start[1:] != row.start[:-1]).flatten() + 1).tolist(), len(row.start)]
    return list(itertools.pairwise(edges))
