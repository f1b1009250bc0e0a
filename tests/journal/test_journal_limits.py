"""Depths and numbers that no zeroblock writes are refused, or left out, in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from journal_toy import GOOD, forge

import zeroblock as zb
from toy import Tiny
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import Header, export, read


@pytest.fixture
def header() -> Header:
    return Header.of(zb.mezo(Tiny(), 1e-2), model="tiny")


@pytest.mark.parametrize("kind", ["list", "object"])
@pytest.mark.parametrize("depth", [40, 400, 900])
def test_a_header_is_not_deep(kind: str, depth: int, header: Header, tmp_path: Path) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"k": value}
    path = forge(tmp_path / "journal.zbj", header, [GOOD], extra={"a": value})
    with pytest.raises(ZeroBlockError, match="nests lists and objects more than 32 deep"):
        export(path, tmp_path / "out.zbj")


def test_a_number_of_steps_is_not_long(header: Header, tmp_path: Path) -> None:
    path = forge(tmp_path / "journal.zbj", header, [GOOD], steps=int("9" * 4000))
    with pytest.raises(ZeroBlockError, match="the header's steps cannot be 999") as error:
        read(path)
    assert len(str(error.value)) < 1000


LARGE = {"kind": "eval", "step": 1, "metric": "accuracy", "value": 10**400, "n": 1, "split": "test"}


@pytest.mark.parametrize("line", ["[" * 100_000, json.dumps(LARGE)], ids=["deep", "large"])
def test_a_strange_line_of_metrics_does_not_stop_an_export(line: str, header: Header, tmp_path: Path) -> None:
    forge(tmp_path / "journal.zbj", header, [GOOD])
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    assert read(export(tmp_path, tmp_path / "out.zbj")).header.steps == 1
