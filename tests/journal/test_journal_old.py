"""Journals that an older zeroblock wrote are read, written, replayed and refused as they were then."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from journal_fixture import BAD_STEP, BUILDERS, DTYPES, FOLDER, HASHES, NAMES, STEPS, Ruled, digest

import zeroblock as zb
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import format, header, read, replay

pytestmark = pytest.mark.filterwarnings("ignore::zeroblock.ZeroBlockWarning")  # one step of each run is not finite
EXPECTED: dict[str, str] = json.loads(HASHES.read_text())
NUMBERS: dict[str, list[float]] = json.loads(FOLDER.joinpath("numbers.json").read_text())
"""The weights of journals whose replay multiplies matrices or takes roots with torch: their last bits depend on the
processor.  These are of an Intel one, the digests of an AMD one."""


def base(name: str) -> torch.nn.Module:
    return Ruled(DTYPES[name.rpartition(".")[2]])


def test_there_is_one_of_every_method_in_fp32_and_bf16() -> None:
    assert {f"{name}.{kind}" for name in zb.METHODS for kind in ("fp32", "bf16")} <= set(EXPECTED)
    assert sorted(EXPECTED) == sorted([*NAMES, "export"])
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 150_000


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_come_out_as_they_did(name: str) -> None:
    contents = read(FOLDER / f"{name}.zbj")
    assert (len(contents.records), contents.torn) == (STEPS, 0)
    assert [record.step for record in contents.records if not record.finite] == [BAD_STEP]
    model = base(name)
    optimizer = contents.header.rebuild(model)
    replay(optimizer, contents.records)
    optimizer.settle()
    if name in NUMBERS and digest(model) != EXPECTED[name]:
        weights = torch.cat([param.detach().flatten() for param in model.parameters()])
        torch.testing.assert_close(weights, torch.tensor(NUMBERS[name]), rtol=1e-5, atol=1e-6)
    else:
        assert digest(model) == EXPECTED[name]


@pytest.mark.parametrize("name", [*NAMES, "export"])
def test_the_bytes_are_written_again_as_they_were(name: str) -> None:
    data = (FOLDER / f"{name}.zbj").read_bytes()
    contents = format.parse(data)
    assert format.dump(contents.header, contents.records) == data  # by columns
    assert format.dump(contents.header, list(contents.records)) == data  # record by record


@pytest.mark.parametrize("name", NAMES)
def test_a_run_of_today_accepts_the_header(name: str) -> None:
    """Resuming builds the optimizer from settings and not from the file; the two must still agree."""
    kind, _, _ = name.partition(".")
    read(FOLDER / f"{name}.zbj").header.check(BUILDERS[kind](base(name)))


def test_an_export_is_loaded_and_a_torn_journal_is_cut() -> None:
    model = Ruled(torch.bfloat16)
    zb.load(model, FOLDER / "export.zbj")
    assert digest(model) == EXPECTED["export"]
    zb.unload(model)
    assert digest(model) == digest(Ruled(torch.bfloat16))
    torn = read(FOLDER / "torn.zbj")
    assert (len(torn.records), torn.torn, torn.damaged) == (STEPS - 1, 19, False)
    whole = (FOLDER / "mezo_bcd.fp32.zbj").read_bytes()
    assert whole.startswith(format.dump(torn.header, torn.records))


@pytest.mark.parametrize("version", ["0.1.9", "0.2.0", "0.30.1", "1.0.0rc1", "12.4"])
def test_later_versions_read_older_journals(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The promise: for as long as noise and arithmetic are the same versions, an older journal is read as it is."""
    monkeypatch.setattr(header, "__version__", version)
    for name in ("mezo_bcd.bf16", "mezo_bcd_adam.fp32"):
        contents, model = read(FOLDER / f"{name}.zbj"), base(name)
        assert "arithmetic" not in contents.header.versions  # 0.1.0 did not write it
        optimizer = contents.header.rebuild(model)
        replay(optimizer, contents.records)
        assert digest(model) == EXPECTED[name]


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"arithmetic": "2"}, "arithmetic version 2, this is 1; install a newer zeroblock, 0.1.0 or later"),
        ({"arithmetic": "0"}, "arithmetic version 0, this is 1; install zeroblock 0.1.0"),
        ({"noise": "2", "zeroblock": "0.9.0"}, "noise version 2, this is 1; install a newer zeroblock, 0.9.0 or later"),
        ({"noise": "\x1b[2J"}, r"noise version \\x1b\[2J, this is 1; install zeroblock 0.1.0"),
    ],
)
def test_newer_is_said_only_where_newer_is_meant(versions: dict[str, Any], message: str) -> None:
    found = read(FOLDER / "mezo.fp32.zbj").header
    changed = found.replace(versions={**found.versions, **versions})
    for force in (False, True):
        with pytest.raises(ZeroBlockError, match=message):
            changed.rebuild(Ruled(), force=force)


def test_a_journal_of_today_says_its_arithmetic() -> None:
    assert header.Header.of(zb.mezo(Ruled(), 1e-2)).versions["arithmetic"] == "1"
