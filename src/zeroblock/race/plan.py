"""The plan of a race: who runs, with which learning rates, for how many steps.

A runner's length is a number of steps, as of every run, so that learning rates that fall and journals work as
always.  The number is what fits into the minutes at the pace that was measured before.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import ZeroBlockError, unknown
from ..sweep.clock import Pace
from ..sweep.plan import Run, Sweep
from ..train.config import BACKPROPAGATION, Config

Fields = dict[str, Any]

FT_LR, FT_FACTOR = 10**-4.5, 10**0.5
"""The learning rates of Adam that are tried unless others are given: around this one, at this factor."""
OWN = ("method", "lr", "steps", "seed", "data_seed", "eval_every", "eval_start", "max_minutes", "save_weights")
"""Settings that are not for the user of a race to give."""
TRY_EVALS = 2
"""Evaluations of a try."""
MAX_STEPS = 100_000_000
"""More than any lap takes."""
MIN_LAP_S, MAX_LAP_S, LAP_SHARE = 4.0, 60.0, 0.1
"""The lap that finds a method's pace takes this share of the minutes, within these seconds."""


@dataclass(frozen=True)
class Entrant:
    """A method in a race.

    Args:
        method: its name in ``METHODS``, or ``ft``.
        lrs: the learning rates that dev chooses from.
        fields: settings for this method alone.
    """

    method: str
    lrs: tuple[float, ...]
    fields: Fields = field(default_factory=dict)


@dataclass(frozen=True)
class Length:
    """How long a run is.

    Args:
        steps: in all.
        every: steps from one evaluation to the next.
    """

    steps: int
    every: int


@dataclass(frozen=True)
class Race:
    """What is raced.

    Args:
        settings: of every run: model, task and so on.
        entrants: the methods; the first is the yardstick of the others.
        seeds: runners per method; each seed is one of the data and of the noise.
        minutes: of training per runner, without evaluations.
        share: the fraction of the minutes that one learning rate is tried for.
        evals: evaluations per runner, besides the one before the first step.
        overrides: settings of every run that win over those of the methods.
    """

    settings: Fields
    entrants: tuple[Entrant, ...]
    seeds: int = 3
    minutes: float = 10.0
    share: float = 0.25
    evals: int = 8
    overrides: Fields = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, low in (("seeds", 1), ("evals", 1)):
            if getattr(self, name) < low:
                raise ZeroBlockError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not self.minutes > 0:
            raise ZeroBlockError(f"max-minutes must be positive, got {self.minutes}")
        if not 0 < self.share <= 1:
            raise ZeroBlockError(f"try-share is a fraction of the minutes, above 0 and at most 1, got {self.share}")
        given = itertools.chain(self.settings, self.overrides, *(one.fields for one in self.entrants))
        if own := next((name for name in given if name in OWN), None):
            raise ZeroBlockError(f"the race itself decides {own}: leave it out of --set")
        for entrant in self.entrants:
            self.lap(entrant)  # which checks its settings before anything runs

    @property
    def seconds(self) -> float:
        """Of training per runner."""
        return 60 * self.minutes

    @property
    def lap_seconds(self) -> float:
        """Of the lap that finds a method's pace."""
        return min(max(LAP_SHARE * self.seconds, MIN_LAP_S), MAX_LAP_S)

    def lap(self, entrant: Entrant, factor: float = 1.0) -> Run:
        """A run that the clock ends, to find the pace of a method; its result is of no use.

        Args:
            entrant: the method.
            factor: on the seconds of the lap.
        """
        changes = {"steps": MAX_STEPS, "eval_every": MAX_STEPS, "eval_start": False, "eval_limit": 1}
        fields = self.settings | entrant.fields | self.overrides | changes | {"save_weights": False}
        given = {"method": entrant.method, "lr": min(entrant.lrs), "max_minutes": factor * self.lap_seconds / 60}
        return Run(entrant.method, Config.of(fields | given), {})

    def length(self, entrant: Entrant, pace: Pace, share: float, evals: int) -> Length:
        """The length of a run that takes a share of the minutes.

        Evaluations fall between two turns where turns are short enough: a method that collects the steps of a turn
        (``lozo``) is slower otherwise.
        """
        every = max(1, pace.steps(share * self.seconds) // evals)
        interval = _interval(self.lap(entrant).config)
        if every > interval:
            every -= every % interval
        return Length(every * evals, every)

    def tries(self, lengths: Mapping[str, Length]) -> Sweep | None:
        """The sweep in which dev chooses the learning rate of every method; None if there is nothing to choose.

        Args:
            lengths: by method; methods without one do not take part.
        """
        cases = [
            {"name": one.method, "lr": list(one.lrs), "eval_start": False} | self._case(one, lengths[one.method])
            for one in self.entrants
            if one.method in lengths and len(one.lrs) > 1
        ]
        return self._sweep({"tune": ["lr"]}, cases, [0]) if cases else None

    def finals(self, lengths: Mapping[str, Length], lrs: Mapping[str, float]) -> Sweep | None:
        """The sweep of the runners; None if none is left.

        Args:
            lengths: by method.
            lrs: the chosen learning rates, by method; methods without one are out.
        """
        cases = [
            {"name": one.method, "lr": lrs[one.method]} | self._case(one, lengths[one.method])
            for one in self.entrants
            if one.method in lengths and one.method in lrs
        ]
        return self._sweep({}, cases, list(range(self.seeds))) if cases else None

    def _case(self, entrant: Entrant, length: Length) -> Fields:
        return entrant.fields | {"method": entrant.method, "steps": length.steps, "eval_every": length.every}

    def _sweep(self, head: Fields, cases: list[Fields], seeds: list[int]) -> Sweep:
        file = head | {"run": self.settings, "case": cases, "grid": {"seed": seeds}, "follow": {"data_seed": "seed"}}
        return Sweep.of("race", file, self.overrides)


def enter(methods: Sequence[str], lrs: Sequence[str], fields: Mapping[str, Fields]) -> tuple[Entrant, ...]:
    """Make the entrants of a race; every method gets the same number of learning rates.

    Args:
        methods: their names.
        lrs: ``1e-4,3e-4`` for all methods of ``METHODS``, or ``method=1e-4,3e-4`` for one.
        fields: settings of single methods.

    >>> [(one.method, one.lrs) for one in enter(["mezo", "ft"], ["1e-4,3e-4,1e-3", "ft=1e-5,2e-5,4e-5"], {})]
    [('mezo', (0.0001, 0.0003, 0.001)), ('ft', (1e-05, 2e-05, 4e-05))]
    """
    from ..method import METHODS

    known = [*METHODS, BACKPROPAGATION]
    for name in (*methods, *fields):
        if name not in known:
            raise unknown("method", name, known)
    if len(set(methods)) < len(methods) or not methods:
        raise ZeroBlockError("--methods names a method twice, or none: write --methods mezo,mezo_bcd,ft")
    common: tuple[float, ...] = ()
    own: dict[str, tuple[float, ...]] = {}
    for text in lrs:
        name, equals, values = text.rpartition("=")
        if equals and name not in methods:
            raise unknown("method in --lr:", name, methods)
        if equals:
            own[name] = _rates(values)
        else:
            common = _rates(values)
    count = len(common) or max(map(len, own.values()), default=0)
    entrants = []
    for name in methods:
        rates = own.get(name) or (adam_rates(count) if name == BACKPROPAGATION else common)
        if not rates:
            raise ZeroBlockError(
                f"{name} needs learning rates to try: give --lr 1e-4,3e-4,1e-3 for all methods, or --lr {name}=1e-4,…"
            )
        if len(rates) != count:
            raise ZeroBlockError(
                f"every method tries the same number of learning rates: {name} has {len(rates)}, others have {count}"
            )
        entrants.append(Entrant(name, rates, dict(fields.get(name, {}))))
    return tuple(entrants)


def adam_rates(count: int) -> tuple[float, ...]:
    """Learning rates of Adam around 3e-5, half a decade apart, to one digit.

    >>> adam_rates(3), adam_rates(1)
    ((1e-05, 3e-05, 0.0001), (3e-05,))
    """
    return tuple(sorted(float(f"{FT_LR * FT_FACTOR ** (i - (count - 1) // 2):.0e}") for i in range(count)))


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise ZeroBlockError(f"--lr {text!r}: write numbers with commas between, as in 1e-4,3e-4,1e-3") from error
    if len(set(rates)) < len(rates):
        raise ZeroBlockError(f"--lr {text!r} has a learning rate twice")
    return rates


def _interval(config: Config) -> int:
    from ..method import METHODS, specimen
    from ..train.compose import options

    if config.method == BACKPROPAGATION:
        return 1
    return METHODS[config.method](specimen(), lr=config.lr, **options(config)).interval


def forwards(config: Config) -> int:
    """Forward passes per step: one per batch and point where the estimator measures.

    A forked pass of two points counts as two, whatever it shares.  A step of ``ft`` counts as three per batch: its
    forward pass, and a backward pass that takes about twice as long.

    >>> forwards(Config(model="m", task="sst2", method="mezo", lr=1e-6, probes=4))
    8
    """
    from ..method import METHODS, specimen
    from ..train.compose import options

    if config.method == BACKPROPAGATION:
        return 3 * config.accumulate
    optimizer = METHODS[config.method](specimen(), lr=config.lr, eps=config.eps, **options(config))
    return len(optimizer.plan().points) * config.accumulate
