"""The diagnostic of an adaptive run: what the schedule itself would say, and what its trajectories do."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from specimen import adaptive_run

import zeroblock as zb
from toy import Tiny, next_token
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import Header, Journal
from zeroblock.lab.adaptive import Diagnosis, Drawn, Seen, probabilities, read, shares
from zeroblock.lab.runner import Runner
from zeroblock.schedule import Adaptive, Economical, Proportional

SCHEDULE = Adaptive(decay=0.2, warmup=20)


@pytest.mark.parametrize("schedule", [SCHEDULE, Proportional(), Economical((3.0, 2.0, 2.0, 1.0, 1.0, 1.0))])
def test_reconstructed_probabilities_reproduce_the_runs_choices(schedule: Drawn) -> None:
    """The optimizer's own picks follow from the reconstructed scores: the reconstruction is the run's."""
    steps = adaptive_run(6, 120, schedule, seed=3)
    scores = [0.0] * 6
    p = probabilities(steps, schedule, 6)
    for t, seen in enumerate(steps):
        assert schedule.pick(t, 6, 3, scores) == seen.block
        assert p[t] == pytest.approx(schedule.probabilities(scores))
        schedule.observe(scores, seen.block, seen.coeffs)
    assert np.ptp(p[-1]) > 0


def test_steps_that_moved_nothing_teach_nothing() -> None:
    steps = [Seen(0, 0, (2.0,)), Seen(1, 1, (float("nan"),)), Seen(2, 1, (1.0,))]
    p = probabilities(steps, SCHEDULE, 2)
    assert p[2] == pytest.approx(p[1])
    assert p[1][0] > p[1][1]


def test_shares_follow_the_probabilities() -> None:
    p = np.tile([0.7, 0.2, 0.1, 0.0], (400, 1))
    drawn = shares(p, 500, seed=1)
    assert drawn.shape == (500, 4)
    assert drawn.sum(1) == pytest.approx(np.ones(500))
    assert drawn.mean(0) == pytest.approx([0.7, 0.2, 0.1, 0.0], abs=0.01)
    low, high = np.percentile(drawn[:, 0], [2.5, 97.5])
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.7 * 0.3 / 400), rel=0.25)


def test_the_run_lies_in_the_band_and_the_band_can_miss() -> None:
    steps = adaptive_run(5, 600, SCHEDULE, seed=0)
    table = Diagnosis(tuple(steps), SCHEDULE, 5, trajectories=400).measure(Runner())["adaptive"]
    # the run's picks less their probabilities are a martingale: within four standard deviations, half a band each
    assert bool(((table.run - table["mean"]).abs() <= 4 * (table.high - table.low) / (2 * 1.96)).all())
    stuck = tuple(Seen(s.step, 0, s.coeffs) for s in steps)
    table = Diagnosis(stuck, SCHEDULE, 5, trajectories=400).measure(Runner())["adaptive"]
    assert not (table.low[0] <= table.run[0] <= table.high[0])


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines))
    return path


def test_records_are_read(tmp_path: Path) -> None:
    lines = [json.dumps({"step": i, "block": i % 2, "coeffs": [0.5, 1.0], "lr": 1}) for i in range(3)]
    path = write(tmp_path / "records.jsonl", *lines, '{"step": 3, "blo')  # killed while writing
    assert [s.block for s in read(path)] == [0, 1, 0]


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_run_is_read_from_its_journal(clip: float | None, tmp_path: Path) -> None:
    model = Tiny()
    optimizer, steps = zb.mezo_bcd_adaptive(model, probes=2, clip=clip), []
    with Journal.create(tmp_path / "journal.zbj", Header.of(optimizer, model="tiny")) as journal:
        with pytest.raises(ZeroBlockError, match="no records"):
            read(tmp_path)
        for _ in range(7):
            optimizer.step(next_token(model))
            journal.append(optimizer.record)
            learnt = [c if clip is None or abs(c) < clip else math.copysign(clip, c) for c in optimizer.record.coeffs]
            steps.append(Seen(optimizer.record.step, optimizer.record.block, tuple(learnt)))
    assert read(tmp_path) == read(tmp_path / "journal.zbj") == steps


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no records"),
        (["[]"], "records?"),
        (['{"step": 0, "block": 0}'], ":1: .*coeffs"),
        (['{"step": 0, "block": 0, "coeffs": []}'], "at least one coefficient"),
        (['{"step": 0, "block": 0, "coeffs": [1]}', '{"step": 2, "block": 0, "coeffs": [1]}'], "step 2 follows step 0"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(ZeroBlockError, match=words):
        read(write(tmp_path / "x.jsonl", *lines))


def test_misuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ZeroBlockError, match="cannot read"):
        read(tmp_path / "absent.jsonl")
    with pytest.raises(ZeroBlockError, match="cannot read the journal"):
        read(tmp_path)
    with pytest.raises(ZeroBlockError, match="there are 1 blocks"):
        probabilities([Seen(0, 1, (1.0,))], SCHEDULE, 1)
    with pytest.raises(ZeroBlockError, match="warm-up"):
        Diagnosis((Seen(0, 0, (1.0,)),), SCHEDULE, 2).measure(Runner())
