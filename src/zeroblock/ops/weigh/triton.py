"""The GPU kernel (Triton), equal to ``reference.py`` to the bit: a single program.

Contraction is off (``enable_fp_fusion=False``), and fp64 division follows IEEE.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import KEPT, LIMIT, NEW, NORMAL

KEPT_SHARE, NEW_SHARE = tl.constexpr(KEPT), tl.constexpr(NEW)
UNIT, MOST = tl.constexpr(NORMAL), tl.constexpr(LIMIT)


@triton.jit
def size_of(own, own_weight, every, every_weight):
    """The running size of a block's coefficients; NaN where there is none yet."""
    return UNIT * ((own + NEW_SHARE * (every / every_weight)) / (own_weight + NEW_SHARE))


@triton.jit
def halves(values, N: tl.constexpr, LEVELS: tl.constexpr):
    """The sum of N values, by adding halves."""
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, [2, N >> (level + 1)]), 0)
    return tl.sum(values, 0)


@triton.jit(do_not_specialize=["coeffs_ptr", "block", "last"])
def _weigh(coeffs_ptr, taken_ptr, table_ptr, out_ptr, block, last, N: tl.constexpr, LEVELS: tl.constexpr):
    i = tl.arange(0, N)
    c = tl.load(coeffs_ptr + i)
    taken = tl.load(taken_ptr) != 0
    own, own_weight = tl.load(table_ptr + 2 * block), tl.load(table_ptr + 2 * block + 1)
    every, every_weight = tl.load(table_ptr + 2 * last), tl.load(table_ptr + 2 * last + 1)
    size = size_of(own, own_weight, every, every_weight)
    limit = tl.where(size > 0, MOST * size, float("inf"))
    c = tl.where(c < -limit, -limit, c)  # NaN stays
    c = tl.where(c > limit, limit, c)
    count = tl.sum((c != 0).to(tl.int32), 0)
    mean = halves(tl.abs(c), N, LEVELS) / tl.maximum(count, 1).to(tl.float64)
    own = tl.where(taken, KEPT_SHARE * own + NEW_SHARE * mean, own)
    own_weight = tl.where(taken, KEPT_SHARE * own_weight + NEW_SHARE, own_weight)
    every = tl.where(taken, KEPT_SHARE * every + NEW_SHARE * mean, every)
    every_weight = tl.where(taken, KEPT_SHARE * every_weight + NEW_SHARE, every_weight)
    tl.debug_barrier()  # all threads have read the table
    tl.store(table_ptr + 2 * block, own)
    tl.store(table_ptr + 2 * block + 1, own_weight)
    tl.store(table_ptr + 2 * last, every)
    tl.store(table_ptr + 2 * last + 1, every_weight)
    size = size_of(own, own_weight, every, every_weight)
    tl.store(out_ptr + i, tl.where(size > 0, c / size, 0.0))


def weigh(coeffs: Tensor, taken: Tensor, table: Tensor, block: int) -> Tensor:
    """See ``reference.py``."""
    coeffs = coeffs.contiguous()
    n, out = len(coeffs), torch.empty_like(coeffs)
    with torch.cuda.device_of(coeffs):
        _weigh[(1,)](
            coeffs, taken.view(torch.uint8), table, out, block, len(table) - 1,
            N=n, LEVELS=n.bit_length() - 1, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out
