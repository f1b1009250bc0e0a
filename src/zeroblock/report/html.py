"""One self-contained HTML page: its style and script inline, nothing fetched, every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..errors import shown
from .html_chart import text

REPORT = "report.html"
MAX_TEXT = 4000
"""Maximum characters of a text from a file that a page shows."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; base-uri 'none'"
"""The browser fetches nothing, whatever the files of a run say."""


def page(title: str, body: Iterable[str]) -> str:
    """A whole document.

    Args:
        title: the title of the window, as plain text.
        body: parts of the page, as HTML.
    """
    here = Path(__file__)
    style, script = (here.with_name(name).read_text(encoding="utf-8") for name in ("html.css", "html.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{plain(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in body if part)
        + f'\n</main>\n<div id="tip" role="status" hidden></div>\n<script>\n{script}</script>\n</body>\n</html>\n'
    )


def plain(value: object, limit: int = MAX_TEXT) -> str:
    """Text of a file as HTML: escaped, without control characters, of bounded length."""
    return text(shown(value, limit))


def card(title: str, *parts: str, style: str = "") -> str:
    """A section with a heading.

    Args:
        title: the heading, as HTML.
        parts: the content, as HTML.
        style: an additional class.
    """
    return f'<section class="card {style}"><h2>{title}</h2>{"".join(parts)}</section>'


def fact(value: str, label: str) -> str:
    """A number and its name; both as HTML."""
    return f'<div class="card fact"><b>{value}</b><span>{label}</span></div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = (), chosen: int = -1) -> str:
    """A table whose cells are HTML.

    Args:
        head: the headings of the columns.
        rows: the cells of every row.
        numbers: right-aligned columns.
        chosen: the row in bold.
    """
    style = dict.fromkeys(numbers, ' class="n"')

    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(f"<{kind}{style.get(i, '')}>{cell}</{kind}>" for i, cell in enumerate(row))

    bold = {chosen: ' class="chosen"'}
    lines = "".join(f"<tr{bold.get(i, '')}>{cells('td', row)}</tr>" for i, row in enumerate(rows))
    return f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{lines}</tbody></table></div>'


def pairs(values: Mapping[str, object]) -> str:
    """A table of names and values; plain text."""
    rows = "".join(
        f'<tr><td class="key">{plain(name)}</td><td class="value">{plain(value)}</td></tr>'
        for name, value in values.items()
    )
    return f'<div class="scroll"><table>{rows}</table></div>'


def command(label: str, line: str) -> str:
    """A command with a button that copies it; plain text."""
    return (
        f'<div class="soft small">{plain(label)}</div><div class="command"><pre>{plain(line)}</pre>'
        '<button type="button" data-copy>Copy</button></div>'
    )


def bar(fraction: float, label: str, style: str = "") -> str:
    """A bar in a table, followed by its number.

    Args:
        fraction: the fraction of the full length, clamped to [0, 1].
        label: the number, as HTML.
        style: an additional class.
    """
    width = min(max(fraction, 0.0), 1.0) if fraction == fraction else 0.0
    return (
        f'<span class="meter"><span class="bar {style}"><i style="width:{100 * width:.1f}%"></i></span>{label}</span>'
    )


def percent(value: float | None, digits: int = 1) -> str:
    """A fraction in percent.

    >>> percent(0.5), percent(None)
    ('50.0 %', '–')
    """
    return "–" if value is None or value != value else f"{100 * value:.{digits}f} %"


def span(seconds: float) -> str:
    """A time in seconds, minutes or hours.

    >>> span(0.25), span(75), span(7500)
    ('0.2 s', '1 min 15 s', '2 h 5 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(nbytes: float) -> str:
    """A number of bytes with a suitable unit.

    >>> size(900), size(20_480), size(1_500_000_000)
    ('900 bytes', '20.5 kB', '1.50 GB')
    """
    for unit, scale, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if nbytes >= scale:
            return f"{nbytes / scale:.{digits}f} {unit}"
    return f"{nbytes:.0f} bytes"
