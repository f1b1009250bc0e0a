"""The configuration of a run: every value that decides what the run does, as flat TOML."""

from __future__ import annotations

import dataclasses
import tomllib
import typing
import warnings
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..adapter import Adapter, Lora, Prefix
from ..amount import nbytes
from ..errors import ZeroBlockError, ZeroBlockWarning, unknown
from ..report.track import TRACKERS
from .value import checked, toml

MEASURED = ("zero-shot", "icl")
"""Methods that measure a model and do not train it."""
BACKPROPAGATION = "ft"
EXECUTION = (
    "data", "device", "engine", "graphs", "max_tokens", "max_minutes", "snapshot_every", "save_weights", "fsync",
    "track", "parallel", "shard", "timeout", "offload", "memory",
)  # fmt: skip
"""Settings that may differ when a run is resumed: they say where and how it runs, not what it computes."""
TIMEOUT_SECONDS = 600.0
LR_SCHEDULES = ("constant", "linear", "cosine")


def _option(default: Any, help: str, least: float | None = None) -> Any:
    """A field with its help text on the command line and the smallest value it accepts."""
    return field(default=default, metadata={"help": help, "least": least})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run, checked when the object is made.

    ``order`` is the name that ``schedule`` had before 0.2; it is still accepted, with a warning.

    >>> Config(model="smollm2", task="sst2", lr=3e-4).replace(seed=1).seed
    1
    """

    model: str = _option(
        dataclasses.MISSING,
        "Required: smollm2, a folder (a model's or a PEFT adapter's), a GGUF file, a hub id, or a shape: opt-125m, "
        "opt-1.3b, opt-13b.",
    )
    random_weights: bool = _option(False, "Use random weights in the model's shape, to measure speed.")
    trust_remote_code: bool = _option(False, "Run the Python code that comes with the model.")
    dtype: str = _option("auto", "fp32, bf16, fp16 or fp64; auto is fp32 on the CPU and for ft, else bf16 or fp16.")
    weights: str | None = _option(None, "Store the layers' matrices as int8 or int4; with :scales only scales move.")
    device: str = _option("auto", "cpu, cuda or cuda:N; auto is the GPU if there is one.")

    task: str = _option(
        dataclasses.MISSING, "Required: a task name (see zeroblock tasks), the path of your own data, or hf:user/name."
    )
    data: str | None = _option(
        None, "Local rows of the paper's tasks: a folder with TASK/train.jsonl and TASK/validation.jsonl. [the hub]"
    )
    data_seed: int = _option(0, "Seed of the splits, the batches and the demonstrations.", 0)
    train: int | None = _option(None, "Number of training examples; each task has its own default.", 1)
    dev: int | None = _option(None, "Number of development examples; each task has its own default.", 1)
    test: int | None = _option(None, "Number of test examples; each task has its own default.", 1)
    turns: Literal["all", "last"] | None = _option(None, "The answers of your own chats that carry loss. [all]")
    ending: Literal["eos", "newline"] | None = _option(
        None, "End of the completions of your own data: the model's end-of-sequence token or a newline. [eos]"
    )
    metric: Literal["likelihood", "f1", "exact_match"] | None = _option(
        None, "f1, exact_match or likelihood, for your own data. [f1 if answers are short, else likelihood]"
    )
    train_tokens: int | None = _option(None, "Leave out training examples with more tokens than this.", 2)
    max_length: int = _option(2048, "Cut longer contexts on the left; never more than the model allows.", 2)

    method: str = _option("mezo_bcd", "A method of zeroblock methods, or ft (backpropagation), zero-shot, icl.")
    lr: float | None = _option(None, "Learning rate. [automatic, in units of the weights; ft needs one]", 0.0)
    steps: int = _option(20_000, "Optimizer steps.", 1)
    batch_size: int = _option(16, "Examples per batch.", 1)
    accumulate: int = _option(1, "Batches per step.", 1)
    lr_schedule: Literal["constant", "linear", "cosine"] | None = _option(
        None, "Keep the learning rate constant, or let it fall to zero. [constant; without --lr linear]"
    )
    warmup: int = _option(0, "Steps over which the learning rate rises from zero.", 0)
    eps: float | None = _option(None, "Distance at which losses are measured. [1e-3; without --lr 0.04 of the weights]")
    seed: int = _option(0, "Seed of the noise and of the block schedule.", 0)
    weight_decay: float = _option(0.0, "Decoupled weight decay, on the matrices of the active block.", 0.0)
    freeze: str | None = _option(None, "Parameters that must not change: names separated by commas; * matches all.")
    lora: str | None = _option(
        None, "Train a LoRA adapter, as in r=8,targets=q,v (alpha=16 unless given); MeZO takes lr 1e-4 and eps 1e-2."
    )
    prefix: int | None = _option(None, "Train a prefix of this many virtual tokens; MeZO takes 5, lr 1e-2, eps 0.1.", 1)
    objective: Literal["loss", "accuracy", "f1", "exact_match"] = _option(
        "loss", "Quantity that the steps improve: loss, or the task's metric itself (accuracy, f1 or exact_match)."
    )
    loss_over: Literal["tokens", "examples"] | None = _option(
        None, "Average an answer's loss over all tokens of the batch, or first within each example. [tokens]"
    )

    partition: str | None = _option(None, "How the weights are cut into blocks: whole, layers, layers:K or linears.")
    schedule: str | None = _option(
        None,
        "The order of the blocks: random, flip-flop, ascending, descending, uniform, adaptive, proportional, "
        "economical, subset or bandit.",
    )
    interval: int | None = _option(None, "Steps per turn, in which the block and its basis stay the same.", 1)
    fold: int | None = _option(None, "lozo: steps collected before they are added to the weights. [as many as fit]", 1)
    rank: int | None = _option(None, "lozo, lozo_m, subzero, zo_muon, eggroll: rank of the directions.", 1)
    keep: float | None = _option(None, "sparse_mezo: fraction of the weights that move; lezo, adalezo: of the layers.")
    probes: int = _option(1, "Random directions per step.", 1)
    clip: float | None = _option(None, "Clamp coefficients to ±clip; a few times their usual size works well.")
    as_published: bool = _option(False, "Do as the method's published code does, where that differs.")
    rounding: Literal["stochastic", "nearest"] | None = _option(
        None, "Rounding of 16-bit weights. [stochastic; mezo as published: nearest]"
    )

    eval_every: int | None = _option(None, "Steps between evaluations. [a fifth of the steps]", 1)
    eval_start: bool = _option(True, "Evaluate before the first step too.")
    eval_limit: int | None = _option(None, "Evaluate on at most this many dev and test examples.", 1)
    shots: int = _option(0, "Demonstrations in the prompt, for icl.", 0)
    calibrate: bool = _option(False, "Calibrate the options (SFC): subtract their log-probability without the context.")

    engine: Literal["forked", "sequential"] = _option("forked", "Measure both losses in one forked pass, or in two.")
    graphs: Literal["auto", "on", "off"] = _option("auto", "Use CUDA graphs.")
    parallel: Literal["data", "probes", "data,probes"] | None = _option(
        None, "Share the examples of a batch (data), the probes (probes), or both (data,probes) over the ranks. [data]"
    )
    shares: int | None = _option(
        None,
        "Number of parts per batch, for --parallel data; fixed for the run. [enough for every rank]",
        1,
    )
    shard: Literal["none", "fsdp"] = _option(
        "none", "fsdp: shard every layer's weights over the ranks that share the data."
    )
    timeout: float = _option(TIMEOUT_SECONDS, "Seconds after which a rank that does not answer ends the run.")
    offload: Literal["host", "disk"] | None = _option(
        None, "Keep the weights on the host, or in a file, and copy layers to the device as they run."
    )
    memory: str | None = _option(None, "Limit on the device's memory, as in 8GB; layers beyond it are streamed.")
    max_tokens: int | None = _option(None, "Maximum tokens per packed row; lower it if memory runs out.", 2)
    max_minutes: float | None = _option(
        None, "Stop after this many minutes; resume continues the run. A run without --lr is complete then."
    )
    snapshot_every: int = _option(0, "Steps between snapshots of the weights, which make resuming faster; 0: none.", 0)
    save_weights: bool = _option(True, "ft: keep the weights of the dev-selected step, in the folder model of the run.")
    fsync: float = _option(1.0, "Seconds between forced writes of the journal to disk; 0: after every step.", 0.0)
    track: str | None = _option(
        None, "Also report to tensorboard, wandb or trackio; none turns it off. On resume, give wandb or trackio again."
    )
    order: InitVar[str | None] = None

    def __post_init__(self, order: str | None) -> None:
        from ..method import own_lr

        named = {"schedule": self.schedule, "order": order, "lr_schedule": self.lr_schedule}
        for name, value in renamed({k: v for k, v in named.items() if v is not None}).items():
            object.__setattr__(self, name, value)
        if self.schedule in LR_SCHEDULES:  # renamed() made it lr_schedule
            object.__setattr__(self, "schedule", None)
        object.__setattr__(self, "lr", own_lr(self.method) if self.lr is None else self.lr)  # a method may have its own
        automatic = self.lr is None and self.trains
        defaults = {"lr_schedule": "linear" if automatic else "constant", "eps": None if automatic else 1e-3}
        for name, value in defaults.items():  # with a learning rate, the papers' defaults
            object.__setattr__(self, name, value if getattr(self, name) is None else getattr(self, name))
        for name, kind in KINDS.items():
            object.__setattr__(self, name, checked(name, kind, getattr(self, name)))
        for item in dataclasses.fields(self):
            value, least = getattr(self, item.name), item.metadata["least"]
            if value is not None and least is not None and value < least:
                raise ZeroBlockError(f"{item.name} must be at least {least}, got {value}")
        for name in ("eps", "keep", "clip", "max_minutes", "timeout"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ZeroBlockError(f"{name} must be positive, got {value}")
        for name, bits in (("seed", 64), ("data_seed", 32), ("steps", 32)):
            if getattr(self, name) >= 1 << bits:
                raise ZeroBlockError(f"{name} must be below 2**{bits}, got {getattr(self, name)}")
        self._check_method()
        self._check_adapter()
        if self.memory is not None:
            nbytes(self.memory)
        if self.offload is not None and self.method == BACKPROPAGATION:
            raise ZeroBlockError(
                "ft needs all weights, gradients and moments on the device: leave out --offload, or raise --memory"
            )
        if self.rounding == "stochastic":  # the default, stored as None so that both spellings are equal
            object.__setattr__(self, "rounding", None)
        if self.track is not None and self.track not in TRACKERS:
            raise unknown("tracker", self.track, TRACKERS)
        if self.shares is not None and self.shares > self.batch_size:
            raise ZeroBlockError(
                f"a batch of {self.batch_size} cannot be cut into {self.shares} shares: raise --batch-size, or lower "
                "--shares (each of the --accumulate batches is cut)"
            )
        if self.timed and (self.warmup or self.lr_schedule != "linear"):
            raise ZeroBlockError(
                "without --lr, the rate of a run of --max-minutes falls linearly to zero: leave out --warmup and "
                "--lr-schedule, or give --steps in place of the minutes"
            )
        if self.warmup >= self.steps:
            raise ZeroBlockError(f"a warm-up of {self.warmup} steps leaves none of the {self.steps} steps")

    def _check_method(self) -> None:
        from ..method import METHODS
        from .compose import check

        if self.method not in (*METHODS, BACKPROPAGATION, *MEASURED):
            raise unknown("method", self.method, [*METHODS, BACKPROPAGATION, *MEASURED])
        if self.method == BACKPROPAGATION and self.lr is None:
            raise ZeroBlockError("ft needs a learning rate: give --lr (MeZO's paper tries 1e-5, 5e-5 and 8e-5)")
        if (self.method == "icl") != (self.shots > 0):
            raise ZeroBlockError(
                "icl needs the number of demonstrations: give --shots (MeZO takes 32)"
                if self.method == "icl"
                else f"shots are for the method icl, not for {self.method}"
            )
        if self.freeze is not None and not self.trains:
            raise ZeroBlockError(f"{self.method} does not train, so there is nothing to freeze")
        if self.method == BACKPROPAGATION and self.objective != "loss":
            raise ZeroBlockError(f"ft follows a gradient, and {self.objective} has none: use objective loss")
        check(self)

    def _check_adapter(self) -> None:
        if self.lora is not None and self.prefix is not None:
            raise ZeroBlockError("a run trains one adapter: give --lora or --prefix, not both")
        made = self.adapter
        if made is not None and not self.trains:
            raise ZeroBlockError(f"{self.method} does not train: leave out --lora and --prefix")
        if self.lora is not None and made is not None:  # so that all spellings are equal
            object.__setattr__(self, "lora", made.text)

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that the run makes and trains; None if it trains the model's own weights."""
        if self.lora is not None:
            return Lora.parse(self.lora, self.seed)
        return None if self.prefix is None else Prefix(self.prefix, self.seed)

    @property
    def timed(self) -> bool:
        """Whether the run's length is given in minutes, after which it is complete."""
        return self.lr is None and self.max_minutes is not None and self.trains

    @property
    def trains(self) -> bool:
        """Whether the method changes the weights."""
        return self.method not in MEASURED

    @property
    def every(self) -> int:
        """Steps from one evaluation to the next; the last evaluation follows the last step in any case."""
        return self.eval_every or max(1, self.steps // 5)

    @property
    def evaluations(self) -> tuple[int, ...]:
        """The steps after which the run is evaluated, in ascending order."""
        if not self.trains:
            return (0,)
        points = set(range(self.every, self.steps + 1, self.every)) | {self.steps}
        return tuple(sorted(points | {0} if self.eval_start else points))

    def replace(self, **changes: Any) -> Config:
        """Return this configuration with some values changed, checked again."""
        return Config.of({**dataclasses.asdict(self), **renamed(changes)})

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Config:
        """Make a configuration from names and values; an unknown name raises an error with the nearest known one."""
        values = renamed(values)
        for name in values:
            if name not in KINDS:
                raise unknown("setting", name, KINDS)
        for name in ("model", "task"):
            if values.get(name) is None:
                raise ZeroBlockError(f'{name} is missing: give --{name}, or {name} = "…" in the configuration')
        return cls(**values)

    @classmethod
    def load(cls, path: str | Path, *, trust_remote_code: bool = False) -> Config:
        """Read a TOML file of flat names and values.

        Args:
            path: the file.
            trust_remote_code: the setting of that name; a file may come from anyone, so its own value is ignored.
        """
        return _named(path, distrust(read(path), path, trust_remote_code))

    def dump(self) -> str:
        """Write the configuration as TOML, without the settings that are None."""
        values = ((name, getattr(self, name)) for name in KINDS)
        return "".join(f"{name} = {toml(value)}\n" for name, value in values if value is not None)


def read(path: str | Path) -> dict[str, Any]:
    """Read the names and values of a TOML file, unchecked."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ZeroBlockError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, too long a number, too deep a nesting
        raise ZeroBlockError(f"{path}: invalid TOML ({error})") from error


def recorded(path: str | Path, *, trust_remote_code: bool = False) -> Config:
    """Read the configuration of a run folder, whichever version of zeroblock wrote it.

    Args:
        path: the folder's ``config.toml``.
        trust_remote_code: see :meth:`Config.load`.
    """
    from ..task import is_rows

    values = renamed(distrust(read(path), path, trust_remote_code), warn=False)
    if values.get("rounding") == "stochastic":  # 0.1 wrote its default, which as_published overrode
        del values["rounding"]
    if not only_options(values.get("task")):
        values.setdefault("loss_over", "examples")  # 0.1 had no other way
    if is_rows(values.get("task")) and "ending" not in values:  # 0.1 read the user's own data in this way only
        values |= {"turns": "last", "ending": "newline", "metric": "f1"}
    if values.pop("gemm", None) is not None:  # 0.2 had it for a day, unreleased
        warnings.warn(f"{path}: gemm was removed; new steps use no 8-bit products", ZeroBlockWarning, stacklevel=2)
    return _named(path, values)


def renamed(values: Mapping[str, Any], *, warn: bool = True) -> dict[str, Any]:
    """Rename settings that have old names.

    Until 0.1 ``order`` was the schedule of the blocks and ``schedule`` the schedule of the learning rate.

    Args:
        values: settings by name; a value may be a list, as in a sweep.
        warn: whether to warn, with the new name.
    """
    current = dict(values)
    for old, new in (("schedule", "lr_schedule"), ("order", "schedule")):
        value = current.get(old)
        if old not in current or (old == "schedule" and not is_lr_schedule(value)):
            continue
        if new in current:
            raise ZeroBlockError(f"{old} = {value!r} is the old name of {new}, which is given too: leave {old} out")
        current = {(new if name == old else name): value for name, value in current.items()}
        if warn:
            what = "the learning rate" if old == "schedule" else "the blocks"
            flag = f"--{new}".replace("_", "-")
            message = f"the schedule of {what} is called {new} ({flag}), no longer {old}; the old name works until 0.3"
            warnings.warn(message, ZeroBlockWarning, stacklevel=2)
    return current


def only_options(task: Any) -> bool:
    """Whether a task is a built-in one that trains on options, so that ``loss_over`` has no effect."""
    from ..task import TASKS

    return isinstance(task, str) and task in TASKS and TASKS[task].over == "options"


def is_lr_schedule(value: Any) -> bool:
    """Whether a value of ``schedule`` means the learning rate, as it did until 0.1."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(one, str) and one in LR_SCHEDULES for one in values)


def distrust(
    values: Mapping[str, Any], where: str | Path, trusted: bool, flag: str = "--trust-remote-code"
) -> dict[str, Any]:
    """Ignore a file's value of ``trust_remote_code``, with a warning.

    A configuration may come from anyone, and the setting runs a stranger's program, so only the
    user may decide.

    Args:
        values: settings by name.
        where: the file that the settings come from.
        trusted: the user's decision.
        flag: the command-line flag that allows it.
    """
    if values.get("trust_remote_code") and not trusted:
        warnings.warn(
            f"{where}: trust_remote_code = true is ignored in files; to run the code that comes with the model, add "
            f"{flag} to this command",
            ZeroBlockWarning,
            stacklevel=2,
        )
    rest = {name: value for name, value in values.items() if name != "trust_remote_code"}
    return rest | ({"trust_remote_code": True} if trusted else {})


def _named(path: str | Path, values: Mapping[str, Any]) -> Config:
    try:
        return Config.of(values)
    except ZeroBlockError as error:
        raise ZeroBlockError(f"{path}: {error}") from error


_HINTS = typing.get_type_hints(Config)
KINDS: dict[str, Any] = {item.name: _HINTS[item.name] for item in dataclasses.fields(Config)}
"""The type of each setting."""
