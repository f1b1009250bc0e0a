"""Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from . import Loss, Scored

MAX_LOGITS = 1 << 26
"""Logits that are normalised at a time, in fp32: 256 MiB."""


def totals(logits: Tensor, row: Scored) -> Tensor:
    """(R, P, V) → (R, O) in fp32; see :func:`zeroblock.ops.score.totals`."""
    count, _, words = logits.shape
    positions = max(1, MAX_LOGITS // (count * words))
    norms = torch.cat([part.float().logsumexp(-1) for part in logits.split(positions, 1)], 1)
    scored = logits[:, row.source, row.target].float() - norms[:, row.source]
    return torch.cat([scored, scored.new_zeros(count, 1)], 1)[:, row.spans].sum(-1)


def losses(totals: Tensor, row: Scored, labels: Tensor, loss: Loss) -> Tensor:
    """(R, O) → (R,); see :func:`zeroblock.ops.score.losses`."""
    if loss is Loss.TOKENS:
        return (-totals).sum(-1)
    means = totals / row.lengths
    logits = torch.cat([means, means.new_full((len(means), 1), -torch.inf)], 1)[:, row.slots]  # (R, E, most options)
    right = logits.gather(2, labels.expand(len(means), -1)[:, :, None])[:, :, 0]
    return (-right if loss is Loss.ANSWER else logits.logsumexp(-1) - right).sum(-1)
