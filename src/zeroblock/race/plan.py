"""The plan of a race: its entrants, their learning rates, and the seconds of each heat."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ZeroBlockError, unknown
from ..sweep.grid import show
from ..sweep.plan import Run
from ..train.config import BACKPROPAGATION, Config

Fields = dict[str, Any]
Rate = float | None
"""A learning rate; None where the method finds its own."""

ZERO_SHOT = "zero-shot"
AUTO = "auto"
FT_LR, FT_FACTOR = 10**-4.5, 10**0.5
"""The default learning rates of Adam: the middle one, and the factor from each to the next."""
OWN = (
    "method", "lr", "steps", "seed", "data_seed", "eval_every", "eval_start", "max_minutes", "save_weights", "warmup",
    "fold", "snapshot_every", "track", "parallel", "shares",
)  # fmt: skip
"""Settings that the race decides and the user cannot give."""
TRY_EVALS = 2
"""Evaluations of a try."""
MAX_STEPS = 100_000_000
"""More steps than any runner takes, because the clock ends it."""
FOLD_STEPS = 50
"""Evaluations fall on multiples of this if a method collects steps before it adds them to the weights."""
NAME = re.compile(r"[\w-]+")
"""Allowed names of entrants, which become part of file names and of ``--set NAME.FIELD``."""
RUNNER = "zeroblock.race.runner"
"""The module that makes a heat."""
WARM_UP_SHARE, MAX_WARM_UP_S = 0.25, 2.0


def warm_up_seconds(seconds: float) -> float:
    """The seconds of steps that move nothing before the clock of a heat starts: enough to capture those of SmolLM2.

    Args:
        seconds: seconds of training.
    """
    return min(WARM_UP_SHARE * seconds, MAX_WARM_UP_S)


@dataclass(frozen=True)
class Entrant:
    """A method in a race.

    Args:
        name: the entrant's name in the tables.
        method: its name in ``METHODS``, ``ft``, or ``zero-shot``.
        lrs: the learning rates that dev chooses from; ``(None,)`` if the method finds its own.
        fields: settings for this entrant alone.
    """

    name: str
    method: str
    lrs: tuple[Rate, ...]
    fields: Fields = field(default_factory=dict)

    @property
    def tries(self) -> bool:
        """Whether dev has anything to choose."""
        return len(self.lrs) > 1


@dataclass(frozen=True)
class Race:
    """The settings of a race.

    Args:
        settings: settings of every run: model, task and so on.
        entrants: the methods; the first that trains is the yardstick of the others.
        seeds: runners per entrant, each with its own seed of data and noise.
        minutes: minutes of training per runner, without evaluations.
        share: the fraction of the minutes for which each learning rate is tried.
        evals: evaluations per runner, besides the one before the first step.
        overrides: settings of every run that override the entrants' own.
        jobs: runners at a time, a fixed number.
    """

    settings: Fields
    entrants: tuple[Entrant, ...]
    seeds: int = 3
    minutes: float = 10.0
    share: float = 0.25
    evals: int = 8
    overrides: Fields = field(default_factory=dict)
    jobs: int = 1

    def __post_init__(self) -> None:
        for name, low in (("seeds", 1), ("evals", 1), ("jobs", 1)):
            if getattr(self, name) < low:
                raise ZeroBlockError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not self.minutes > 0:
            raise ZeroBlockError(f"max-minutes must be positive, got {self.minutes}")
        if not 0 < self.share <= 1:
            raise ZeroBlockError(f"try-share is a fraction of the minutes, above 0 and at most 1, got {self.share}")
        given = itertools.chain(self.settings, self.overrides, *(one.fields for one in self.entrants))
        if own := next((name for name in given if name in OWN), None):
            raise ZeroBlockError(f"the race itself decides {own}: leave it out of --set")
        object.__setattr__(self, "_made", {})
        heats = [self.run(entrant, lr, 0) for entrant in self.entrants for lr in entrant.lrs]  # checks the settings
        names = [heat.name for heat in heats]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ZeroBlockError(f"two heats would be called {twice}: rename an entrant, or give other learning rates")
        for heat in heats:
            config = heat.config
            if config.trains and config.lr is None and config.lr_schedule not in (None, "linear"):
                raise ZeroBlockError(
                    f"{heat.more['entrant']}: without a learning rate the size of steps falls linearly to zero: leave "
                    f"lr_schedule {config.lr_schedule} out, or give it to other entrants with --set NAME.lr_schedule"
                )

    @property
    def seconds(self) -> float:
        """Seconds of training per runner."""
        return 60 * self.minutes

    @property
    def task(self) -> str:
        """The name of the task."""
        return str((self.settings | self.overrides)["task"])

    @property
    def model(self) -> str:
        """The name of the model."""
        return str((self.settings | self.overrides)["model"])

    @property
    def by_loss(self) -> bool:
        """Whether dev selects by loss, the default, rather than by the metric that the steps improve."""
        return bool((self.settings | self.overrides).get("objective", "loss") == "loss")

    def tries(self, entrant: Entrant) -> Iterator[Run]:
        """The heats in which dev chooses the learning rate of an entrant; none if there is nothing to choose."""
        for lr in entrant.lrs if entrant.tries else ():
            yield self._heat("try", entrant, lr, 0, self.share * self.seconds, TRY_EVALS)

    def run(self, entrant: Entrant, lr: Rate, seed: int) -> Run:
        """A runner: the heat of a seed at a learning rate; its best weights are measured on test."""
        return self._heat("run", entrant, lr, seed, self.seconds, self.evals)

    def _heat(self, kind: str, entrant: Entrant, lr: Rate, seed: int, seconds: float, evals: int) -> Run:
        made: dict[tuple[Any, ...], Run] = self._made  # type: ignore[attr-defined]  # checking a configuration is slow
        key = (kind, entrant.name, lr, seed)
        if key not in made:
            made[key] = self._new(kind, entrant, lr, seed, seconds, evals)
        return made[key]

    def _new(self, kind: str, entrant: Entrant, lr: Rate, seed: int, seconds: float, evals: int) -> Run:
        given: Fields = {"method": entrant.method, "seed": seed, "data_seed": seed}
        if entrant.method != ZERO_SHOT:
            given |= {"lr": lr, "steps": MAX_STEPS, "eval_every": FOLD_STEPS}
        config = Config.of({**self.settings, **entrant.fields, **self.overrides, **given})
        rate = "" if lr is None else f"-lr{show(lr)}"
        name = re.sub(r"[^\w.+-]+", "-", f"{Path(self.task).stem}-{kind}-{entrant.name}{rate}-seed{seed}")
        more = {"entrant": entrant.name, "kind": kind, "seconds": seconds, "evals": evals}
        return Run(name, config, {}, RUNNER, more)

    def document(self) -> Fields:
        """The race as a JSON object."""
        plain: Fields = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Race:
        """Make a race from its document."""
        entrants = tuple(Entrant(**{**one, "lrs": tuple(one["lrs"])}) for one in document["entrants"])
        return cls(**{**document, "entrants": entrants})


def enter(names: Sequence[str], lrs: Sequence[str], fields: Mapping[str, Fields]) -> tuple[Entrant, ...]:
    """Make the entrants of a race; all that have learning rates get the same number of them.

    Args:
        names: methods, or ``name=method`` for a variant with its own settings.
        lrs: ``1e-4,3e-4`` for all entrants, or ``name=1e-4,3e-4`` for one; ``auto`` adds the same method without a
            learning rate. Without any, every method finds its own.
        fields: settings of single entrants.

    >>> [(one.name, one.lrs) for one in enter(["mezo", "ft"], ["auto,1e-4,3e-4"], {})]
    [('mezo', (0.0001, 0.0003)), ('mezo auto', (None,)), ('ft', (3e-05, 0.0001))]
    """
    from ..method import METHODS

    known = [*METHODS, BACKPROPAGATION, ZERO_SHOT]
    methods = {name: method or name for name, _, method in (word.partition("=") for word in names)}
    for method in methods.values():
        if method not in known:
            raise unknown("method", method, known)
    for name in methods:
        if not NAME.fullmatch(name):
            raise ZeroBlockError(f"--methods: an entrant's name has letters, digits, - and _ only, got {name!r}")
    if len(methods) < len(names) or not names:
        raise ZeroBlockError("--methods names an entrant twice, or none: write --methods mezo,mezo_bcd,ft")
    for name in fields:
        if name not in methods:
            raise unknown("method in --set:", name, methods)
    common: tuple[Rate, ...] = ()
    own: dict[str, tuple[Rate, ...]] = {}
    for text in lrs or [AUTO]:
        name, equals, values = text.rpartition("=")
        if equals and name not in methods:
            raise unknown("method in --lr:", name, methods)
        if equals:
            own[name] = _rates(values, own.get(name, ()))
        else:
            common = _rates(values, common)
    free = None in common
    common = tuple(lr for lr in common if lr is not None)
    count = len(common) or max((len([lr for lr in some if lr is not None]) for some in own.values()), default=0)
    entrants = []
    for name, method in methods.items():
        mine, settings = own.get(name, common), dict(fields.get(name, {}))
        if method == ZERO_SHOT:
            entrants.append(Entrant(name, method, (None,), settings))
            continue
        if method == BACKPROPAGATION and None in own.get(name, ()):
            raise ZeroBlockError(f"{name} needs a learning rate: give --lr {name}=3e-5, or leave --lr {name}= out")
        if method == BACKPROPAGATION and name not in own:
            mine = adam_rates(max(count, 1))
        rates = tuple(lr for lr in mine if lr is not None)
        if rates and len(rates) != max(count, 1):
            raise ZeroBlockError(
                f"every method tries the same number of learning rates: {name} has {len(rates)}, others have {count}"
            )
        if rates:
            entrants.append(Entrant(name, method, rates, settings))
        if method != BACKPROPAGATION and (free or None in mine or not rates):
            entrants.append(Entrant(f"{name} {AUTO}", method, (None,), settings))
    return tuple(entrants)


def adam_rates(count: int) -> tuple[float, ...]:
    """Learning rates of Adam around 3e-5, half a decade apart, to one digit.

    >>> adam_rates(3), adam_rates(1)
    ((1e-05, 3e-05, 0.0001), (3e-05,))
    """
    return tuple(sorted(float(f"{FT_LR * FT_FACTOR ** (i - (count - 1) // 2):.0e}") for i in range(count)))


def _rates(text: str, before: tuple[Rate, ...]) -> tuple[Rate, ...]:
    """Parse learning rates, and append them to those of an earlier --lr."""
    try:
        rates = before + tuple(None if word.strip() == AUTO else float(word) for word in text.split(","))
    except ValueError as error:
        raise ZeroBlockError(f"--lr {text!r}: write numbers with commas between, as in auto,1e-4,3e-4") from error
    if len(set(rates)) < len(rates):
        raise ZeroBlockError(f"--lr {text!r} has a learning rate twice")
    return rates
