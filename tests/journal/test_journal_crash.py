"""``kill -9`` at random moments of a real run, resumed until it is done: as if nothing had happened."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from journal_toy import save_model, save_reviews
from safetensors.torch import load_file

from toy import same, snapshot
from zeroblock import model as models
from zeroblock.journal import read, replay

STEPS, MIDDLE = 60, 37
KINDS = ("mezo_adam", "mezo_bcd_adaptive", "sparse_mezo", "zo_momentum", "lozo", "hizoo", "mezo_svrg")
"""One method of each kind of state: moments, scores, a mask, a momentum, held steps, a curvature and an anchor."""
RUNS = list(zip(KINDS, itertools.cycle(["fp32", "bf16"]), strict=False))  # test_resume has every method
RATES = {"mezo_adam": 1e-3, "mezo_bcd_adam": 1e-3}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    save_model(folder / "model")
    save_reviews(folder / "data")
    return folder


class Server:
    """Commands in processes of their own, see ``journal_server``."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("journal_server.py")
        self.process = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, log: Path, words: Sequence[object], **options: Any) -> int | None:
        """The exit status of ``zeroblock WORDS``, or None where it was killed."""
        task = {"log": str(log), "words": [str(word) for word in words], **options}
        self.process.stdin.write(json.dumps(task) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def moment(draw: random.Random, journal: Path, took: float) -> dict[str, Any]:
    """When to kill: after a while, be it while loading or while summing up, or in the midst of the steps."""
    if draw.random() < 0.3:
        return {"seconds": draw.uniform(0, took)}
    size = journal.stat().st_size if journal.exists() else 1000
    return {"file": str(journal), "size": size + draw.randint(1, 5) * 28}


def words_of(place: Path, method: str, dtype: str, *more: object) -> list[object]:
    return [
        "train", "--model", place / "model", "--task", "sst2", "--data", place / "data", "--device", "cpu",
        "--method", method, "--dtype", dtype, "--lr", RATES.get(method, 1e-2), "--lr-schedule", "linear",
        "--steps", STEPS, "--batch-size", 4, "--eval-limit", 2, "--eval-every", STEPS, "--no-eval-start", *more,
    ]  # fmt: skip


def check(log: Path, code: int | None) -> None:
    assert code == 0, log.read_text()


def rebuilt(place: Path, out: Path, steps: int) -> dict[str, torch.Tensor]:
    contents = read(out, steps)
    model = models.load(str(place / "model"), getattr(torch, contents.header.dtype), "cpu")
    replay(contents.header.rebuild(model), contents.records)
    return snapshot(model)


def follow(
    server: Server, place: Path, tmp_path: Path, method: str, dtype: str, kills: int, *more: object, bare: bool = False
) -> int:
    """Run it undisturbed and run it killed, ``bare`` without figures; the number of kills that hit."""
    draw = random.Random(f"{method} {dtype}")
    log, calm, killed = tmp_path / "log", tmp_path / "calm", tmp_path / "killed"
    words = words_of(place, method, dtype)
    began = time.monotonic()
    check(log, server.run(log, [*words, "--out", calm, "--snapshot-every", STEPS], bare=bare))
    took = time.monotonic() - began
    hits = 0
    while not (killed / "summary.json").exists():
        again = ["resume", killed] if (killed / "config.toml").exists() else [*words, *more, "--out", killed]
        kill = moment(draw, killed / "journal.zbj", took) if hits < kills else {}
        code = server.run(log, again, **kill, bare=bare)
        if code is None:
            hits += 1
        else:
            check(log, code)
    assert (killed / "journal.zbj").read_bytes() == (calm / "journal.zbj").read_bytes()
    live = load_file(calm / "snapshot" / "weights.safetensors")
    assert same(rebuilt(place, killed, STEPS), live)
    assert same(rebuilt(place, killed, MIDDLE), rebuilt(place, calm, MIDDLE))
    assert not same(rebuilt(place, killed, MIDDLE), live)
    return hits


def test_twenty_kills_change_nothing(server: Server, place: Path, tmp_path: Path) -> None:
    runs = [("mezo_bcd", "fp32", []), ("mezo_bcd_adam", "bf16", ["--snapshot-every", 13]), ("lozo_m", "bf16", [])]
    hits = 0
    for number, (method, dtype, more) in enumerate(itertools.cycle(runs)):
        folder = tmp_path / str(number)
        folder.mkdir()
        hits += follow(server, place, folder, method, dtype, min(8, 20 - hits), *more, bare=number > 0)
        if hits == 20 and number >= 2:
            break
    assert hits == 20


@pytest.mark.parametrize(("method", "dtype"), RUNS)
def test_every_kind_of_method_survives(server: Server, place: Path, tmp_path: Path, method: str, dtype: str) -> None:
    assert follow(server, place, tmp_path, method, dtype, 2, bare=True) <= 2
