"""``docs/theory.md``: a row for every numbered statement of the paper, figures that exist, numbers from the tables."""

from __future__ import annotations

import re
from pathlib import Path

import pandas
import pytest

from zeroblock.cli.lab import app

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "theory.md"
TABLES = ROOT / "results" / "lab" / "theory"
VERDICTS = ("holds", "holds, corrected", "step fails, claim survives", "fails", "assumption", "definitions")


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if re.match(r"\| (3\.|B\.|C\.)\d", line)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_every_numbered_statement_has_a_row(rows: list[list[str]]) -> None:
    numbers = [number for row in rows for number in row[0].split(", ")]
    assert numbers == [f"3.{i}" for i in range(1, 11)] + [f"B.{i}" for i in range(1, 13)] + ["C.1", "C.2"]


def test_every_row_has_a_verdict_a_number_and_a_command(rows: list[list[str]]) -> None:
    commands = {command.name for command in app.registered_commands}
    for row in rows:
        assert len(row) == 6, row
        verdicts = row[2].replace("**", "").split("; ")
        assert all(verdict in VERDICTS for verdict in verdicts), row[2]
        if verdicts[0] not in ("assumption", "definitions"):
            named = re.findall(r"`(\w+)`", row[4])
            assert named
            assert set(named) <= commands
            assert row[3]
            assert row[5]


def test_figures_and_tables_are_there(text: str) -> None:
    figures = re.findall(r"\]\(\.\./([^)]+\.png)\)", text)
    assert len(figures) >= 8
    assert all((ROOT / figure).is_file() for figure in figures)
    for table in re.findall(r"`(\w+\.csv)`", text):
        assert (TABLES / table).is_file()


def test_quoted_numbers_are_those_of_the_tables(text: str) -> None:
    rate = pandas.read_csv(TABLES / "bounds_rate.csv").groupby("s").last()
    convergence = pandas.read_csv(TABLES / "convergence.csv")
    schedules = pandas.read_csv(TABLES / "schedules.csv").query("best").set_index("schedule")
    stability = pandas.read_csv(TABLES / "bounds_stability.csv")
    lemmas = pandas.read_csv(TABLES / "bounds_lemmas.csv")
    quoted = [
        f"{rate.ratio[8]:.2f} ± {rate.ratio_error[8]:.2f}, {rate.ratio[32]:.3f} ± {rate.ratio_error[32]:.3f}",
        f"{100 * schedules.loss['best']:.1f} ± {100 * schedules.error['best']:.1f} %",
    ]
    for kind in ("kind == 'fixed'", "factor == 1.0"):
        for row in (convergence.query(kind).iloc[0], convergence.query(kind).iloc[-1]):
            quoted.append(f"{row.steps:.0f} ± {row.steps_error:.0f}")
    last = stability.query("T == 3000")
    quoted += [f"{value:.3f} ± " for value in (last.slope.min(), last.slope.max())]
    claims, steps, ours = (lemmas[lemmas.role == role] for role in ("claim", "step", "ours"))
    quoted.append(
        f"{len(claims)} lines are statements of the paper, of which {int(claims.holds.sum())} hold; {len(steps)} "
    )
    quoted.append(f"; {len(ours)} are replacements of ours")
    for words in quoted:
        assert words in text, words
