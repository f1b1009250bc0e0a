"""The micro-batches of a step: how a Trainer's batches become the objective of a zeroth-order step."""

from __future__ import annotations

import collections
import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..closure import Closure, evaluation, value_of
from ..engine import Engine
from ..engine.bridge import IGNORED, BridgeError
from ..engine.trial import tolerance
from ..errors import ZeroBlockError, ZeroBlockWarning

LANGUAGE_LOSS = "ForCausalLMLoss"
"""The function in transformers that the engine's loss equals: the mean over the scored tokens."""
PLAIN_LOSSES = {("transformers", "Trainer.compute_loss"), ("trl", "SFTTrainer.compute_loss")}
"""Packages and names of the methods that only ask the model for that loss."""


class Micro(NamedTuple):
    """One micro-batch.

    Args:
        model: the Trainer's model, without a wrapper for several processes.
        inputs: the batch, on the host.
        items: the number of scored tokens in all micro-batches of the step, if the Trainer counts them.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    items: Any


class MicroBatches:
    """Collects micro-batches until their step.

    Args:
        trainer: the trainer; its ``compute_loss`` defines the loss.
        packed: see :class:`ZeroOrderMixin`.
    """

    def __init__(self, trainer: Any, packed: bool | None) -> None:
        self.trainer, self.trusted, self.packed = trainer, packed, packed is not False
        self.waiting: list[Micro] = []
        self._engine: Engine | None = None
        self._tolerance, self._checked = 0.0, False
        self._told = False

    def add(self, one: Micro) -> None:
        """Queue a micro-batch for its step."""
        self.waiting.append(one)
        _count_tokens(self.trainer, one.inputs)

    def objective(self) -> Closure | list[Closure]:
        """The objective of the step that the waiting micro-batches make up."""
        step, self.waiting = self.waiting, []
        if self.packed:
            first = not self._checked
            try:
                objectives, reason = self._packed_objectives(step), ""
            except BridgeError as error:
                objectives, reason = [], str(error)
            reason = self._shared(reason, first)
            if not reason:
                return objectives
            self._tell(reason)
        return functools.partial(self._loss, step)

    def _shared(self, reason: str, first: bool) -> str:
        """The reason why a step cannot be packed, the same on all ranks, which have to measure in the same way.

        Args:
            reason: the reason on this rank; empty if there is none.
            first: whether the ranks have not compared their reasons yet.
        """
        team = self.trainer.zero_order.team
        if team is None:
            return reason
        if first:
            reason = next(filter(None, team.channel.exchange(reason)), "")
            self.packed = not reason
        elif reason:
            raise ZeroBlockError(f"a batch of this rank cannot be packed, and others can: give packed=False ({reason})")
        return reason

    def _packed_objectives(self, step: list[Micro]) -> list[Closure]:
        if self.trainer.args.world_size > 1 and not self.trainer.args.average_tokens_across_devices:
            raise BridgeError(
                "ranks are weighted equally without average_tokens_across_devices, whatever their token counts"
            )
        if self._engine is None:
            self._engine = self._tried(step[0].model)
        if len(step) > 1 and not self._summed(step):
            raise BridgeError("micro-batches are weighted equally in this loss, whatever their token counts")
        step = [one for one in step if _carries_loss(one.inputs)] or step
        objectives: list[Closure] = [self._engine.objective_from(one.inputs) for one in step]
        if not self._checked:
            self._check(step[0], objectives[0])
            self._checked = True
        return objectives

    def _tried(self, model: nn.Module) -> Engine:
        """The engine, if it can pack the model and the loss is a language model's; otherwise packing is turned off."""
        self.packed = False
        reason = _own_loss(self.trainer, model, bool(self.trusted))
        if reason:
            raise BridgeError(reason)
        with warnings.catch_warnings(), self.trainer.accelerator.autocast():
            warnings.simplefilter("ignore", ZeroBlockWarning)  # the reason is reported below
            try:
                engine = Engine(self.trainer.model)
            except ZeroBlockError as error:
                raise BridgeError(str(error)) from error
            self._tolerance = tolerance(engine)
        if not engine.packed:
            raise BridgeError(engine.reason)
        self.packed = True
        return engine

    def _check(self, one: Micro, objective: Closure) -> None:
        """Compare the loss on packed rows with the trainer's own, once: a model may add other terms to it."""
        with torch.no_grad(), evaluation(self.trainer.model), _metrics_to(self.trainer, None):
            packed, plain = value_of(objective), self._value(one._replace(items=None))
        if not abs(packed - plain) <= self._tolerance * max(1.0, abs(plain)):
            self.packed = False
            raise BridgeError(f"the loss is {plain:.6g} by compute_loss and {packed:.6g} on packed rows")

    def _loss(self, step: list[Micro]) -> float:
        """The loss of a step by the trainer's own ``compute_loss``, summed as the Trainer sums it."""
        with _metrics_to(self.trainer, "train"):
            total = sum(map(self._value, step))
        return total if self._summed(step) else total / len(step)

    def _value(self, one: Micro) -> float:
        compute = self.trainer.compute_loss
        inputs = self.trainer._prepare_inputs(dict(one.inputs))  # a copy, because some trainers change it
        with self.trainer.compute_loss_context_manager():
            return value_of(functools.partial(compute, one.model, inputs, num_items_in_batch=one.items))

    def _summed(self, step: list[Micro]) -> bool:
        """Whether the losses of micro-batches are shares of the step's loss, and not means of their own."""
        trainer = self.trainer
        said = getattr(trainer, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        counted = trainer.model_accepts_loss_kwargs and step[0].items is not None
        return bool(counted or trainer.compute_loss_func is not None)

    def _tell(self, reason: str) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"steps are measured by compute_loss, without packed rows: {reason}. Give packed=False if this "
                "is intended",
                ZeroBlockWarning,
                stacklevel=2,
            )


def _carries_loss(inputs: Mapping[str, Any]) -> bool:
    labels = inputs.get("labels")
    return labels is None or bool((torch.as_tensor(labels)[..., 1:] != IGNORED).any())


def _own_loss(trainer: Any, model: nn.Module, trusted: bool) -> str:
    """The reason why a trainer's loss may differ from the mean over scored tokens; empty if there is none."""
    compute = trainer.compute_loss
    name = getattr(compute, "__qualname__", type(compute).__name__)
    if not trusted and (str(compute.__module__).partition(".")[0], name) not in PLAIN_LOSSES:
        return f"{name} defines a different loss (if it is the mean over scored tokens, give packed=True)"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func defines a different loss"
    if trainer.label_smoother is not None:
        return "label_smoothing_factor defines a different loss"
    if getattr(trainer.args, "loss_type", "nll") != "nll" or getattr(trainer, "aux_loss_enabled", False):
        return "loss_type or an auxiliary loss of experts defines a different loss"
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    config = getattr(base, "config", None)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "output_router_logits", False):
        return f"{type(base).__name__} is not a plain causal language model"
    loss = getattr(base, "loss_function", None)
    if getattr(loss, "__name__", "") != LANGUAGE_LOSS:
        return f"the loss of {type(base).__name__} is not that of a causal language model"
    return ""


@contextlib.contextmanager
def _metrics_to(trainer: Any, mode: str | None) -> Iterator[None]:
    """A context in which the metrics that TRL collects in ``compute_loss`` count for a mode, or are dropped.

    TRL follows the mode of the model, which is evaluation while a step is measured.
    """
    metrics = getattr(trainer, "_metrics", None)
    if not isinstance(metrics, dict) or not {"train", "eval"} <= metrics.keys():
        yield
        return
    target = collections.defaultdict(list) if mode is None else metrics[mode]
    trainer._metrics = dict.fromkeys(metrics, target)
    try:
        yield
    finally:
        trainer._metrics = metrics


def _count_tokens(trainer: Any, inputs: Mapping[str, Any]) -> None:
    """Count training tokens for TRL, whose ``compute_loss`` does not while the model is in evaluation mode."""
    mask, metrics = inputs.get("attention_mask"), getattr(trainer, "_metrics", None)
    if mask is not None and isinstance(metrics, dict) and hasattr(trainer, "_total_train_tokens"):
        trainer._total_train_tokens += int(mask.sum())
        metrics["train"]["num_tokens"] = [trainer._total_train_tokens]
