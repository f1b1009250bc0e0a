"""``report.html`` of a race: its table and its figure on one self-contained page."""

from __future__ import annotations

from pathlib import Path

from .. import atomic
from ..report.html import REPORT, card, command, page, plain, table
from .course import Course
from .table import cells, head, notes, rules, standings, title


def write_report(folder: Path) -> Path:
    """Rewrite the tables, the figure and the page of a race from its heats, and return the path of the page.

    Args:
        folder: the race's folder, with ``race.json`` and ``heats.jsonl``.
    """
    from .figure import draw
    from .table import write

    course = Course.open(folder)
    write(course)
    draw(course.folder, title(course), course.scores)
    return write_page(course)


def write_page(course: Course) -> Path:
    """Write the page and return its path.

    Args:
        course: the race so far.
    """
    names, found = head(course), standings(course.scores)
    figure = course.folder / "race.svg"
    picture = figure.read_text(encoding="utf-8") if figure.is_file() else ""
    rows = [[plain(cell) for cell in cells(one, course.race.seeds)] for one in found]
    remarks = notes(course)
    body = [
        f"<header><h1>{plain(title(course))}</h1></header>",
        card("Standings", table([plain(name) for name in names], rows, numbers=range(1, len(names)))),
        card("Dev, against seconds and forward passes", picture[picture.find("<svg") :]) if picture else "",
        card("Rules", *(f"<p>{plain(rule)}</p>" for rule in rules(course) if rule)),
        card("Notes", *(f"<p>{plain(note)}</p>" for note in remarks)) if remarks else "",
        card("Command", command("Make the race, or what is left of it", course.command)),
    ]
    path = course.folder / REPORT
    atomic.write(path, page(title(course), body))
    return path
