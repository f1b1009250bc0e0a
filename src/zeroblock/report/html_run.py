"""``report.html`` of a run: its result next to the baseline, its curves, blocks and commands, on one page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import atomic
from ..errors import shown
from ..evaluate.measurement import SPLITS
from ..task.metric import is_loss
from ..train.compose import most
from .html import REPORT, bar, card, command, fact, page, pairs, percent, plain, size, span, table
from .html_chart import Level, Line, activity_chart, line_chart, number
from .move import Moves
from .source import Source, read_source
from .summary import LOSS, setback

MAX_TABLE_BLOCKS = 400
"""Maximum rows of the table of blocks; with more blocks there is none."""
MEDIAN_OF = 50
"""The smoothed loss is a median over a fiftieth of the run."""
FILES = ("summary.md", "config.toml", "metrics.jsonl", "steps.csv", "summary.json", "journal.zbj", "about.json")


def write_report(folder: Path) -> Path:
    """Write ``report.html`` of a run folder, finished or not, and return its path.

    Args:
        folder: see :func:`~zeroblock.report.source.read_source`.
    """
    path = folder / REPORT
    atomic.write(path, report(read_source(folder)))
    return path


def report(source: Source) -> str:
    """The report on a run as one HTML document."""
    charts = list(_charts(source))
    return page(
        source.title,
        [
            _header(source),
            _result(source),
            _facts(source),
            *(f'<div class="grid2">{"".join(charts[i : i + 2])}</div>' for i in range(0, len(charts), 2)),
            _activity(source),
            _blocks(source),
            _evaluations(source),
            card("Commands", *(command(label, line) for label, line in source.commands().items())),
            _environment(source),
            _settings(source),
            _footer(source),
        ],
    )


def _header(source: Source) -> str:
    if source.finished:
        state = '<span class="pill done">finished</span>'
    else:
        state = '<span class="pill going">not finished</span>'
    steps = f"step {source.taken:,} of {source.config.steps:,}" if source.config.trains else "without training"
    began = str(source.about.get("began", ""))[:10]
    words = [plain(word) for word in (steps, began) if word]
    heading = " · ".join(plain(Path(part).name or part) for part in (source.config.task, source.config.method))
    return (
        f"<header><h1>{heading} · {plain(Path(source.config.model).name)}</h1>"
        f'<div class="soft">{state}{" · ".join(words)}</div></header>'
    )


def _at(source: Source, split: str, step: int) -> dict[str, Any] | None:
    return next((point for point in source.splits[split] if point["step"] == step), None)


def _result(source: Source) -> str:
    """The result, next to the same model before training."""
    summary = source.summary
    if summary is None:
        return card("No result yet", '<p class="soft">The first evaluation of trained weights brings one.</p>')
    chosen = summary["selected_step"]
    now, before = _at(source, "test", chosen), _at(source, "test", 0) if chosen else None
    value = summary["test"]["selected"] if now is None else now["value"]
    metric, n = summary["metric"], summary["test"]["n"]
    where = f"at step {chosen:,}, selected by {summary['selected_by']}" if source.config.trains else "without training"
    said = plain(where)
    scores = [percent(value), f"{plain(metric)} on {n:,} test examples, {said}"]
    if is_loss(metric) and now is not None:  # free text: the loss says more
        scores = [f"{now['loss']:.3f}", f"loss on {n:,} test examples, {said}"]
    if before is None:
        return card("Result", f'<div class="hero">{_big(*scores)}</div>')
    losses = [] if now is None else [before["loss"], now["loss"]]
    lost = all(map(math.isfinite, losses)) and len(losses) == 2
    if lost and (is_loss(metric) or value == before["value"]):  # the metric says nothing that the loss does not
        first = _was(f"{losses[0]:.3f}") + _big(f"{losses[1]:.3f}", f"loss on {n:,} test examples, {said}")
        as_before = f'<div class="was">{percent(value)}</div><div class="label">{plain(metric)}, as before</div>'
        rest = "" if is_loss(metric) else f"<div>{as_before}</div>"
    else:
        first = _was(percent(before["value"])) + _big(*scores) + _change(100 * (value - before["value"]), "points")
        drop = f"{losses[0]:.3f} → {losses[1]:.3f}" if lost else ""
        rest = f'<div><div class="was">{drop}</div><div class="label">test loss</div></div>' if drop else ""
    return card("Result", f'<div class="hero">{first}{rest}</div>') + _alarm(source, summary)


def _was(number_before: str) -> str:
    return (
        f'<div><div class="was">{number_before}</div><div class="label">before training</div></div>'
        '<div class="arrow" aria-hidden="true">→</div>'
    )


def _big(result: str, label: str) -> str:
    return f'<div><div class="big">{result}</div><div class="label">{label}</div></div>'


def _change(points: float, unit: str) -> str:
    style = "up" if points >= 0 else "down"
    return f'<div><div class="change {style}">{points:+.1f} {unit}</div></div>'


def _alarm(source: Source, summary: dict[str, Any]) -> str:
    """The warning of ``train`` and ``summary.md``, computed from the evaluations of this page, or nothing."""
    seen = {split: (_at(source, split, summary["selected_step"]), _at(source, split, 0)) for split in SPLITS}
    judged = summary | {"lr": source.config.lr, "clip": source.config.clip}
    for split, (now, _) in seen.items():
        judged[split] = summary[split] | ({} if now is None else {"value": now["value"], "loss": now["loss"]})
    judged["test"] |= {"selected": judged["test"].get("value", summary["test"]["selected"])}
    for key, name in (("zero_shot", "value"), (LOSS, "loss")):
        judged[key] = {split: was[name] for split, (_, was) in seen.items() if was is not None}
    warning = setback(judged)
    return card("The model got worse", f"<p>It is {plain(warning)}.</p>", style="alarm") if warning else ""


def _facts(source: Source) -> str:
    config, summary = source.config, source.summary or {}
    facts = []
    if config.trains:
        facts.append((f"{source.taken:,}", "steps"))
        rate = "automatic" if config.lr is None else f"{config.lr:g}"
        facts.append((plain(rate), f"learning rate, {plain(config.lr_schedule)}"))
        facts.append((f"{config.batch_size * config.accumulate}", "examples per step"))
    if summary.get("seconds"):
        facts.append((span(summary["seconds"]), "time in all"))
    if summary.get("peak_memory"):
        facts.append((size(summary["peak_memory"]), "peak memory"))
    if source.about.get("weights"):
        millions = source.about["weights"] / 1e6
        facts.append((f"{millions:,.0f} M" if millions >= 10 else f"{millions:.2g} M", "weights"))
    if source.journal is not None:
        facts.append((size(source.journal.stat().st_size), "journal: the only file to keep"))
    if summary.get("skipped"):
        facts.append((f"{summary['skipped']:,}", "steps skipped: loss not finite"))
    return f'<div class="facts">{"".join(fact(*one) for one in facts)}</div>'


def _charts(source: Source) -> Iterator[str]:
    """Charts of the loss and the metric over the steps, if there is something to draw."""
    steps, dev = source.steps, source.splits["dev"]
    chosen = [] if source.summary is None or not source.config.trains else [source.summary["selected_step"]]
    at_chosen = [Level("selected step", "c-chosen", step, vertical=True) for step in chosen]
    lines = []
    if len(steps["step"]):
        x, y, width = _medians(steps["step"], steps["loss"])
        if width > 1:
            lines.append(Line("training, every step", "c-raw", steps["step"], steps["loss"]))
        lines.append(Line(f"training, median of {width} steps" if width > 1 else "training", "c-train", x, y))
    if len(dev) > 1 or lines:
        lines.append(Line("dev", "c-dev", [p["step"] for p in dev], [p["loss"] for p in dev], marked=True))
    if any(len(line.x) for line in lines):
        yield card("Loss", line_chart("loss", lines, at_chosen, noisy=("c-raw", "c-train")), style="figure")
    held_out = [
        Line(name, f"c-{name}", [p["step"] for p in points], [100 * p["value"] for p in points], marked=True)
        for name, points in source.splits.items()
        if points
    ]
    if any(len(line.x) > 1 for line in held_out):
        before = _at(source, "test", 0)
        levels = [] if before is None else [Level("test before training", "c-before", 100 * before["value"])]
        metric = plain(source.splits["dev"][0]["metric"] if dev else "metric")
        yield card(
            f"Held-out {metric}", line_chart("metric", held_out, [*levels, *at_chosen], unit=" %"), style="figure"
        )


def _medians(x: Any, y: Any) -> tuple[Any, Any, int]:
    """Medians of the loss in consecutive windows: steps, values and the windows' width."""
    keep = np.isfinite(y)
    x, y = x[keep], y[keep]
    width = max(1, min(10, len(y) // 4), len(y) // MEDIAN_OF)
    count = max(1, len(y) // width)
    if not len(y):
        return x, y, 1
    parts = np.array_split(np.arange(len(y)), count)
    return np.array([x[p].mean() for p in parts]), np.array([np.median(y[p]) for p in parts]), width


def _names(source: Source) -> list[str]:
    """Names of the blocks; blocks without a known name are numbered."""
    steps = source.steps["block"]
    known = [shown(name) for name in source.blocks]
    count = max(len(known), int((source.summary or {}).get("blocks") or 0), int(steps.max()) + 1 if len(steps) else 0)
    return known + [f"block {i}" for i in range(len(known), count)]


def _activity(source: Source) -> str:
    names, steps = _names(source), source.steps
    if len(names) < 2 or not len(steps["step"]):
        return ""
    chart = activity_chart("block activity", steps["step"], steps["block"], steps["coeff"], names)
    count = most(source.config, len(names))
    several = f" A step moves up to {count} blocks, and the mark is at the one that its record names." * (count > 1)
    text = (
        '<p class="soft small">One row per block, from the input at the top to the output; a mark where the block was '
        "active, and its coefficient, the measured slope of the loss along the step's random direction: small"
        f'<span class="ramp"></span>large.{several}</p>'
    )
    return card("Which block moved when", text, chart, style="figure")


def _moves(source: Source) -> NDArray[np.float64] | None:
    """(steps,) the size of every step relative to its block's weights; None if it is unknown."""
    coeffs = source.coeffs()
    if coeffs is None:
        return None
    about = source.about.get("blocks", [])
    parts = {str(name): str(value) for name, value in source.about.get("parts", {}).items()}
    sizes = [one.get("rms") for one in about] + [None] * (len(_names(source)) - len(about))
    count, steps = len(_names(source)), source.steps
    moves = Moves(parts, count, most(source.config, count), sizes, source.config.clip)
    if not moves.known:
        return None
    rows = zip(steps["block"].astype(int).tolist(), steps["lr"].tolist(), coeffs, strict=True)
    found = [moves.next(*row) for row in rows]
    return np.array([math.nan if size is None else size for size in found], dtype=np.float64)


def _blocks(source: Source) -> str:
    """A table of the blocks: visits, coefficients, and how far each block moved relative to its weights."""
    names, steps = _names(source), source.steps
    known = np.isfinite(steps["coeff"])
    if not known.any() or len(names) > MAX_TABLE_BLOCKS:
        return ""
    moves = _moves(source)
    exact = moves is not None
    rows: list[tuple[str, int, float, float | None, float | None]] = []
    for i, name in enumerate(names):
        mine = known & (steps["block"] == i)
        coeffs = np.abs(steps["coeff"][mine])
        sizes = np.array([]) if moves is None else moves[mine]
        told = bool(len(sizes)) and bool(np.isfinite(sizes).all())
        typical = float(np.median(sizes)) if told else None
        far = math.sqrt(float(np.sum(sizes**2))) if told else None
        rows.append(
            (name, int((steps["block"] == i).sum()), float(np.median(coeffs)) if len(coeffs) else 0.0, typical, far)
        )
    # a single block that is far above the others must not flatten their bars
    top = [float(np.quantile([row[k] or 0.0 for row in rows], 0.95)) or 1.0 for k in (2, 3, 4)]
    head = ["block", "steps", "median |coefficient|"]
    head += ["median step, of the weights' size", "moved in all"] if exact else []
    cells = []
    for name, visits, coeff, typical, far in rows:
        row = [plain(name), f"{visits:,}", bar(coeff / top[0], number(coeff))]
        if exact:
            row += [
                "–" if typical is None else bar(typical / top[1], percent(typical, 3), "two"),
                "–" if far is None else bar(far / top[2], percent(far, 2), "two"),
            ]
        cells.append(row)
    text = (
        "The size of a step is the root mean square of what it adds to the weights of its block, relative to that of "
        "the weights. Steps are random in direction, so what a block has moved in all is "
        "the root of the sum of their squares."
        if exact
        else "The coefficient of a step is the measured slope of the loss along its random direction."
    )
    body = table(head, cells, numbers=(1,)).replace('class="scroll"', 'class="scroll tall"', 1)
    return card("Step sizes by block", f'<p class="soft small">{text}</p>', body, style="figure")


def _evaluations(source: Source) -> str:
    """Every evaluation, the selected one in bold."""
    steps = sorted({point["step"] for points in source.splits.values() for point in points})
    if not steps:
        return ""
    chosen = (source.summary or {}).get("selected_step", -1)
    rows = []
    for step in steps:
        mark = "before training" if step == 0 and source.config.trains else f"{step:,}"
        row = [mark + (" (selected)" if step == chosen and source.config.trains else "")]
        for split in SPLITS:
            point = _at(source, split, step)
            exact = None if point is None else point.get("exact_match")
            more = "" if exact is None else f" (exact match {percent(exact)})"
            row += [
                "–" if point is None else percent(point["value"]) + more,
                "–" if point is None else number(point["loss"]),
            ]
        rows.append(row)
    counts = {split: f"{points[-1]['n']:,}" if points else "0" for split, points in source.splits.items()}
    head = ["step", *(word for s in SPLITS for word in (f"{s} (n = {counts[s]})", f"{s} loss"))]
    best = (source.summary or {}).get("test", {}).get("best")
    note = (
        f'<p class="soft small">Best of all evaluations on test, as the paper reports it: {percent(best)}. It looks at '
        "test, so it does not predict results on new data.</p>"
        if best is not None and source.config.trains
        else ""
    )
    return card(
        "Evaluations",
        table(head, rows, numbers=(1, 2, 3, 4), chosen=steps.index(chosen) if chosen in steps else -1),
        note,
    )


def _environment(source: Source) -> str:
    about = source.about
    values = {name: about[name] for name in ("machine", "system", "device", "dtype", "began") if about.get(name)}
    values |= about.get("versions", {})
    parts = about.get("parts", {})
    cards = [card("Environment", pairs(values))] if values else []
    cards += [card("Parts of the method", pairs(parts))] if parts else []
    return f'<div class="grid2">{"".join(cards)}</div>' if cards else ""


def _settings(source: Source) -> str:
    """The settings that differ from their defaults, and the others in a fold-out."""
    fields = {field.name: field.default for field in dataclasses.fields(source.config)}
    values = {name: getattr(source.config, name) for name in fields}
    chosen = {name: value for name, value in values.items() if value is not None and value != fields[name]}
    rest = {name: "–" if value is None else value for name, value in values.items() if name not in chosen}
    return card("Configuration", pairs(chosen), f"<details><summary>Defaults</summary>{pairs(rest)}</details>")


def _footer(source: Source) -> str:
    there = [name for name in FILES if (source.folder / name).is_file()]
    links = ", ".join(f'<a href="{name}">{name}</a>' for name in there)
    version = plain(source.about.get("versions", {}).get("zeroblock", ""))
    return f"<footer>Made by zeroblock {version} from the files in this folder: {links}</footer>"
