"""``zeroblock push``: send a fine-tune to the hub, as a model or as its journal, with a card."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ZeroBlockError, unknown
from .replay import Device, Force, Model, Remote, Step, check_new, choose_step, is_kept, write_run

KINDS = ("model", "journal")
SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".md")
"""Suffixes of the files of a model folder that are sent; pickled weights and code are not."""


def push(
    run: Annotated[Path, typer.Argument(help="A run's folder, an exported file, or a folder that replay wrote.")],
    repo: Annotated[str, typer.Argument(help="The repository on the hub: user/name.", metavar="USER/NAME")],
    what: Annotated[
        str, typer.Option(help="The model, for from_pretrained; or its journal, for zb.load.", metavar="model|journal")
    ] = "model",
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write the files to this new folder instead of sending them."),
    ] = None,
    step: Step = None,
    model: Model = None,
    endpoint: Annotated[
        str | None, typer.Option(metavar="URL", help="Address of the hub; by default HF_ENDPOINT, or the public hub.")
    ] = None,
    device: Device = "auto",
    force: Force = False,
    trust_remote_code: Remote = False,
) -> None:
    """Send a fine-tune to the hub: the model, or its journal, with a card.

    For example: `zeroblock push runs/sst2 ann/opt-sst2`, or first with `--dry-run look`
    """
    from .. import hub
    from ..adapter import is_folder

    if what not in KINDS:
        raise unknown("--what", what, KINDS)
    user = hub.check_access(repo, endpoint) if dry_run is None else ""
    with _folder(dry_run) as folder:
        if what == "journal":
            _write_journal(run, step, folder, repo)
        elif (run / "config.json").is_file() or is_folder(str(run)):
            _take_model(run, folder, repo, link=dry_run is None)
        else:
            write_run(run, step, folder, model, device, force, trust_remote_code, repo)
        adapted = is_folder(str(folder))
        if adapted:
            _name_base(folder)
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        typer.echo(f"{repo} ({'private' if private else 'public'}):")
        for file in files:
            typer.echo(f"  {file.relative_to(folder)!s:<28} {file.stat().st_size:>15,} bytes")
        if dry_run is not None:
            typer.echo(f"nothing was sent: look at {dry_run}, then leave --dry-run out")
            return
        typer.echo(f"sending as {user}")
        url = hub.upload(folder, repo, private=private, message=f"{what} from zeroblock", endpoint=endpoint)
    load = f'zb.load("{repo}")' if what == "journal" else f'from_pretrained("{repo}")'
    if adapted:
        load = f'PeftModel.from_pretrained(base, "{repo}")'
    typer.echo(f"{url}: {load}")


@contextlib.contextmanager
def _folder(dry_run: Path | None) -> Iterator[Path]:
    """A folder for the files: the one of ``--dry-run``, or one that is removed at the end."""
    if dry_run is not None:
        check_new(dry_run)
        yield dry_run
        return
    with tempfile.TemporaryDirectory(prefix="zeroblock-push-") as name:
        yield Path(name)


def _write_journal(run: Path, step: str | None, folder: Path, repo: str) -> None:
    """Export a run's journal, with its card."""
    from ..hub import JOURNAL
    from ..journal import export, read
    from ..journal.format import locate
    from ..report.card import Facts, hub_card, public_card

    if is_kept(run):
        raise ZeroBlockError("ft keeps no journal: push its weights with --what model")
    given = read(run, 0).header
    folder.mkdir(parents=True, exist_ok=True)
    if given.steps is not None and step in (None, "last"):  # exported already, with a card
        shutil.copyfile(locate(run), folder / JOURNAL)
        text = public_card(given.card, [str(given.extra.get("method") or "")], given.model)
    else:
        path = export(run, folder / JOURNAL, step=choose_step(run, step))
        contents = read(path)
        facts = Facts.read(locate(run).parent, len(contents.records))
        method = str(contents.header.extra.get("method") or "")
        text = hub_card(facts, "journal", repo) if facts else public_card(contents.header.card, [method], given.model)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _name_base(folder: Path) -> None:
    """Make an adapter name its base by its hub id, or else by the last part of its path."""
    from ..adapter import CONFIG, base_of
    from ..journal.share import public_name
    from ..report.card import hub_name

    base = public_name(base_of(str(folder)))
    known = hub_name(base)
    if known is None:
        typer.echo(
            f"{CONFIG} names the base {base!r}, which is not a repository on the hub: others need that model too",
            err=True,
        )
    file = folder / CONFIG
    settings = json.loads(file.read_text(encoding="utf-8")) | {"base_model_name_or_path": known or base}
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _take_model(run: Path, folder: Path, repo: str, link: bool) -> None:
    """Take the files of a model folder, but no links, pickles or code.

    Args:
        run: the model folder.
        folder: the destination.
        repo: replaces the placeholder in the card.
        link: share the disk space with the model folder where the file system can.
    """
    from ..report.card import PLACEHOLDER

    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(run.iterdir()):
        if file.is_file() and not file.is_symlink() and file.suffix in SUFFIXES:
            with contextlib.suppress(OSError):
                if link and file.suffix == ".safetensors":
                    (folder / file.name).hardlink_to(file)
                    continue
            shutil.copyfile(file, folder / file.name)
    card = folder / "README.md"
    if card.is_file():
        card.write_text(card.read_text(encoding="utf-8").replace(PLACEHOLDER, repo), encoding="utf-8")
    if not any(folder.glob("*.safetensors")):
        raise ZeroBlockError(f"{run} holds no safetensors: zeroblock replay RUN --out DIR writes such a folder")
