"""The sweep file: its tables, checked, and the runs that they expand to.

    tune = ["lr", "rank"]         # dev chooses these, for each row and task
    tune_seeds = 1                # optional: only the first seed tunes, the others use its choice

    [run]                         # fields of every run's configuration
    model = "smollm2"
    steps = 2000

    [grid]                        # fields that take several values
    task = ["sst2", "rte"]        # the columns of the table
    seed = [0, 1]                 # averaged

    [follow]
    data_seed = "seed"            # takes each run's seed

    [task.rte]                    # for one task
    steps = 4000

    [[case]]                      # a row of the table
    name = "LOZO"
    method = "lozo"
    lr = [1e-6, 1e-7]
    rank = [1, 2, 4]

    [case.task.rte]               # for one task of the case above
    lr = 1e-7

Tables further down in this example win over those above them.  The values of a list are tried
one by one.  A list of a field that is neither tuned nor averaged makes one row per value, so a
file without cases is a plain grid.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ZeroBlockError, unknown
from ..task import TASKS
from ..task.own import is_hub, is_path
from ..train.config import BACKPROPAGATION, Config, distrust, is_lr_schedule, renamed

KEYS = ("tune", "tune_seeds", "run", "grid", "follow", "task", "case")
AVERAGED = ("seed", "data_seed")

Fields = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A row of the table, as the file describes it.

    Args:
        name: the row's name.
        fields: the row's own values, possibly lists.
        task: further values, for single tasks.
    """

    name: str
    fields: Fields
    task: dict[str, Fields]


@dataclass(frozen=True)
class CellPlan:
    """The configurations of one cell of the table.

    Args:
        row: the name of its row.
        task: its column.
        candidates: every choice of the tuned fields, with one configuration per seed.
    """

    row: str
    task: str
    candidates: list[tuple[Fields, list[Config]]]


@dataclass(frozen=True)
class Grid:
    """The tables of a sweep file, checked.

    Args:
        run: fields of all runs, including those of ``[grid]``.
        task: fields of single tasks.
        cases: at least one, which may be empty.
        follow: fields that take the value of another field.
        tune: fields that dev chooses.
        tune_seeds: the number of seeds that dev chooses by; None for all.
        overrides: fields from the command line.
    """

    run: Fields
    task: dict[str, Fields]
    cases: list[Case]
    follow: dict[str, str]
    tune: tuple[str, ...]
    tune_seeds: int | None
    overrides: Fields

    @classmethod
    def of(cls, file: Mapping[str, Any], overrides: Fields) -> Grid:
        """Check the contents of a file.

        Args:
            file: see the module's docstring.
            overrides: fields that win over everything in the file.
        """
        for key in file:
            if key not in KEYS:
                raise unknown("key", key, KEYS)
        overrides = _check("--set", overrides)
        run, grid = _table(file, "run"), _table(file, "grid")
        for field, value in grid.items():
            if not isinstance(value, list):
                raise ZeroBlockError(f"[grid] {field} is one value: write {field} = [{value!r}], or put it under [run]")
        for field, value in run.items():
            if isinstance(value, list):
                raise ZeroBlockError(f"[run] {field} has several values: put it under [grid]")
        tasks = {name: _check(f"[task.{name}]", table, "task") for name, table in _nested(file, "task").items()}
        cases = [_case(table) for table in _several(file.get("case", {}))]
        names = [case.name for case in cases]
        if repeated := {name for name in names if names.count(name) > 1}:
            raise ZeroBlockError(f"two cases are named {sorted(repeated)[0]!r}: give each [[case]] its own name")
        follow = _check("[follow]", file.get("follow", {}))
        _check("[follow]", {str(source): None for source in follow.values()})
        if both := next((name for name in follow if name in grid), None):
            raise ZeroBlockError(f"[follow] {both} takes the value of {follow[both]}: leave it out of [grid]")
        tune = file.get("tune", [])
        if not isinstance(tune, list) or not all(isinstance(field, str) for field in tune):
            raise ZeroBlockError(f'tune is a list of fields, as in tune = ["lr"], not {tune!r}')
        tune = list(_check("tune", {field: _old_values(file, field) for field in tune}))
        if wrong := [field for field in tune if field in ("task", *AVERAGED)]:
            raise ZeroBlockError(f"tune cannot hold {wrong[0]!r}: dev chooses within a task, and seeds are averaged")
        seeds = file.get("tune_seeds")
        if seeds is not None and (not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1):
            raise ZeroBlockError(f"tune_seeds is a number of seeds, at least 1, not {seeds!r}")
        checked = cls(run | grid, tasks, cases, follow, tuple(tune), seeds, overrides)
        known = {task for task, _ in checked._pairs()}
        for name in {*tasks, *(name for case in cases for name in case.task)}:
            # an override may leave tasks out; the file itself must not name tasks that it does not run
            if "task" not in overrides and name not in known:
                raise unknown("task in a task table:", name, known)
        return checked

    def cells(self) -> list[CellPlan]:
        """Plan the cells of the table, column by column, with every configuration checked."""
        cells = [cell for task, case in self._pairs() for cell in self._cells(task, case)]
        if not cells:
            raise ZeroBlockError('no task: give one in [run] or several in [grid], as in task = ["sst2", "rte"]')
        return cells

    def _pairs(self) -> list[tuple[str, Case]]:
        """Every task with every case that has it, task by task."""
        of_case = {
            case.name: _several((self.run | case.fields | self.overrides).get("task", [])) for case in self.cases
        }
        for task in itertools.chain.from_iterable(of_case.values()):
            if not isinstance(task, str):
                raise ZeroBlockError(f"task = {task!r} is not a task's name")
        tasks = dict.fromkeys(itertools.chain.from_iterable(of_case.values()))
        for task in tasks:
            if not (is_path(task) or is_hub(task)) and task not in TASKS:
                raise unknown("task", task, TASKS)
        return [(task, case) for task in tasks for case in self.cases if task in of_case[case.name]]

    def _cells(self, task: str, case: Case) -> Iterator[CellPlan]:
        """Plan the cells of one task and case: one per choice of the fields that make rows."""
        own = self.task.get(task, {}) | case.fields | case.task.get(task, {}) | self.overrides
        fields = self.run | own | {"task": task}
        follow = {name: source for name, source in self.follow.items() if name not in own}
        lists = {name: value for name, value in fields.items() if isinstance(value, list)}
        for name, values in lists.items():
            if not all(isinstance(value, (str, int, float)) for value in values):
                raise ZeroBlockError(
                    f"{_where(case, task)}: {name} = {values} holds a value that is neither text nor number"
                )
            if not values or len({json.dumps(value) for value in values}) < len(values):
                raise ZeroBlockError(f"{_where(case, task)}: {name} = {values} is empty or has a value twice")
        rows = {name: values for name, values in lists.items() if name not in (*self.tune, *AVERAGED)}
        tuned = {name: values for name, values in lists.items() if name in self.tune}
        seeds = {name: values for name, values in lists.items() if name in AVERAGED}
        for row in _product(rows):
            candidates = [
                (values, [self._config(fields | row | values | seed, case, follow) for seed in _product(seeds)])
                for values in _product(tuned)
            ]
            label = ", ".join(filter(None, [case.name, *(f"{name} {show(value)}" for name, value in row.items())]))
            yield CellPlan(label or str(candidates[0][1][0].method), task, candidates)

    def _config(self, fields: Fields, case: Case, follow: Mapping[str, str]) -> Config:
        fields = fields | {name: fields[source] for name, source in follow.items() if source in fields}
        if fields.get("method") == BACKPROPAGATION:  # the weights of all runs would fill the disk
            fields = {"save_weights": False, **fields}
        try:
            return Config.of(fields)
        except ZeroBlockError as error:
            raise ZeroBlockError(f"{_where(case, fields['task'])}: {error}") from error


def show(value: Any) -> str:
    """Format a value in a few characters, for names and labels.

    >>> show(3e-4), show(0.75), show(20000), show("flip-flop"), show(True)
    ('3e-4', '0.75', '20000', 'flip-flop', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value and not 1e-2 <= abs(value) < 1e4:
        digits, _, exponent = f"{value:e}".partition("e")
        return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def parse(settings: Iterable[str]) -> Fields:
    """Parse fields from the command line, each ``field=value`` with the value as in TOML, or bare text.

    >>> parse(["steps=100", "task=['sst2', 'rte']", "data=my/folder"])
    {'steps': 100, 'task': ['sst2', 'rte'], 'data': 'my/folder'}
    """
    fields: Fields = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals or not name.strip():
            raise ZeroBlockError(f"--set {setting!r}: write field=value")
        try:
            fields[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            fields[name.strip()] = value
    return fields


def names() -> list[str]:
    """The names of the fields of a configuration."""
    return [field.name for field in dataclasses.fields(Config)]


def _check(where: str, fields: Any, *wrong: str) -> Fields:
    """Return a table of configuration fields under their current names, or raise an error for a misspelt one."""
    if not isinstance(fields, dict):
        raise ZeroBlockError(f"{where} is a table of fields, not {fields!r}")
    current = renamed(fields)
    if where != "--set":
        current = distrust(current, where, trusted=False, flag="--set trust_remote_code=true")
    known = [name for name in names() if name not in wrong]
    for name in current:
        if name not in known:
            raise unknown(f"field in {where}:", name, known)
    return current


def _old_values(file: Mapping[str, Any], field: str) -> Any:
    """A value of a tuned field that shows that ``schedule`` has its old meaning; None if the file has none."""
    cases = [case for case in _several(file.get("case", {})) if isinstance(case, dict)]
    tables = [file.get("run"), file.get("grid"), *cases]
    values = [table[field] for table in tables if isinstance(table, dict) and field in table]
    return next((value for value in values if is_lr_schedule(value)), None)


def _table(file: Mapping[str, Any], key: str) -> Fields:
    return _check(f"[{key}]", file.get(key, {}))


def _nested(table: Mapping[str, Any], key: str) -> dict[str, Any]:
    nested = table.get(key, {})
    if not isinstance(nested, dict):
        raise ZeroBlockError(f"{key} is a table for every task, as in [{key}.sst2], not {nested!r}")
    return nested


def _case(table: Any) -> Case:
    if not isinstance(table, dict):
        raise ZeroBlockError(f"cases are written as [[case]] tables, not as {table!r}")
    fields = {key: value for key, value in table.items() if key not in ("name", "task")}
    name = str(table.get("name", ""))
    where = f"[[case]] {name!r}"
    task = table.get("task", {})
    if not isinstance(task, dict):  # task = "sst2": the case has that task alone
        return Case(name, _check(where, fields) | {"task": task}, {})
    inner = {key: _check(f"{where}, task {key}", value, "task") for key, value in task.items()}
    return Case(name, _check(where, fields), inner)


def _where(case: Case, task: str) -> str:
    return f"case {case.name!r}, task {task}" if case.name else f"task {task}"


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _product(axes: Mapping[str, Sequence[Any]]) -> Iterator[Fields]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))
