"""The site: built strictly, every link and anchor resolved, and opened in a real browser."""

from __future__ import annotations

import html.parser
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from browser import Browser, needs_browser, served
from zeroblock.method import CITATIONS, METHODS

mkdocs = pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

ROOT = Path(__file__).parents[2]
MAX_PICTURE_BYTES = 150_000


class Page(html.parser.HTMLParser):
    """The anchors of a page, and the addresses it names."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.sources: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name == "href" and value:
                (self.links if tag == "a" else self.sources).append(value)
            elif name == "src" and value:
                self.sources.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as ``make docs`` builds it."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config
    from mkdocs.exceptions import Abort

    out = tmp_path_factory.mktemp("site")
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")
    said: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    ear = Ear(logging.WARNING)
    logging.getLogger("mkdocs").addHandler(ear)
    try:
        build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(out)))
    except Abort:
        pytest.fail("\n".join(said))
    finally:
        logging.getLogger("mkdocs").removeHandler(ear)
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """Every page by its address."""
    return {path.relative_to(site).as_posix(): Page(path) for path in site.rglob("*.html")}


def test_links_and_anchors_resolve(site: Path, pages: dict[str, Page]) -> None:
    assert len(pages) > 25
    broken = []
    for name, page in pages.items():
        for link in page.links + page.sources:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or name == "404.html":
                continue
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                broken.append(f"{name}: {link}")
            elif parts.fragment and target.suffix == ".html":
                other = pages[target.resolve().relative_to(site.resolve()).as_posix()]
                if unquote(parts.fragment) not in other.anchors | {"__skip"}:
                    broken.append(f"{name}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_elsewhere(pages: dict[str, Page]) -> None:
    outside = {source for page in pages.values() for source in page.sources if urlsplit(source).netloc}
    assert outside == set()


def test_the_methods_are_those_of_the_code(site: Path, pages: dict[str, Page]) -> None:
    """The page is made of a table that test_cli.py compares with the methods, and of docstrings."""
    text = (site / "methods" / "index.html").read_text(encoding="utf-8")
    assert set(METHODS) <= pages["methods/index.html"].anchors
    for name, citation in CITATIONS.items():
        assert citation.partition(",")[0] in text, name
    assert "δ = sign(g)" in text
    assert "z̄" in text


def test_every_public_name_and_command_has_an_entry(pages: dict[str, Page]) -> None:
    from typer.main import get_command

    import zeroblock as zb
    from zeroblock.cli import app

    anchors = {anchor for name, page in pages.items() if name.startswith("api/") for anchor in page.anchors}
    documented = {anchor.rpartition(".")[2] for anchor in anchors}
    missing = {name for name in zb.__all__ if name != "integrations"} - documented
    assert missing == set(), "name their module in a comment <!-- api: … --> of a page in docs/api"
    for name in get_command(app).commands:  # type: ignore[attr-defined]
        assert f"zeroblock-{name}" in pages["commands/index.html"].anchors


def test_pictures_are_small() -> None:
    for path in (ROOT / "docs" / "images").glob("*.png"):
        assert path.stat().st_size < MAX_PICTURE_BYTES, path.name


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@needs_browser
@pytest.mark.parametrize(
    ("page", "dark", "width"), [("", False, 1400), ("methods/", True, 390), ("api/optimizer/", True, 1400)]
)
def test_a_page_opens_without_errors(site: Path, browser: Browser, page: str, dark: bool, width: int) -> None:
    ask = "[document.body.getAttribute('data-md-color-scheme'), document.documentElement.scrollWidth]"
    with served(site) as url:
        visit = browser.open(f"{url}/{page}", width=width, dark=dark, ask=ask)
    assert visit.problems == []
    assert all(request.startswith(url) for request in visit.requests)
    assert visit.answer == ["slate" if dark else "default", width]  # nothing sticks out to the right


@needs_browser
def test_a_broken_page_is_noticed(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<link rel="icon" href="data:,"><img src="gone.png"><script>console.error("no"); null.x</script>'
    )
    with served(tmp_path) as url:
        visit = browser.open(f"{url}/")
    assert visit.failed == [f"404 {url}/gone.png"]
    assert "console: no" in visit.errors
    assert any("TypeError" in error for error in visit.errors)
