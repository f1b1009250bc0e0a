"""The parts of an optimizer as plain data, and back, by a table of known names: nothing from a file is ever run.

A part is ``{"name": "Adam", "betas": [0.9, 0.999], "eps": 1e-08, "reset": true}``.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Sequence
from typing import Any

from .. import block as blocks_of
from ..block import Block, Partition
from ..errors import ZeroBlockError, shown, unknown
from ..estimator import ESTIMATORS
from ..registry import Registry
from ..rule import RULES, Rule
from ..schedule import SCHEDULES, Schedule
from ..subspace import SUBSPACES, Subspace

KNOWN: dict[str, Registry] = {
    "schedule": SCHEDULES,
    "subspace": SUBSPACES,
    "estimator": ESTIMATORS,
    "rule": RULES,
}
PARTS: dict[Any, str] = {Schedule: "schedule", Subspace: "subspace", Rule: "rule"}
"""The kinds of parts that another part may hold, by protocol or base class: Adaptive holds a schedule."""
MAX_DEPTH = 4
"""The deepest nesting of parts within parts."""

Spec = dict[str, Any]


def describe(kind: str, part: object) -> Spec | None:
    """A part as data; None for one that is not zeroblock's own, which a file cannot rebuild.

    A field that was added to its part later is left out if it has its default, as in journals from before.
    """
    if KNOWN[kind].classes().get(type(part).__name__) is not type(part):
        return None
    data: Spec = {"name": type(part).__name__}
    hints = typing.get_type_hints(type(part))
    for field in dataclasses.fields(part):  # type: ignore[arg-type]
        value = getattr(part, field.name)
        if "later" in field.metadata and value == field.default:
            continue
        if dataclasses.is_dataclass(value):
            value = describe(PARTS[hints[field.name]], value)
            if value is None:
                return None
        data[field.name] = list(value) if isinstance(value, tuple) else value
    return data


def build(kind: str, spec: object, depth: int = MAX_DEPTH) -> Any:
    """The part that data describes; every field must be present, known and of its type.

    Only a field that was added later (``metadata["later"]``) may be missing, as in older journals: it gets its default.
    """
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise ZeroBlockError(
            f"the journal does not describe its {kind}, which is not one of zeroblock's own; "
            "build the optimizer in Python and give zb.replay the records"
        )
    name = spec["name"]
    classes = KNOWN[kind].classes()
    if name not in classes:
        raise unknown(kind, name[:100], classes)
    cls = classes[name]
    hints = typing.get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls)]
    later = {field.name: field.default for field in dataclasses.fields(cls) if "later" in field.metadata}
    spec = {**later, **spec}
    if set(spec) != {"name", *fields}:
        raise ZeroBlockError(
            f"{kind} {name} has the fields {', '.join(fields) or 'none'}, the journal says {shown(spec)}"
        )
    values = {}
    for field in fields:
        value = spec[field]
        if hints[field] in PARTS:
            if not depth:
                raise ZeroBlockError(f"{kind} {name}: parts are nested too deeply")
            values[field] = build(PARTS[hints[field]], value, depth - 1)
            continue
        if not fits(value, hints[field]):
            raise ZeroBlockError(f"{kind} {name}: {field} cannot be {shown(repr(value))}")
        values[field] = tuple(value) if isinstance(value, list) else value
    return cls(**values)


def fits(value: object, hint: Any) -> bool:
    """Whether a value read from JSON, where tuples are lists, is of an annotated type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is dict:
        return isinstance(value, dict) and all(fits(v, arguments[1]) for v in value.values())
    if origin is tuple:
        if not isinstance(value, list):
            return False
        each = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        return len(value) == len(each) and all(fits(v, a) for v, a in zip(value, each, strict=True))
    if arguments:  # int | None
        return any(fits(value, argument) for argument in arguments)
    if isinstance(value, bool):
        return hint is bool
    if hint is float and isinstance(value, int):
        return abs(value) < 1 << 1023  # larger numbers are no floats
    return isinstance(value, hint)


def describe_partition(partition: Partition | Sequence[Any], blocks: Sequence[Block]) -> Spec:
    """A partition by name if it has one, otherwise the blocks themselves."""
    cut: object = partition
    options: dict[str, Any] = {}
    if isinstance(cut, functools.partial) and not cut.args:
        options, cut = cut.keywords, cut.func
    name = getattr(cut, "__name__", "")
    if blocks_of.PARTITIONS.get(name) is cut and set(options) <= ({"k"} if name == "layers" else set()):
        return {"name": name, **options}
    return {"name": "explicit", "blocks": [[block.name, list(block.params)] for block in blocks]}


def build_partition(spec: object) -> Partition | list[Block]:
    """The partition that data describes."""
    match spec:
        case {"name": "layers", "k": int(k), **rest} if not rest and not isinstance(k, bool):
            return functools.partial(blocks_of.layers, k=k)
        case {"name": str(name), **rest} if not rest and name in blocks_of.PARTITIONS:
            return blocks_of.PARTITIONS[name]
        case {"name": "explicit", "blocks": list(blocks), **rest} if not rest and all(map(_is_block, blocks)):
            return [Block(name, tuple(params)) for name, params in blocks]
    raise ZeroBlockError(f"the journal's partition is not one that zeroblock knows: {shown(spec)}")


def _is_block(value: object) -> bool:
    match value:
        case [str(), list(params)]:
            return all(isinstance(param, str) for param in params)
    return False
