"""One step of Adam on an estimate that is never materialised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...noise import Draw, Rounding
from ..shared.dispatch import backend, check, inplace, is_triton


def adam_(
    param: Tensor,
    m: Tensor,
    v: Tensor,
    draw: Draw,
    scalars: Sequence[float] | Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    decay: float = 1.0,
    rounding: Rounding = Rounding.STOCHASTIC,
) -> Tensor:
    """One step of Adam on the estimate Σₖ share_k·u_k, in one pass over weights and moments.

    All in fp32, each operation rounded once, in this order::

        g  = share_0·u_0;   g ← fma(u_k, share_k, g)  for k = 1, 2, …      u = 0 outside the mask
        m' = fma(m, β1, (1-β1)·g)
        v' = fma(v, β2, (1-β2)·(g·g))
        d  = (m'·c1) / (sqrt(v'·c2) + eps)
        θ' = round(fma(d, -lr, decay·θ))

    16-bit weights are rounded as in ``add_noise_``.  bf16 moments are rounded
    stochastically whatever ``rounding`` says, since a step moves v by less than
    half a unit: m' by the low, v' by the high half of the element's word in the
    rounding stream.

    Args:
        param: weights of any shape and strides; fp32, fp16 or bf16.
        m: first moments, contiguous, one per element of ``param`` in row-major order; fp32 or bf16.
        v: second moments, like ``m``.
        draw: the noise of the weights; moments of elements outside its mask only decay.
        scalars: (taken, -lr, c1, c2, share_0, share_1, …) with c = 1/(1 - βᵗ); taken is 1, or 0 to write
            nothing.  On a GPU also an fp32 tensor of them, which only the kernel reads.
        betas: β1 and β2.
        eps: added to the root.
        decay: factor on the weights.
        rounding: the rounding of 16-bit weights.

    Returns:
        ``param``.
    """
    check(param)
    if param.dtype == torch.float64:
        raise TypeError("adam_ computes in fp32 and would cut fp64 weights; use fp32, fp16 or bf16 weights")
    if m.dtype != v.dtype or m.dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"moments must be both float32 or both bfloat16, got {m.dtype} and {v.dtype}")
    for moment in (m, v):
        if moment.numel() != param.numel() or not moment.is_contiguous():
            raise ValueError(
                f"moments must be contiguous with the {param.numel()} elements of the weights, "
                f"got shape {tuple(moment.shape)} and strides {moment.stride()}"
            )
    if isinstance(scalars, Tensor) and scalars.dtype != torch.float32:
        raise TypeError(f"a tensor of scalars must be float32, got {scalars.dtype}")
    module = backend("adam", param.device.type)
    on_device = isinstance(scalars, Tensor) and is_triton(module)
    numbers = scalars if on_device else tuple(float(s) for s in scalars)
    if len(numbers) < 5:
        raise ValueError(f"scalars are taken, -lr, c1, c2 and at least one share, got {len(numbers)}")
    b1, b2 = betas
    constants = tuple(float(c) for c in (b1, 1 - b1, b2, 1 - b2, eps))
    flat_m, flat_v = m.detach().view(-1), v.detach().view(-1)

    def run(flat: Tensor, first: int) -> None:
        span = slice(first, first + flat.numel())
        module.adam_(
            flat, flat_m[span], flat_v[span], draw.at(first), numbers, constants, decay=decay, rounding=rounding
        )

    inplace(param, run)
    return param
