"""Hooks of the site: the parts of its pages that come from the code, and the pages that lie beside docs/.

A comment in a page stands for text that is made when the site is built, so that it cannot go stale:

    <!-- methods -->                 every method: its docstring, its parts' equations, its citation
    <!-- commands -->                every command with its options, as --help prints them
    <!-- api: optimizer method -->   the public names of these modules, with their docstrings
"""

from __future__ import annotations

import ast
import inspect
import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "zeroblock"
OUTSIDE = {
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "examples.md": "examples/README.md",
    "log.md": "dev/LOG.md",
}
"""Pages that lie elsewhere in the repository, where readers of the code look for them."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
MARKER = re.compile(r"^<!-- (methods|commands|api):?([\w ]*)-->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for uri, path in OUTSIDE.items():
        files.append(File.generated(config, uri, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def expand(match: re.Match[str]) -> str:
        return {"methods": methods, "commands": commands, "api": lambda: api(match[2].split())}[match[1]]()

    return LINK.sub(lambda match: _link(match, page, config, files), MARKER.sub(expand, markdown))


def _link(match: re.Match[str], page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link that leads out of docs/, as the site has it: to a page, to a copy of the file, or, for a folder, none."""
    text, target, anchor = match[1], match[2], match[3] or ""
    if ":" in target or target.startswith("/"):
        return match[0]
    here = page.file.src_uri
    from_root = posixpath.dirname(OUTSIDE[here]) if here in OUTSIDE else posixpath.join("docs", posixpath.dirname(here))
    path = posixpath.normpath(posixpath.join(from_root, target))
    if path.startswith("docs/"):
        uri = path.removeprefix("docs/")
    elif path == "README.md":
        uri = "index.md"
    else:
        uri = {value: key for key, value in OUTSIDE.items()}.get(path) or posixpath.join("repository", path)
        if (ROOT / path).is_dir():
            return text
        if not (ROOT / path).is_file():
            raise PluginError(f"{here}: the repository has no {path}")
        uri += ".txt" if uri.startswith("repository/") and uri.endswith(".md") else ""  # not a page of the site
        if files.get_file_from_path(uri) is None and (ROOT / path).is_file():
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return f"[{text}]({posixpath.relpath(uri, posixpath.dirname(here) or '.')}{anchor})"


def methods() -> str:
    """A section for every method, from the table that the command line prints and from the docstrings."""
    rows = json.loads((SOURCE / "cli" / "methods.json").read_text(encoding="utf-8"))
    about = {name: doc for module in ("method", "schedule", "subspace", "rule") for name, doc in _docs(module).items()}
    measured = dict(line.split("   ", 1) for line in _equations("estimator"))
    moved = _equations("rule")[0]
    sections = []
    for row in rows:
        parts = row["parts"]
        names = {part: parts[part].partition("(")[0] for part in ("schedule", "subspace", "rule")}
        if parts["partition"] == "whole":
            del names["schedule"]
        rule = about[names["rule"]].partition(".  ")[0].partition("\n")[0].rstrip(".")
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", parts["estimator"].partition("(")[0]).lower()
        lines = [
            measured.get(kind, measured["two-sided"]).strip(),
            "g = c·z",
            rule if "δ" in rule else f"δ = {rule}",
            moved,
        ]
        chosen = {part: parts[part].removesuffix("()") for part in names}
        said = "\n".join(f"| {part} | `{chosen[part]}` | {_cell(about[name])} |" for part, name in names.items())
        defaults = ", ".join(f"`{key}={value!r}`" for key, value in row["defaults"].items())
        sections.append(
            f"### {row['name']}\n\n{_prose(about[row['name']])}\n\n```text\n" + "\n".join(lines) + "\n```\n\n"
            f"| part | choice | |\n|---|---|---|\n| partition | `{parts['partition']}` | |\n{said}\n"
            f"| interval | {parts['interval']} | |\n\n"
            f"Defaults: {defaults}. {row['citation']}."
        )
    return "\n\n".join(sections)


def commands() -> str:
    """A section for every command: what it does, and its options."""
    sys.path.insert(0, str(SOURCE.parent))
    from typer.main import get_command

    from zeroblock.cli import app

    sections: list[str] = []

    def add(command: Any, words: list[str]) -> None:
        inner = getattr(command, "commands", {})
        text = inspect.cleandoc(command.help or "").replace("\b\n", "").replace("\b", "")
        sections.append(f"### zeroblock {' '.join(words)}\n\n{_help(text)}")
        rows = []
        for option in command.params:
            names = [f"`{name}`" for name in [*option.opts, *option.secondary_opts] if name != "--help"]
            if getattr(option, "param_type_name", "") == "argument":
                names = [f"`{option.name.upper()}`"]
            said = getattr(option, "help", None) or ""
            if names:
                rows.append(f"| {' '.join(names)} | {said.replace('|', chr(92) + '|')} |")
        if rows:
            sections.append("| option | |\n|---|---|\n" + "\n".join(rows))
        for name, one in inner.items():
            add(one, [*words, name])

    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        add(command, [name])
    return "\n\n".join(sections)


def api(modules: list[str]) -> str:
    """Directives for the public names of some modules; a module that is no home of public names adds its own."""
    homes = public()
    sections = []
    for module in modules:
        names = homes.get(module) or _all(module)
        sections += [f"::: zeroblock.{module}.{name}" for name in names]
    return "\n\n".join(sections)


def public() -> dict[str, list[str]]:
    """The public names by the module that they are imported from, read from the package's source."""
    for node in ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            return {module: names.split() for module, names in ast.literal_eval(node.value).items()}
    raise LookupError("src/zeroblock/__init__.py has no table _MODULES")


def _all(module: str) -> list[str]:
    path = SOURCE / module / "__init__.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _docs(module: str) -> dict[str, str]:
    """Docstrings of the functions and classes of a module or a package, without importing it."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in _files(module)]
    nodes = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_docstring(node) or "" for node in nodes}


def _files(module: str) -> list[Path]:
    """A module's file, or a package's, the one of its base first."""
    found = sorted((SOURCE / module).glob("*.py"), key=lambda path: path.name != "base.py")
    return found or [SOURCE / f"{module}.py"]


def _equations(module: str) -> list[str]:
    """The indented lines of the docstring of a module, or of a package's base."""
    text = ast.get_docstring(ast.parse(_files(module)[0].read_text(encoding="utf-8"))) or ""
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def _prose(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _cell(text: str) -> str:
    """The first sentence of a docstring, in one line of a table."""
    first = re.split(r"(?<=\.)(?:  |\n\n)", _prose(text))[0]
    return " ".join(first.split()).replace("|", "\\|")


def _help(text: str) -> str:
    """A help text as Markdown: what is indented becomes a block of code."""
    return re.sub(r"(?:^ {2,}.*\n?)+", lambda m: "```text\n" + inspect.cleandoc(m[0]) + "\n```\n", text, flags=re.M)
