"""The operations of bases on all tensors of a block: on a GPU many small tensors take their noise in one launch.

Their bases decide which tensors can, and the result is the same to the bit: ``elementwise``, ``scale`` and ``rounding``
say all that a kernel has to know.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..noise import Key
from ..ops.noise.taker import Taker
from ..ops.noise.together import Group, add_noise_together_, copied, fits, grouped, moved, perturb_together
from ..ops.shared.branch import beside
from .base import Alphas, Basis


def mirrored(places: Sequence[tuple[Tensor, Basis]], key: Key, eps: float) -> list[tuple[Tensor, Tensor]]:
    """:meth:`Basis.mirrored` of every tensor."""
    takers = [_copied(param, basis, key, eps) for param, basis in places]
    found: dict[int, tuple[Tensor, ...]] = {}
    for group in beside(grouped(takers), _nbytes(places)):
        if group.table is None:
            param, basis = places[group.indices[0]]
            found[group.indices[0]] = basis.mirrored(param, key, eps)
        else:
            pairs = perturb_together(_of(group, takers), group.table)
            found.update(zip(group.indices, pairs, strict=True))
    return [(found[i][0], found[i][1]) for i in range(len(places))]


def perturbed(places: Sequence[tuple[Tensor, Basis]], key: Key, eps: float) -> list[Tensor]:
    """:meth:`Basis.perturbed` of every tensor; the tensor itself if it is at that point already."""
    takers = [_copied(param, basis, key, eps) for param, basis in places]
    found: dict[int, Tensor] = {}
    for group in grouped(takers):
        if group.table is None:
            param, basis = places[group.indices[0]]
            found[group.indices[0]] = basis.perturbed(param, key, eps) if eps or basis.behind else param
        else:
            copies = perturb_together(_of(group, takers), group.table, sides=1)
            found.update((i, copy) for i, (copy,) in zip(group.indices, copies, strict=True))
    return [found[i] for i in range(len(places))]


def add_(places: Sequence[tuple[Tensor, Basis]], key: Key, alphas: Alphas, decays: Sequence[float]) -> None:
    """:meth:`Basis.add_` of every tensor.

    Args:
        places: the tensors, each with its basis.
        key: see :class:`Basis`.
        alphas: see :class:`Basis`.
        decays: the decay of each tensor.
    """
    takers: list[Taker | None] = []
    for (param, basis), decay in zip(places, decays, strict=True):
        taker = _taker(param, basis, key)
        takers.append(None if taker is None else moved(taker._replace(decay=decay), alphas))
    for group in beside(grouped(takers), _nbytes(places)):
        if group.table is None:
            param, basis = places[group.indices[0]]
            basis.add_(param, key, alphas, decays[group.indices[0]])
        else:
            add_noise_together_(_of(group, takers), group.table, alphas)


def _taker(param: Tensor, basis: Basis, key: Key) -> Taker | None:
    draw = basis.elementwise(key) if fits(param) else None
    return None if draw is None else Taker(param, draw, basis.rounding, basis.scale)


def _copied(param: Tensor, basis: Basis, key: Key, eps: float) -> Taker | None:
    taker = _taker(param, basis, key)
    return None if taker is None else copied(taker, eps)


def _of(group: Group, takers: Sequence[Taker | None]) -> list[Taker]:
    return [taker for taker in (takers[i] for i in group.indices) if taker is not None]


def _nbytes(places: Sequence[tuple[Tensor, Basis]]) -> int:
    return sum(param.nbytes for param, _ in places)
