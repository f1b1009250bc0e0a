"""Noise, written into tensors or added to weights.

out   ← decay·start + Σₖ alpha[k]·u_k      fill_
param ← decay·param + Σₖ alpha[k]·u_k      add_noise_
copy  = param ± eps·u                      perturb, perturb_pair
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...noise import Draw, Key, Rounding, accepts_key
from ..shared.branch import home
from ..shared.dispatch import Alpha, backend, check, coefficients, inplace, is_triton
from ..shared.reference import words


@accepts_key(0, offset_follows=True)
def normal(
    draw: Draw,
    shape: tuple[int, ...],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A tensor of noise: element i (row-major) is ``f(draw.key, draw.offset + i)``.

    Args:
        draw: the address and the distribution.
        shape: shape of the result.
        device: where to put it.
        dtype: dtype of the result, fp32 by default; noise is computed in fp32 and rounded to nearest.

    Returns:
        A tensor of ``shape``.

    >>> from zeroblock import Draw, Key
    >>> normal(Draw(Key(0, 1)), (5,))[2:].equal(normal(Draw(Key(0, 1), offset=2), (3,)))
    True
    """
    return fill_(torch.empty(shape, dtype=dtype or torch.float32, device=device), draw)


def uniform(key: Key, n: int, offset: int = 0) -> list[float]:
    """``n`` uniform numbers in [0, 1), for choices made on the host.

    >>> from zeroblock.noise import SCHEDULE, Key
    >>> len(uniform(Key(0, 0, stream=SCHEDULE), 3))
    3
    """
    return [int(w) / 2**32 for w in words(key, offset, n)]


def fill_(out: Tensor, draw: Draw, alpha: Alpha = 1.0, *, start: Tensor | None = None, decay: float = 1.0) -> Tensor:
    """out[i] ← decay·start[i] + Σₖ alpha[k]·u_k[i], row-major, in fp32 and then rounded to nearest.

    Args:
        out: contiguous, of any shape and dtype of weights; only written.
        draw: the noise; it has no mask.
        alpha: as in :func:`add_noise_`.
        start: contiguous, of out's shape, in fp32; zero by default.
        decay: factor on ``start``.

    Returns:
        ``out``.
    """
    if draw.mask is not None:
        raise ValueError("fill_ writes every element and takes no mask; use add_noise_ on zeros")
    module, flat = backend("noise", out.device.type), out.view(-1)
    alphas = coefficients(alpha, module, out.device)
    if not out.numel():
        return out
    if start is None:
        module.fill_(flat, draw, alphas)
        return out
    mixed = is_triton(module) and out.dtype != torch.float64  # the kernel reads fp32 and writes a narrower dtype
    wide = flat if mixed or out.dtype == start.dtype else torch.empty_like(start).view(-1)
    module.add_noise_(wide, start.view(-1), draw, alphas, decay=decay, rounding=Rounding.NEAREST)
    if wide is not flat:
        flat.copy_(wide)
    return out


@accepts_key(1)
def add_noise_(
    param: Tensor, draw: Draw, alpha: Alpha, *, decay: float = 1.0, rounding: Rounding = Rounding.STOCHASTIC
) -> Tensor:
    """param ← decay·param + Σₖ alpha[k]·u_k, in one pass, without materialising u.

    Args:
        param: weights of any shape and strides; fp32, fp64, fp16 or bf16.
        draw: the noise of the weights.
        alpha: one coefficient, or one per probe; on a GPU also an fp32 tensor of them, which only the kernel reads.
        decay: factor on the weights.
        rounding: the rounding of 16-bit weights; the sum itself is fp32.

    Returns:
        ``param``.
    """
    check(param)
    module = backend("noise", param.device.type)
    alphas = coefficients(alpha, module, param.device)
    if decay == 1.0 and not isinstance(alphas, Tensor) and not any(alphas):
        return param  # not even the sign of a zero changes

    def run(flat: Tensor, first: int) -> None:
        module.add_noise_(flat, flat, draw.at(first), alphas, decay=decay, rounding=rounding)

    inplace(param, run)
    return param


@accepts_key(1)
def perturb(param: Tensor, draw: Draw, eps: float, *, rounding: Rounding = Rounding.STOCHASTIC) -> Tensor:
    """A contiguous copy param + eps·u; ``param`` is only read.

    Stochastic rounding mirrors with the sign of eps, so that the copies at +eps
    and -eps lie at equal distances on both sides of the weights.
    """
    return _perturb(_empty(param), None, param, draw, eps, rounding)


@accepts_key(1)
def perturb_pair(
    param: Tensor, draw: Draw, eps: float, *, rounding: Rounding = Rounding.STOCHASTIC
) -> tuple[Tensor, Tensor]:
    """``perturb`` at +eps and at -eps from one read of the weights and one draw of u."""
    plus, minus = _empty(param), _empty(param)
    return _perturb(plus, minus, param, draw, eps, rounding), minus


def _empty(param: Tensor) -> Tensor:
    """A contiguous tensor like the weights."""
    with home():
        return torch.empty(param.shape, dtype=param.dtype, device=param.device)


def _perturb(out: Tensor, minus: Tensor | None, param: Tensor, draw: Draw, eps: float, rounding: Rounding) -> Tensor:
    check(param)
    if param.numel():
        backend("noise", param.device.type).add_noise_(
            out.view(-1), param.detach().contiguous().view(-1), draw, (eps,), decay=1.0, rounding=rounding,
            flip=eps < 0, minus=None if minus is None else minus.view(-1),
        )  # fmt: skip
    return out
