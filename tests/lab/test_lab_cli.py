"""``zeroblock lab`` end to end, at tiny sizes: files, captions, one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from specimen import adaptive_run
from typer.testing import CliRunner

from toy import Tiny, next_token
from zeroblock.cli.lab import app
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import read
from zeroblock.schedule import Economical

PNG = b"\x89PNG"


def call(*words: object) -> None:
    found = CliRunner().invoke(app, [str(w) for w in words])
    if found.exception and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lab")
    call("all", "--out", out, "--quick", "--workers", 1)
    return out


def test_every_figure_comes_as_png_and_pdf_with_numbers_and_a_sentence(folder: Path) -> None:
    pictures = sorted(folder.glob("*.png"))
    assert len(pictures) == 14
    text = (folder / "README.md").read_text()
    for picture in pictures:
        assert picture.read_bytes().startswith(PNG)
        assert picture.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
        assert f"]({picture.name})" in text
        assert f"[{picture.stem}.pdf]" in text
    for table in folder.glob("*.csv"):
        assert len(pandas.read_csv(table)) > 0
        assert f"]({table.name})" in text, table.name


def test_the_numbers_say_what_the_figures_show(folder: Path) -> None:
    alignment = pandas.read_csv(folder / "alignment.csv")
    assert float(alignment.z.abs().max()) < 4.5
    tails = pandas.read_csv(folder / "tails.csv")
    assert bool((tails.empirical <= tails.bound + 4 * tails.error).all())
    lemmas = pandas.read_csv(folder / "bounds_lemmas.csv")
    assert int((~lemmas.holds[lemmas.role == "claim"]).sum()) == 2
    assert bool(lemmas.holds[lemmas.role == "ours"].all())
    assert float(pandas.read_csv(folder / "bounds_corrected.csv").z.max()) < 4.5
    fit = pandas.read_csv(folder / "convergence_fit.csv")
    assert float(fit.r2.iloc[0]) > 0.8


def test_two_processes_give_the_numbers_of_one(tmp_path: Path) -> None:
    for workers in (1, 2):
        call("tails", "--quick", "--out", tmp_path / str(workers), "--workers", workers)
    assert (tmp_path / "1" / "tails.csv").read_bytes() == (tmp_path / "2" / "tails.csv").read_bytes()


def test_a_run_is_diagnosed(tmp_path: Path) -> None:
    from zeroblock.schedule import Adaptive

    with (tmp_path / "run.jsonl").open("w") as file:
        for seen in adaptive_run(4, 80, Adaptive(warmup=8)):
            file.write(json.dumps({"step": seen.step, "block": seen.block, "coeffs": seen.coeffs}) + "\n")
    call("adaptive", tmp_path / "run.jsonl", "--warmup", 8, "--trajectories", 50, "--out", tmp_path / "out")
    table = pandas.read_csv(tmp_path / "out" / "adaptive.csv")
    assert list(table.block) == [0, 1, 2, 3]
    assert float(table["mean"].sum()) == pytest.approx(1, abs=1e-4)
    assert (tmp_path / "out" / "adaptive.png").read_bytes().startswith(PNG)
    with pytest.raises(ZeroBlockError, match="warm-up"):
        call("adaptive", tmp_path / "run.jsonl", "--out", tmp_path / "out", "--warmup", 500)


def test_a_journal_says_itself_what_the_run_was(tmp_path: Path) -> None:
    import zeroblock as zb
    from zeroblock.journal import Header, Journal
    from zeroblock.lab.adaptive import diagnose

    for name, schedule in (("adaptive", zb.Adaptive(0.3, 0.5, 6, signed=True)), ("shuffled", zb.Shuffled())):
        model = Tiny()
        optimizer = zb.mezo_bcd(model, 1e-2, schedule=schedule, interval=2)
        with Journal.create(tmp_path / f"{name}.zbj", Header.of(optimizer)) as journal:
            optimizer.listener = journal.append
            for _ in range(30):
                optimizer.step(next_token(model))
    found = diagnose(tmp_path / "adaptive.zbj", zb.Adaptive())
    assert (found.schedule, found.interval, found.blocks) == (zb.Adaptive(0.3, 0.5, 6, signed=True), 2, 5)
    assert found.labels == tuple(block.name for block in optimizer.blocks)
    call("adaptive", tmp_path / "adaptive.zbj", "--trajectories", 50, "--out", tmp_path / "out")
    with pytest.raises(ZeroBlockError, match="chose its blocks by Shuffled"):
        call("adaptive", tmp_path / "shuffled.zbj", "--out", tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Llama and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = ["<s>", "</s>", "<unk>", "good", "bad", "plot", "film", "It", "was", "great", "terrible", ".", "a", "the"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty rows in sst2's layout, of our own making."""
    folder = tmp_path_factory.mktemp("data") / "sst2"
    folder.mkdir()
    for part in ("train", "validation"):
        text = [f"a {'good' if i % 2 else 'bad'} {'plot' if i % 3 else 'film'} ." for i in range(160)]
        rows = [{"sentence": t, "label": i % 2, "idx": i} for i, t in enumerate(text)]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder.parent


def test_a_model_is_measured_block_by_block(language_model: Path, data: Path, tmp_path: Path) -> None:
    call("blocks", "--model", language_model, "--task", "sst2", "--data", data, "--out", tmp_path, "--steps", 12,
         "--warmup", 4, "--compare", "--sketch", 5, "--probes", 3, "--iterations", 6, "--max-tokens", 16,
         "--eps", 5e-3)  # fmt: skip
    table = pandas.read_csv(tmp_path / "blocks.csv")
    assert set(table.step) == {0, 12}
    assert set(table.way) == {"backward", "forward"}
    assert table.block.nunique() == 4  # embedding, two layers, norm
    start = table[table.step == 0].pivot(index="block", columns="way", values="trace")
    assert start.forward.to_numpy() == pytest.approx(start.backward.to_numpy(), rel=0.2, abs=0.05)
    assert table[table.step == 0].probability.nunique() == 1
    assert table[table.step == 12].probability.nunique() > 1
    for name in ("blocks", "blocks_agreement", "adaptive"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    # the cost-aware schedule has heard of the run's steps, and of costs that were measured
    assert float(table[table.step == 0].cost.mean()) == pytest.approx(1, abs=0.02)
    contents = read(tmp_path / "blocks.zbj")
    assert len(contents.records) == 12
    assert contents.header.extra["costs"] == list(table[(table.step == 0) & (table.way == "forward")].cost)
    last = table[(table.step == 12) & (table.way == "backward")]
    scores = [0.0] * 4
    schedule = Economical(tuple(last.cost))
    for record in contents.records:
        schedule.observe(scores, record.block, record.coeffs)
    assert list(last.economical) == pytest.approx(schedule.probabilities(scores), rel=1e-4)
    heat = pandas.read_csv(tmp_path / "economical_probabilities.csv")
    assert heat.filter(like="block_").sum(axis=1).tolist() == pytest.approx([1.0] * 12, abs=1e-5)  # six digits each


def test_a_run_that_was_cut_is_drawn_elsewhere(language_model: Path, data: Path, tmp_path: Path) -> None:
    """Rows alone are written first, as where nothing can draw; a killed run ends in the middle of a line."""
    call("blocks", "--model", language_model, "--task", "sst2", "--data", data, "--out", tmp_path, "--steps", 6,
         "--warmup", 4, "--probes", 2, "--iterations", 1, "--max-tokens", 16, "--costs", "2,1,1,1",
         "--rows-only")  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"blocks.csv", "blocks.zbj"}
    text = (tmp_path / "blocks.csv").read_text()
    (tmp_path / "blocks.csv").write_text(text[:-30])
    found = CliRunner().invoke(app, ["draw", str(tmp_path), "--trajectories", "20"])
    assert found.exit_code == 0, found.output
    lines = [line for line in found.stdout.splitlines() if line.startswith("| ")]
    assert len(lines) == 3  # headings, the start, step 6
    assert lines[1].split(" | ")[5:7] == ["uniform", "block 1: 0.27; others 0.2 to 0.27"]
    assert lines[2].split(" | ")[4].endswith(" of 3")  # the last block was cut off
    for name in ("blocks", "adaptive"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    (tmp_path / "blocks.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ZeroBlockError, match="it lacks the columns block"):
        call("draw", tmp_path)
    with pytest.raises(ZeroBlockError, match="3 costs for 4 blocks"):
        call("blocks", "--model", language_model, "--task", "sst2", "--data", data, "--out", tmp_path, "--costs",
             "1,1,1", "--max-tokens", 16)  # fmt: skip


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--model", "./no/such/folder", "--task", "sst2"), "no folder './no/such/folder'"),
        (("--model", "nowhere", "--task", "sst2", "--sketch", "3"), "5 vectors"),
        (("--model", "nowhere", "--task", "sst2", "--partition", "layer"), "did you mean 'layers'"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    with pytest.raises(ZeroBlockError, match=says) as caught:
        call("blocks", *words, "--out", tmp_path)
    assert "\n" not in str(caught.value)


def test_too_few_examples_is_said(language_model: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroBlockError, match="raise --max-tokens"):
        call(
            "blocks", "--model", language_model, "--task", "sst2", "--data", data, "--out", tmp_path, "--max-tokens", 4
        )


def test_help_answers_without_torch_or_matplotlib() -> None:
    code = (
        "import sys; from zeroblock.cli.lab import app; import typer.testing as t; "
        "r = t.CliRunner().invoke(app, ['--help']); assert r.exit_code == 0 and 'convergence' in r.output; "
        "print([m for m in ('torch', 'matplotlib', 'pandas', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
