"""The forked forward: several points of weight space in one pass of the model's own forward.

Points differ in the active block alone.  So the modules before the block run once; its own
modules run once per point, each time on a perturbed copy that exists only while they run; and
the modules after it run once, on the rows of all points together.  The model is not
rewritten: its own modules are called, the active ones through a wrapper during the pass.

    ids ──► layer 0 ──► … ──► layer j at θ⁺ ─┐
                          └─► layer j at θ⁻ ─┴─► layer j+1 (two rows) ──► … ──► head

A packed row is one string per point.  A padded row is several strings, which have masks and contexts: every layer
after the active one gets these, too, once per point, with the strings of a point side by side.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import family
from ..basis import together
from ..direction import METADATA, Member, Point
from ..exclusive import refusal
from ..interrupt import uninterrupted
from .anatomy import Anatomy, ForkError

PAIR_TOKENS = 1024
"""Rows of up to this many tokens get both copies of a layer at once, from one draw; longer rows get them in turn."""
PAIR_STAGES = 8
"""With this many perturbed modules, all rows get both at once: a second draw would cost more than a second copy."""

Forward = Callable[..., Any]


class _Watch(TorchFunctionMode):
    """Raises if an active tensor is read outside the modules that show the points' copies."""

    def __init__(self, fork: Fork, members: Sequence[Member]) -> None:
        super().__init__()
        self.fork, self.members = fork, members

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.fork.shown and func not in METADATA:
            names = {id(self.fork.anatomy.held(member)): member.name for member in self.members}
            for value in (*args, *kwargs.values()):
                if id(value) in names:
                    raise ForkError(f"{names[id(value)]!r} is read without calling the module that holds it")
        return func(*args, **kwargs)


@contextlib.contextmanager
def forking(
    anatomy: Anatomy, points: Sequence[Point], tokens: int, watch: bool = False, strings: int | None = None
) -> Iterator[Fork]:
    """A context in which the model's forward runs at all points and returns a row for each.

    Args:
        anatomy: the anatomy of the model that will run.
        points: the points, whose directions have the same members.
        tokens: the number of tokens of the row that will run.
        watch: whether to raise if the model reads an active tensor where no copy can be shown; this takes time.
        strings: the number of strings of a padded row; None for a packed one.
    """
    members = points[0].direction.members
    if _low_rank(members) and any(point.direction.members is not members for point in points):
        raise ForkError("low-rank points around two origins are measured one after another")
    stages = anatomy.stages(members)
    fork = Fork(anatomy, points, tokens, len(stages), strings)
    active = {id(module) for module, _ in stages}
    followers = [layer for layer in anatomy.layers if id(layer) not in active] if fork.padded else []
    replaced: list[tuple[nn.Module, Forward | None]] = []
    cached = torch.is_autocast_cache_enabled()
    with uninterrupted() as shield:
        try:
            torch.set_autocast_cache_enabled(False)  # the cache would hand one point's weights to the next
            changes = (change for module, mine in stages for change in fork.replacements(module, mine, anatomy))
            for one, forward in (*changes, *((layer, fork.followed(layer)) for layer in followers)):
                replaced.append((one, vars(one).get("forward")))
                vars(one)["forward"] = fork.guarded(one, forward)  # Module.__setattr__ takes twenty times as long
            with _Watch(fork, members) if watch else contextlib.nullcontext(), shield.opened():
                yield fork
        finally:
            for one, before in reversed(replaced):
                restore(one, before)
            torch.clear_autocast_cache()  # the step moves weights whose casts it may hold
            torch.set_autocast_cache_enabled(cached)


def restore(module: nn.Module, before: Forward | None) -> None:
    """Restore a module's forward: the one that was set on it before, or its class's."""
    if before is None:
        vars(module).pop("forward", None)
    else:
        vars(module)["forward"] = before


def scratch(anatomy: Anatomy, blocks: Iterable[Sequence[Member]], points: Sequence[Point], tokens: int) -> int:
    """The most bytes of perturbed copies that exist at once in a pass at such points, whichever block is active.

    Args:
        anatomy: the anatomy of the model that will run.
        blocks: the members of every block.
        points: as in :func:`forking`.
        tokens: the number of tokens of the row that will run.
    """
    most = 0
    for block in blocks:
        stages = anatomy.stages(block)
        paired = all(member.basis.pairs for member in block if member.basis.factor_shape is None)
        copies = 2 if paired and Fork(anatomy, points, tokens, len(stages)).mirrored else 1
        for _, members in stages:
            sizes = (m.basis.copied_bytes(m.param) for m in members if m.basis.factor_shape is None)
            most = max(most, copies * sum(sizes))
    return most


class Fork:
    """The state of one forked pass: the points, and whether their rows have parted yet."""

    def __init__(
        self, anatomy: Anatomy, points: Sequence[Point], tokens: int, stages: int, strings: int | None = None
    ) -> None:
        self.anatomy, self.points, self.tokens, self.parted = anatomy, points, tokens, False
        self.strings, self.padded = strings or 1, strings is not None
        """Number of rows per point, and whether they are padded strings."""
        self.thread = threading.get_ident()
        self.shown = 0
        """Number of running modules that show a point's weights, nested ones included."""
        paired = _in_pairs(points) and points[0].direction.paired
        self.mirrored = paired and (tokens <= PAIR_TOKENS or stages >= PAIR_STAGES)
        """Whether the points come in pairs, and both copies of a pair are made at once."""

    def replacements(
        self, module: nn.Module, members: list[Member], anatomy: Anatomy
    ) -> list[tuple[nn.Module, Forward]]:
        """The modules that are wrapped, each with its forward during the pass."""
        by_owner: dict[int, tuple[nn.Module, list[Member]]] = {}
        for member in members:
            for owner in anatomy.owners[member.name]:
                if owner is module or member.name in anatomy.layer:
                    by_owner.setdefault(id(owner), (owner, []))[1].append(member)
        inside = members[0].name in anatomy.layer
        if (self.padded and inside) or not all(_beside(owner, mine) for owner, mine in by_owner.values()):
            # a module within a layer may see the strings of a padded row in any order, as LED's queries do
            return [(module, self._showing(self.copied(module, members)))]
        leaves = [
            (owner, self._showing(self.factored(owner, mine) if _low_rank(mine) else self.copied(owner, mine)))
            for owner, mine in by_owner.values()
        ]
        return leaves if id(module) in by_owner else [(module, self.entered(module)), *leaves]

    def guarded(self, module: nn.Module, forward: Forward) -> Forward:
        """A forward that refuses other threads: they would read a point's weights, and restore these as the model's."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                raise refusal(module)
            return forward(*args, **kwargs)

        return call

    def _showing(self, forward: Forward) -> Forward:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.shown += 1
            try:
                return forward(*args, **kwargs)
            finally:
                self.shown -= 1

        return noted

    def copied(self, module: nn.Module, members: Sequence[Member]) -> Forward:
        """The module's forward, run once per point on perturbed copies of its active tensors."""
        inner = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            outs: list[Any] = []
            params = [self.anatomy.held(member) for member in members]
            originals = [param.data for param in params]
            try:
                for copies in self._copies(members):  # enumerate would keep the last copies while the next are made
                    for param, copy in zip(params, copies, strict=True):
                        param.data = copy
                    del copies, copy
                    r = len(outs)
                    torch.clear_autocast_cache()  # an autocast inside the model's forward switches its cache on again
                    outs.append(inner(*self._mine(args, r), **self._mine(kwargs, r)))
                    for param, original in zip(params, originals, strict=True):
                        param.data = original
            finally:
                with uninterrupted():  # even a second Ctrl-C leaves no copy in place of the weights
                    for param, original in zip(params, originals, strict=True):
                        param.data = original
                    torch.clear_autocast_cache()
            self.parted = True
            return self._join(outs, members[0].name in self.anatomy.layer)

        return forward

    def entered(self, module: nn.Module) -> Forward:
        """The module's forward on one row per point, for inner modules that treat these rows differently."""
        inner = module.forward

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            hidden = self.rows(hidden)
            self.parted = True
            return inner(hidden, *args, **kwargs)

        return forward

    def followed(self, layer: nn.Module) -> Forward:
        """The forward of an inactive layer; once the points have parted, its arguments get the rows of all points."""
        inner = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return inner(*self._wide(args), **self._wide(kwargs))

        return forward

    def factored(self, module: nn.Module, members: Sequence[Member]) -> Forward:
        """A matrix product with ±ε(xV)Uᵀ added to it: the perturbed matrix never exists."""
        weight = next(m for m in members if m.basis.factor_shape is not None)
        bias = next((m for m in members if m is not weight), None)
        rows = len(self.points)

        kind = family.product(module)
        if kind == "embedding":
            inner = module.forward

            def embedding(ids: Tensor) -> Tensor:
                v, us = self._factors(self.anatomy.gathered(weight))  # here, so that a captured layer draws its own
                ids = self._strung(ids) if self.padded and self.parted else ids
                y: Tensor = self._wide(inner(ids)) if self.parted else self.rows(inner(ids))
                ids = ids.to(v.device)
                each = torch.stack([F.embedding(self._mine(ids, r), us[r]) for r in range(rows)]).flatten(1, -2)
                y = y + (each @ v.mT).view(-1, *y.shape[1:])
                self.parted = True
                return y

            return embedding

        transposed = kind == "transposed"

        def linear(x: Tensor) -> Tensor:
            self._whole(x)
            mine = self.anatomy.gathered(weight)
            matrix, plain = mine.param, module._parameters.get("bias") if bias is None else None
            v, us = self._factors(mine)
            left, right = (us, v.mT.expand(rows, -1, -1)) if transposed else (v, us.transpose(1, 2))
            x = x.to(matrix.device)
            x = self.rows(x)
            lead = x.shape[:-1]
            x = x.reshape(rows, -1, x.shape[-1])  # experts see the rows end to end
            y = F.linear(x, matrix.T if transposed else matrix, plain)
            y.baddbmm_(x @ left, right.to(y.dtype))  # autocast does not cast for in-place operations
            if bias is not None:
                y += torch.stack([copy for (copy,) in self._copies([bias])])[:, None]
            self.parted = True
            return y.view(*lead, -1)

        return linear

    def _factors(self, weight: Member) -> tuple[Tensor, Tensor]:
        """√ε·V of (n, r), or for each point (R, n, r), and (B ± ε·U)/√ε for each point, (R, m, r), in the matrix's
        dtype."""
        _, matrix, basis = weight
        size = max(abs(point.scale) for point in self.points)
        root = math.sqrt(size)  # each factor takes √ε, so that neither product leaves the range of 16 bits
        assert basis.factor_shape is not None
        _, rank = basis.factor_shape
        us = torch.empty((len(self.points), matrix.shape[0], rank), dtype=matrix.dtype, device=matrix.device)
        for u, point in zip(us, self.points, strict=True):
            basis.coordinates_(u, point.direction.key, point.scale, 1 / root)
        bases = [basis.probed(point.direction.key) for point in self.points]
        if bases[0] is basis:
            return basis.factor(matrix.device, root, matrix.dtype), us
        return torch.stack([one.factor(matrix.device, root, matrix.dtype) for one in bases]), us

    def _copies(self, members: Sequence[Member]) -> Iterator[list[Tensor]]:
        """Yield the copies of a module's active tensors at each point."""
        names = {member.name for member in members}
        for direction, scale in self.points[:: 2 if self.mirrored else 1]:
            mine = [self.anatomy.gathered(member) for member in direction.members if member.name in names]
            if not (self.mirrored and all(member.basis.pairs for member in mine)):
                for side in (scale, -scale) if self.mirrored else (scale,):
                    yield together.perturbed([(m.param.data, m.basis) for m in mine], direction.key, side)
                continue
            pairs = together.mirrored([(m.param, m.basis) for m in mine], direction.key, scale)
            yield [plus for plus, _ in pairs]
            minus = [minus for _, minus in pairs]
            del pairs
            yield minus
            del minus  # before the next pair is made

    def rows(self, x: Tensor) -> Tensor:
        """x with the rows of all points, each point's rows side by side."""
        return x if self.parted else self._repeated(x)

    def _repeated(self, x: Tensor) -> Tensor:
        return x.expand(len(self.points), *x.shape).flatten(0, 1)

    def _wide(self, value: Any) -> Any:
        """Once the points have parted, repeat arguments that have the rows of one point for all points."""
        if isinstance(value, Tensor):
            one = self.padded and self.parted and value.dim() > 1 and value.shape[0] == self.strings
            return self._repeated(value) if one else value
        if isinstance(value, tuple):
            return tuple(map(self._wide, value))
        if isinstance(value, dict):
            return {name: self._wide(one) for name, one in value.items()}
        return value

    def _whole(self, x: Tensor) -> None:
        """Raise unless x has the rows of all points; a router, for example, passes only some tokens to an expert."""
        points = len(self.points) if self.parted else 1
        if x.shape[0] != points * self.strings and not (x.dim() == 2 and x.shape[0] == points * self.tokens):
            raise ForkError(f"a module of a layer sees {tuple(x.shape)}, not the rows of all points")

    def _mine(self, value: Any, r: int) -> Any:
        """The part of an argument that belongs to one point."""
        if isinstance(value, Tensor):
            rows = len(self.points)
            if not self.parted or value.dim() < 2 or value.shape[0] in (1, self.strings):
                return value
            self._whole(value)
            return value.chunk(rows)[r]  # OPT lays the rows end to end
        if isinstance(value, tuple):
            return tuple(self._mine(one, r) for one in value)
        if isinstance(value, dict):
            return {name: self._mine(one, r) for name, one in value.items()}
        return value

    def _join(self, outs: Sequence[Any], inside: bool) -> Any:
        """The outputs of all points, joined as rows; ``inside`` a layer, tokens may lie end to end."""
        first = outs[0]
        if isinstance(first, Tensor):
            if self.padded and first.dim() == 2 and not inside:  # a table of positions, looked up once for all strings
                outs = [out[None] for out in outs]
            return torch.cat([self._strung(out) for out in outs])
        if isinstance(first, tuple):
            return tuple(self._join(parts, inside) for parts in zip(*outs, strict=True))
        if first is None:
            return None
        raise ForkError(f"a layer returned {type(first).__name__}, which has no rows")

    def _strung(self, x: Tensor) -> Tensor:
        """x with a row for every string, if one row serves all strings, as T5's position bias does."""
        one = self.padded and x.dim() > 1 and x.shape[0] == 1
        return x.expand(self.strings, *x.shape[1:]) if one else x


def _in_pairs(points: Sequence[Point]) -> bool:
    """Whether the points come in pairs, each the two sides of one direction."""
    sides = list(zip(points[0::2], points[1::2], strict=False))
    return 2 * len(sides) == len(points) and all(_opposite(*pair) for pair in sides)


def _opposite(a: Point, b: Point) -> bool:
    return a.direction is b.direction and a.scale == -b.scale


def _low_rank(members: Sequence[Member]) -> bool:
    return any(member.basis.factor_shape is not None for member in members)


def _beside(owner: nn.Module, members: Sequence[Member]) -> bool:
    """Whether a module's active tensors can be perturbed in this module alone, without copies of its matrices."""
    if _low_rank(members):
        return family.product(owner) is not None
    return all(member.param.dim() < 2 for member in members) and not any(True for _ in owner.children())
