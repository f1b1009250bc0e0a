"""Attention under a mask, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None) -> Tensor:
    """softmax(c·tanh(scale·QKᵀ/c))·V over the keys that each query sees.

    Args:
        query: (R, H, S, d).
        key: (R, K, S, d), K dividing H.
        value: (R, K, S, e).
        mask: (S, S), True where the query (row) sees the key (column).
        scale: factor on the scores.
        softcap: c; without it the scores are scale·QKᵀ.

    Returns:
        (R, H, S, e).
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and (query.is_cuda or softcap is not None):  # no fused GPU kernel takes both groups and a mask
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if softcap is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
    scores = softcap * torch.tanh(query @ key.transpose(2, 3) * scale / softcap)
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype)
    return weights @ value
