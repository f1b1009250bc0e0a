"""The course of a race: its finished heats, the learning rates that dev chose, and the heats that come next.

A race's folder holds ``race.json``, the race to run, and ``heats.jsonl``, one line per finished heat.  Everything
else follows from the two, so a race that was stopped continues where it was.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import ZeroBlockError
from ..sweep.plan import Run
from .plan import Entrant, Race, Rate
from .score import Score

STATE, HEATS = "race.json", "heats.jsonl"
FIXED = ("settings", "overrides", "minutes", "share", "evals", "jobs")
"""Settings that cannot change when a race continues; entrants and seeds can be added."""
NOT_FINITE = "not finite"
"""Part of the reason for which a heat fails if its loss is not finite before the clock starts; in earlier versions, at
any time."""
UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, StopIteration)
"""What reading a result raises that is not one."""


class Course:
    """A race in its folder.

    Args:
        race: the race to run.
        folder: the folder that holds the race.
        command: the command that makes the race; a folder keeps the commands of all its entrants, one per line.
    """

    def __init__(self, race: Race, folder: Path, command: str = "") -> None:
        self.folder, self.command = folder, command
        self.race = self._joined(race)
        self.failed: dict[str, str] = {}
        """The reasons why heats failed, by name."""
        self.done: dict[str, Score] = {}
        """The scores of finished heats, by name."""
        self._whole: bytes | None = None
        """The complete lines of ``heats.jsonl`` if its last line was cut short; else None."""
        self._read()

    @classmethod
    def open(cls, folder: Path) -> Course:
        """Open the race in a folder.

        Args:
            folder: the race's folder, with ``race.json``.
        """
        state = _state(folder / STATE)
        _refuse_older(folder, state)
        try:
            course = cls(Race.of(state["race"]), folder, str(state["command"]))
            course.failed = {str(name): str(why) for name, why in state["failed"].items()}
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ZeroBlockError(f"{folder / STATE} is damaged ({error!r}): restore the race's own file") from error
        return course

    @property
    def scores(self) -> dict[str, list[Score]]:
        """The scores of the runners so far, by entrant, in the order of the race."""
        found: dict[str, list[Score]] = {one.name: [] for one in self.race.entrants}
        for run in self._runs():
            if run.name in self.done:
                found[run.more["entrant"]].append(self.done[run.name])
        return found

    def chosen(self, entrant: Entrant) -> tuple[Rate] | None:
        """The learning rate of the best try on dev, in a tuple of one; None if dev has not chosen."""
        if not entrant.tries:
            return (entrant.lrs[0],)
        heats = list(self.race.tries(entrant))
        if any(heat.name not in self.done and not self._diverged(heat) for heat in heats):
            return None  # a try that failed for want of memory, say, might have been the best
        tried = [self.done[heat.name] for heat in heats if heat.name in self.done]
        best = max((score for score in tried if self._merit(score) > -math.inf), key=self._merit, default=None)
        return None if best is None else (best.lr,)

    def hopeless(self, entrant: Entrant) -> bool:
        """Whether the loss stopped being finite with every learning rate that an entrant tried."""
        ended = all(heat.name in self.done or self._diverged(heat) for heat in self.race.tries(entrant))
        return entrant.tries and ended and self.chosen(entrant) is None

    def _diverged(self, heat: Run) -> bool:
        """Whether a heat failed because its loss was not finite."""
        return NOT_FINITE in self.failed.get(heat.name, "")

    def heats(self) -> Iterator[Run]:
        """The heats that are left and can be run now, the most informative first."""
        found: dict[str, Run] = {}
        for entrant in self.race.entrants:  # the tries, and one heat of those with nothing to choose
            first = [] if entrant.tries else [self.race.run(entrant, entrant.lrs[0], 0)]
            found |= {heat.name: heat for heat in (*self.race.tries(entrant), *first)}
        found |= {heat.name: heat for heat in self._runs()}
        return (heat for name, heat in found.items() if name not in self.done and name not in self.failed)

    def left(self) -> Iterator[Run]:
        """All heats that are left; until dev has chosen, runners are listed with their entrant's first lr."""
        for entrant in self.race.entrants:
            tries, chosen = list(self.race.tries(entrant)), self.chosen(entrant)
            failed = any(heat.name in self.failed and not self._diverged(heat) for heat in tries)
            waits = failed or self.hopeless(entrant)
            lr = entrant.lrs[0] if chosen is None else chosen[0]
            runs = [] if waits else [self.race.run(entrant, lr, seed) for seed in range(self.race.seeds)]
            yield from (heat for heat in (*tries, *runs) if heat.name not in self.done and heat.name not in self.failed)

    def end(self, heat: Run, error: str) -> Score | None:
        """Add the result of a heat; returns None if it failed.

        Args:
            heat: the heat that ended.
            error: why it failed; empty if it did not.
        """
        path = self.place(heat)
        if not error and path.is_file():
            try:
                line = json.loads(path.read_text(encoding="utf-8"))
                score = Score.of(line)
            except UNREADABLE as damage:
                error = f"its result cannot be read ({damage!r})"
            else:
                self.done[heat.name] = score
                with atomic.append(self.folder / HEATS) as file:
                    file.write(json.dumps({"heat": heat.name, **line}).encode() + b"\n")
                self.failed.pop(heat.name, None)
            path.unlink()
        if heat.name in self.done:
            return self.done[heat.name]
        self.failed[heat.name] = error or "it ended early"
        self.save()
        return None

    def place(self, heat: Run) -> Path:
        """The file for a heat's result, until :meth:`end` reads and removes it."""
        return self.folder / f".{heat.name}.json"

    def save(self) -> None:
        """Write ``race.json``, and remove a line of ``heats.jsonl`` that a kill cut short."""
        atomic.make_folder(self.folder)
        if self._whole is not None:
            atomic.write(self.folder / HEATS, self._whole)
            self._whole = None
        state = {"race": self.race.document(), "command": self.command, "failed": self.failed}
        atomic.write(self.folder / STATE, json.dumps(state, indent=2) + "\n")

    def _runs(self) -> Iterator[Run]:
        """The runners whose learning rates are known, seed by seed."""
        found = [(entrant, self.chosen(entrant)) for entrant in self.race.entrants]
        for seed in range(self.race.seeds):
            yield from (self.race.run(entrant, lr[0], seed) for entrant, lr in found if lr)

    def _merit(self, score: Score) -> float:
        """The merit of a heat on dev, by the measure that also selects its weights; diverged heats come last."""
        value = -score.best.loss if self.race.by_loss else score.best.dev
        return -math.inf if math.isnan(value) else value

    def _joined(self, race: Race) -> Race:
        """Merge the race with the one in its folder; an error if the folder holds another race."""
        path = self.folder / STATE
        if not path.exists():
            return race
        state = _state(path)
        _refuse_older(self.folder, state)
        try:
            there = Race.of(state["race"])
        except (LookupError, TypeError, AttributeError) as error:
            raise ZeroBlockError(f"{path} does not describe a race ({error!r}): give another --out") from error
        held, asked = there.document(), race.document()
        for name in FIXED:
            if held[name] != asked[name]:
                raise ZeroBlockError(
                    f"{self.folder} holds another race ({name} {held[name]!r}, not {asked[name]!r}): give another --out"
                )
        entrants = {one.name: one for one in there.entrants}
        for entrant in race.entrants:
            other = entrants.setdefault(entrant.name, entrant)
            if (other.method, other.lrs, other.fields) != (entrant.method, entrant.lrs, entrant.fields):
                raise ZeroBlockError(
                    f"{self.folder} holds a race in which {entrant.name} has other learning rates or settings "
                    f"({other.lrs}, {other.fields}): give another --out"
                )
        seeds = max(there.seeds, race.seeds)
        self.command = "\n".join(
            dict.fromkeys([*str(state.get("command", "")).splitlines(), *self.command.splitlines()])
        )
        return dataclasses.replace(race, entrants=tuple(entrants.values()), seeds=seeds)

    def _read(self) -> None:
        """Read the finished heats; if a kill cut the last line short, its heat is run again."""
        path = self.folder / HEATS
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        for number, line in enumerate(lines, start=1):
            if number == len(lines) and not line.endswith(b"\n"):
                self._whole = b"".join(lines[:-1])
                break
            try:
                row = json.loads(line)
                self.done[str(row["heat"])] = Score.of(row)
            except UNREADABLE as error:
                raise ZeroBlockError(
                    f"{path}: line {number} is not the result of a heat ({error!r}): remove it"
                ) from error


def _refuse_older(folder: Path, state: dict[str, Any]) -> None:
    """Refuse a race from before races went by the clock: it has planned lengths, and a folder per runner."""
    if "race" not in state and "methods" in state:
        raise ZeroBlockError(
            f"{folder} holds a race of an older zeroblock, which this one cannot continue: its tables and runs stay as "
            "they are; give another --out to race again"
        )


def _state(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return dict(state)
    except (ValueError, TypeError, RecursionError) as error:
        raise ZeroBlockError(f"{path} is damaged ({error}): give another --out") from error
