"""The configuration of a run: every value that decides what it does, as flat TOML."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import ZeroBlockError, unknown
from ..report.track import TRACKERS

MEASURED = ("zero-shot", "icl")
"""Methods without training."""
BACKPROPAGATION = "ft"
EXECUTION = ("data", "device", "engine", "graphs", "max_tokens", "max_minutes", "snapshot_every", "fsync", "track")
"""Settings that may differ when a run is resumed: they say where and how it runs, not what it is."""


def _option(default: Any, help: str, least: float | None = None) -> Any:
    """A field with what the command line says of it, and the least value it may have."""
    return field(default=default, metadata={"help": help, "least": least})


@dataclass(frozen=True, kw_only=True)
class Config:
    """A run, checked when made.

    >>> Config(model="smollm2", task="sst2", lr=3e-4).replace(seed=1).seed
    1
    """

    model: str = _option(dataclasses.MISSING, "smollm2, a folder, a GGUF file, a hub id, or opt-125m|1.3b|13b.")
    random_weights: bool = _option(False, "Build the model's shape with random weights, for speed work.")
    trust_remote_code: bool = _option(False, "Run the code that comes with the model.")
    dtype: str = _option("auto", "auto (fp32 on the CPU and for ft, else bf16 or fp16), fp32, bf16, fp16, fp64.")
    device: str = _option("auto", "auto, cpu, cuda or cuda:N.")

    task: str = _option(dataclasses.MISSING, "A task's name (see zeroblock tasks), or a path of one's own data.")
    data: str | None = _option(None, "Folder that holds TASK/train.jsonl and TASK/validation.jsonl; else the hub.")
    data_seed: int = _option(0, "Seed of the splits, of the order of batches and of demonstrations.", 0)
    train: int | None = _option(None, "Training examples; the task's own number unless said.", 1)
    dev: int | None = _option(None, "Development examples; the task's own number unless said.", 1)
    test: int | None = _option(None, "Test examples; the task's own number unless said.", 1)
    train_tokens: int | None = _option(None, "Leave out training examples of more tokens than this.", 2)
    max_length: int = _option(2048, "Longer contexts are cut on the left; the model's own length if shorter.", 2)

    method: str = _option("mezo_bcd", "A method of zeroblock methods; ft, zero-shot or icl.")
    shots: int = _option(0, "Demonstrations in the prompt, for icl.", 0)
    calibrate: bool = _option(False, "Choose options by SFC: less their log-probability without the context.")
    lr: float | None = _option(None, "Learning rate; every method that trains needs one.", 0.0)
    eps: float = _option(1e-3, "Distance of the two points from the weights.")
    steps: int = _option(20_000, "Optimizer steps.", 1)
    batch_size: int = _option(16, "Examples a batch.", 1)
    accumulate: int = _option(1, "Batches a step.", 1)
    seed: int = _option(0, "Seed of the noise and of the order of blocks.", 0)
    weight_decay: float = _option(0.0, "Decoupled, on the matrices of the active block.", 0.0)
    freeze: str | None = _option(None, "Parameters that stay as they are: names with commas, * for anything.")
    partition: str | None = _option(None, "whole, layers, layers:K or linears.")
    order: str | None = _option(None, "Of the blocks: random, flip-flop, ascending, descending, uniform, adaptive.")
    interval: int | None = _option(None, "Steps for which a block and its basis are held.", 1)
    fold: int | None = _option(None, "Steps of lozo held before they reach the weights; else as many as can be.", 1)
    rank: int | None = _option(None, "Of the directions, for lozo and lozo_m.", 1)
    keep: float | None = _option(None, "Share of the weights that sparse_mezo moves.")
    probes: int = _option(1, "Directions a step.", 1)
    clip: float | None = _option(None, "Take coefficients beyond this for this: a few times their usual size.")
    as_published: bool = _option(False, "What the method's own code does, where it differs.")
    rounding: Literal["stochastic", "nearest"] = _option("stochastic", "Of 16-bit weights: stochastic or nearest.")
    schedule: Literal["constant", "linear", "cosine"] = _option("constant", "Of lr: constant, linear or cosine.")
    warmup: int = _option(0, "Steps over which lr rises from zero.", 0)
    objective: Literal["loss", "accuracy", "f1", "exact_match"] = _option(
        "loss", "loss, or the metric itself: accuracy, f1 or exact_match."
    )

    eval_every: int | None = _option(None, "Steps between evaluations; a fifth of the steps unless said.", 1)
    eval_start: bool = _option(True, "Evaluate before the first step too.")
    eval_limit: int | None = _option(None, "Evaluate on this many dev and test examples at most.", 1)

    engine: Literal["forked", "sequential"] = _option("forked", "forked (one pass for both losses) or sequential.")
    graphs: Literal["auto", "on", "off"] = _option("auto", "CUDA graphs: auto, on or off.")
    max_tokens: int | None = _option(None, "Tokens a row at most; lower it when memory runs out.", 2)
    max_minutes: float | None = _option(None, "Stop after so many minutes, to be resumed.")
    snapshot_every: int = _option(0, "Steps between snapshots of the weights, which shorten resuming; 0 for none.", 0)
    fsync: float = _option(1.0, "Seconds between the journal's forced writes to disk; 0 for every step.", 0.0)
    track: str | None = _option(None, "Report to tensorboard, wandb or trackio too; none stops that.")

    def __post_init__(self) -> None:
        for name, kind in KINDS.items():
            object.__setattr__(self, name, _checked(name, kind, getattr(self, name)))
        for item in dataclasses.fields(self):
            value, least = getattr(self, item.name), item.metadata["least"]
            if value is not None and least is not None and value < least:
                raise ZeroBlockError(f"{item.name} must be at least {least}, got {value}")
        for name in ("eps", "keep", "clip", "max_minutes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ZeroBlockError(f"{name} must be positive, got {value}")
        for name, bits in (("seed", 64), ("data_seed", 32), ("steps", 32)):
            if getattr(self, name) >= 1 << bits:
                raise ZeroBlockError(f"{name} must be below 2**{bits}, got {getattr(self, name)}")
        self._check_method()
        if self.track is not None and self.track not in TRACKERS:
            raise unknown("tracker", self.track, TRACKERS)
        if self.warmup >= self.steps:
            raise ZeroBlockError(f"a warm-up of {self.warmup} steps leaves nothing of {self.steps} steps")

    def _check_method(self) -> None:
        from ..method import METHODS
        from .compose import check

        if self.method not in (*METHODS, BACKPROPAGATION, *MEASURED):
            raise unknown("method", self.method, [*METHODS, BACKPROPAGATION, *MEASURED])
        if self.trains and self.lr is None:
            raise ZeroBlockError(f"{self.method} needs a learning rate, which depends on model and method: give --lr")
        if (self.method == "icl") != (self.shots > 0):
            raise ZeroBlockError(
                "icl needs the number of demonstrations: give --shots (MeZO takes 32)"
                if self.method == "icl"
                else f"shots are for the method icl, not for {self.method}"
            )
        if self.freeze is not None and not self.trains:
            raise ZeroBlockError(f"{self.method} trains nothing, so there is nothing to freeze")
        if self.method == BACKPROPAGATION and self.objective != "loss":
            raise ZeroBlockError(f"ft follows a gradient, and {self.objective} has none: use objective loss")
        check(self)

    @property
    def trains(self) -> bool:
        """Whether the method moves the weights."""
        return self.method not in MEASURED

    @property
    def every(self) -> int:
        """Steps from one evaluation to the next; the last one comes at the end, whenever that is."""
        return self.eval_every or max(1, self.steps // 5)

    @property
    def evaluations(self) -> tuple[int, ...]:
        """The steps after which the run is evaluated, in order."""
        if not self.trains:
            return (0,)
        points = set(range(self.every, self.steps + 1, self.every)) | {self.steps}
        return tuple(sorted(points | {0} if self.eval_start else points))

    def replace(self, **changes: Any) -> Config:
        """This configuration with some values changed, checked again."""
        return Config.of({**dataclasses.asdict(self), **changes})

    @classmethod
    def of(cls, values: dict[str, Any]) -> Config:
        """A configuration from names and values; an unknown name gets the nearest suggested."""
        for name in values:
            if name not in KINDS:
                raise unknown("setting", name, KINDS)
        for name in ("model", "task"):
            if values.get(name) is None:
                raise ZeroBlockError(f'{name} is missing: give --{name}, or {name} = "…" in the configuration')
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path) -> Config:
        """Read a TOML file of flat names and values."""
        values = read(path)
        try:
            return cls.of(values)
        except ZeroBlockError as error:
            raise ZeroBlockError(f"{path}: {error}") from error

    def dump(self) -> str:
        """The configuration as TOML; what is None is left out."""
        values = ((name, getattr(self, name)) for name in KINDS)
        return "".join(f"{name} = {_toml(value)}\n" for name, value in values if value is not None)


def read(path: str | Path) -> dict[str, Any]:
    """The names and values of a TOML file, not yet checked."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ZeroBlockError(f"cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ZeroBlockError(f"{path}: invalid TOML ({error})") from error


KINDS: dict[str, Any] = typing.get_type_hints(Config)
"""The type of each setting."""


def _checked(name: str, kind: Any, value: Any) -> Any:
    """The value as its type, or an error that says what was expected."""
    optional = isinstance(kind, types.UnionType)
    if optional:
        if value is None:
            return None
        kind = next(k for k in typing.get_args(kind) if k is not types.NoneType)
    if typing.get_origin(kind) is Literal:
        if value not in typing.get_args(kind):
            raise unknown(name, str(value), typing.get_args(kind))
        return value
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:  # exactly: True is not a number of steps
        raise ZeroBlockError(f"{name} is {value!r}, expected {kind.__name__}{' or nothing' if optional else ''}")
    if kind is float and not math.isfinite(value):
        raise ZeroBlockError(f"{name} must be finite, got {value}")
    return value


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character TOML escapes more
    return str(value).lower() if isinstance(value, bool) else repr(value)
