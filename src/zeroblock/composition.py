"""Compositions of parts: refuse those that cannot work, and describe them in words."""

from __future__ import annotations

import functools
import math
import operator
import warnings
import zlib
from typing import Any, Generic, SupportsIndex, TypeVar, overload

import torch
from torch import nn

from . import __version__
from .budget import COARSE, EPS, UNKNOWN_VISITS, Budget
from .errors import ZeroBlockError, ZeroBlockWarning
from .estimator import Estimator
from .noise import VERSION
from .precision import SMALL_EPS
from .quantise import elements
from .ranks.wrapper import unwrapped
from .rule import Rule
from .subspace import Subspace
from .weights import Weights

T = TypeVar("T")


class Fixed(Generic[T]):
    """An attribute that is set when its object is built, and never again.

    >>> class Optimizer:
    ...     seed = Fixed[int]()
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Fixed[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> Fixed[T] | T:
        if instance is None:
            return self
        try:
            value: T = vars(instance)[self.name]
        except KeyError:
            raise AttributeError(f"{owner.__name__} has no attribute {self.name!r} yet") from None
        return value

    def __set__(self, instance: object, value: T) -> None:
        if self.name in vars(instance):
            raise ZeroBlockError(
                f"{self.name} is fixed when the optimizer is built, because its state and its journal depend on it: "
                "build another optimizer, which continues from the current weights"
            )
        vars(instance)[self.name] = value


def check_model(model: object) -> nn.Module:
    """Return the model without a wrapper for several processes; refuse parameters, which other optimizers take."""
    if not isinstance(model, nn.Module):
        raise ZeroBlockError(
            f"ZeroOrder takes the model itself and not its parameters, got {type(model).__name__}: write "
            "zb.ZeroOrder(model, lr=...) and step(closure); Hugging Face's Trainer can do neither, so use "
            "zb.integrations.ZeroOrderTrainer instead"
        )
    return unwrapped(model)


def check_numbers(lr: float, weight_decay: float, clip: float | None) -> None:
    """Refuse numbers that no optimizer can use."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if isinstance(value, str):
            leave = "; without lr zeroblock chooses the size of steps" if name == "lr" else ""
            raise ZeroBlockError(f"{name} must be a number, got {value!r}{leave}")
        if not (value >= 0 and math.isfinite(value)):
            raise ZeroBlockError(f"{name} must be finite and not negative, got {value}")
    if clip is not None and not (clip > 0 and math.isfinite(clip)):
        raise ZeroBlockError(f"clip must be finite and positive, or None, got {clip}")


def count(name: str, value: SupportsIndex) -> int:
    """Check a number of steps, and convert it from any kind of integer."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise ZeroBlockError(f"{name} must be a whole number and at least 1, got {value!r}")
    return count


def check(subspace: Subspace, restore: str, interval: int, fold: int, weight_decay: float) -> None:
    """Refuse combinations that cannot work, with the reason."""
    if restore not in ("copy", "subtract"):
        raise ZeroBlockError(f"restore must be 'copy' or 'subtract', got {restore!r}")
    if restore == "subtract" and not subspace.retraces:
        raise ZeroBlockError(
            f"{subspace} cannot be restored by subtraction, which would not undo the step it made: "
            "leave restore='subtract' (or as_published) out"
        )
    if fold == 1:
        return
    if not subspace.folds:
        raise ZeroBlockError(
            f"fold is for low-rank steps (lozo, lozo_m, LowRank), whose sum is small: with {subspace} leave it out"
        )
    if interval % fold:
        divisor = next(d for d in range(min(fold, interval), 0, -1) if interval % d == 0)
        raise ZeroBlockError(
            f"fold {fold} does not divide the interval of {interval} steps, in which the basis stays the same: give "
            f"fold {divisor}, or interval {-(-interval // fold) * fold}"
        )
    if restore == "subtract":
        raise ZeroBlockError("restore='subtract' moves the weights, which are not θ between folds: leave fold out")
    if weight_decay:
        raise ZeroBlockError("weight_decay writes every weight at every step: leave out fold or weight_decay")


def check_anchor(estimator: Estimator, restore: str, fold: int) -> None:
    """Refuse an anchor if a copy of the weights could not serve as one."""
    if estimator.anchors and restore == "subtract":
        raise ZeroBlockError("an anchor is measured on copies: leave restore='subtract' out")
    if estimator.anchors and fold > 1:
        raise ZeroBlockError("an anchor is a copy of the weights, which are not θ between folds: leave fold out")


def check_falling(lr: float, shown: float, step: int, length: int) -> None:
    """Refuse a learning rate that was set from outside while it falls by itself; warn at the first step past the end.

    Args:
        lr: the learning rate as it is.
        shown: the one that the optimizer has set.
        step: the number of steps taken.
        length: the number of steps over which it falls.
    """
    if lr != shown:
        raise ZeroBlockError("with steps= the learning rate falls by itself: leave steps out to set or schedule lr")
    if step == length:
        warnings.warn(
            f"the {length} steps that the optimizer was built for (steps={length}) are taken, and its learning rate is "
            "zero: further steps move nothing; build an optimizer with more steps to train further",
            ZeroBlockWarning,
            stacklevel=3,
        )


def check_storage(weights: Weights, rule: Rule, estimator: Estimator) -> None:
    """Refuse parts that need whole floating-point tensors, if a process holds shards of them, or integers."""
    if not (weights.sharded or weights.quantised):
        return
    stored = "are integers here" if weights.quantised else "are spread over several processes here"
    if not rule.divisible:
        name = type(getattr(rule, "rule", rule)).__name__  # of the rule inside Normalized
        raise ZeroBlockError(
            f"the rule {name} needs whole tensors of numbers, and some {stored}: take another rule, or keep the "
            "weights as they are loaded"
        )
    if estimator.anchors:
        raise ZeroBlockError(f"an anchor is a copy of the numbers in tensors, and some {stored}: take another method")


ADAPTED = 10
"""A model with at least this many weights per trainable one counts as a model with an adapter."""


def of_other_length(length: int | None, state_dict: dict[str, Any]) -> bool:
    """Whether a state is of a run of another length, whose learning rate would spend another budget; warn if it is."""
    other = state_dict.get("length", length)
    if other == length:
        return False
    mine, theirs = (f"steps={n}" if n else "no steps=" for n in (length, other))
    warnings.warn(
        f"the state was saved with {theirs}, and this optimizer has {mine}: its learning rate is its own, and not that "
        "of the state; weights that have moved already will move by more than the budget of one run",
        ZeroBlockWarning,
        stacklevel=4,
    )
    return True


def say_units(weights: Weights, estimator: Estimator, allowed: Budget) -> None:
    """Warn of what does not fit steps in units of the weights.

    Args:
        weights: the weights to train.
        estimator: measures at distances in units of the weights.
        allowed: the budget of the run.
    """
    say_near(weights, estimator)
    say_coarse(weights, allowed)
    say_still(weights, allowed)


def say_near(weights: Weights, estimator: Estimator) -> None:
    """Warn of points so near to θ that losses in bf16 do not resolve their difference."""
    eps = getattr(estimator, "eps", math.inf)
    whole = len(weights.blocks) == 1  # moves all weights at once, so that losses differ by more
    if eps < SMALL_EPS and not whole and any(param.dtype == torch.bfloat16 for param in weights.params.values()):
        name = type(estimator).__name__
        warnings.warn(
            f"without a learning rate eps is in units of the weights: {name}(eps={eps:g}) measures at "
            f"{100 * eps:.2g}% of their size, where losses in bf16 are mostly rounding: give {name}(eps={EPS:g})",
            ZeroBlockWarning,
            stacklevel=5,
        )


def say_still(weights: Weights, allowed: Budget) -> None:
    """Warn that adapter matrices which start at zero hardly move in steps that are a share of their size.

    LoRA's are exempt if the matrix next to them can be read: their size follows from it.
    """
    trainable = sum(map(elements, weights.params.values()))
    if weights.sharded or ADAPTED * trainable > sum(map(elements, weights.model.parameters())):
        return
    unknown = {name: p for name, p in weights.params.items() if p.dim() > 1 and name not in weights.sizes}
    zero = next((name for name, p in unknown.items() if not weights.shelf.value(p).any()), None)
    if zero is not None:
        warnings.warn(
            f"without a learning rate a run moves every tensor by some {allowed.displacement:.0%} of its size, but "
            f"{zero!r} starts at zero and its intended size is unknown, so the adapter learns little: "
            "give a learning rate and an eps, such as 1e-2 and 1e-2 on a small model, or 1e-4 and 1e-2 on one of "
            "billions of weights",
            ZeroBlockWarning,
            stacklevel=5,
        )


def say_coarse(weights: Weights, allowed: Budget) -> None:
    """Warn that a grid of integers is too coarse for the steps that a budget allows."""
    spacing = weights.spacing if weights.quantised else 0.0
    walk = allowed.walk(spacing)
    if walk > COARSE:
        warnings.warn(
            f"without a learning rate a run is meant to move the weights by {allowed.displacement:.0%} of their size, "
            f"but these integers are {spacing:.0%} of it apart, and rounding to them moves the weights by some "
            f"{walk:.0%} in {UNKNOWN_VISITS:,} steps on a block: give a small learning rate, or train the scales "
            "(int4:scales) or an adapter (--lora)",
            ZeroBlockWarning,
            stacklevel=5,
        )


def check_alone(weights: Weights) -> None:
    """Refuse several ranks with streamed weights: each would need a copy of all weights on its host."""
    if weights.shelf.streams:
        raise ZeroBlockError(
            "streamed weights are for one process, and several take the steps together here: start one without "
            "torchrun (parallel=None in Python), or leave out offload, and shard the model with FSDP2"
        )


def begin_as(optimizer: Any, words: str | None) -> None:
    """Give an optimizer the units of the journal or state that it continues, unless the user chose its units.

    Args:
        optimizer: an optimizer on the weights that the run began with, or one about to load a state.
        words: the subspace, as written in the journal or the state.
    """
    begun = as_begun(optimizer, words)
    if begun != optimizer.subspace:
        vars(optimizer)["subspace"] = begun  # fixed for all other code
        optimizer.weights.begin_in(begun)
        optimizer.enter(optimizer.turn)


def as_begun(optimizer: Any, words: str | None) -> Subspace:
    """The subspace of an optimizer in the units of a run; unchanged if the user chose its units."""
    subspace: Subspace = optimizer.subspace
    return subspace.in_units(words) if optimizer.chose_units and words is not None else subspace


def check_state(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Refuse a state that another optimizer saved."""
    if "parts" not in state_dict:
        raise ZeroBlockError("this state is not one of ZeroOrder.state_dict()")
    begun = as_begun(optimizer, state_dict["parts"].get("subspace"))
    for what, mine, theirs in [
        ("seed", optimizer.seed, state_dict["seed"]),
        ("number of blocks", len(optimizer.blocks), len(state_dict["scores"])),
        ("restore", optimizer.restore, state_dict.get("restore", optimizer.restore)),
        *both_parts({**optimizer.parts, "subspace": in_words(begun)}, state_dict["parts"]),
    ]:
        if mine != theirs:
            raise ZeroBlockError(f"the state was saved with {what} {theirs}, this optimizer has {mine}")
    for block, saved in zip(optimizer.blocks, state_dict.get("blocks", ()), strict=False):
        if (block.name, *block.params) != tuple(saved):
            raise ZeroBlockError(f"the state's block {saved[0]!r} is not this optimizer's: it has other parameters")
    if state_dict.get("shards", {}) != optimizer.weights.layout():
        raise ZeroBlockError(
            "the state was saved with other shards: every process loads the state that it saved, with the same number "
            "of processes and the same placements; with others, continue from the journal, which has no shards"
        )
    if set(state_dict["thresholds"]) != set(optimizer.params):
        raise ZeroBlockError("the state's parameters are not this model's trainable parameters")
    unknown_names = set(state_dict["state"]) - set(optimizer.params)
    if unknown_names:
        raise ZeroBlockError(f"the state has parameters that this model lacks, for example {min(unknown_names)!r}")


def partition_name(partition: object) -> str:
    """A partition in words: a function's name with its options, or "explicit" for a list of blocks."""
    if isinstance(partition, functools.partial):
        options = ", ".join(f"{k}={v}" for k, v in partition.keywords.items())
        return f"{partition.func.__name__}({options})"
    return getattr(partition, "__name__", "explicit")


def in_words(part: object) -> str:
    """A part in words that are the same in every process."""
    return type(part).__qualname__ if type(part).__repr__ is object.__repr__ else repr(part)


def parts_of(optimizer: Any) -> dict[str, str]:
    """The composition of an optimizer in words: every value that its weights depend on."""
    return {
        "partition": partition_name(optimizer.partition),
        **{kind: in_words(getattr(optimizer, kind)) for kind in ("schedule", "subspace", "estimator", "rule")},
        "interval": repr(optimizer.interval),
        **({} if optimizer.fold == 1 else {"fold": repr(optimizer.fold)}),
        **({} if optimizer.clip is None else {"clip": repr(optimizer.clip)}),
        "distribution": optimizer.distribution.name.lower(),
        "rounding": optimizer.rounding.name.lower(),
        "noise": f"version {VERSION}",
    }


def facts_of(optimizer: Any) -> dict[str, object]:
    """Everything besides the weights that must be equal in processes which take steps together, by name."""
    blocks = repr([(block.name, *block.params) for block in optimizer.blocks])
    return {
        "version of zeroblock": __version__,
        "version of torch": torch.__version__,
        "layout": str(optimizer.team.ranks),
        "seed": optimizer.seed,
        **optimizer.parts,
        "blocks": f"{len(optimizer.blocks)} blocks ({zlib.crc32(blocks.encode()):08x})",
        "restore": optimizer.restore,
        "weight_decay": optimizer.weight_decay,
        "lr": optimizer.lr,
        "number of steps taken": optimizer.steps,
    }


def both_parts(mine: dict[str, str], theirs: dict[str, str]) -> list[tuple[str, str | None, str | None]]:
    """Every part that either composition has: its name, and its words in both."""
    return [(part, mine.get(part), theirs.get(part)) for part in {**mine, **theirs}]
