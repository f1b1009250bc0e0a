"""The header: everything that the weights of a run depend on besides the base weights and the records."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import typing
import warnings
from typing import Any, Self

import torch
from torch import nn

from .. import __version__
from ..composition import both_parts
from ..errors import ZeroBlockError, ZeroBlockWarning, shown
from ..noise import VERSION as NOISE_VERSION
from ..noise import Distribution, Rounding
from ..optimizer import ZeroOrder
from ..turn import Turns
from ..weights import is_matrix
from . import identity, spec

ARITHMETIC_VERSION = 1
"""Version of the way from records to weights that ``docs/journal.md`` specifies: rules, lifts, masks and folds."""
PARTS = ("schedule", "subspace", "estimator", "rule")
DTYPES = ("float32", "bfloat16", "float16", "float64", "mixed")
MAX_PROBES = 1 << 16
MAX_SINGLE = float(torch.finfo(torch.float32).max)
"""Steps are computed in single precision, in which larger learning rates and decays do not exist."""
MATRICES = "matrices"
MAX_STEPS = 1 << 32
MAX_NESTING = 32
"""The deepest nesting of lists and objects in a header; zeroblock's own have six levels."""


@dataclasses.dataclass(frozen=True)
class Header:
    """The data that a journal holds once, at its beginning.

    Args:
        model: name of the base model, for people and as a default for commands.
        fingerprint: the fingerprint of the base weights, see ``fingerprint``.
        order: hash of the parameters' names and shapes in their order.
        dtype: the dtype of the weights; "mixed" if there are several.
        frozen: names of the parameters that were not trained.
        blocks: names of the blocks.
        method: the parts as data, from which ``rebuild`` makes an optimizer.
        parts: the parts as text, ``optimizer.parts``.
        probes: coefficients per record.
        seed: the seed of noise, bases and schedule.
        weight_decay: λ.
        decays: "matrices", or the names of the parameters that λ applies to.
        task: name of the task.
        data: fingerprint of the data.
        versions: the versions of zeroblock, torch, the noise and the arithmetic.
        extra: anything else that the writer wants to keep.
        card: Markdown for people, in an exported file.
        steps: the number of records in an exported file; None while a run may still write.
    """

    model: str
    fingerprint: str
    order: str
    dtype: str
    frozen: tuple[str, ...]
    blocks: tuple[str, ...]
    method: dict[str, Any]
    parts: dict[str, str]
    probes: int
    seed: int
    weight_decay: float
    decays: str | tuple[str, ...]
    task: str
    data: str
    versions: dict[str, str]
    extra: dict[str, Any]
    card: str = ""
    steps: int | None = None

    @classmethod
    def of(cls, optimizer: ZeroOrder, *, model: str = "", task: str = "", data: str = "", **extra: Any) -> Self:
        """The header of a run that is about to take its first step.

        Args:
            optimizer: the optimizer, at step 0.
            model: name of the base model.
            task: name of the task.
            data: fingerprint of the data.
            extra: anything that JSON can hold.
        """
        if optimizer.steps:
            raise ZeroBlockError(
                f"a journal starts at step 0 and this optimizer is at step {optimizer.steps}; "
                "create the journal before the first step, or open the one of this run"
            )
        weights = optimizer.weights
        if weights.subspace.reads and not weights.sharded and weights.read()[1] != weights.initial:
            raise ZeroBlockError(
                "the weights have changed since the optimizer was built, which read their sizes: load the weights "
                "first, then build it"
            )
        module = optimizer.model
        dtypes = {str(p.dtype).removeprefix("torch.") for p in module.parameters()}
        return cls(
            model=model,
            fingerprint=identity.fingerprint(module),
            order=identity.order(module),
            dtype=dtypes.pop() if len(dtypes) == 1 else "mixed",
            frozen=tuple(name for name, p in module.named_parameters() if not p.requires_grad),
            blocks=tuple(block.name for block in optimizer.blocks),
            method=_method(optimizer),
            parts=optimizer.parts,
            probes=optimizer.estimator.probes,
            seed=optimizer.seed,
            weight_decay=float(optimizer.param_groups[0]["weight_decay"]),
            decays=_decays(optimizer),
            task=task,
            data=data,
            versions=_versions(),
            extra=extra,
        )

    def replace(self, **changes: Any) -> Self:
        """This header with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def encode(self) -> bytes:
        """This header as JSON; equal headers give equal bytes."""
        try:
            text = json.dumps(
                dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
            )
            return text.encode()
        except (TypeError, ValueError) as error:
            raise ZeroBlockError(f"a journal's header holds plain, finite values only ({error})") from error

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read a header from JSON: every field must be present, known and of its type."""
        try:
            fields = json.loads(data, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ZeroBlockError(f"the header is not JSON ({error})") from error
        if not isinstance(fields, dict):
            raise ZeroBlockError("the header is not an object")
        if _is_deep(fields):
            raise ZeroBlockError(f"the header nests lists and objects more than {MAX_NESTING} deep")
        hints = typing.get_type_hints(cls)
        if set(fields) != set(hints):
            odd = min(set(fields) ^ set(hints))
            raise ZeroBlockError(f"the header {'has an unknown' if odd in fields else 'lacks the'} field {odd!r}")
        for name, hint in hints.items():
            if not spec.fits(fields[name], hint):
                raise ZeroBlockError(f"the header's {name} cannot be {shown(repr(fields[name]))}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
        }
        ranges = {
            "probes": 1 <= values["probes"] <= MAX_PROBES,
            "seed": 0 <= values["seed"] < 1 << 64,
            "steps": values["steps"] is None or 0 <= values["steps"] < MAX_STEPS,
            "weight_decay": 0 <= values["weight_decay"] <= MAX_SINGLE,
            "dtype": values["dtype"] in DTYPES,
            "method": _is_method(values["method"]),
        }
        for name, right in ranges.items():
            if not right:
                raise ZeroBlockError(f"the header's {name} cannot be {shown(repr(values[name]))}")
        return cls(**values)

    def check(self, optimizer: ZeroOrder, *, force: bool = False) -> None:
        """Refuse an optimizer that would not repeat this run, with the reason.

        Args:
            optimizer: the optimizer, at step 0 on the base weights.
            force: accept other base weights and a newer version of the package.
        """
        if optimizer.steps:
            raise ZeroBlockError(f"check a journal before its replay; the optimizer is at step {optimizer.steps}")
        self.check_versions(force=force)
        self._check_method(optimizer)
        self.check_base(optimizer.model, force=force)

    def _check_method(self, optimizer: ZeroOrder) -> None:
        mine = _method(optimizer)
        parts = both_parts(self.parts, optimizer.parts)
        pairs: list[tuple[str, Any, Any]] = [
            ("seed", self.seed, optimizer.seed),
            ("weight decay", self.weight_decay, float(optimizer.param_groups[0]["weight_decay"])),
            ("probes", self.probes, optimizer.estimator.probes),
            *(pair for pair in parts if pair[0] != "partition"),
            ("restore", self.method["restore"], mine["restore"]),
            ("decayed parameters", self.decays, _decays(optimizer)),
            ("number of blocks", len(self.blocks), len(optimizer.blocks)),
            *(("block", f"{a!r}", f"{b.name!r}") for a, b in zip(self.blocks, optimizer.blocks, strict=False)),
        ]
        for what, theirs, ours in pairs:
            if theirs != ours:
                raise ZeroBlockError(
                    f"the journal was written with {shown(what)} {shown(theirs)}, this optimizer has {ours}"
                )
        if self.method["partition"] != mine["partition"]:
            raise ZeroBlockError(
                f"the journal was written with partition {shown(self.parts.get('partition'))}, this optimizer has "
                f"{optimizer.parts['partition']}, whose blocks hold other parameters"
            )
        if self.method.get("sizes") != mine.get("sizes"):
            raise ZeroBlockError(
                "the sizes of LoRA's factors are not those of the journal's run: give the adapter the alpha and the "
                "scaling that it was trained with, on the same matrices"
            )
        frozen = {name for name, p in optimizer.model.named_parameters() if not p.requires_grad}
        if frozen != set(self.frozen):
            name = min(frozen ^ set(self.frozen))
            was, now = ("frozen", "trainable") if name in self.frozen else ("trainable", "frozen")
            raise ZeroBlockError(f"{name!r} was {was} when the journal was written and is {now} now")

    def check_versions(self, *, force: bool = False) -> None:
        """Refuse a journal with another version of noise or arithmetic, or of a newer zeroblock unless forced.

        A journal of an older zeroblock is accepted if its noise and its arithmetic have today's versions.
        """
        mine, theirs = _versions(), {"arithmetic": "1", **self.versions}  # 0.1 wrote no arithmetic version
        for kind in ("noise", "arithmetic"):
            version = theirs.get(kind, "")
            if version != mine[kind]:
                newer = version.isdecimal() and int(version) > int(mine[kind])
                wrote = shown(theirs.get("zeroblock"))
                advice = f"install a newer zeroblock, {wrote} or later" if newer else f"install zeroblock {wrote}"
                raise ZeroBlockError(
                    f"the journal was written with {kind} version {shown(version)}, this is {mine[kind]}; {advice}"
                )
        if not force and not _release(theirs.get("zeroblock", "")) <= _release(mine["zeroblock"]):
            raise ZeroBlockError(
                f"the journal was written by zeroblock {shown(theirs.get('zeroblock'))}, this is {mine['zeroblock']}; "
                "install a newer one, or take the risk with --force (in Python force=True)"
            )
        rule = self.method["rule"] or {}
        if theirs.get("torch") != mine["torch"] and rule.get("rule", rule) != {"name": "SGD"}:
            warnings.warn(
                f"the journal was written with torch {shown(theirs.get('torch'))}, this is {mine['torch']}: with a "
                "rule other than SGD the weights may differ in their last bits",
                ZeroBlockWarning,
                stacklevel=3,
            )

    def check_base(self, model: nn.Module, *, force: bool = False) -> None:
        """Refuse a model with other parameters, or with other weights unless forced."""
        self.check_order(model)
        named = f" ({shown(self.model)})" if self.model else ""
        fingerprint = identity.fingerprint(model)
        if fingerprint != self.fingerprint and not force:
            dtypes = ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters()}))
            other = f", and they are {dtypes} where the run had {self.dtype}" if dtypes != self.dtype else ""
            raise ZeroBlockError(
                f"the journal starts from other base weights{named}: their fingerprint is {shown(self.fingerprint)}, "
                f"these have {fingerprint}{other}; give the model it was trained from{_rounded(self.extra)}"
            )

    def check_order(self, model: nn.Module) -> None:
        """Refuse a model with other parameters; the model may be on the meta device."""
        if identity.order(model) != self.order:
            named = f" ({shown(self.model)})" if self.model else ""
            advice = _lacking(self.extra, model)
            raise ZeroBlockError(
                f"this model's parameters are not those of the journal's base{named}: "
                f"their names, shapes or order differ, so its noise would fall on other weights{advice}"
            )

    def turns(self) -> Turns | None:
        """The turns of this run, from which every step's blocks follow; None if zeroblock has no such schedule."""
        try:
            schedule = spec.build("schedule", self.method["schedule"])
        except ZeroBlockError:
            return None
        return Turns(schedule, len(self.blocks), self.method["interval"], self.seed, self.method.get("clip"))

    def rebuild(self, model: nn.Module, *, force: bool = False) -> ZeroOrder:
        """The optimizer of this run at step 0, from the file alone.

        Args:
            model: a model with the base weights; its ``requires_grad`` flags are set to those of the run.
            force: accept other base weights and a newer version of the package.
        """
        self.check_versions(force=force)
        self.check_base(model, force=force)
        parts = {kind: spec.build(kind, self.method[kind]) for kind in PARTS}
        frozen, decayed = set(self.frozen), set(self.decays)
        for name, param in model.named_parameters():
            param.requires_grad_(name not in frozen)
        optimizer = ZeroOrder(
            model,
            0.0,  # every record brings its own
            partition=spec.build_partition(self.method["partition"]),
            interval=self.method["interval"],
            seed=self.seed,
            weight_decay=self.weight_decay,
            fold=self.method.get("fold", 1),
            clip=self.method.get("clip"),
            decays=is_matrix if self.decays == MATRICES else lambda name, param: name in decayed,
            distribution=Distribution[self.method["distribution"].upper()],
            rounding=Rounding[self.method["rounding"].upper()],
            restore=self.method["restore"],
            **parts,
        )
        self._check_method(optimizer)
        return optimizer


def _lacking(extra: dict[str, Any], model: nn.Module) -> str:
    """Advice for a model that lacks the adapter of the run."""
    if "adapter" not in extra or hasattr(model, "peft_config"):
        return ""
    return "; the run trained an adapter: first model = zeroblock.adapter.recorded(header.extra).attach(model)"


def _rounded(extra: dict[str, Any]) -> str:
    """Advice for a prefix whose start was computed on another machine."""
    made = extra.get("adapter")
    if not isinstance(made, dict) or made.get("kind") != "prefix":
        return ""
    return ", or accept with --force (force=True) that the prefix began with other last bits on another machine"


def _method(optimizer: ZeroOrder) -> dict[str, Any]:
    return {
        "partition": spec.describe_partition(optimizer.partition, optimizer.blocks),
        **{kind: spec.describe(kind, getattr(optimizer, kind)) for kind in PARTS},
        "interval": optimizer.interval,
        "distribution": optimizer.distribution.name.lower(),
        "rounding": optimizer.rounding.name.lower(),
        "restore": optimizer.restore,
        **({} if optimizer.fold == 1 else {"fold": optimizer.fold}),
        **({} if optimizer.clip is None else {"clip": optimizer.clip}),
        **({} if not optimizer.weights.sizes else {"sizes": identity.sizes(optimizer.weights)}),
    }


def _decays(optimizer: ZeroOrder) -> str | tuple[str, ...]:
    if optimizer.decays is is_matrix:
        return MATRICES
    return tuple(name for name, param in optimizer.params.items() if optimizer.decays(name, param))


def _is_method(data: dict[str, Any]) -> bool:
    needed = {"partition", *PARTS, "interval", "distribution", "rounding", "restore"}
    return (
        set(data) - {"clip", "fold", "sizes"} == needed
        and spec.fits(data.get("clip", 1.0), float)
        and spec.fits(data["interval"], int)
        and spec.fits(data.get("fold", 1), int)
        and spec.fits(data.get("sizes", ""), str)
        and all(data[part] is None or isinstance(data[part], dict) for part in PARTS)
        and data["distribution"] in [d.name.lower() for d in Distribution]
        and data["rounding"] in [r.name.lower() for r in Rounding]
        and data["restore"] in ("copy", "subtract")
    )


def _is_deep(value: Any) -> bool:
    """Whether plain data is nested deeper than a header may be; checked level by level, without recursion."""
    level = [value]
    for _ in range(MAX_NESTING + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")


def _versions() -> dict[str, str]:
    return {
        "zeroblock": __version__,
        "torch": torch.__version__,
        "noise": str(NOISE_VERSION),
        "arithmetic": str(ARITHMETIC_VERSION),
    }


def _release(version: str) -> tuple[float, ...]:
    """The major and minor numbers, which decide; infinite if the text has none."""
    match = re.match(r"(\d{1,9})\.(\d{1,9})", version)
    return (float(match[1]), float(match[2])) if match else (math.inf,)
