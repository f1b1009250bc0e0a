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

__all__ = [
    "Bernoulli",
    "Magnitude",
    "Mask",
    "adam_",
    "add_",
    "add_noise_",
    "add_outer_",
    "fill_",
    "perturb",
    "perturb_pair",
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PIECE = 1 << 22  # elements of a strided tensor that are copied at a time

Alpha = float | Sequence[float] | Tensor
"""One coefficient, or one a probe; on a GPU also an fp32 tensor of them."""


def backend(device: torch.device) -> ModuleType:
    """The module that serves a device."""
    return _backend(device.type)


@functools.cache
def _backend(device: str) -> ModuleType:
    name = {"cpu": "cpu", "cuda": "triton"}.get(device, "reference")
    return importlib.import_module(f".{name}", __name__)


def _is_triton(module: ModuleType) -> bool:
    return module.__name__.endswith("triton")


def _check(param: Tensor) -> None:
    if param.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"weights of dtype {param.dtype} cannot be perturbed; supported: {names}")


def _alphas(alpha: Alpha) -> tuple[float, ...] | Tensor:
    if isinstance(alpha, Tensor):
        return alpha if alpha.is_cuda or _is_triton(backend(alpha.device)) else tuple(alpha.tolist())
    return (alpha,) if isinstance(alpha, (int, float)) else tuple(alpha)


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


def fill_(
    out: Tensor,
    key: Key,
    alpha: Alpha = 1.0,
    *,
    offset: int = 0,
    start: Tensor | None = None,
    decay: float = 1.0,
    distribution: Distribution = Distribution.NORMAL,
) -> Tensor:
    """out[i] ← decay·start[i] + Σₖ alpha[k]·u_k[offset + i], row-major, in fp32 and then rounded to nearest.

    Args:
        out: contiguous, of any shape and dtype of weights; only written.
        start: contiguous, of out's shape, in fp32; zero by default.
        decay: factor on it.
        key, alpha, offset, distribution: as in ``add_noise_``.

    Returns:
        ``out``.
    """
    module, flat, alphas = backend(out.device), out.view(-1), _alphas(alpha)
    if not out.numel():
        return out
    if start is None:
        module.fill_(flat, key, alphas, offset=offset, distribution=distribution)
        return out
    mixed = _is_triton(module) and out.dtype != torch.float64  # its kernel reads fp32 and writes less; fp64 is fp64
    wide = flat if mixed or out.dtype == start.dtype else torch.empty_like(start).view(-1)
    module.add_noise_(
        wide, start.view(-1), key, alphas, offset=offset, decay=decay, mask=None, distribution=distribution,
        rounding=Rounding.NEAREST,
    )  # fmt: skip
    if wide is not flat:
        flat.copy_(wide)
    return out


def add_noise_(
    param: Tensor,
    key: Key,
    alpha: Alpha,
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
    alphas = _alphas(alpha)
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
    if _is_triton(module):
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


def adam_(
    param: Tensor,
    m: Tensor,
    v: Tensor,
    key: Key,
    scalars: Sequence[float] | Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    offset: int = 0,
    decay: float = 1.0,
    mask: Mask | None = None,
    distribution: Distribution = Distribution.NORMAL,
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
        m: first moments, contiguous, as many elements as ``param`` in its row-major order; fp32 or bf16.
        v: second moments, like ``m``.
        key: address of u_0; u_k is that of probe ``key.probe + k``.
        scalars: (taken, -lr, c1, c2, share_0, share_1, …) with c = 1/(1 - βᵗ); with taken = 0 nothing is written,
            otherwise it is 1.  On a GPU also an fp32 tensor of them, which is read there and not here.
        betas: β1 and β2.
        eps: added to the root.
        offset: global offset of the first element.
        decay: factor on the weights.
        mask: which elements take noise; all by default.  The moments of the others decay.
        distribution: NORMAL or RADEMACHER.
        rounding: of 16-bit weights.

    Returns:
        ``param``.
    """
    _check(param)
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
    module = backend(param.device)
    on_device = isinstance(scalars, Tensor) and _is_triton(module)
    numbers = scalars if on_device else tuple(float(s) for s in scalars)
    if len(numbers) < 5:
        raise ValueError(f"scalars are taken, -lr, c1, c2 and at least one share, got {len(numbers)}")
    b1, b2 = betas
    constants = tuple(float(c) for c in (b1, 1 - b1, b2, 1 - b2, eps))
    flat_m, flat_v = m.detach().view(-1), v.detach().view(-1)

    def run(flat: Tensor, first: int) -> None:
        span = slice(first, first + flat.numel())
        module.adam_(
            flat, flat_m[span], flat_v[span], key, numbers, constants, offset=offset + first, decay=decay, mask=mask,
            distribution=distribution, rounding=rounding,
        )  # fmt: skip

    _inplace(param, run)
    return param


def _outer(z: Tensor, v: Tensor) -> Tensor:
    """z Vᵀ by r explicit products, so that the sum's order does not depend on a library; (rows, n) fp32."""
    out = torch.outer(z[:, 0], v[:, 0])
    for k in range(1, z.shape[1]):
        out += torch.outer(z[:, k], v[:, k])
    return out
