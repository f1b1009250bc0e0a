"""The configuration: what is accepted, what is refused and in which words, and its way through TOML."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from toy import PATIENCE_S
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.method import METHODS
from zeroblock.train import Config
from zeroblock.train.compose import eps_advice, fold_advice, options
from zeroblock.train.compose import optimizer as build
from zeroblock.train.config import recorded
from zeroblock.train.lr import lr_at

BASE = {"model": "m", "task": "sst2", "lr": 1e-3}
OTHER = {
    "model": 'a "quoted" \\ path\n\x7f\x01 ü 😀', "random_weights": True, "trust_remote_code": True, "dtype": "bf16",
    "device": "cuda:1", "task": "./own.toml", "data": "some/folder", "data_seed": 7, "train": 10, "dev": 11,
    "test": 12, "train_tokens": 30, "max_length": 99, "method": "lozo", "calibrate": True, "lr": 1e-300,
    "eps": 3, "steps": 17, "batch_size": 3, "accumulate": 2, "seed": 2**64 - 1, "weight_decay": 0.1, "interval": 4,
    "fold": 1, "turns": "last", "ending": "newline", "metric": "f1", "lora": "r=4,alpha=8.5,targets=q_proj",
    "freeze": "a*", "rank": 3, "probes": 2, "clip": 4, "as_published": True, "rounding": "nearest",
    "lr_schedule": "cosine", "warmup": 5,
    "objective": "accuracy", "loss_over": "examples", "eval_every": 6, "eval_start": False, "eval_limit": 9,
    "engine": "sequential", "graphs": "off", "max_tokens": 512, "max_minutes": 1.5, "snapshot_every": 8,
    "fsync": 0, "track": "tensorboard", "save_weights": False, "weights": "int4", "parallel": "probes", "shares": 3,
    "timeout": 60, "shard": "fsdp",
    "offload": "disk", "memory": "8GB",
}  # fmt: skip


def test_round_trip_of_every_setting(tmp_path: Path) -> None:
    config = Config.of(OTHER)
    plain = Config.of(BASE)
    same = {f.name for f in dataclasses.fields(Config) if getattr(config, f.name) == getattr(plain, f.name)}
    assert same == {"shots", "partition", "schedule", "keep", "prefix"}  # which lozo does not have, or not with lora
    for one in (config, plain, Config.of({**BASE, "schedule": "flip-flop", "partition": "layers:2"})):
        (tmp_path / "run.toml").write_text("# a comment\n" + one.dump(), encoding="utf-8")
        assert Config.load(tmp_path / "run.toml", trust_remote_code=one.trust_remote_code) == one
        assert tomllib.loads(one.dump())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batchsize": 3}, "unknown setting 'batchsize'; did you mean 'batch_size'?"),
        ({"steps": "many"}, "steps is 'many', expected int"),
        ({"steps": True}, "steps is True, expected int"),
        ({"steps": 1.5}, "steps is 1.5, expected int"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"steps": 2**32}, "steps must be below 2**32"),
        ({"data_seed": 2**32}, "data_seed must be below 2**32"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"lr": None, "method": "ft"}, "needs a learning rate"),
        ({"lr": float("inf")}, "lr must be finite"),
        ({"lr": -1.0}, "lr must be at least 0"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"model": None}, "model is missing"),
        ({"task": None}, "task is missing"),
        ({"method": "mezo_bdc"}, "unknown method 'mezo_bdc'; did you mean 'mezo_bcd'?"),
        ({"method": "zeroshot"}, "did you mean 'zero-shot'?"),
        ({"lr_schedule": "cosin"}, "unknown lr_schedule 'cosin'; did you mean 'cosine'?"),
        ({"rounding": "up"}, "choose from: stochastic, nearest"),
        ({"schedule": "flipflop"}, "did you mean 'flip-flop'?"),
        ({"partition": "layer"}, "did you mean 'layers'?"),
        ({"rank": 2}, "mezo_bcd takes no rank"),
        ({"method": "mezo", "partition": "layers"}, "mezo takes no partition"),
        ({"method": "mezo", "schedule": "random"}, "mezo has one block, so it takes no schedule"),
        ({"method": "ft", "probes": 2}, "ft takes no probes"),
        ({"method": "ft", "clip": 2.0}, "ft takes no clip"),
        ({"clip": 0}, "clip must be positive"),
        ({"method": "ft", "schedule": "random"}, "ft takes no schedule"),
        ({"method": "ft", "objective": "accuracy"}, "accuracy has none"),
        ({"method": "icl"}, "give --shots (MeZO takes 32)"),
        ({"shots": 4}, "shots are for the method icl"),
        ({"warmup": 20_000}, "leaves none of the 20000 steps"),
        ({"keep": 1.5, "method": "sparse_mezo"}, "must be in"),
        ({"fold": 50}, "fold is for low-rank steps"),
        ({"fold": 2, "method": "ft"}, "ft takes no fold"),
        ({"fold": 20, "method": "lozo"}, "give fold 10, or interval 60"),
        ({"fold": 50, "method": "lozo", "weight_decay": 0.1}, "leave out fold or weight_decay"),
        ({"fold": 50, "method": "lozo", "eval_every": 75}, "--eval-every a multiple of it, or --fold a divisor"),
    ],
    ids=str,
)
def test_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ZeroBlockError) as caught:
        Config.of({**BASE, **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_is_named_in_its_error(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    with pytest.raises(ZeroBlockError, match=r"cannot read .*run\.toml"):
        Config.load(file)
    file.write_text("steps = ")
    with pytest.raises(ZeroBlockError, match=r"run\.toml: invalid TOML"):
        Config.load(file)
    file.write_text('model = "m"\ntask = "t"\nstep = 3')
    with pytest.raises(ZeroBlockError, match=r"run\.toml: unknown setting 'step'; did you mean 'steps'"):
        Config.load(file)


@pytest.mark.parametrize("method", METHODS)
def test_every_option_reaches_the_optimizer(method: str) -> None:
    from toy import Tiny

    given: dict[str, object] = {**BASE, "method": method, "eps": 2e-3, "seed": 5, "interval": 7, "weight_decay": 0.5}
    if "bcd" in method:
        given |= {"partition": "linears"}
    if method in ("mezo_bcd", "mezo_bcd_adam"):
        given |= {"schedule": "flip-flop"}
    if method.startswith("lozo"):
        given |= {"rank": 3, "as_published": True}
    if method == "sparse_mezo":
        given |= {"keep": 0.25}
    found = build(Config.of({**given, "probes": 2, "clip": 4, "rounding": "nearest"}), Tiny())
    assert (found.seed, found.interval, found.estimator.eps, found.estimator.probes) == (5, 7, 2e-3, 2)
    assert (found.param_groups[0]["weight_decay"], found.clip) == (0.5, 4.0)
    told = str(found.parts)
    assert "'rounding': 'nearest'" in told
    for name, value in (
        ("schedule", "FlipFlop"),
        ("partition", "linears"),
        ("rank", "LowRank(rank=3"),
        ("keep", "0.25"),
    ):
        if name in given:
            assert value in told


@pytest.mark.parametrize(
    ("change", "fold"),
    [
        ({}, 50),
        ({"eval_every": 75}, 25),
        ({"eval_every": 75, "interval": 1}, 1),
        ({"eval_every": 30, "steps": 77}, 10),  # the last evaluation needs no fold
        ({"interval": 40, "fold": 20, "eval_every": 100}, 20),
        ({"eval_every": 20_000}, 50),
        ({"as_published": True}, 1),
        ({"weight_decay": 0.1}, 1),
        ({"method": "mezo_bcd"}, 1),
        ({"method": "lozo_m", "eval_every": 7}, 1),
    ],
    ids=str,
)
def test_low_rank_steps_are_held_as_long_as_they_can_be(change: dict[str, object], fold: int) -> None:
    """And the choice is not taken for a wish: another run may begin from the same configuration."""
    from toy import Tiny

    config = Config.of({**BASE, "method": "lozo", **change})
    built = build(config, Tiny())
    assert built.fold == fold
    assert config.fold == change.get("fold")
    told = fold_advice(config, built)
    assert bool(told) == ("eval_every" in change and fold < 40 and "interval" not in change)
    assert not told or "--eval-every 50 is faster" in told or "--eval-every 100 is faster" in told


def test_the_default_rounding_does_not_undo_as_published() -> None:
    assert "rounding" not in options(Config.of({**BASE, "method": "mezo", "as_published": True}))


def test_evaluations() -> None:
    def steps(**changes: object) -> tuple[int, ...]:
        return Config.of({**BASE, **changes}).evaluations

    assert steps() == (0, 4000, 8000, 12000, 16000, 20000)
    assert steps(steps=7, eval_every=3) == (0, 3, 6, 7)
    assert steps(steps=7, eval_every=3, eval_start=False) == (3, 6, 7)
    assert steps(steps=3) == (0, 1, 2, 3)
    assert steps(method="zero-shot") == (0,)


def test_rates() -> None:
    def rates(**changes: object) -> list[float]:
        config = Config.of({**BASE, "lr": 2.0, "steps": 6, **changes})
        return [round(lr_at(config, step), 9) for step in range(6)]

    assert rates() == [2.0] * 6
    assert rates(warmup=2) == [1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert rates(warmup=2, lr_schedule="linear") == [1.0, 2.0, 2.0, 1.5, 1.0, 0.5]
    assert rates(warmup=2, lr_schedule="cosine") == [1.0, 2.0, 2.0, 1.707106781, 1.0, 0.292893219]


def test_reading_the_settings_needs_no_torch() -> None:
    script = "import sys, zeroblock.cli.train, zeroblock.cli.evaluate, zeroblock.cli.resume, zeroblock.cli.demo\n"
    script += "print(sorted({'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({"order": "flip-flop"}, {"schedule": "flip-flop"}, r"is called schedule \(--schedule\), no longer order"),
        (
            {"schedule": "linear"},
            {"lr_schedule": "linear"},
            r"called lr_schedule \(--lr-schedule\), no longer schedule",
        ),
        (
            {"schedule": "cosine", "order": "uniform"},
            {"lr_schedule": "cosine", "schedule": "uniform"},
            "no longer (order|schedule)",
        ),
    ],
    ids=str,
)
def test_names_of_0_1_are_accepted(old: dict[str, str], new: dict[str, str], message: str, tmp_path: Path) -> None:
    """By the library, in a file, and silently in the folder of a run."""
    expected = Config.of({**BASE, **new})
    with pytest.warns(ZeroBlockWarning, match=message):
        assert Config.of({**BASE, **old}) == expected
    with pytest.warns(ZeroBlockWarning, match=message):
        assert Config(**BASE, **old) == expected  # type: ignore[arg-type]
    with pytest.warns(ZeroBlockWarning, match=message):
        assert Config.of(BASE).replace(**old) == expected
    file = tmp_path / "config.toml"
    file.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in {**BASE, **old}.items()))
    with pytest.warns(ZeroBlockWarning, match=message):
        assert Config.load(file) == expected
    assert recorded(file) == expected


def test_an_old_name_beside_the_new_one_is_refused() -> None:
    for both in ({"order": "uniform", "schedule": "random"}, {"schedule": "linear", "lr_schedule": "cosine"}):
        with pytest.raises(ZeroBlockError, match=r"is the old name of (lr_)?schedule, which is given too"):
            Config.of({**BASE, **both})


def test_the_configuration_of_a_run_of_0_1(tmp_path: Path) -> None:
    """As 0.1.0 wrote it: every setting that is not None, the default of rounding among them."""
    file = tmp_path / "config.toml"
    file.write_text(
        '# zeroblock train --config run/config.toml --out DIR\nmodel = "m"\nrandom_weights = false\n'
        'trust_remote_code = false\ndtype = "fp32"\ndevice = "auto"\ntask = "sst2"\ndata_seed = 0\nmax_length = 2048\n'
        'method = "mezo"\nshots = 0\ncalibrate = false\nlr = 0.001\neps = 0.001\nsteps = 100\nbatch_size = 16\n'
        "accumulate = 1\nseed = 0\nweight_decay = 0.0\nprobes = 1\nas_published = true\n"
        'rounding = "stochastic"\nschedule = "linear"\nwarmup = 0\nobjective = "loss"\neval_every = 20\n'
        'eval_start = true\nengine = "forked"\ngraphs = "auto"\nsnapshot_every = 0\nfsync = 1.0\n'
    )
    config = recorded(file)
    assert (config.lr_schedule, config.schedule, config.rounding, config.as_published) == ("linear", None, None, True)


def test_a_run_that_began_with_8_bit_products_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(Config.of(BASE).dump() + 'gemm = "fp8"\n')
    with pytest.warns(ZeroBlockWarning, match="8-bit products"):
        assert recorded(file) == Config.of(BASE)


@pytest.mark.parametrize(
    ("change", "dtype", "told"),
    [
        ({}, torch.bfloat16, "eps 0.001 is 0.5% of the weights' size"),
        ({"method": "fzoo_bcd"}, torch.bfloat16, "--eps 0.008 or --dtype fp32"),
        ({"eps": 0.002}, torch.bfloat16, "1%"),
        ({"eps": 0.004}, torch.bfloat16, ""),
        ({"lr": None}, torch.bfloat16, ""),
        ({"method": "mezo"}, torch.bfloat16, ""),
        ({}, torch.float32, ""),
        ({}, torch.float16, ""),
    ],
    ids=str,
)
def test_an_eps_that_bf16_hides_is_told(change: dict[str, object], dtype: torch.dtype, told: str) -> None:
    from toy import Tiny

    model = Tiny()
    for param in model.parameters():
        if param.dim() == 2:
            nn.init.constant_(param, 0.2)
    advice = eps_advice(build(Config.of({**BASE, **change}), model.to(dtype)))
    assert told in advice
    assert bool(told) == bool(advice)


def test_rounding_as_published() -> None:
    """The published code of MeZO rounds to nearest; asking for stochastic rounding as well is refused."""
    with pytest.raises(ZeroBlockError, match=r"mezo as published rounds to the nearest number.*leave out rounding"):
        Config.of({**BASE, "method": "mezo", "as_published": True, "rounding": "stochastic"})
    allowed = Config.of({**BASE, "method": "lozo", "as_published": True, "rounding": "stochastic"})
    assert allowed == Config.of({**BASE, "method": "lozo", "as_published": True})
    nearest = Config.of({**BASE, "method": "mezo", "as_published": True, "rounding": "nearest"})
    assert build(nearest, nn.Linear(2, 2)).parts["rounding"] == "nearest"


@pytest.mark.parametrize("text", ["steps = " + "9" * 5000, "steps = " + "[" * 100_000], ids=["number", "nested"])
def test_toml_that_python_cannot_hold(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ZeroBlockError, match=r"run\.toml: invalid TOML"):
        Config.load(tmp_path / "run.toml")


def test_with_lr_what_is_left_open_is_what_the_papers_have() -> None:
    """So a folder of an earlier version holds the same configuration."""
    assert Config.of(BASE) == Config.of({**BASE, "eps": 1e-3, "lr_schedule": "constant"})
    automatic = Config.of({**BASE, "lr": None})
    assert (automatic.eps, automatic.lr_schedule) == (None, "linear")
