"""The course of a race: a lap for every method's pace, tries for its learning rate, then the runners.

``race.json`` in the race's folder holds the lengths and the choices, so a race that was stopped goes on with them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import atomic
from ..errors import ZeroBlockError
from ..sweep.clock import CLOCK, Pace, read
from ..sweep.crew import Crew, Hand, Hire, Tell
from ..sweep.grid import show
from ..sweep.outcome import choose, folder_of
from ..sweep.plan import Run, Sweep
from .plan import TRY_EVALS, Entrant, Length, Race
from .score import Score

STATE = "race.json"
LAPS = "pace"
"""The folder of the laps."""
LAP_STEPS, MAX_DOUBLINGS = 4, 6
"""A lap has at least so many steps, or two where it takes a quarter of the minutes; else it is made twice as long."""


class Course:
    """A race in its folder.

    Args:
        race: what is raced.
        folder: holds run folders under ``runs``, their output under ``log``, and the race's state.
        jobs: the number of runners at a time.
        hire: gives one more hand.
        say: is called with lines about the stages.
        tell: is called at every begin and end of a run.
    """

    def __init__(self, race: Race, folder: Path, jobs: int, hire: Hire, say: Callable[[str], None], tell: Tell) -> None:
        self.race, self.folder, self.jobs, self.hire, self.say, self.tell = race, folder, jobs, hire, say, tell
        self.runs = folder / "runs"
        self.failed: dict[str, str] = {}
        """Why runners failed, by the name of the run."""
        self._state = self._load()

    def make(self) -> None:
        """Make the whole race, or what is left of it."""
        atomic.make_folder(self.folder)
        self._save()
        self._laps()
        self._tries()
        finals = self.finals()
        if finals is not None:
            self._crew(finals)

    def finals(self) -> Sweep | None:
        """The runners, once their learning rates are chosen; None before."""
        methods = self._methods
        ready = {one.method for one in self.race.entrants if methods[one.method].get("final")}
        if any(one.method not in ready and not self.out.get(one.method) for one in self.race.entrants):
            return None
        lengths = {name: Length(*methods[name]["final"]) for name in ready}
        return self.race.finals(lengths, {name: methods[name]["lr"] for name in ready})

    def scores(self) -> dict[str, list[Score]]:
        """The scores so far, by method, in the order of the race."""
        finals = self.finals()
        found: dict[str, list[Score]] = {one.method: [] for one in self.race.entrants}
        for run in finals.runs.values() if finals else ():
            score = Score.read(run, folder_of(run, self.runs), self.race.seconds)
            if score is not None:
                found[run.config.method].append(score)
        return found

    @property
    def out(self) -> dict[str, str]:
        """Why methods are out of the race, by name."""
        return {name: one["out"] for name, one in self._methods.items() if one.get("out")}

    @property
    def _methods(self) -> dict[str, dict[str, Any]]:
        methods: dict[str, dict[str, Any]] = self._state["methods"]
        return methods

    def _load(self) -> dict[str, Any]:
        """Read the state, with an entry for every method; a folder with another race is refused."""
        race, path = self.race, self.folder / STATE
        asked = {"settings": race.settings, "overrides": race.overrides, "minutes": race.minutes}
        asked |= {"share": race.share, "evals": race.evals}
        asked = json.loads(json.dumps(asked))
        try:
            state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            state = {"asked": asked, "methods": {}}
        except ValueError as error:
            raise ZeroBlockError(f"{path} is damaged ({error}): give another --out") from error
        try:
            held, methods = dict(state["asked"]), state["methods"]
        except (ValueError, LookupError, TypeError) as error:
            raise ZeroBlockError(f"{path} is no race's ({error!r}): give another --out") from error
        if held != asked:
            name = next(key for key in asked if held.get(key) != asked[key])
            raise ZeroBlockError(
                f"{self.folder} holds another race ({name} {held.get(name)!r}, not {asked[name]!r}): give another --out"
            )
        for entrant in race.entrants:
            own = json.loads(json.dumps({"lrs": entrant.lrs, "fields": entrant.fields}))
            there = methods.setdefault(entrant.method, dict(own))
            if {name: there.get(name) for name in own} != own:
                raise ZeroBlockError(
                    f"{self.folder} holds a race in which {entrant.method} has other learning rates or settings "
                    f"({there.get('lrs')}, {there.get('fields')}): give another --out"
                )
            there.pop("out", None)  # what failed before may work now
        return state

    def _save(self) -> None:
        atomic.write(self.folder / STATE, json.dumps(self._state, indent=2) + "\n")

    def _laps(self) -> None:
        """Find the pace of every method that has none, one after another."""
        due = [one for one in self.race.entrants if "pace" not in self._methods[one.method]]
        hand = self.hire() if due else None
        try:
            for entrant in due:
                if hand is None or not hand.alive:
                    hand = self.hire()
                pace, error = self._lap(entrant, hand)
                one = self._methods[entrant.method]
                if pace is None:
                    one["out"] = error or "it took no step"
                    self.say(f"out    {entrant.method}: {one['out']}")
                else:
                    one["pace"] = asdict(pace)
                    self.say(f"pace   {entrant.method}: {pace.rate:.3g} steps per second")
                self._save()
        finally:
            if hand is not None:
                hand.close()

    def _lap(self, entrant: Entrant, hand: Hand) -> tuple[Pace | None, str]:
        """Find the pace of a method, or why it cannot run; a lap of a few steps is made again, twice as long."""
        place, logs = self.folder / LAPS / entrant.method, self.folder / "log"
        logs.mkdir(exist_ok=True)
        for doubling in range(MAX_DOUBLINGS):
            shutil.rmtree(place, ignore_errors=True)
            run = self.race.lap(entrant, 2.0**doubling)
            error = hand.make(run, place, logs / f"pace-{entrant.method}.txt")
            clock = read(place / CLOCK)
            enough = LAP_STEPS if 2.0**doubling * self.race.lap_seconds < self.race.seconds / 4 else 2
            if not clock or clock[-1][0] >= enough or not hand.alive:
                break
        return Pace.of(clock), error

    def _tries(self) -> None:
        """Let dev choose a learning rate for every method, and plan its runners."""
        race, methods = self.race, self._methods
        due = [one for one in race.entrants if "final" not in methods[one.method] and one.method not in self.out]
        lengths: dict[str, Length] = {}
        for entrant in due:
            one = methods[entrant.method]
            if "try" not in one:
                length = race.length(entrant, Pace(**one["pace"]), race.share, TRY_EVALS)
                one["try"] = [length.steps, length.every]
            lengths[entrant.method] = Length(*one["try"])
        self._save()
        sweep = race.tries(lengths)
        crew = self._crew(sweep) if sweep else None
        cells = {cell.row: cell for cell in sweep.cells} if sweep else {}
        for entrant in due:
            one, pace = methods[entrant.method], Pace(**methods[entrant.method]["pace"])
            one["lr"] = entrant.lrs[0]
            if crew is not None and entrant.method in cells:
                cell = cells[entrant.method]
                chosen = choose(cell, crew.outcomes)
                if chosen is None:
                    one["out"] = next((crew.failed[run.name] for run in cell.tuning() if run.name in crew.failed), "")
                    self.say(f"out    {entrant.method}: every learning rate failed: {one['out']}")
                    continue
                one["lr"] = chosen.values["lr"]
                pace = self._pace_of(chosen.runs[0]) or pace
                dev = crew.outcomes[chosen.runs[0].name].dev
                self.say(f"choose {entrant.method}: lr {show(one['lr'])}, dev {dev:.1%}, of {len(entrant.lrs)} tried")
            self._plan_final(entrant, pace)
        self._save()

    def _plan_final(self, entrant: Entrant, pace: Pace) -> None:
        length = self.race.length(entrant, pace, 1.0, self.race.evals)
        self._methods[entrant.method]["final"] = [length.steps, length.every]

    def _pace_of(self, run: Run) -> Pace | None:
        return Pace.of(read(folder_of(run, self.runs) / CLOCK))

    def _crew(self, sweep: Sweep) -> Crew:
        crew = Crew(sweep, self.folder, self.jobs, self.tell, self.hire)
        crew.make()
        self.failed |= crew.failed
        return crew
