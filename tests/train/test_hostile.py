"""Run folders and configurations that come from a stranger, or that were damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_toy import Kill, kept, lines, settings, undisturbed
from safetensors.torch import load_file, save_file

from toy import PATIENCE_S, zeroblock
from zeroblock import atomic
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.journal import Journal, read
from zeroblock.report.view import Progress, Quiet
from zeroblock.train import Config, make, resume, run

COMMAND = [sys.executable, "-c", "from zeroblock.cli import main; main()"]


class Notes(Quiet):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


# ---------------------------------------------------------------------------------------------------------------------
# Links


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "steps.csv", "summary.json"])
def test_drafts_are_not_written_through_links(name: str, llama: Path, data: Path, tmp_path: Path) -> None:
    """A link planted under the draft's old name is not followed, and the run is whole."""
    target = tmp_path / "precious"
    target.write_text("precious")
    run(settings(llama, data), tmp_path / "run", Kill(5))
    (tmp_path / "run" / f"{name}.part").symlink_to(target)
    assert resume(tmp_path / "run").summary is not None
    assert target.read_text() == "precious"


@pytest.mark.parametrize("name", ["summary.md", "figures/loss.png", "config.toml"])
def test_a_link_under_a_files_name_is_replaced(
    name: str, llama: Path, data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if name.startswith("figures"):
        request.getfixturevalue("figures")
    target = tmp_path / "precious"
    target.write_text("precious")
    config = settings(llama, data)
    if name == "config.toml":  # a folder that holds no run yet
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / name).symlink_to(tmp_path / "missing")
        run(config, tmp_path / "run")
        assert not (tmp_path / "missing").exists()
        return
    run(config, tmp_path / "run", Kill(5))
    (tmp_path / "run" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "run" / name).symlink_to(target)
    resume(tmp_path / "run")
    assert target.read_text() == "precious"
    assert not (tmp_path / "run" / name).is_symlink()


def test_lines_are_not_added_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="links are not followed"):
        atomic.append(tmp_path / "metrics.jsonl")
    assert (tmp_path / "precious").read_text() == "precious"


def test_figures_are_not_drawn_through_a_link(llama: Path, data: Path, tmp_path: Path, figures: None) -> None:
    (tmp_path / "elsewhere").mkdir()
    run(settings(llama, data), tmp_path / "run", Kill(5))
    (tmp_path / "run" / "figures").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(ZeroBlockError, match="figures is a link, and links are not followed"):
        resume(tmp_path / "run")
    assert list((tmp_path / "elsewhere").iterdir()) == []
    (tmp_path / "run" / "figures").unlink()
    assert resume(tmp_path / "run").summary is not None


def test_a_snapshot_is_not_written_through_links(llama: Path, data: Path, tmp_path: Path) -> None:
    """Neither under the old name of its draft nor under its own."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "state.pt").write_text("precious")
    config = settings(llama, data)
    run(config, tmp_path / "run", Kill(3))
    for name in ("snapshot", "snapshot.part", "snapshot.old"):
        (tmp_path / "run" / name).symlink_to(elsewhere, target_is_directory=True)
    resume(tmp_path / "run", snapshot_every=2)
    assert [file.name for file in elsewhere.iterdir()] == ["state.pt"]
    assert (elsewhere / "state.pt").read_text() == "precious"
    assert (tmp_path / "run" / "snapshot" / "weights.safetensors").is_file()


def test_a_write_that_fails_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match=r"file"):
        atomic.write(tmp_path / "file", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_drafts_of_a_killed_process_are_removed(llama: Path, data: Path, tmp_path: Path) -> None:
    run(settings(llama, data), tmp_path / "run", Kill(5))
    stray, mine = tmp_path / "run" / f".steps.csv.{'0f' * 8}.part", tmp_path / "run" / ".mine.part"
    stray.write_text("half")
    mine.write_text("dear")
    resume(tmp_path / "run")
    assert not stray.exists()
    assert mine.read_text() == "dear"


# ---------------------------------------------------------------------------------------------------------------------
# Code that comes with a model


@pytest.fixture
def coded(llama: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A model whose folder brings code, and the file that this code writes when it runs."""
    model, mark = tmp_path / "coded", tmp_path / "it-ran"
    model.mkdir()
    for file in llama.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"}
    config["model_type"] = "mine"
    (model / "config.json").write_text(json.dumps(config))
    (model / "mine.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(mark)!r}).write_text('')\n"
        "class MyConfig(LlamaConfig):\n    model_type = 'mine'\n"
        "class MyModel(LlamaForCausalLM):\n    config_class = MyConfig\n"
    )
    return model, mark


def test_a_folder_cannot_ask_for_code(coded: tuple[Path, Path], data: Path, tmp_path: Path) -> None:
    """The model's code runs when this very command says so, and not because a configuration does."""
    model, mark = coded
    run(settings(model, data, trust_remote_code=True, dtype="fp32"), tmp_path / "run", Kill(5))
    assert mark.exists()
    mark.unlink()
    ignored = r"trust_remote_code = true is ignored .* --trust-remote-code"
    with pytest.warns(ZeroBlockWarning, match=ignored), pytest.raises(ZeroBlockError, match="comes with Python code"):
        resume(tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    assert "trust_remote_code = true" in file.read_text()
    with pytest.warns(ZeroBlockWarning, match=ignored):
        assert not Config.load(file).trust_remote_code
    done = zeroblock("train", "--config", file, "--out", tmp_path / "new")
    assert (done.returncode, done.stderr.count("\n")) == (2, 2)
    assert "trust_remote_code = true is ignored" in done.stderr
    assert "add --trust-remote-code to this command" in done.stderr
    assert not mark.exists()
    assert resume(tmp_path / "run", trust_remote_code=True).steps == 10


def test_every_command_that_asks_for_the_flag_has_it(coded: tuple[Path, Path], data: Path) -> None:
    model, mark = coded
    file = model / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": [None, "words.Words"]}, "tokenizer_class": "Words"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    (model / "words.py").write_text(
        "from pathlib import Path\nfrom transformers import PreTrainedTokenizerFast\n"
        f"Path({str(mark)!r}).write_text('')\n"
        "class Words(PreTrainedTokenizerFast):\n    pass\n"
    )
    for asked in (("blocks", "--model", model), ("tasks", "show", "sst2", "--data", data, "--tokenizer", model)):
        done = zeroblock(*asked)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "add --trust-remote-code to this command" in done.stderr
        assert not mark.exists()
        done = command(*asked, "--trust-remote-code")
        assert done.returncode == 0, done.stderr
        assert mark.exists()
        mark.unlink()


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE_S)


# ---------------------------------------------------------------------------------------------------------------------
# Damaged files


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe\n", b"[]\n", b"7\n", b'{"step": "4"}\n', b"9" * 5000 + b"\n", b"[" * 100_000 + b"\n", b"\n"],
    ids=["not UTF-8", "list", "number", "wrong type", "endless number", "nested", "empty"],
)
def test_bad_lines_of_measurements_are_measured_again(line: bytes, llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, eval_every=2)
    whole = undisturbed(config)
    run(config, tmp_path / "run", Kill(5))
    file = tmp_path / "run" / "metrics.jsonl"
    good = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*good[:3], line, *good[3:]]))
    view = Notes()
    resume(tmp_path / "run", view)
    assert any("metrics.jsonl is damaged (line 4" in note for note in view.notes)
    assert whole == kept(tmp_path / "run")


@pytest.mark.parametrize(
    "text",
    ["[]", "3", "null", "{}", '{"steps": 1}', "\ud800", '{"a": ' + "9" * 5000 + "}", "[" * 100_000],
    ids=["list", "number", "null", "empty", "half", "surrogate", "endless number", "nested"],
)
def test_a_bad_summary_is_one_line(text: str, llama: Path, data: Path, tmp_path: Path) -> None:
    config = settings(llama, data, steps=2, eval_every=2)
    run(config, tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_bytes(text.encode(errors="surrogatepass"))
    for attempt in (lambda: resume(tmp_path / "run"), lambda: make(config, tmp_path / "run")):
        with pytest.raises(ZeroBlockError, match=r"summary\.json is damaged .*: remove it, then zeroblock resume"):
            attempt()


@pytest.mark.parametrize("name", ["metrics.jsonl", "steps.csv"])
def test_a_report_of_damaged_files_is_one_line(name: str, llama: Path, data: Path, tmp_path: Path) -> None:
    run(settings(llama, data, steps=2, eval_every=2), tmp_path / "run")
    (tmp_path / "run" / "summary.md").unlink()
    (tmp_path / "run" / name).write_bytes(b"step,block\n\xff,x\n")
    with pytest.raises(ZeroBlockError, match=f"{name} is damaged"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("how", ["missing", "shape", "dtype", "steps", "negative", "list", "state"])
def test_a_snapshot_with_wrong_contents_is_left_alone(how: str, llama: Path, data: Path, tmp_path: Path) -> None:
    """Its checksums match: whoever wrote it wrote it so."""
    from zeroblock.train.snapshot import _crc

    config = settings(llama, data, method="mezo_bcd_adam", snapshot_every=3)
    whole = undisturbed(config.replace(snapshot_every=0))
    run(config, tmp_path / "run", Kill(8))
    place = tmp_path / "run" / "snapshot"
    weights, state = load_file(place / "weights.safetensors"), torch.load(place / "state.pt", weights_only=True)
    name = next(reversed(weights))
    changes: dict[str, Callable[[], Any]] = {
        "missing": lambda: weights.pop(name),
        "shape": lambda: weights.update({name: weights[name][..., :1].clone()}),
        "dtype": lambda: weights.update({name: weights[name].double()}),
        "steps": lambda: state["optimizer"].update(steps="6"),
        "negative": lambda: state["optimizer"].update(steps=-2),
        "list": lambda: state.update(optimizer=[]),
        "state": lambda: state["optimizer"].pop("thresholds"),
    }
    changes[how]()
    save_file(weights, place / "weights.safetensors")
    state["crc"] = _crc(place / "weights.safetensors")
    torch.save(state, place / "state.pt")
    view = Notes()
    resume(tmp_path / "run", view)
    assert any("the snapshot is damaged" in note for note in view.notes)
    assert "replaying 8 of 8 steps" in view.notes
    assert whole == kept(tmp_path / "run")


# ---------------------------------------------------------------------------------------------------------------------
# Two at once, signals, and a journal that is lost


@pytest.mark.parametrize("steps", [0, 5])
def test_two_resumes_at_once(steps: int, llama: Path, data: Path, tmp_path: Path) -> None:
    """The second is refused before it touches anything, whether or not there is a journal yet."""
    config = settings(llama, data, eval_every=2)
    whole = run(config, tmp_path / "whole")
    if steps:
        run(config, tmp_path / "run", Kill(steps))
    else:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "config.toml").write_text((tmp_path / "whole" / "config.toml").read_text())

    class Second(Quiet):
        refused = 0

        def step(self, progress: Progress) -> None:
            if progress.step == 7:
                before = {p: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
                for attempt in (lambda: resume(tmp_path / "run"), lambda: make(config, tmp_path / "run")):
                    with pytest.raises(ZeroBlockError, match=f"is being written by process {os.getpid()}: wait"):
                        attempt()
                assert before == {p: p.read_bytes() for p in (tmp_path / "run").iterdir() if p.is_file()}
                Second.refused += 1

    resume(tmp_path / "run", Second())
    assert Second.refused == 1
    assert kept(whole.folder) == kept(tmp_path / "run")


def test_a_second_signal_names_itself(llama: Path, data: Path, tmp_path: Path) -> None:
    """Two in one step; the exit status is that of the second, and the run can be resumed."""
    script = (
        "import os, signal\nfrom zeroblock.report import view\n"
        "class Both(view.Quiet):\n    def step(self, progress):\n        if progress.step == 4:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n            os.kill(os.getpid(), signal.SIGINT)\n"
        "view.view = lambda quiet, json: Both()\nfrom zeroblock.cli import main\nmain()\n"
    )
    config = settings(llama, data)
    file = tmp_path / "run.toml"
    file.write_text(config.dump())
    options = ["train", "--config", str(file), "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", script, *options], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert len(read(tmp_path / "run").records) == 4
    assert resume(tmp_path / "run").steps == 10


def test_a_second_sigterm_exits_with_its_status(llama: Path, data: Path, tmp_path: Path) -> None:
    class Twice(Kill):
        def step(self, progress: Progress) -> None:
            super().step(progress)
            super().step(progress)

    with pytest.raises(SystemExit) as left:
        run(settings(llama, data), tmp_path / "run", Twice(4))
    assert left.value.code == 143
    assert len(read(tmp_path / "run").records) == 4
    assert resume(tmp_path / "run").steps == 10


@pytest.mark.parametrize("ends", ["finished", "stopped", "snapshot"])
def test_a_journal_that_is_lost_ends_the_run(
    ends: str, llama: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No summary, and no advice to resume, of weights that nothing can rebuild."""
    sync = Journal.sync

    def checked(self: Journal) -> None:
        if not self.path.exists():
            raise ZeroBlockError("the journal is gone")
        sync(self)

    class Delete(Quiet):
        def step(self, progress: Progress) -> None:
            if progress.step == 9:
                (tmp_path / "run" / "journal.zbj").unlink()
                if ends == "stopped":
                    os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Journal, "sync", checked)
    monkeypatch.setattr(Journal, "close", lambda self: None)  # the run must have noticed before
    config = settings(llama, data, fsync=3600.0, snapshot_every=9 if ends == "snapshot" else 0)
    with pytest.raises(ZeroBlockError, match="the journal is gone"):
        run(config, tmp_path / "run", Delete())
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not (tmp_path / "run" / "snapshot").exists()
    assert lines(tmp_path / "run")[-1]["step"] == 8


@pytest.mark.parametrize("how", ["deleted", "cut", "replaced"])
def test_a_journal_that_is_deleted_or_cut_is_noticed(how: str, llama: Path, data: Path, tmp_path: Path) -> None:
    """Its writer writes it anew, unless another file is in its place: no run ends without a journal."""
    config = settings(llama, data, fsync=3600.0)
    whole = undisturbed(config)

    class Damage(Quiet):
        def step(self, progress: Progress) -> None:
            journal = tmp_path / "run" / "journal.zbj"
            if progress.step == 9 and how == "cut":
                os.truncate(journal, journal.stat().st_size - 40)
            elif progress.step == 9:
                journal.unlink()
                if how == "replaced":
                    journal.write_text("another file")

    if how == "replaced":
        with pytest.raises(ZeroBlockError, match="was replaced by another file during the run"):
            run(config, tmp_path / "run", Damage())
        assert not (tmp_path / "run" / "summary.json").exists()
        return
    with pytest.warns(ZeroBlockWarning, match=f"was {how} during the run; its 10 steps were written anew"):
        run(config, tmp_path / "run", Damage())
    assert whole == kept(tmp_path / "run")
