"""``report.html`` of a race: its table and its figure on one self-contained page."""

from __future__ import annotations

from pathlib import Path

from .. import atomic
from ..report.html import REPORT, card, command, page, plain, table
from .course import Course
from .table import cells, head, rules, standings, title


def write_page(course: Course, line: str) -> Path:
    """Write the page and return its path.

    Args:
        course: the race so far.
        line: the command that makes it.
    """
    scores = course.scores()
    names, found = head(course, scores), standings(scores)
    figure = course.folder / "race.svg"
    picture = figure.read_text(encoding="utf-8") if figure.is_file() else ""
    rows = [[plain(cell) for cell in cells(one)] for one in found]
    body = [
        f"<header><h1>{plain(title(course))}</h1></header>",
        card("Standings", table([plain(name) for name in names], rows, numbers=range(1, len(names)))),
        card("Dev, against seconds and forward passes", picture[picture.find("<svg") :]) if picture else "",
        card("Rules", *(f"<p>{plain(rule)}</p>" for rule in rules(course, scores) if rule)),
        card("Command", command("Make the race, or what is left of it", line)),
    ]
    path = course.folder / REPORT
    atomic.write(path, page(title(course), body))
    return path
