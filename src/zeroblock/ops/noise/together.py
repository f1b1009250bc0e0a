"""The noise of many small tensors in one launch, equal to the functions for one tensor to the bit.

A launch on a GPU takes about 5 µs, whatever it does.  In a captured step of OPT-125M, 26 launches for 16 tensors took
211 of 950 µs, most of it this overhead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..shared.branch import home
from ..shared.dispatch import backend, is_triton
from ..shared.tables import Table
from .taker import Taker

LARGE = 1 << 22
"""The most elements of a tensor that shares a launch: with more, a separate launch has inner tiles without bounds
(``MIN_WHOLE_TILES``), and its work takes longer than the launch itself."""
MOST = 128
"""The most tensors in a launch, since every program reads the ends of all."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Group(NamedTuple):
    """Tensors that share a launch, or a single tensor.

    Args:
        indices: indices of the tensors.
        table: their table; None for a single tensor.
    """

    indices: tuple[int, ...]
    table: Table | None = None


def fits(param: Tensor) -> bool:
    """Whether a tensor may share a launch, as far as this does not depend on its noise."""
    return (
        is_triton(backend("noise", param.device.type))
        and param.dtype in DTYPES
        and 0 < param.numel() <= LARGE
        and param.is_contiguous()
    )


def grouped(takers: Sequence[Taker | None]) -> list[Group]:
    """Group the tensors that share a launch; a None stands for a tensor that gets a separate launch."""
    alike: dict[object, list[int]] = {}
    for i, taker in enumerate(takers):
        alike.setdefault(i if taker is None else _kind(taker) or i, []).append(i)
    found = []
    for indices in alike.values():
        for start in range(0, len(indices), MOST):
            some = indices[start : start + MOST]
            mine = [taker for taker in (takers[i] for i in some) if taker is not None]
            table = (
                backend("noise", mine[0].param.device.type).laid_out(mine) if len(mine) > 1 and _apart(mine) else None
            )
            found += [Group((i,)) for i in some] if table is None else [Group(tuple(some), table)]
    return found


def _apart(takers: Sequence[Taker]) -> bool:
    """Whether no two tensors share memory: programs of one launch would write over each other's results."""
    places = sorted((taker.param.data_ptr(), taker.param.nbytes) for taker in takers)
    return all(start + size <= after for (start, size), (after, _) in itertools.pairwise(places))


def _kind(taker: Taker) -> object:
    """A key that the tensors of a launch share; None for a tensor that gets a separate launch."""
    param, draw, key = taker.param, taker.draw, taker.draw.key
    if draw.mask is not None or draw.rows is not None or not fits(param):
        return None
    alike = (param.device, param.dtype, taker.rounding, taker.decay, taker.flip, taker.aligned)
    return (*alike, key, id(key.clock), draw.distribution)


def perturb_together(takers: Sequence[Taker], table: Table, sides: int = 2) -> list[tuple[Tensor, ...]]:
    """For every tensor of a group, ``perturb`` at ±factor, or both copies of ``perturb_pair``.

    The copies of a side are pieces of one tensor, aligned as separate tensors of torch are.

    Args:
        takers: the tensors; ``flip`` says that the first side is at -factor.
        table: their table.
        sides: 1 or 2.
    """
    like = takers[0]
    with home():
        flat = [torch.empty(table.about.size, dtype=like.param.dtype, device=like.param.device) for _ in range(sides)]
    module = backend("noise", like.param.device.type)
    module.add_noise_together_(takers, table, (-1.0 if like.flip else 1.0,), *flat)
    places = zip(takers, table.about.copies, strict=True)
    return [tuple(one[a : a + taker.param.numel()].view(taker.param.shape) for one in flat) for taker, a in places]


def add_noise_together_(takers: Sequence[Taker], table: Table, alphas: Sequence[float] | Tensor) -> None:
    """``add_noise_`` on every tensor of a group, with coefficients alphas·factor, products in fp32."""
    numbers = alphas if isinstance(alphas, Tensor) else tuple(map(float, alphas))
    backend("noise", takers[0].param.device.type).add_noise_together_(takers, table, numbers)


def copied(taker: Taker, eps: float) -> Taker | None:
    """The taker for a copy at distance factor·eps; None if that is zero or not finite."""
    distance = taker.factor * eps
    if not (distance and math.isfinite(distance)):
        return None
    return taker._replace(factor=abs(distance), flip=distance < 0)


def moved(taker: Taker, alphas: Sequence[float] | Tensor) -> Taker | None:
    """The taker for a step with coefficients alphas·factor.

    None for a step of zero, which is not taken, and for coefficients on another device or not in fp32.
    """
    if isinstance(alphas, Tensor):
        return taker if alphas.device == taker.param.device and alphas.dtype == torch.float32 else None
    with np.errstate(over="ignore"):  # in a run that diverges
        return taker if any(np.float32(alpha) * np.float32(taker.factor) for alpha in alphas) else None
