"""The shape of the code: who imports whom, how large files are, and that parts are asked rather than recognised."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

import zeroblock as zb
from zeroblock.estimator import ESTIMATORS
from zeroblock.rule import RULES
from zeroblock.schedule import SCHEDULES
from zeroblock.subspace import SUBSPACES

ROOT = Path(zb.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
KERNELS = {"cpu.py", "triton.py"}
MAX_LINES = 400
OWN_FILES = {"basis", "subspace", "estimator", "rule", "schedule"}
"""The parts: modules or packages."""


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(file): file for file in FILES}


def imports(name: str, file: Path) -> set[str]:
    """Modules of the package that a module imports, anywhere: at the top, in functions, for types only.

    Lazy tables of exports (``_HOME``, ``_MODULES``) are not imports: nothing in the package reads a name through them.
    """
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    targets: set[str] = set()
    skipped: set[ast.AST] = set()
    tree = ast.parse(file.read_text())
    if file.name == "__init__.py":  # its names for type checkers, which stand for a lazy table
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            targets.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                targets.add(inner if inner in MODULES else base)
    return {target for target in targets if target in MODULES and target != name}


def test_no_import_cycle() -> None:
    graph = {name: imports(name, file) for name, file in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            pytest.fail("import cycle: " + " → ".join([*path[path.index(name) :], name]))
        if name in done:
            return
        for target in sorted(graph[name]):
            visit(target, [*path, name])
        done.add(name)

    for name in graph:
        visit(name, [])
    assert len(done) == len(MODULES) > 100


def test_the_engine_and_the_parts_never_see_the_optimizer() -> None:
    parts = {"basis", "direction", "estimator", "rule", "schedule", "state", "step", "subspace", "turn"}
    low = [n for n in MODULES if n.partition(".")[2].split(".")[0] in parts | {"engine", "ops", "run"}]
    assert len(low) > 40
    for name in low:
        seen = {target.split(".")[1] for target in imports(name, MODULES[name]) if "." in target}
        assert not seen & {"optimizer", "method", "rerun"}, name


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_are_small(file: Path) -> None:
    if file.name in KERNELS:
        pytest.skip("a kernel")
    lines = len(file.read_text().splitlines())
    assert lines < MAX_LINES, f"{file.relative_to(ROOT)} has {lines} lines; split it by what it does"


def test_the_optimizer_is_a_composition() -> None:
    methods = [name for name, value in vars(zb.ZeroOrder).items() if inspect.isfunction(value)]
    assert len(methods) < 15, methods


def test_parts_are_asked_not_recognised() -> None:
    """``isinstance`` on a part outside the parts' own files needs a comment on its line that says why."""
    parts = {cls.__name__ for registry in (SCHEDULES, SUBSPACES, ESTIMATORS, RULES) for cls in registry.values()}
    parts |= {"Elementwise", "Factored", "FiniteDifference", "Replay"}
    for file in FILES:
        if file.relative_to(ROOT).with_suffix("").parts[0] in OWN_FILES:
            continue
        lines = file.read_text().splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                named = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                line = lines[node.lineno - 1]
                assert not named & parts or "#" in line, f"{file.relative_to(ROOT)}:{node.lineno}: {line.strip()}"


def test_no_private_name_crosses_modules() -> None:
    for name, file in MODULES.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("zeroblock")):
                private = [
                    alias.name for alias in node.names if alias.name.startswith("_") and alias.name != "__version__"
                ]
                assert not private, f"{name} imports {private} of {node.module}"


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: zb.Estimate, "zeroblock.Estimate is now called zeroblock.step.Numbers"),
        (
            lambda: importlib.import_module("zeroblock.engine").Objective,
            "is now called .*BatchObjective",
        ),
        (lambda: importlib.import_module("zeroblock.task").Row, "zeroblock.task.Row is now called DataRow"),
        (lambda: zb.normal(zb.Key(0, 1), 0, (3,)), "normal: a Key with separate offset"),
    ],
)
def test_old_names_work_and_name_the_new_ones(read: Callable[[], object], message: str) -> None:
    with pytest.warns(zb.ZeroBlockWarning, match=message):
        assert read() is not None
