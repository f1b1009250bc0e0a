"""Files that somebody made up, with right checksums throughout: refused in one clear line, or harmless."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from journal_toy import GOOD, command, forge, save_model, tokens_loss, write

import zeroblock as zb
from toy import Tiny, same, snapshot
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import Header, Journal, export, read


@pytest.fixture
def header() -> Header:
    return Header.of(zb.mezo(Tiny(), 1e-2), model="tiny")


# Numbers that no optimizer writes


@pytest.mark.parametrize("rate", [math.nan, math.inf, -math.inf, -1e-3, 1e300, 4e38])
def test_a_rate_that_no_optimizer_has_is_refused_by_step(rate: float, header: Header, tmp_path: Path) -> None:
    path = forge(tmp_path / "journal.zbj", header, [GOOD, GOOD, (1.0, rate, 0, 1.0), GOOD])
    model = Tiny()
    for attempt in (read, Journal.open, lambda place: zb.load(model, place)):
        with pytest.raises(ZeroBlockError, match=r"step 2 has the learning rate .*--step 2 takes the steps before it"):
            attempt(path)
    assert same(snapshot(model), snapshot(Tiny()))
    assert len(read(path, 2).records) == 2


def test_such_a_rate_is_not_written_either(header: Header, tmp_path: Path) -> None:
    with Journal.create(tmp_path / "journal.zbj", header) as journal:
        for rate in (math.nan, math.inf, -1.0, 1e300):
            with pytest.raises(ZeroBlockError, match="step 0: the learning rate cannot be"):
                journal.append(zb.Record(0, 0, (1.0,), rate, (), 1.0))
        journal.append(zb.Record(0, 0, (1.0,), 0.0, (), 1.0))
    assert len(read(tmp_path).records) == 1


@pytest.mark.parametrize("decay", [1e308, 1e39, -0.1])
def test_a_decay_that_no_optimizer_has_is_refused(decay: float, header: Header, tmp_path: Path) -> None:
    path = forge(tmp_path / "journal.zbj", header, [GOOD], weight_decay=decay)
    with pytest.raises(ZeroBlockError, match="the header's weight_decay cannot be"):
        read(path)


def test_infinity_has_more_than_one_spelling(header: Header, tmp_path: Path) -> None:
    path = forge(tmp_path / "journal.zbj", header, [GOOD])
    text = header.encode().replace(b'"weight_decay":0.0', b'"weight_decay":1e999')
    assert text != header.encode()
    with pytest.raises(ZeroBlockError, match="the header's weight_decay cannot be"):
        Header.decode(text)
    assert len(read(path).records) == 1


# Weights that are not finite


@pytest.mark.parametrize("bad", [0, 1, 7, 29])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_that_ruins_the_weights_is_named(bad: int, dtype: torch.dtype, tmp_path: Path) -> None:
    header = Header.of(zb.mezo(Tiny(dtype=dtype), 1e-2))
    rows = [GOOD] * 30
    rows[bad] = (1.0, 1e30, 0, 1e30)
    path = forge(tmp_path / "journal.zbj", header, rows)
    model = Tiny(dtype=dtype)
    with pytest.raises(
        ZeroBlockError, match=rf"step {bad} makes weights of '\S+' infinite or NaN.*zeroblock replay --step {bad} takes"
    ):
        zb.load(model, path)
    assert same(snapshot(model), snapshot(Tiny(dtype=dtype)))  # the base is back
    zb.load(model, forge(tmp_path / "good.zbj", header, rows[:bad]))


def test_records_that_ruin_the_weights_are_refused_by_a_replay_in_python(tmp_path: Path) -> None:
    path = forge(tmp_path / "journal.zbj", Header.of(zb.mezo(Tiny(), 1e-2)), [GOOD, (1.0, 1e30, 0, 1e30), GOOD])
    records = read(path).records
    zb.replay(zb.mezo(Tiny(), 1e-2), records[:1])
    with pytest.raises(ZeroBlockError, match=r"the steps up to 3 make weights of '\S+' infinite or NaN"):
        zb.replay(zb.mezo(Tiny(), 1e-2), records)


def test_a_base_that_is_not_finite_is_not_the_journals_doing(tmp_path: Path) -> None:
    def base() -> torch.nn.Module:
        model = Tiny()
        with torch.no_grad():
            model.norm.bias[0] = math.inf
        return model

    path = forge(tmp_path / "journal.zbj", Header.of(zb.mezo(base(), 1e-2)), [GOOD])
    model = base()
    zb.load(model, path)
    assert not torch.equal(model.embed.weight, base().embed.weight)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def real(base: Path) -> Header:
    """The header of a run of a model that the command line can load."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return Header.of(zb.mezo(model, 1e-2), model=str(base))


def test_apply_and_replay_do_not_write_ruined_weights(
    base: Path, real: Header, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = forge(tmp_path / "bad.zbj", real, [GOOD, GOOD, (1.0, 1e30, 0, 1e30), GOOD])
    for words in (["apply", path], ["replay", path]):
        code, said = command(monkeypatch, capsys, *words, "--model", base, "--out", tmp_path / "out")
        assert code == 2
        assert "step 2 makes weights of 'model.embed_tokens.weight' infinite or NaN" in said
        assert not (tmp_path / "out").exists()
    code, said = command(monkeypatch, capsys, "replay", path, "--model", base, "--step", 2, "--out", tmp_path / "out")
    assert code == 0, said


# Words


@pytest.mark.parametrize("dtype", ["load", "nn", "", "int8", "complex64", "\x1b[2J", "Tensor"])
def test_a_dtype_is_one_of_five_words(
    dtype: str,
    base: Path,
    real: Header,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = forge(tmp_path / "bad.zbj", real, [GOOD], dtype=dtype)
    code, said = command(monkeypatch, capsys, "apply", path, "--model", base, "--out", tmp_path / "out")
    assert code == 2
    assert "the header's dtype cannot be" in said
    assert len(said.splitlines()) == 1
    assert "\x1b" not in said


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202e"


@pytest.mark.parametrize(
    "fields",
    [
        {"model": f"tiny{ESCAPES}"},
        {"model": f"tiny{ESCAPES}", "fingerprint": "0" * 32},
        {"model": f"tiny{ESCAPES}", "order": "0" * 32},
        {"fingerprint": ESCAPES},
        {"dtype": ESCAPES},
        {"versions": {"zeroblock": f"9.9{ESCAPES}", "noise": "1"}},
        {"versions": {"zeroblock": "0.1.0", "noise": ESCAPES}},
        {"versions": {"zeroblock": "0.1.0", "noise": "1", "torch": ESCAPES}},
        {"parts": {ESCAPES: ESCAPES}},
        {"blocks": [ESCAPES]},
        {"frozen": [ESCAPES]},
        {"decays": [ESCAPES]},
        {"method": {ESCAPES: ESCAPES}},
        {"rule": {"name": ESCAPES}},
        {"rule": {"name": "Momentum", "beta": ESCAPES, "reset": False}},
        {"rule": {"name": "Momentum", ESCAPES: 1}},
        {"partition": {"name": ESCAPES}},
        {"estimator": {"name": ESCAPES}},
        {ESCAPES: 1},
    ],
    ids=lambda fields: "-".join("odd" if name == ESCAPES else name for name in fields),
)
@pytest.mark.parametrize("force", [False, True])
def test_no_escape_sequence_of_a_header_reaches_the_terminal(
    fields: dict[str, Any],
    force: bool,
    base: Path,
    real: Header,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    method = {name: value for name, value in fields.items() if name in ("rule", "partition", "estimator")}
    if method:
        fields = {"method": {**real.method, **method}}
    path = forge(tmp_path / "bad.zbj", real, [GOOD], **fields)
    words = ["--force"] if force else []
    for given in ([], ["--model", base]):
        _, said = command(monkeypatch, capsys, "apply", path, "--out", tmp_path / f"out{len(given)}", *given, *words)
        assert said
        assert not {"\x1b", "\x07", "\x9b", "\r", "\u202e"} & set(said)
    _, said = command(monkeypatch, capsys, "inspect", path)
    assert not {"\x07", "\x9b", "\r", "\u202e"} & set(said)
    assert "\x1b]" not in said
    assert "\x1b[2J" not in said


# A damaged last record


def damage(path: Path) -> int:
    """Flip a bit of the last record; the steps before it."""
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    return len(read(path).records)


def test_a_damaged_last_record_is_not_called_an_unfinished_write(tmp_path: Path) -> None:
    write(tmp_path / "journal.zbj")
    assert damage(tmp_path / "journal.zbj") == 11
    contents = read(tmp_path)
    assert contents.damaged
    assert contents.note == "a damaged record of step 11, whose checksum does not match"
    model = Tiny()
    with pytest.raises(ZeroBlockError, match="ends with a damaged record of step 11"):
        zb.load(model, tmp_path)
    with pytest.raises(ZeroBlockError, match="ends with a damaged record of step 11"):
        export(tmp_path, tmp_path / "out.zbj")
    export(tmp_path, tmp_path / "out.zbj", step=11)
    with pytest.warns(zb.ZeroBlockWarning, match="does not match: these are the weights after 11 steps"):
        zb.load(model, tmp_path, force=True)
    with Journal.open(tmp_path) as journal:  # a run that has not finished takes the step again
        assert journal.note == (
            "left out a damaged record of step 11, whose checksum does not match; the run takes the lost step again"
        )


@pytest.mark.parametrize("loss", ["bit", "record"])
def test_a_finished_run_that_lost_its_last_record_says_so(
    loss: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    optimizer = zb.mezo_bcd(model, 1e-2)
    path = tmp_path / "journal.zbj"
    with Journal.create(path, Header.of(optimizer, model=str(base))) as journal:
        for _ in range(4):
            optimizer.step(tokens_loss(model))
            journal.append(optimizer.record)
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 4}))
    out = tmp_path / "out"
    if loss == "bit":
        damage(path)
    else:
        path.write_bytes(path.read_bytes()[:-28])
    code, said = command(monkeypatch, capsys, "replay", tmp_path, "--out", out)
    assert code == 2
    assert "the run finished with 4 steps, and the journal" in said
    assert "--step 3 (or --force)" in said
    assert not out.exists()
    _, said = command(monkeypatch, capsys, "inspect", tmp_path)
    text = " ".join(said.replace("│", " ").split())
    assert "every checksum matches" not in text
    assert "3 steps are intact" in text
    assert "the run finished with 4 steps, 1 is missing" in text
    assert json.loads(command(monkeypatch, capsys, "inspect", tmp_path, "--json")[1])["missing_steps"] == 1
    code, said = command(monkeypatch, capsys, "apply", path, "--out", out)
    assert (code, "--step" in said) == (2, False)
    assert "; --force takes the 3 steps before it; to take the lost steps again, remove summary.*" in said
    code, said = command(monkeypatch, capsys, "export", tmp_path, "--out", tmp_path / "out.zbj")
    assert (code, "--force" in said) == (2, False)
    assert "; --step 3 takes the 3 steps before it; to take the lost steps again, remove summary.*" in said
    code, said = command(monkeypatch, capsys, "replay", tmp_path, "--out", out, "--step", 3)
    assert code == 0, said
    with warnings.catch_warnings():
        warnings.simplefilter("always", zb.ZeroBlockWarning)
        code, said = command(monkeypatch, capsys, "replay", tmp_path, "--out", tmp_path / "forced", "--force")
    assert code == 0, said
    assert "zeroblock: warning: " in said
    assert "these are the weights after 3 steps" in said


@pytest.mark.parametrize("text", ["[]", "{}", '{"steps": "x"}', "\x00", '{"steps": null}', "[" * 100_000])
def test_a_summary_that_is_none_is_no_reason_to_fail(text: str, tmp_path: Path) -> None:
    write(tmp_path / "journal.zbj")
    (tmp_path / "summary.json").write_text(text)
    model = Tiny()
    zb.load(model, tmp_path)
    assert not torch.equal(model.embed.weight, Tiny().embed.weight)


def test_the_summary_of_a_run_is_not_that_of_an_export_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "journal.zbj")
    (tmp_path / "summary.json").write_text('{"steps": 12}')
    model = Tiny()
    zb.load(model, export(tmp_path, tmp_path / "half.zbj", step=6))
    assert not torch.equal(model.embed.weight, Tiny().embed.weight)


# Paths


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("{home}/models/base", "base"),
        ("{home}/models/base/", "base"),
        ("~/base", "base"),
        ("./some/base", "base"),
        ("C:\\Users\\ann\\base", "base"),
        ("{home}/hub/models--facebook--opt-125m/snapshots/27dcfa74d334", "facebook/opt-125m"),
        ("{home}/hub/models--gpt2/snapshots/27dcfa74d334", "gpt2"),
        ("{home}/base.gguf", "base.gguf"),
        ("facebook/opt-125m", "facebook/opt-125m"),
        ("smollm2", "smollm2"),
        ("", ""),
    ],
)
def test_an_export_names_no_folder_of_this_machine(model: str, name: str, tmp_path: Path) -> None:
    home = tmp_path / "ann"
    model = model.format(home=home)
    optimizer = zb.mezo(Tiny(), 1e-2)
    header = Header.of(
        optimizer,
        model=model,
        task=f"{home}/task.jsonl",
        data="0123abcd",
        method="mezo",
        notes=[f"{home}/notes.txt", {"deep": f"{home}/more.txt", "n": 3}, "and/or", "/"],
    )
    run = tmp_path / "run"
    run.mkdir()
    forge(run / "journal.zbj", header, [GOOD, GOOD])
    data = export(run, tmp_path / "shared.zbj").read_bytes()
    contents = read(tmp_path / "shared.zbj")
    assert contents.header.model == name
    assert contents.header.task == "task.jsonl"
    assert contents.header.data == "0123abcd"
    assert contents.header.extra["notes"] == ["notes.txt", {"deep": "more.txt", "n": 3}, "and/or", ""]
    assert b"ann" not in data
    assert f"--model {name or 'BASE'} " in contents.header.card
    assert read(run).header.model == model  # the run itself must find its base again
    zb.load(Tiny(), tmp_path / "shared.zbj")


def test_a_relative_folder_is_told_from_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ann" / "base").mkdir(parents=True)
    forge(tmp_path / "journal.zbj", Header.of(zb.mezo(Tiny(), 1e-2), model="ann/base"), [GOOD])
    assert read(export("journal.zbj", "shared.zbj")).header.model == "base"


# Memory and depth


def test_a_file_cannot_have_a_large_model_built(
    real: Header, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"model": "opt-13b", "dtype": "float64", "extra": {"random_weights": True}}
    path = forge(tmp_path / "journal.zbj", real, [GOOD], **fields)
    built: list[str] = []
    monkeypatch.setattr("zeroblock.model.load", lambda name, *_, **__: built.append(name))
    code, said = command(monkeypatch, capsys, "apply", path, "--out", tmp_path / "out")
    assert code == 2
    assert "asks for random weights in the shape of opt-13b" in said
    for words in (["apply", path, "--force"], ["replay", path], ["replay", tmp_path]):
        code, said = command(monkeypatch, capsys, *words, "--out", tmp_path / "out")
        assert code == 2
        assert "parameters are not those of the journal's base (opt-13b)" in said
    named = forge(tmp_path / "shared.zbj", real, [GOOD], **fields, steps=1)
    code, said = command(monkeypatch, capsys, "replay", named, "--out", tmp_path / "out")
    assert code == 2
    assert "asks for random weights" in said
    assert not built


def test_weights_that_do_not_fit_are_one_line(
    base: Path, real: Header, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = forge(tmp_path / "journal.zbj", real.replace(model=str(base)), [GOOD])
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ):

        def fails(*_: Any, error: Exception = error, **__: Any) -> None:
            raise error

        monkeypatch.setattr("zeroblock.model.load", fails)
        code, said = command(monkeypatch, capsys, "replay", path, "--out", tmp_path / "out")
        assert code == 2
        assert "in float32 does not fit into the memory of this device" in said
        assert "Traceback" not in said
