"""A given change of the weights, whole or as a product of two thin matrices.

    param ← decay·param + alpha·delta      add_
    param ← decay·param + alpha·z Vᵀ       add_outer_

Neither draws noise; 16-bit weights are rounded by bits of the ROUNDING stream.
"""

from __future__ import annotations

from torch import Tensor

from ...noise import Draw, Rounding
from ..shared.dispatch import backend, check, inplace


def add_(
    param: Tensor,
    delta: Tensor,
    alpha: float,
    draw: Draw,
    *,
    decay: float = 1.0,
    rounding: Rounding = Rounding.STOCHASTIC,
    flip: bool = False,
) -> Tensor:
    """param ← decay·param + alpha·delta in fp32 (fp64 for fp64), then rounded.

    Args:
        param: weights of any shape and strides.
        delta: fp32, one element per element of ``param``, in row-major order.
        alpha: factor on delta.
        draw: its key's seed, step and probe, and its offset, address the rounding bits.
        decay: factor on the weights.
        rounding: the rounding of 16-bit weights.
        flip: complement the rounding bits, for a copy on the other side.

    Returns:
        ``param``.
    """
    check(param)
    if decay == 1.0 and alpha == 0.0:
        return param
    module, flat_delta = backend("outer", param.device.type), delta.contiguous().view(-1)

    def run(flat: Tensor, first: int) -> None:
        part = flat_delta[first : first + flat.numel()]
        module.add_(flat, part, alpha, draw.at(first), decay=decay, rounding=rounding, flip=flip)

    inplace(param, run)
    return param


def add_outer_(
    param: Tensor,
    z: Tensor,
    v: Tensor,
    alpha: float,
    draw: Draw,
    *,
    decay: float = 1.0,
    rounding: Rounding = Rounding.STOCHASTIC,
    flip: bool = False,
) -> Tensor:
    """param ← decay·param + alpha·z Vᵀ, equal to ``add_`` of the product, which is never whole in memory.

    Args:
        param: weights, m·n of them.
        z: (m, r) fp32.
        v: (n, r) fp32.
        alpha, draw, decay, rounding, flip: as in :func:`add_`.

    Returns:
        ``param``.
    """
    check(param)
    if (decay == 1.0 and alpha == 0.0) or not param.numel():
        return param
    whole = param.detach().contiguous()
    backend("outer", param.device.type).add_outer_(
        whole.view(-1), z.contiguous(), v.contiguous(), alpha, draw, decay=decay, rounding=rounding, flip=flip
    )
    if whole.data_ptr() != param.data_ptr():
        param.detach().copy_(whole)
    return param
