"""A fine-tune as a file: exported, loaded into a model, and taken out of it again."""

from __future__ import annotations

import gc
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from journal_toy import build, key, write

import zeroblock as zb
from toy import Tiny, next_token, same, snapshot
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import Header, Journal, export, format, load, read, unload
from zeroblock.journal import share as module


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write(folder / "journal.zbj")
    lines = [
        {"kind": "eval", "step": step, "split": "test", "metric": "accuracy", "value": value, "n": 872}
        for step, value in ((6, 0.5), (12, 0.75))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def trained(name: str, steps: int = 12, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    model = Tiny(dtype=dtype)
    optimizer = build(name, model)
    for _ in range(steps):
        optimizer.step(next_token(model))
    return model


@pytest.mark.parametrize(
    ("name", "dtype"), list(zip(zb.METHODS, itertools.cycle([torch.float32, torch.bfloat16]), strict=False))
)
def test_a_file_is_loaded_and_unloaded_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    write(tmp_path / "journal.zbj", name=name, dtype=dtype)
    file = export(tmp_path, tmp_path / "shared" / "tiny.zbj")
    model = Tiny(dtype=dtype)
    model.layers[0].requires_grad_(False)  # a model in use: flags are not the file's business
    load(model, file)
    assert same(snapshot(model), snapshot(trained(name, dtype=dtype)))
    assert not any(p.requires_grad for p in model.layers[0].parameters())
    assert model.norm.weight.requires_grad
    unload(model)
    assert same(snapshot(model), snapshot(Tiny(dtype=dtype)))
    load(model, file)
    assert same(snapshot(model), snapshot(trained(name, dtype=dtype)))


def test_only_what_moves_is_kept(run: Path, tmp_path: Path) -> None:
    file = export(run, tmp_path / "one.zbj", step=1)
    model = Tiny()
    load(model, file)
    block = read(file).records[0].block
    kept = module._bases[model]
    assert set(kept) == set(zb.mezo_bcd(Tiny(), 1e-2).blocks[block].params)
    assert len(kept) < len(dict(model.named_parameters()))
    del model
    gc.collect()
    assert not len(module._bases)


def test_an_export_is_a_journal_with_a_card(run: Path, tmp_path: Path) -> None:
    file = export(run, tmp_path / "tiny.zbj")
    contents, before = read(file), read(run)
    assert [key(r) for r in contents.records] == [key(r) for r in before.records]
    assert contents.header.steps == 12
    assert contents.header.replace(card="", steps=None) == before.header
    card = contents.header.card
    assert card.startswith("# tiny fine-tuned with mezo_bcd on successor\n")
    assert f"fingerprint {before.header.fingerprint}" in card
    assert "- accuracy: 0.7500 of 872 test examples" in card
    assert "0.5000" not in card
    assert "zeroblock apply FILE.zbj --model tiny" in card
    assert "- rule: SGD()" in card
    half = read(export(run, tmp_path / "half.zbj", step=6))
    assert len(half.records) == half.header.steps == 6
    assert "- accuracy: 0.5000 of 872 test examples" in half.header.card
    model = Tiny()
    load(model, tmp_path / "half.zbj")
    assert same(snapshot(model), snapshot(trained("mezo_bcd", 6)))
    again = export(file, tmp_path / "again.zbj")
    assert [key(r) for r in read(again).records] == [key(r) for r in before.records]


def test_a_part_of_a_shared_file_is_not_mistaken_for_the_whole(run: Path, tmp_path: Path) -> None:
    file = export(run, tmp_path / "tiny.zbj")
    whole, model = file.read_bytes(), Tiny()
    for cut in (1, 28, 56, 60):
        file.write_bytes(whole[:-cut])
        with pytest.raises(ZeroBlockError, match=r"should hold 12 steps and holds (9|1[01])\b.*get it again"):
            load(model, file)
    file.write_bytes(whole + bytes(28))
    with pytest.raises(ZeroBlockError, match="holds 12 and 28 bytes more"):
        load(model, file)
    file.write_bytes(whole)
    with pytest.raises(ZeroBlockError, match="takes no more steps"):
        Journal.open(file)
    assert same(snapshot(model), snapshot(Tiny()))


def test_an_unfinished_tail_is_told(run: Path) -> None:
    file = run / "journal.zbj"
    file.write_bytes(file.read_bytes()[:-5])
    model = Tiny()
    with pytest.warns(zb.ZeroBlockWarning, match="23 bytes of an unfinished write after 11 whole steps"):
        load(model, run)
    assert same(snapshot(model), snapshot(trained("mezo_bcd", 11)))


def test_the_wrong_model_is_left_alone(run: Path) -> None:
    model = Tiny()
    with torch.no_grad():
        model.embed.weight += 1
    before = snapshot(model)
    with pytest.raises(ZeroBlockError, match="starts from other base weights"):
        load(model, run)
    assert same(snapshot(model), before)
    load(model, run, force=True)
    assert not same(snapshot(model), before)
    unload(model)
    assert same(snapshot(model), before)


def test_one_at_a_time(run: Path) -> None:
    model = Tiny()
    with pytest.raises(ZeroBlockError, match="no journal is loaded"):
        unload(model)
    load(model, run)
    with pytest.raises(ZeroBlockError, match="loaded into this model already"):
        load(model, run)
    unload(model)
    with pytest.raises(ZeroBlockError, match="no journal is loaded"):
        unload(model)


def test_a_load_that_is_interrupted_leaves_the_base(run: Path) -> None:
    model = Tiny()

    def stop(done: float) -> None:
        if done > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load(model, run, progress=stop)
    assert same(snapshot(model), snapshot(Tiny()))
    load(model, run)
    assert same(snapshot(model), snapshot(trained("mezo_bcd")))


def test_nothing_is_not_exported_and_nothing_is_overwritten(tmp_path: Path) -> None:
    Journal.create(tmp_path / "journal.zbj", Header.of(zb.mezo(Tiny(), 1e-2))).close()
    with pytest.raises(ZeroBlockError, match="has no steps to export"):
        export(tmp_path, tmp_path / "out.zbj")
    (tmp_path / "journal.zbj").unlink()
    write(tmp_path / "journal.zbj", 2)
    export(tmp_path, tmp_path / "out.zbj")
    with pytest.raises(ZeroBlockError, match="ever overwritten"):
        export(tmp_path, tmp_path / "out.zbj")
    with pytest.raises(ZeroBlockError, match="holds 2 steps, so there is no step 3"):
        export(tmp_path, tmp_path / "more.zbj", step=3)


@pytest.mark.filterwarnings("ignore::zeroblock.ZeroBlockWarning")
@pytest.mark.parametrize("restore", ["copy", "subtract"])
def test_a_skipped_step_that_walked_is_taken_back_too(restore: str, tmp_path: Path) -> None:
    """Measuring in place moves 16-bit weights, whatever the loss was."""
    model = Tiny(dtype=torch.bfloat16)
    base, optimizer = snapshot(model), zb.mezo_bcd(model, 1e-2, schedule=zb.Ascending(), restore=restore)
    with Journal.create(tmp_path / "journal.zbj", Header.of(optimizer)) as journal:
        optimizer.listener = journal.append
        optimizer.step(lambda: math.nan)
        optimizer.step(next_token(model))
    again = Tiny(dtype=torch.bfloat16)
    zb.load(again, tmp_path / "journal.zbj")
    assert same(snapshot(again), snapshot(model))
    zb.unload(again)
    assert same(snapshot(again), base)


def test_a_journal_of_a_strange_estimator_is_refused() -> None:
    header = Header.of(zb.mezo(Tiny(), 1e-2))
    for change in ({"name": []}, {"name": {}}, {"eps": 10**400}):
        method = {**header.method, "estimator": {**header.method["estimator"], **change}}

        def written(method: dict[str, object] = method) -> Header:
            return format.parse(format.dump(header.replace(method=method), [])).header

        with pytest.raises(ZeroBlockError):
            written().rebuild(Tiny())


def test_no_folder_of_this_machine_is_in_an_export(tmp_path: Path) -> None:
    optimizer = zb.mezo(Tiny(), 1e-2)
    optimizer.step(next_token(optimizer.model))
    extra = {
        "/home/ann/key": "whole",
        "url": "file:///home/ann/one.txt",
        "text": "from /home/ann/two.txt, 'C:\\ann\\three' and ~ann/four; https://hub/kept is no path, and/or neither",
        "nested": [{"inner": "~/ann/five"}],
    }
    header = Header.of(zb.mezo(Tiny(), 1e-2), model="/home/ann/base", task="/home/ann/task", **extra)
    with Journal.create(tmp_path / "journal.zbj", header) as journal:
        journal.append(optimizer.record)
    file = export(tmp_path, tmp_path / "out.zbj")
    assert b"ann" not in file.read_bytes()
    assert read(file).header.extra == {
        "key": "whole",
        "url": "one.txt",
        "text": "from two.txt, 'three' and four; https://hub/kept is no path, and/or neither",
        "nested": [{"inner": "five"}],
    }
