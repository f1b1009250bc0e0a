"""Models and journals on a hub: pushed, shown before they are sent, loaded again, and refused with a fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from hub_stand_in import TOKEN, Hub, serving
from journal_toy import save_model, save_reviews, write
from typer.testing import CliRunner

import zeroblock as zb
from toy import PATIENCE_S, Tiny
from zeroblock.cli import app
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import export, read

STORY = Path(__file__).with_name("hub_story.py")


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving() as served:
        yield served


@pytest.fixture
def ann(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The hub as the user ann sees it."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # for the base, which transformers asks for
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    )
    return hub


def call(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def run(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of the story, whose model and journal are on the hub."""
    folder = tmp_path_factory.mktemp("story")
    base = save_model(folder / "base")
    api = huggingface_hub.HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo("ann/base")
    api.upload_folder(repo_id="ann/base", folder_path=base)
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        [sys.executable, STORY, save_reviews(folder / "data"), folder],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (folder / "said.txt").write_text(done.stdout)
    return folder / "run"


def test_what_was_pushed_loads_again_bit_for_bit(run: Path, hub: Hub) -> None:
    found = json.loads((run.parent / "found.json").read_text())
    assert found == dict.fromkeys(("pushed", "applied", "loaded", "moved", "pipeline"), True)
    tuned, steps = hub.repos["ann/tuned"], hub.repos["ann/steps"]
    assert (tuned.visibility, tuned.messages) == ("private", ["model from zeroblock"])
    assert steps.visibility != "private"
    assert set(steps.files) == {"journal.zbj", "README.md"}
    assert {"model.safetensors", "config.json", "tokenizer.json", "README.md"} <= set(tuned.files)
    said = (run.parent / "said.txt").read_text()
    size = len(steps.files["journal.zbj"])
    assert said.index(f"{size:,} bytes") < said.index(f'{hub.url}/ann/steps: zb.load("ann/steps")')
    assert "ann/tuned (private):" in said


def test_cards_are_in_the_hub_format_and_name_no_folder(run: Path, hub: Hub) -> None:
    selected = json.loads((run / "summary.json").read_text())["selected_step"]
    for repo, library, load in (
        ("ann/tuned", "transformers", 'pipeline("text-generation", model="ann/tuned")'),
        ("ann/steps", "zeroblock", 'zb.load("ann/steps")'),
    ):
        text = hub.repos[repo].files["README.md"].decode()
        data = huggingface_hub.ModelCard(text).data
        assert (data.base_model, data.library_name, data.license) == ("ann/base", library, None)
        assert {"zeroblock", "zeroth-order", "mezo_bcd"} <= set(data.tags)
        assert (data.datasets, data.metrics) == (["glue"], ["accuracy"])
        assert data.eval_results[0].metric_type == "accuracy"
        assert load in text
        assert f"{selected} of 3 steps, selected by dev loss" in text
        assert "| before training |" in text
        assert "zeroblock train --model ann/base" in text
        assert "--lr 0.01" in text
        assert str(run.parent) not in text
    assert "vllm serve ann/tuned" in hub.repos["ann/tuned"].files["README.md"].decode()


def test_a_dry_run_writes_and_sends_nothing(run: Path, ann: Hub, tmp_path: Path) -> None:
    before = len(ann.requests)
    said = call("push", run, "ann/new", "--what", "journal", "--dry-run", tmp_path / "look")
    assert "nothing was sent" in said
    assert len(ann.requests) == before
    assert sorted(file.name for file in (tmp_path / "look").iterdir()) == ["README.md", "journal.zbj"]
    assert read(tmp_path / "look" / "journal.zbj").header.steps is not None
    merged = run.parent / "applied"
    (merged / "evil.py").write_text("")
    (merged / "link.json").symlink_to(run / "config.toml")
    (merged / "README.md").write_text("---\ntags: [a]\n---\nload USER/NAME")
    call("push", merged, "ann/new", "--dry-run", tmp_path / "model")
    names = {file.name for file in (tmp_path / "model").iterdir()}
    assert "model.safetensors" in names
    assert not {"evil.py", "link.json"} & names
    assert (tmp_path / "model" / "README.md").read_text().endswith("load ann/new")


def test_an_exported_file_without_its_run(ann: Hub, tmp_path: Path) -> None:
    write(tmp_path / "journal.zbj")
    file = export(tmp_path / "journal.zbj", tmp_path / "tuned.zbj")
    said = call("push", file, "ann/tiny", "--what", "journal")
    assert "tiny" in said
    assert ann.repos["ann/tiny"].files["journal.zbj"] == file.read_bytes()
    model, other = Tiny(), Tiny()
    zb.load(model, "ann/tiny")
    zb.load(other, file)
    assert all(a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(ZeroBlockError, match=r"base of ann/tiny could not be loaded: .*load\(model, 'ann/tiny"):
        zb.load("ann/tiny")


def test_refusals_name_the_fix(run: Path, ann: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, message in (
        ([run, "name"], "'name' is not a repository: give user/name"),
        ([run, "bob/x", "--what", "journal"], "refuses to let this token write to bob/x .*status 403"),
        ([run, "ann/x", "--what", "weights"], "unknown --what 'weights'"),
        ([tmp_path, "ann/x"], "cannot read the journal"),
        ([run, "ann/x", "--endpoint", "http://127.0.0.1:9"], "could not be reached .*--dry-run FOLDER"),
    ):
        with pytest.raises(ZeroBlockError, match=message):
            call("push", *words)
    with pytest.raises(ZeroBlockError, match=r"holds no journal\.zbj: .*from_pretrained\('ann/tuned'\)"):
        zb.load("ann/tuned")
    with pytest.raises(ZeroBlockError, match="no file or folder 'ann/typo' here, and it could not be downloaded"):
        zb.load(Tiny(), "ann/typo")
    with pytest.raises(ZeroBlockError, match="lacks the journal"):
        zb.load(Tiny())  # type: ignore[call-overload]
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ZeroBlockError, match=r"status 401.*hf auth login"):
        call("push", run, "ann/x")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ZeroBlockError, match=r"no token for the hub: .*hf auth login, or set HF_TOKEN"):
        call("push", run, "ann/x")
