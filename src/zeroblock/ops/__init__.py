"""Noise arithmetic on weights: one signature, three implementations.

``reference`` (numpy) is the specification in code, ``cpu`` a compiled loop and
``triton`` the GPU kernel; all agree to the bit.  The functions here take
tensors of any shape and layout, pick the implementation by device and hand it
flat pieces.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..noise import ROUNDING, Distribution, Key, Rounding
from .spec import Bernoulli, Magnitude, Mask

__all__ = ["Bernoulli", "Magnitude", "Mask", "add_", "add_noise_", "add_outer_", "fill_", "perturb", "perturb_pair"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PIECE = 1 << 22  # elements of a strided tensor that are copied at a time


def backend(device: torch.device) -> ModuleType:
    """The module that serves a device."""
    return _backend(device.type)


@functools.cache
def _backend(device: str) -> ModuleType:
    name = {"cpu": "cpu", "cuda": "triton"}.get(device, "reference")
    return importlib.import_module(f".{name}", __name__)


def _check(param: Tensor) -> None:
    if param.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"weights of dtype {param.dtype} cannot be perturbed; supported: {names}")


def _pieces(x: Tensor, start: int = 0) -> Iterator[tuple[Tensor, int]]:
    """Sub-tensors of at most PIECE elements in row-major order, with their first index."""
    if x.numel() <= PIECE or x.dim() == 0:
        yield x, start
        return
    width = x.numel() // x.shape[0]
    rows = max(1, PIECE // width)
    for a in range(0, x.shape[0], rows):
        part = x[a : a + rows] if rows > 1 or width <= PIECE else x[a]
        yield from _pieces(part, start + a * width)


def _inplace(x: Tensor, run: Callable[[Tensor, int], None]) -> None:
    """run(flat, first) over a tensor; a strided one goes through small contiguous copies."""
    x = x.detach()
    if x.numel() == 0:
        return
    if x.is_contiguous():
        return run(x.view(-1), 0)
    for part, first in _pieces(x):
        copy = part.contiguous()
        run(copy.view(-1), first)
        part.copy_(copy)


def fill_(out: Tensor, key: Key, *, offset: int = 0, distribution: Distribution = Distribution.NORMAL) -> Tensor:
    """out[i] ← u[offset + i], row-major; out is contiguous fp32 of any shape."""
    if out.numel():
        backend(out.device).fill_(out.view(-1), key, offset=offset, distribution=distribution)
    return out


def add_noise_(
    param: Tensor,
    key: Key,
    alpha: float | Sequence[float] | Tensor,
    *,
    offset: int = 0,
    decay: float = 1.0,
    mask: Mask | None = None,
    distribution: Distribution = Distribution.NORMAL,
    rounding: Rounding = Rounding.STOCHASTIC,
) -> Tensor:
    """param ← decay·param + Σₖ alpha[k]·u_k, in one pass, without materialising u.

    Args:
        param: weights of any shape and strides; fp32, fp64, fp16 or bf16.
        key: address of u_0; u_k is that of probe ``key.probe + k``.
        alpha: one coefficient, or one a probe; on a GPU also an fp32 tensor of them, which is read there and not here.
        offset: global offset of the first element.
        decay: factor on the weights.
        mask: which elements take noise; all by default.
        distribution: NORMAL or RADEMACHER.
        rounding: of 16-bit weights; the sum itself is fp32.

    Returns:
        ``param``.
    """
    _check(param)
    alphas = (alpha,) if isinstance(alpha, (int, float)) else alpha if isinstance(alpha, Tensor) else tuple(alpha)
    if decay == 1.0 and not isinstance(alphas, Tensor) and not any(alphas):
        return param  # not even the sign of a zero changes
    module = backend(param.device)

    def run(flat: Tensor, first: int) -> None:
        module.add_noise_(
            flat, flat, key, alphas, offset=offset + first, decay=decay, mask=mask, distribution=distribution,
            rounding=rounding,
        )  # fmt: skip

    _inplace(param, run)
    return param


def perturb(
    param: Tensor,
    key: Key,
    eps: float,
    *,
    offset: int = 0,
    mask: Mask | None = None,
    distribution: Distribution = Distribution.NORMAL,
    rounding: Rounding = Rounding.STOCHASTIC,
) -> Tensor:
    """A contiguous copy param + eps·u; ``param`` is only read.

    Stochastic rounding mirrors with the sign of eps, so that the copies at +eps
    and -eps lie at equal distances on both sides of the weights.
    """
    out = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    return _perturb(out, None, param, key, eps, offset, mask, distribution, rounding)


def perturb_pair(
    param: Tensor,
    key: Key,
    eps: float,
    *,
    offset: int = 0,
    mask: Mask | None = None,
    distribution: Distribution = Distribution.NORMAL,
    rounding: Rounding = Rounding.STOCHASTIC,
) -> tuple[Tensor, Tensor]:
    """``perturb`` at +eps and at -eps from one read of the weights and one draw of u."""
    plus, minus = (torch.empty(param.shape, dtype=param.dtype, device=param.device) for _ in range(2))
    return _perturb(plus, minus, param, key, eps, offset, mask, distribution, rounding), minus


def _perturb(
    out: Tensor,
    minus: Tensor | None,
    param: Tensor,
    key: Key,
    eps: float,
    offset: int,
    mask: Mask | None,
    distribution: Distribution,
    rounding: Rounding,
) -> Tensor:
    _check(param)
    if param.numel():
        backend(param.device).add_noise_(
            out.view(-1), param.detach().contiguous().view(-1), key, (eps,), offset=offset, decay=1.0, mask=mask,
            distribution=distribution, rounding=rounding, flip=eps < 0, minus=None if minus is None else minus.view(-1),
        )  # fmt: skip
    return out


def add_(
    param: Tensor,
    delta: Tensor,
    alpha: float,
    key: Key,
    *,
    offset: int = 0,
    decay: float = 1.0,
    rounding: Rounding = Rounding.STOCHASTIC,
    flip: bool = False,
) -> Tensor:
    """param ← decay·param + alpha·delta in fp32 (fp64 for fp64), then rounded.

    Args:
        param: weights of any shape and strides.
        delta: fp32, as many elements as ``param`` in its row-major order.
        alpha: factor on delta.
        key: its seed, step and probe address the rounding bits.
        offset: global offset of the first element.
        decay: factor on the weights.
        rounding: of 16-bit weights.
        flip: complement the rounding bits, for a copy on the other side.

    Returns:
        ``param``.
    """
    _check(param)
    if decay == 1.0 and alpha == 0.0:
        return param
    module, flat_delta = backend(param.device), delta.reshape(-1)

    def run(flat: Tensor, first: int) -> None:
        module.add_(
            flat, flat_delta[first : first + flat.numel()], alpha, key.to(stream=ROUNDING),
            offset=offset + first, decay=decay, rounding=rounding, flip=flip,
        )  # fmt: skip

    _inplace(param, run)
    return param


def add_outer_(
    param: Tensor,
    z: Tensor,
    v: Tensor,
    alpha: float,
    key: Key,
    *,
    offset: int = 0,
    decay: float = 1.0,
    rounding: Rounding = Rounding.STOCHASTIC,
    flip: bool = False,
) -> Tensor:
    """param ← decay·param + alpha·z Vᵀ, as ``add_`` of the product would be; the product is never whole in memory.

    Args:
        param: of m·n elements.
        z: (m, r) fp32.
        v: (n, r) fp32.
        alpha, key, offset, decay, rounding, flip: as in ``add_``.

    Returns:
        ``param``.
    """
    _check(param)
    m, n = len(z), len(v)
    whole = param.detach().contiguous()
    module = backend(param.device)
    if module.__name__.endswith("triton"):
        module.add_outer_(
            whole.view(-1), z.contiguous(), v.contiguous(), alpha, key.to(stream=ROUNDING), offset=offset, decay=decay,
            rounding=rounding, flip=flip,
        )  # fmt: skip
    else:
        matrix = whole.view(m, n)
        rows = max(1, 4096 // n, min(PIECE // n, m // 16))  # a sixteenth of a large tensor at most
        for a in range(0, m, rows):
            add_(
                matrix[a : a + rows], _outer(z[a : a + rows], v), alpha, key, offset=offset + a * n, decay=decay,
                rounding=rounding, flip=flip,
            )  # fmt: skip
    if whole.data_ptr() != param.data_ptr():
        param.detach().copy_(whole)
    return param


def _outer(z: Tensor, v: Tensor) -> Tensor:
    """z Vᵀ by r explicit products, so that the sum's order does not depend on a library; (rows, n) fp32."""
    out = torch.outer(z[:, 0], v[:, 0])
    for k in range(1, z.shape[1]):
        out += torch.outer(z[:, k], v[:, k])
    return out
