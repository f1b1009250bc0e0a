"""The real model on real rows: packed scores of all eleven tasks against each string alone, unpadded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_engine_equality import slow_scores

from zeroblock.engine import Engine
from zeroblock.task import TASKS, get

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
PAPER = sorted(set(TASKS) - {"reviews"})
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the tasks' rows are not beside the project")


@pytest.fixture(scope="module")
def smollm2():
    from zeroblock import model

    return model.load("smollm2", device="cpu").eval(), model.tokenizer("smollm2")


@pytest.mark.parametrize("name", PAPER)
def test_packed_scores_of_real_rows(name: str, smollm2) -> None:
    model, tokenizer = smollm2
    task = get(name, tokenizer)
    examples = sorted(task.load(DATA).dev, key=lambda one: len(one.context) * len(one.options))[:3]
    encoder = task.encoder(tokenizer, 400)
    encode = encoder.example if task.over == "options" or not task.metric.generates else encoder.target
    batch = [encode(example) for example in examples]
    got = [score.total for scores in Engine(model).scores(batch) for score in scores]
    expected = [total for scores in slow_scores(model, batch) for total in scores]
    assert len(got) >= len(batch)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bits_are_packed_and_forked(dtype: str, smollm2) -> None:
    """What rounding does to scores is not taken for a fault of packing."""
    from zeroblock import model

    engine = Engine(model.load("smollm2", dtype, "cpu"))
    assert engine.forked, engine.reason
