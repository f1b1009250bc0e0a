"""Runs on several ranks: the bits of one process, one writer, and a run that goes on wherever it was stopped."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from loop_toy import kept, lines
from pool import Pool
from ranks_toy import PRELOAD, absent, commanded, digest, four, made, met, passes, travelled, two  # noqa: F401 (fixtures)
from typer.testing import CliRunner

import run_toy
import zeroblock as zb
from zeroblock.cli import app
from zeroblock.journal import read
from zeroblock.model import load
from zeroblock.train import Config, joint
from zeroblock.train.launch import Launch, leave
from zeroblock.train.peers import Peers

KILLS = int(os.environ.get("ZEROBLOCK_TEST_KILLS", "2"))
"""How often a rank is killed; 20 take some minutes."""


@pytest.fixture
def base(llama: Path, data: Path) -> dict[str, Any]:
    return {
        "model": str(llama), "task": "sst2", "data": str(data), "lr": 1e-3, "steps": 10, "batch_size": 5,
        "eval_every": 4, "device": "cpu", "fsync": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        ("two", {"parallel": "data", "dtype": "bf16", "shares": 2}),
        ("two", {"parallel": "probes", "probes": 3, "method": "lozo", "interval": 4}),
        ("four", {"parallel": "data,probes", "probes": 2, "shares": 2, "method": "mezo_bcd_adam", "interval": 3}),
        ("four", {"parallel": "data,probes", "probes": 2, "shares": 2, "shard": "fsdp", "dtype": "bf16"}),
    ],
    ids=["data", "probes", "both", "sharded"],
)
def test_many_ranks_make_the_run_of_one(
    ranks: str, settings: dict[str, Any], base: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    values = base | settings
    alone = travelled("run", values, str(tmp_path / "alone"))
    given = {name: value for name, value in values.items() if name != "shares"}  # which is the number of ranks
    found = request.getfixturevalue(ranks).run(travelled, "run", given, str(tmp_path / "many"))
    assert set(found) == {alone}
    assert kept(tmp_path / "many") == kept(tmp_path / "alone")
    assert absent(tmp_path / "many")
    agreed = (tmp_path / "many" / "checksums.jsonl").read_text().splitlines()
    assert len(agreed) == 4  # one per evaluation
    assert not (tmp_path / "alone" / "checksums.jsonl").exists()
    model = load(values["model"], values.get("dtype", "fp32"), "cpu")
    zb.load(model, tmp_path / "many")
    assert digest(model) == alone[3]


def test_a_run_goes_on_with_other_ranks(base: dict[str, Any], tmp_path: Path, two: Pool, four: Pool) -> None:  # noqa: F811
    """One process, then four ranks of which one has the folder, then two, one of which gets a signal, then one."""
    values = base | {"shares": 3, "snapshot_every": 2, "steps": 14}
    whole = travelled("run", values, str(tmp_path / "whole"))
    out = str(tmp_path / "parts")
    assert travelled("run", values, out, stop=(0, 3))[:3] == (3, "terminated", 143)
    stopped = four.run(travelled, "resume", values, out, writer=2, stop=(1, 5))
    assert {one[1:3] for one in stopped} == {("terminated", 143)}
    assert len({one[0] for one in stopped}) == 1
    steps = stopped[0][0]
    assert 5 <= steps < 10
    again = two.run(travelled, "make", values | {"parallel": "data"}, out, stop=(1, steps + 1))
    assert {one[1:3] for one in again} == {("terminated", 143)}
    assert travelled("resume", values, out) == whole
    assert kept(tmp_path / "parts") == kept(tmp_path / "whole")
    assert absent(tmp_path / "parts")


def test_a_sharded_run_goes_on_with_whole_weights(base: dict[str, Any], tmp_path: Path, two: Pool) -> None:  # noqa: F811
    """One process, two ranks with half of every tensor each, twice, and one process; snapshots hold whole tensors."""
    values = base | {"shares": 2, "snapshot_every": 2}
    whole = travelled("run", values, str(tmp_path / "whole"))
    out = str(tmp_path / "parts")
    split = values | {"parallel": "data", "shard": "fsdp"}
    assert travelled("run", values, out, stop=(0, 1))[:2] == (1, "terminated")
    before = two.run(travelled, "make", split, out, stop=(1, 4))  # with a snapshot, and without the evaluation
    assert {one[:2] for one in before} == {(4, "terminated")}
    assert {one[1] for one in two.run(travelled, "make", split, out, stop=(1, 6))} == {"terminated"}
    assert travelled("resume", values, out) == whole
    assert kept(tmp_path / "parts") == kept(tmp_path / "whole")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"shares": 3}, "3 is not divisible by 2: start a number of ranks that divides 3, or use --shard none"),
        ({"parallel": "probes", "probes": 2}, "give --parallel data"),
        ({"max_tokens": 100}, "leave out --max-tokens"),
        ({"graphs": "on"}, "leave out --graphs on"),
        ({"offload": "disk"}, "leave out --offload"),
        ({"lora": "r=2,targets=q"}, "leave out --lora"),
    ],
    ids=str,
)
def test_shards_say_what_they_need(
    settings: dict[str, Any],
    reason: str,
    base: dict[str, Any],
    tmp_path: Path,
    two: Pool,  # noqa: F811
) -> None:
    outcomes = two.outcomes(travelled, "run", base | {"shard": "fsdp"} | settings, str(tmp_path / "run"))
    assert all(outcome.kind == "RankError" and reason in outcome.message for outcome in outcomes)


def test_ranks_stop_together(two: Pool) -> None:  # noqa: F811
    """Rank 0 says whether the end of the time counts: on a GPU it may have heard of steps that others have not."""
    assert two.run(met) == [[True, False]] * 2


def test_ranks_that_gather_weights_take_the_same_passes(llama: Path, two: Pool) -> None:  # noqa: F811
    """A rank with a long row would otherwise wait for ever for the others, which need fewer passes for theirs."""
    assert two.run(passes, str(llama)) == [[2, 2]] * 2


@pytest.mark.parametrize(
    "settings",
    [{"lr": None, "max_minutes": 0.01, "steps": 100_000, "eval_every": 50_000}, {"schedule": "economical"}],
    ids=["minutes", "economical"],
)
def test_what_one_rank_measures_all_ranks_take(
    settings: dict[str, Any],
    base: dict[str, Any],
    tmp_path: Path,
    two: Pool,  # noqa: F811
) -> None:
    """Rank 0's clock decides learning rates and the end, or the probabilities of blocks; the journal keeps them."""
    outcomes = two.run(travelled, "run", base | settings, str(tmp_path / "run"))
    assert len(set(outcomes)) == 1
    steps, reason, _, weights = outcomes[0]
    assert reason == ""
    rates = [record.lr for record in read(tmp_path / "run").records]
    assert len(rates) == steps >= 1
    if "schedule" in settings:
        assert 'schedule = "economical:' in (tmp_path / "run" / "config.toml").read_text()
    model = load(base["model"], "fp32", "cpu")
    zb.load(model, tmp_path / "run")
    assert digest(model) == weights


def test_evaluations_are_shared(base: dict[str, Any], tmp_path: Path, two: Pool) -> None:  # noqa: F811
    values = base | {"task": "squad", "method": "zero-shot"}
    del values["lr"]
    travelled("run", values, str(tmp_path / "alone"))
    two.run(travelled, "run", values, str(tmp_path / "many"))
    assert lines(tmp_path / "many") == lines(tmp_path / "alone")


@pytest.mark.parametrize("other", ["version", "model", "data", "setting", "snapshots"])
def test_a_rank_that_differs_is_refused_by_name(
    other: str,
    base: dict[str, Any],
    tmp_path: Path,
    two: Pool,  # noqa: F811
) -> None:
    out = tmp_path / "run"
    if other == "version":
        outcomes = two.outcomes(travelled, "run", base, str(out), version={1: "0.0.1"})
        message = "rank 1 has zeroblock 0.0.1, rank 0 has "
    elif other == "model":
        model = run_toy.save_model(tmp_path / "model", seed=1)
        outcomes = two.outcomes(travelled, "run", base, str(out), own={1: {"model": str(model)}})
        message = "rank 1 has a base model with the fingerprint "
    elif other == "data":
        rows = run_toy.save_sst2(tmp_path / "rows")
        file = rows / "sst2" / "train.jsonl"
        file.write_text(file.read_text().replace('"label": 0', '"label": 1', 3))
        outcomes = two.outcomes(travelled, "run", base, str(out), own={1: {"data": str(rows)}})
        message = "rank 1 has training data with the fingerprint "
    elif other == "snapshots":  # which the ranks make together
        outcomes = two.outcomes(travelled, "run", base, str(out), own={1: {"snapshot_every": 3}})
        message = "rank 1 has the setting snapshot_every 3, rank 0 has 0: give all of them the same settings"
    else:
        outcomes = two.outcomes(travelled, "run", base, str(out), own={1: {"lr": 1e-4}})
        message = "rank 1 has the setting lr 0.0001, rank 0 has 0.001: give all of them the same settings"
    assert [outcome.kind for outcome in outcomes] == ["RankError"] * 2
    assert all(message in outcome.message for outcome in outcomes)
    assert not out.exists()


def test_one_bit_is_noticed_before_anything_is_saved(base: dict[str, Any], tmp_path: Path, two: Pool) -> None:  # noqa: F811
    values = base | {"snapshot_every": 3}
    outcomes = two.outcomes(travelled, "run", values, str(tmp_path / "run"), flip=(1, 4))
    assert all("rank 1 has" in outcome.message and "differ after 6 steps" in outcome.message for outcome in outcomes)
    assert {line["step"] for line in lines(tmp_path / "run")} == {0, 4}
    assert '"step": 4,' in (tmp_path / "run" / "checksums.jsonl").read_text().splitlines()[-1]


@pytest.mark.parametrize("shard", ["none", "fsdp"])
def test_a_stopped_rank_ends_the_run_which_goes_on(shard: str, base: dict[str, Any], tmp_path: Path) -> None:
    values = base | {"shares": 2}
    whole = travelled("run", values, str(tmp_path / "whole"))
    out = tmp_path / "run"
    with Pool(2, timeout_s=6.0, preload=PRELOAD) as pool:
        pool.send(travelled, "run", values | {"shard": shard}, str(out), freeze=(1, 5, 12.0))
        outcome = pool.answer(0)
        pool.processes[1].kill()  # nobody waits for it any more
    assert "rank 1 no longer answers" in outcome.message
    assert "continues from it" in outcome.message
    assert len(read(out).records) in (6, 7)  # rank 0 may have heard of a step more
    assert travelled("resume", values, str(out)) == whole
    assert kept(out) == kept(tmp_path / "whole")


def test_killed_ranks_are_started_again(base: dict[str, Any], tmp_path: Path) -> None:
    """By torchrun's own agent; here its ranks are forked from a process that has imported everything."""
    import multiprocessing

    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    steps = 8 * KILLS
    values = base | {"steps": steps, "eval_every": 10, "shares": 2, "snapshot_every": 7}
    travelled("run", values, str(tmp_path / "whole"))
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOAD))
    draw = random.Random(KILLS)
    kills = [(draw.randrange(2), step) for step in sorted(draw.sample(range(steps - 1), KILLS))]
    launch = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="test", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        max_restarts=len(kills), start_method="forkserver", monitor_interval=0.05,
    )  # fmt: skip
    arguments = ["train", *made(values | {"parallel": "data"}), "--out", str(tmp_path / "killed"), "--quiet"]
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}  # the agent has its own, and keeps them
    try:
        elastic_launch(launch, commanded)(arguments, kills)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert kept(tmp_path / "killed") == kept(tmp_path / "whole")


def test_torchrun(base: dict[str, Any], tmp_path: Path) -> None:
    """The command itself: rank 0 speaks, the others are silent."""
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "zeroblock"]
    arguments = ["train", *made(base), "--out", str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(zb.__file__).parents[1])}
    ended = subprocess.run([sys.executable, *ranks, *arguments], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("2 ranks share the examples of every batch (--parallel data)") == 1
    assert ended.stdout.count("sst2, mezo_bcd: 10 steps") == 1
    assert 'parallel = "data"\nshares = 2\n' in (tmp_path / "run" / "config.toml").read_text()


def test_a_rank_that_fails_ends_by_its_own_status() -> None:
    """It waits for the others to come as far, and no teardown of the interpreter or of torch can end it otherwise."""
    store, ended = dist.HashStore(), []
    other = threading.Thread(target=lambda: (Launch(1, 2, 1, 2).part(store), ended.append(1)))
    other.start()
    assert not ended
    Launch(0, 2, 0, 2).part(store)
    other.join()
    assert ended
    code = "import atexit, os; from zeroblock.train.launch import leave; atexit.register(os.abort); leave(2)"
    environment = os.environ | {"RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(Path(zb.__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 2


def test_leaving_needs_no_sound_environment_and_no_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "one")
    monkeypatch.setenv("WORLD_SIZE", "2")
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    before = signal.getsignal(signal.SIGTERM)
    with (tmp_path / "closed").open("w") as gone:
        pass
    monkeypatch.setattr(sys, "stdout", gone)
    try:
        leave(2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert codes == [2]


def test_what_needs_torchrun(base: dict[str, Any], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["train", *made(base | {"parallel": "data"}), "--out", str(tmp_path / "run")])
    assert "torchrun --standalone --nproc-per-node" in str(result.exception)


def test_one_process_has_nothing_to_divide(base: dict[str, Any]) -> None:
    told: list[str] = []
    config = joint.shared(Config(**base, shard="fsdp"), Peers.here(), told.append, begins=True)
    assert config.shard == "none"
    assert told == ["one process holds all weights, so --shard fsdp divides nothing: start it with torchrun"]
