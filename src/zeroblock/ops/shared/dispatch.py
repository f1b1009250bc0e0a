"""From a tensor of any shape and layout to the version of an operation that serves its device."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PIECE = 1 << 22  # elements of a strided tensor that are copied at a time

Alpha = float | Sequence[float] | Tensor
"""One coefficient, or one per probe; on a GPU also an fp32 tensor of them."""


@functools.cache
def backend(operation: str, device: str) -> ModuleType:
    """The version of an operation that serves a type of device."""
    name = {"cpu": "cpu", "cuda": "triton"}.get(device, "reference")
    return importlib.import_module(f"..{operation}.{name}", __package__)


def is_triton(module: ModuleType) -> bool:
    """Whether a version reads tensors of coefficients on the device."""
    return module.__name__.endswith("triton")


def tf32_allowed() -> bool:
    """Whether fp32 products on a GPU may have the precision of TF32."""
    products = torch.backends.cuda.matmul
    own = getattr(products, "fp32_precision", None)  # since torch 2.9; asking for allow_tf32 may raise where it is set
    return (products.allow_tf32 if own is None else own == "tf32") or os.environ.get("NVIDIA_TF32_OVERRIDE") == "1"


def check(param: Tensor) -> None:
    """Refuse weights of a dtype that no version supports."""
    if param.dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"weights of dtype {param.dtype} cannot be perturbed; supported: {names}")


def coefficients(alpha: Alpha, module: ModuleType, device: torch.device) -> tuple[float, ...] | Tensor:
    """Coefficients in the form that a version takes: numbers, or a tensor that stays on the GPU."""
    if isinstance(alpha, Tensor):
        return alpha if is_triton(module) and alpha.device == device else tuple(alpha.tolist())
    return (alpha,) if isinstance(alpha, (int, float)) else tuple(alpha)


def pieces(x: Tensor, start: int = 0) -> Iterator[tuple[Tensor, int]]:
    """Sub-tensors of at most PIECE elements in row-major order, with their first index."""
    if x.numel() <= PIECE or x.dim() == 0:
        yield x, start
        return
    width = x.numel() // x.shape[0]
    rows = max(1, PIECE // width)
    for a in range(0, x.shape[0], rows):
        part = x[a : a + rows] if rows > 1 or width <= PIECE else x[a]
        yield from pieces(part, start + a * width)


def inplace(x: Tensor, run: Callable[[Tensor, int], None]) -> None:
    """Call run(flat, first) on a tensor; a strided one goes through small contiguous copies."""
    x = x.detach()
    if x.numel() == 0:
        return
    if x.is_contiguous():
        return run(x.view(-1), 0)
    for part, first in pieces(x):
        copy = part.contiguous()
        run(copy.view(-1), first)
        part.copy_(copy)
