"""The examples run as written, in one process, and use nothing but public names."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

import zeroblock as zb

FOLDER = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
PUBLIC = {"zeroblock", "zeroblock.journal", "zeroblock.task"}
MAX_LINES = 60
NEEDS = {
    "compose": ("peft",),
    "trainer_resume": ("accelerate",),
    "sft_chat": ("trl", "datasets"),
    "accelerate_loop": ("accelerate",),
}


def test_there_are_nine_and_the_readme_names_them() -> None:
    text = (FOLDER / "README.md").read_text()
    assert len(SCRIPTS) == 9
    assert all(f"| `{path.name}` |" in text for path in SCRIPTS)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in NEEDS.get(path.stem, ()):
        pytest.importorskip(name)
    monkeypatch.setenv("CI", "1")  # TRL sends no telemetry then
    monkeypatch.setattr("sys.argv", [str(path)])
    runpy.run_path(str(path), run_name="__main__")  # it asserts what it claims
    assert capsys.readouterr().out


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_an_example_is_short_and_public(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert f"python examples/{path.name}" in text.partition('"""')[2].partition('"""')[0]
    tree = ast.parse(text)
    modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in modules if name.startswith("zeroblock")} <= PUBLIC
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "zb"
    }
    assert used
    assert used <= set(zb.__all__)
    assert not [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")]
