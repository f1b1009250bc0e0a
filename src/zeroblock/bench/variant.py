"""Variants: a method with an engine, as a user would run it; one call takes one step."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Protocol

from torch import nn

from ..engine import Engine
from ..engine.anatomy import ForkError
from ..errors import unknown
from ..method import METHODS, get, specimen
from ..optimizer import ZeroOrder
from .batch import Batch, Load
from .ceiling import Ceiling
from .reference import REFERENCES, MeZO

ENGINES = ("sequential", "forked")
REFERENCE = "reference"
LR = 1e-9
"""Too small to change the model's losses, but not zero, so that no step can be skipped."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """The name of a variant.

    Args:
        method: a method of the library, or the name of a published procedure.
        engine: ``sequential`` or ``forked``; ``reference`` for a published procedure.
    """

    method: str
    engine: str

    def __str__(self) -> str:
        return self.method if self.engine == REFERENCE else f"{self.method}, {self.engine}"


def choose(methods: list[str], engines: list[str]) -> list[Choice]:
    """Every method with every engine. Published procedures come once, and first: ratios are relative to one of them."""
    for method in methods:
        if method not in METHODS and method not in REFERENCES:
            raise unknown("method", method, [*REFERENCES, *METHODS])
    for engine in engines:
        if engine not in ENGINES:
            raise unknown("engine", engine, ENGINES)
    published = [Choice(name, REFERENCE) for name in REFERENCES if name in methods]
    ours = itertools.product((m for m in dict.fromkeys(methods) if m in METHODS), dict.fromkeys(engines))
    return [*published, *itertools.starmap(Choice, ours)]


class Variant(Protocol):
    """Something whose steps can be timed."""

    cycle: int
    """Number of steps in which every block has its turn."""

    @property
    def captures(self) -> bool:
        """Whether the first step of a block at a length is slow because it is captured for the following ones."""
        ...

    @property
    def held(self) -> int:
        """Bytes that captured steps hold; the allocator does not count them as in use."""
        ...

    def step(self, batch: Batch) -> None:
        """Take one whole step, starting from the examples' token ids."""
        ...

    def rewind(self, steps: int) -> None:
        """Wait for submitted steps, then go back to the start: the next steps visit the same blocks again.

        Args:
            steps: number of steps that follow. The last of them folds, unless they are fewer than half of the steps
                between two folds.
        """
        ...

    def gemm_ms(self, ceiling: Ceiling, load: Load) -> float | None:
        """Milliseconds of a step's products with the weights, averaged over blocks: a floor."""
        ...

    def copied(self) -> float:
        """Bytes that perturbation and update must read and write, averaged over blocks."""
        ...


class Published:
    """A published procedure."""

    captures, held = False, 0

    def __init__(self, reference: MeZO) -> None:
        self.reference, self.cycle = reference, reference.cycle

    def step(self, batch: Batch) -> None:
        self.reference.step(batch)

    def rewind(self, steps: int) -> None:
        self.reference.steps = 0

    def gemm_ms(self, ceiling: Ceiling, load: Load) -> float | None:
        return ceiling.padded_ms(load.padded)

    def copied(self) -> float:
        """Four passes, each of which reads and writes the weights."""
        return 8 * sum(p.nbytes for p in self.reference.params.values()) / self.cycle


class Ours:
    """A method of the library with an engine."""

    def __init__(self, optimizer: ZeroOrder, engine: Engine, forked: bool) -> None:
        self.optimizer, self.engine, self.forked = optimizer, engine, forked
        self.cycle = len(optimizer.blocks) * optimizer.interval if len(optimizer.blocks) > 1 else 1
        self._start = optimizer.state_dict()

    @property
    def captures(self) -> bool:
        return self.engine.graphs is not None and self.optimizer.plan().capturable

    @property
    def held(self) -> int:
        return 0 if self.engine.graphs is None else self.engine.graphs.bytes

    def step(self, batch: Batch) -> None:
        objective = self.engine.objective(batch.encoded, batch.labels, batch.over)
        self.optimizer.step(objective if self.forked else lambda: objective())

    def rewind(self, steps: int) -> None:
        self.optimizer.flush()
        fold = self.optimizer.fold
        self.optimizer.load_state_dict(self._start)
        if 2 * steps >= fold:  # start within a fold, so that the last step ends one
            self.optimizer.enter(dataclasses.replace(self.optimizer.turn, step=-steps % fold))

    def gemm_ms(self, ceiling: Ceiling, load: Load) -> float | None:
        if not self.forked:
            return ceiling.packed_ms(load.tokens, load.positions)
        return ceiling.forked_ms(load.tokens, load.positions, self.optimizer.blocks, shared=self._low_rank)

    def copied(self) -> float:
        """Bytes of both perturbed copies, written from one read (forked) or two, of the update and of the state.

        A forked low-rank step perturbs nothing in memory.
        """
        params = self.optimizer.params.values()
        perturb = 0 if self.forked and self._low_rank else 3 if self.forked else 4
        weights = (perturb + 2 / self.optimizer.fold) * sum(p.nbytes for p in params)
        state = 0 if self._low_rank else 2 * 4 * len(self.optimizer.rule.state) * sum(p.numel() for p in params)
        return (weights + state) / len(self.optimizer.blocks)

    @property
    def _low_rank(self) -> bool:
        return self.optimizer.subspace.folds


def build(
    choice: Choice,
    model: nn.Module,
    *,
    seed: int = 0,
    max_tokens: int | None = None,
    graphs: bool | None = None,
    interval: int | None = None,
) -> Variant:
    """Make a variant ready to be timed.

    Args:
        choice: the variant.
        model: the model, on its device. Steps barely move it.
        seed: the seed of the noise and of the order of blocks.
        max_tokens: maximum length of a packed row.
        graphs: whether to use CUDA graphs; None lets the engine choose.
        interval: steps per turn for methods that hold a block; None for their default.
    """
    if choice.engine == REFERENCE:
        return Published(REFERENCES[choice.method](model, LR, seed=seed))
    options: dict[str, Any] = {} if graphs is None else {"graphs": graphs}
    engine = Engine(model, fork=choice.engine == "forked", max_tokens=max_tokens, **options)
    if choice.engine == "forked" and not engine.forked:
        raise ForkError(f"{type(model).__name__} cannot be forked: {engine.reason}")
    plain, given = get(choice.method)(specimen()), {}
    if interval is not None and len(plain.blocks) > 1 and plain.interval > 1:
        given["interval"] = interval
    if plain.subspace.folds:  # as zeroblock train does
        given["fold"] = given.get("interval", plain.interval)
    return Ours(get(choice.method)(model, lr=LR, seed=seed, **given), engine, choice.engine == "forked")
