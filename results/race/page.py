"""Write the measured parts of docs/race.md from the rows in this folder.

    python results/race/page.py

Every race is a folder with race.json and heats.jsonl; steps.csv holds the step times.  The script
replaces the text between the marks in the page, and writes the figures to docs/images.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from zeroblock.bench.methods import MethodRow
from zeroblock.bench.methods import table as steps_table
from zeroblock.bench.row import read
from zeroblock.race import figure, table
from zeroblock.race.course import Course
from zeroblock.race.plan import AUTO
from zeroblock.race.score import Score, first_to

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
MODELS = {"smollm2": "SmolLM2-135M", "qwen": "Qwen2.5-1.5B", "gemma": "Gemma-3-270M"}
SHOWN = dict.fromkeys(MODELS, ("sst2", "rte", "squad", "boolq")) | {"gemma": ("sst2",)}
"""The tasks with a figure and standings of their own; Gemma took few steps on longer texts, on a CPU."""
YARDSTICK = "mezo"
MIN_SEEDS = 3
"""Minimum number of seeds for a verdict."""
FEW = "too few seeds to say"

CLAIMS = {
    "mezo_bcd": "up to 2.77 times as fast as MeZO in wall clock on OPT-13B, with comparable iteration complexity and "
    "fine-tuning performance",
    "lozo": "outperforms existing zeroth-order methods, and closely approaches first-order ones",
    "fzoo": "on average 3 % more accuracy than MeZO with 3 times fewer forward passes",
    "fzoo_bcd": "FZOO's: on average 3 % more accuracy than MeZO with 3 times fewer forward passes; nobody has "
    "published it with blocks",
    "hizoo": "fewer training steps and better accuracy than MeZO; on SST-2 a speed-up of 8 times",
    "conmezo": "up to 2 times as fast as MeZO",
    "subzero": "better fine-tuning performance and faster convergence than MeZO",
    "zo_muon": "24.7 % of MeZO's queries for the same SST-2 performance",
    "eggroll": "a hundred times the training speed of plain evolution strategies at large populations; it makes no "
    "claim against MeZO",
    "lezo": "over 3 times as fast as MeZO on SST-2, BoolQ and Copa, without losing performance",
    "adalezo": "1.7 to 3.0 times as fast in wall clock as the methods before it",
    "adamezo": "outperforms MeZO with up to 70 % fewer forward passes",
    "mezo_greedy": "faster convergence and better accuracy than the methods it is put into",
    "mezo_svrg": "up to 20 % more test accuracy than MeZO, often with half the GPU hours",
    "sparse_mezo": "9 % more accuracy than MeZO and 3.5 times as fast, on RTE",
    "mezo_bcd_adam": "a variant of MeZO-BCD with Adam's moments of one block; the paper's headline is about MeZO-BCD",
}
"""The claims of the papers' abstracts about speed and accuracy."""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=HERE, help="the folder of the races and of steps.csv")
    parser.add_argument("--docs", type=Path, default=DOCS, help="the folder of race.md and of images/")
    args = parser.parse_args()
    courses = {
        (model, task): Course.open(args.rows / model / task)
        for model, shown in SHOWN.items()
        for task in shown
        if (args.rows / model / task / "race.json").is_file()
    }
    for path in sorted(args.rows.glob("*/*/race.json")):
        if (path.parts[-3], path.parts[-2]) not in courses:  # races on other tasks only get their own tables
            table.write(Course.open(path.parent), figure="")
    page = args.docs / "race.md"
    text = page.read_text(encoding="utf-8")
    text = filled(text, "standings", standings(courses, args.docs))
    text = filled(text, "tasks", tasks(args.rows))
    text = filled(text, "claims", claims(courses))
    text = filled(text, "commands", commands(args.rows))
    text = filled(text, "steps", steps(args.rows / "steps.csv"))
    page.write_text(text, encoding="utf-8")
    print(f"{page}: {len(courses)} races")


def filled(text: str, name: str, lines: Sequence[str]) -> str:
    """Replace the text between the marks of a part."""
    begin, end = f"<!-- race: {name} -->", f"<!-- race: end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"docs/race.md has no {begin} … {end}")
    body = "\n".join([begin, "", *lines, "", end]) if lines else f"{begin}\n{end}"
    return pattern.sub(lambda _: body, text)


def tasks(rows: Path) -> list[str]:
    """The tables of all tasks, as results/lrfree/table.py makes them, one per model."""
    spec = importlib.util.spec_from_file_location("lrfree_table", HERE.parent / "lrfree" / "table.py")
    assert spec is not None
    assert spec.loader is not None
    lrfree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lrfree)
    lines: list[str] = []
    for model, name in MODELS.items():
        if list((rows / model).glob("*/runners.csv")):
            cells, found = lrfree.read(rows / model)
            lines += ["", f"### {name}", "", *lrfree.markdown(rows / model, cells, found)[2:-1]]  # without its heading
    return lines[1:]


def standings(courses: dict[tuple[str, str], Course], docs: Path) -> list[str]:
    """A figure, the rules and a table per race."""
    lines: list[str] = []
    for (model, task), course in courses.items():
        place = docs / "images" / f"race-{model}-{task}.svg"
        table.write(course, os.path.relpath(place, course.folder))
        place.parent.mkdir(parents=True, exist_ok=True)
        lines += ["", f"### {MODELS[model]}, {task}", ""]
        with tempfile.TemporaryDirectory() as folder:
            if figure.draw(Path(folder), f"{MODELS[model]}, {task}", course.scores):
                shutil.move(Path(folder) / "race.svg", place)
                lines += [f"![Dev against seconds and forward passes, {task}](images/{place.name})", ""]
        lines += [*table.rules(course), "", *table.standings_table(course), ""]
        lines += [f"- {note}" for note in table.notes(course)]
        machine = next((one.about for some in course.scores.values() for one in some), {})
        lines += ["", f"{machine.get('machine', '')}, {machine.get('versions', '')}, {machine.get('date', '')}."]
    return lines


def claims(courses: dict[tuple[str, str], Course]) -> list[str]:
    """Each paper's claim, and the result of the race on SmolLM2's sst2, compared with MeZO."""
    course = courses.get(("smollm2", "sst2"))
    if course is None:
        return []
    scores = course.scores
    lines = ["| method | its paper says | found here, on SmolLM2-135M's sst2 | is it what the paper says? |"]
    lines += ["|---|---|---|---|"]
    for method, said in CLAIMS.items():
        found, verdicts = [], []
        for suffix in ("", f" {AUTO}"):
            mine, other = scores.get(method + suffix) or [], scores.get(YARDSTICK + suffix) or []
            if mine and other:
                how = "without an lr" if suffix else "with an lr"
                result, verdict = beside(mine, other, course.race.evals)
                found.append(f"{how}: {result}")
                verdicts.append(f"{how}: {verdict}")
        if found:
            lines.append(f"| `{method}` | {said} | {'; '.join(found)} | {'; '.join(verdicts)} |")
    return lines


def beside(mine: Sequence[Score], other: Sequence[Score], evals: int) -> tuple[str, str]:
    """A method against MeZO: test and the time to MeZO's best dev loss, in numbers and as a verdict.

    Args:
        mine: the runners of the method.
        other: those of MeZO.
        evals: evaluations per runner; times that differ by less than the time between two count as equal.
    """
    a, b = ([100 * one.test for one in some if not math.isnan(one.test)] for some in (mine, other))
    if not a or not b:
        return "no test", "open"
    gap = fmean(a) - fmean(b)
    error = math.sqrt(sum(stdev(some) ** 2 / len(some) for some in (a, b))) if min(len(a), len(b)) > 1 else math.nan
    enough = min(len(a), len(b)) >= MIN_SEEDS
    marks = {one.seed: one.best.loss for one in other}
    there = {one.seed for one in mine if first_to([one], marks, "seconds")}  # only these seeds are compared
    reached, own = (
        {name: first_to([one for one in some if one.seed in there], marks, name) for name in ("seconds", "forwards")}
        for some in (mine, other)
    )
    result = f"test {gap:+.1f} points (standard error {error:.1f})"
    word = "not told apart from MeZO" if math.isnan(error) or abs(gap) <= 2 * error else ""
    word = word or ("more accurate than MeZO" if gap > 0 else "less accurate than MeZO")
    if not reached["seconds"]:
        return f"{result}; no seed reached MeZO's best dev loss", f"{word}; slower" if enough else FEW
    speed = []
    for name, unit in (("seconds", "time"), ("forwards", "passes")):
        if own[name]:
            speed.append(f"{fmean(reached[name]) / fmean(own[name]):.2f} × MeZO's {unit}")
    count = f"{len(reached['seconds'])} of {len(mine)} seeds reached MeZO's best dev loss"
    ratio = fmean(reached["seconds"]) / fmean(own["seconds"]) if own["seconds"] else math.nan
    pace = "faster" if ratio < 1 - 1 / evals and len(reached["seconds"]) == len(mine) else "not clearly faster"
    told = f"{result}; {count}" + (f", in {' and '.join(speed)}" if speed else "")
    return told, f"{word}; {pace}" if enough else FEW


def commands(rows: Path) -> list[str]:
    """The commands that made the races, each once."""
    courses = [Course.open(path.parent) for model in MODELS for path in sorted(rows.glob(f"{model}/*/race.json"))]
    found = dict.fromkeys(line for course in courses for line in course.command.splitlines())
    return ["```", *found, "```"] if found else []


def steps(path: Path) -> list[str]:
    """The table of step times."""
    if not path.is_file():
        return ["Not measured yet: `bash results/race/run.sh steps` does it."]
    rows = read(path, MethodRow)
    if not rows:
        return []
    first = rows[0]
    where = f"{first.machine}, {first.dtype}, {first.tokens} tokens per batch of {first.batch_size}, {first.versions}"
    return [*steps_table(rows), "", f"{where}, {first.date}."]


if __name__ == "__main__":
    main()
