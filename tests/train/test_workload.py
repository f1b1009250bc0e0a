"""What a run works on: examples that do not fit, and those that are left out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from loop_toy import settings

from zeroblock.errors import ZeroBlockError
from zeroblock.train import loop


def test_rows_that_do_not_fit_are_named(llama: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "short:", "completion": " a"} for _ in range(40)]
    rows[19] = {"prompt": "x" * 230 + ":", "completion": " a"}  # fits with its answer, not with what may be generated
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = settings(llama, tmp_path).replace(task=str(file), data=None, dev=None, test=None, train=None)
    notes = [note for seed in range(6) for note in loop.prepare(config.replace(data_seed=seed)).notes]
    assert any(
        re.search(r"contexts cut on the left .*: 1 (dev|test), the first being .*own\.jsonl:20$", n) for n in notes
    )
    rows[19] = {"prompt": "x:", "completion": " " + "y" * 60}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = [note for seed in range(6) for note in loop.prepare(config.replace(data_seed=seed)).notes]
    assert any("answers longer than the 50 tokens that are generated: 1 of dev and test" in note for note in notes)
    rows[19] = {"prompt": "x:", "completion": " " + "y" * 300}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ZeroBlockError, match=r"own\.jsonl:20: an option of \d+ tokens in a maximum length"):
        loop.prepare(config)


def test_only_short_examples_are_trained_on(llama: Path, data: Path, tmp_path: Path) -> None:
    setting = loop.prepare(settings(llama, data, train_tokens=22))
    everything = loop.prepare(settings(llama, data))
    lengths = [max(len(ids) for ids, _ in one.rows) for one, _ in everything.train]
    assert len(setting.train) == sum(length <= 22 for length in lengths) < len(lengths)
    assert setting.fingerprint != everything.fingerprint
    with pytest.raises(ZeroBlockError, match="no training example left"):
        loop.prepare(settings(llama, data, train_tokens=2))
