"""Runs whose weights rest in a file of their own: the same numbers, and nobody's files change."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_toy import Kill, kept, settings
from transformers import AutoConfig
from typer.testing import CliRunner

import zeroblock as zb
from toy import same, snapshot
from zeroblock.amount import nbytes
from zeroblock.bench import stream
from zeroblock.cli import app
from zeroblock.errors import ZeroBlockError
from zeroblock.model import load, skeleton
from zeroblock.offload import Division, divide, least_division, shelf_of
from zeroblock.offload.mapped import Mapped
from zeroblock.report.view import Quiet
from zeroblock.train import resume, run
from zeroblock.train.offloaded import divided
from zeroblock.train.workload import prepare, resolve


def _digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


class _Notes(Quiet):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


def test_a_run_on_a_file(llama: Path, data: Path, tmp_path: Path, models: list[Any]) -> None:
    before = _digests(llama)
    config = settings(llama, data, dtype="bf16", steps=6, eval_every=3, eval_limit=10)
    run(config, tmp_path / "resident")
    offloaded, notes = config.replace(offload="disk"), _Notes()
    stopped = run(offloaded, tmp_path / "offloaded", Kill(4))
    assert stopped.steps == 4
    with pytest.raises(ZeroBlockError, match="use --offload disk"):
        resume(tmp_path / "offloaded", offload="host")  # decided anew, as when a run begins
    resume(tmp_path / "offloaded", notes)  # from the base and the journal: the file of the first sitting is gone
    assert any("private file of the run" in line for line in notes.lines)
    assert isinstance(shelf_of(models[-1]), Mapped)
    assert same(snapshot(models[0]), snapshot(models[-1]))
    assert kept(tmp_path / "resident") == kept(tmp_path / "offloaded")
    assert _digests(llama) == before
    assert not [file for file in (tmp_path / "offloaded").iterdir() if "weights" in file.name]


@pytest.mark.parametrize("lr", [1e-2, None])
def test_adapters_keep_their_dtype(
    llama: Path, data: Path, tmp_path: Path, models: list[Any], lr: float | None
) -> None:
    lora = "r=2,targets=q,v"
    config = settings(llama, data, lr=lr, dtype="bf16", steps=2, eval_every=2, eval_limit=2, lora=lora)
    run(config, tmp_path / "resident")
    run(config.replace(offload="disk"), tmp_path / "offloaded")  # the files are fp32
    assert {param.dtype for param in models[1].parameters()} == {torch.float32, torch.bfloat16}
    assert same(snapshot(models[0]), snapshot(models[1]))
    assert kept(tmp_path / "resident") == kept(tmp_path / "offloaded")


def test_weights_on_a_file_take_no_memory(llama: Path, tmp_path: Path) -> None:
    model: Any = load(str(llama), "fp32", "cpu", lazy=True)
    own = {param.data_ptr() for param in model.parameters()}
    shelf = zb.shelve(model, "disk", device="cpu", folder=tmp_path / "not" / "there")
    assert isinstance(shelf, Mapped)
    start, stop = shelf.region.flat.data_ptr(), shelf.region.flat.data_ptr() + len(shelf.region.flat)
    assert all(start <= param.data_ptr() < stop for param in model.parameters())
    assert own.isdisjoint(param.data_ptr() for param in model.parameters())
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{start:x}-" in line.split()[0]]
    assert len(mapped) == 1
    assert "s" in mapped[0].split()[1]  # shared with its file: what is written need not stay in memory
    assert "(deleted)" in mapped[0]
    assert os.listdir(tmp_path) == []


def test_settings(llama: Path, data: Path, tmp_path: Path) -> None:
    assert nbytes("500 MB") == 500_000_000
    for wrong in ("8", "GB", "0GB", "8XB", "-1GB", "9" * 400 + "GB"):
        with pytest.raises(ZeroBlockError, match="amount of memory"):
            settings(llama, data, memory=wrong)
    assert nbytes("8gib") == 8 << 30
    with pytest.raises(ZeroBlockError, match="leave out --offload"):
        settings(llama, data, method="ft", offload="host")
    with pytest.raises(ZeroBlockError, match="use --offload disk"):
        resolve(settings(llama, data, offload="host"))
    assert resolve(settings(llama, data, memory="1GB")).offload is None  # all of it fits
    with pytest.raises(ZeroBlockError, match=r"is too little.*give --memory"):
        resolve(settings(llama, data, memory="30KB"))


def test_memory_is_divided(llama: Path) -> None:
    model = load(str(llama), "fp32", "cpu")
    found = [divide(model, size) for size in range(700_000, 4_000_000, 100_000)]
    for one in found:
        assert one.used <= one.memory
        assert 2 <= one.buffers <= one.layers
    assert [one.tokens for one in found] == sorted(one.tokens for one in found)  # long rows come first
    assert found[0].tokens < found[-1].tokens
    half = divide(model, 1_000_000, dtype=torch.bfloat16)
    assert (half.layer, half.outside) == (found[0].layer // 2, found[0].outside // 2)
    method = settings(llama, llama, method="zo_momentum", memory="4MB", dtype="fp32")
    division = divided(method, model)
    assert division is not None
    assert division.kept == sum(param.nbytes for param in model.parameters())  # a number per weight
    assert divide(model, 4_000_000, kept=2_000_000).tokens < divide(model, 4_000_000).tokens
    assert divide(model, 10**9).tokens == 4096
    assert divide(model, 10**9, tokens=16_384).tokens == 16_384
    assert divide(model, 10**9, tokens=100).tokens == 100
    least = next(size for size in range(1000, 10**7, 1000) if fits(model, size))
    for tokens in (4100, 513):  # not multiples of the steps in which rows get shorter
        assert all(divide(model, one.memory, tokens=tokens).tokens >= 256 for one in found)
        with pytest.raises(ZeroBlockError, match="is too little"):
            divide(model, least - 1000, tokens=tokens)  # room for a shorter row than any is meant to be
    assert all(one.pass_tokens is not None and one.pass_tokens >= 2 * one.tokens for one in found)
    assert least_division(model, 256).pass_tokens is None  # nobody gave a memory
    short = settings(llama, llama, method="mezo_bcd", memory="1GB", dtype="fp32", max_tokens=8192)
    assert divided(short, model).tokens == 8192  # type: ignore[union-attr]
    thirteen = Division(4 * 10**9, 40, 629 * 10**6, 536 * 10**6, 629 * 10**6, 0, 755 * 10**6, 3072, 3)
    assert "0 of 40 layers stay, 40 are streamed" in thirteen.describe()
    assert dataclasses.replace(thirteen, buffers=40).stay == 40


def fits(model: torch.nn.Module, memory: int) -> bool:
    try:
        divide(model, memory)
    except ZeroBlockError:
        return False
    return True


def test_bench_stream(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = AutoConfig.from_pretrained(llama, num_hidden_layers=6)  # more layers than buffers
    deep.save_pretrained(tmp_path / "deep")
    rows = [{"context": [k + 3] * (k + 2), "options": [[5], [6, 7]], "label": k % 2} for k in range(6)]
    (tmp_path / "sst2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--encoded", str(tmp_path), "--device", "cpu", "--dtype", "fp32", "--steps", "3"]
    flags += ["--model", str(tmp_path / "deep")]
    timed, begun = stream._times, list[int]()
    monkeypatch.setattr(
        stream, "_times", lambda optimizer, *rest: (begun.append(optimizer.steps), timed(optimizer, *rest))[1]
    )
    shown = CliRunner().invoke(app, ["bench", "stream", *flags, "--batch-size", "2,4", "--json"])
    assert shown.exit_code == 0, shown.output
    assert begun == [0, 2, 2] * 2  # the warm-up, the steps, and the same steps without copies
    found = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [one["batch_size"] for one in found] == [2, 4]
    assert all(one["copy_ms"] > 0 and one["compute_ms"] > 0 for one in found)
    model = skeleton(str(tmp_path / "deep"))
    memory = next(size for size in range(600_000, 10**7, 10_000) if fits(model, size) and divide(model, size).stay == 2)
    shown = CliRunner().invoke(app, ["bench", "stream", *flags, "--memory", f"{memory}B", "--json"])
    assert shown.exit_code == 0, shown.output
    kept = json.loads(shown.stdout)
    assert 0 < kept["bytes_in"] < found[0]["bytes_in"]  # layers that stay are not copied
    assert kept["copy_ms"] == pytest.approx(1e3 * kept["bytes_in"] / kept["bandwidth"], rel=0.02)
    shown = CliRunner().invoke(app, ["bench", "stream", *flags, "--weights", "int4", "--max-tokens", "8", "--json"])
    assert shown.exit_code == 0, shown.output
    small = json.loads(shown.stdout)
    assert small["dtype"] == "int4"
    assert small["rows"] > 1
    assert 0 < small["bytes_in"] / small["rows"] < found[0]["bytes_in"]
    for wrong in (["--offload", "disk"], ["--offload", "hots"], ["--method", "mezo_bdc"]):
        assert isinstance(CliRunner().invoke(app, ["bench", "stream", *flags, *wrong]).exception, ZeroBlockError)


def test_an_engine_takes_the_limits_of_its_shelf(llama: Path) -> None:
    """In Python nobody hands them over: ``zb.shelve`` and then ``zb.Engine``."""
    model = load(str(llama), "fp32", "cpu")
    division = divide(model, 1_000_000)
    zb.shelve(model, "host", device="cpu", memory=1_000_000)
    engine = zb.Engine(model)
    assert engine.max_tokens == division.tokens < 4096
    assert engine.shelf.pass_tokens == division.pass_tokens is not None
    assert zb.Engine(model, max_tokens=64).max_tokens == 64
    free = load(str(llama), "fp32", "cpu")
    zb.shelve(free, "host", device="cpu")  # without a memory there is no limit
    assert (zb.Engine(free).max_tokens, zb.Engine(free).shelf.pass_tokens) == (None, None)


def test_rows_are_never_longer_than_the_memory_allows(llama: Path, data: Path, tmp_path: Path) -> None:
    config = resolve(settings(llama, data, offload="disk", memory="1MB", max_tokens=100_000, dtype="fp32"))
    work = prepare(config, folder=tmp_path)
    division = divided(config, work.model)
    assert division is not None
    assert work.engine.max_tokens == division.tokens < 100_000


def test_plan_says_it(llama: Path, data: Path) -> None:
    flags = ["--model", str(llama), "--task", "sst2", "--data", str(data), "--device", "cpu", "--seconds", "0"]
    shown = CliRunner().invoke(app, ["plan", *flags, "--offload", "disk", "--memory", "1MB", "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["division"]["tokens"] == 256
    assert found["expected_bytes"] >= found["division"]["row"]
    assert found["timing"]["steps"] >= 3  # it was measured
