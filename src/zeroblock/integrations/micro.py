"""The micro-batches of a step: how a Trainer's batches become the objective of a zeroth-order step."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from ..engine import Engine
from ..engine.bridge import IGNORED, BridgeError
from ..engine.trial import tolerance
from ..errors import ZeroBlockError, ZeroBlockWarning
from ..step import Closure, evaluation, value_of

LANGUAGE_LOSS = "ForCausalLMLoss"
"""The function in transformers that the engine's loss equals: the mean over the scored tokens."""
PLAIN_LOSSES = {("transformers", "Trainer.compute_loss"), ("trl", "SFTTrainer.compute_loss")}
"""Packages and names of the methods that do no more than ask the model for that loss."""


class Micro(NamedTuple):
    """One micro-batch, on the device.

    Args:
        model: as the Trainer wraps it.
        inputs: the batch.
        items: the number of scored tokens in all micro-batches of the step, if the Trainer counts them.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    items: Any


class MicroBatches:
    """Collects micro-batches until their step.

    Args:
        trainer: its ``compute_loss`` defines the loss.
        packed: measure on packed rows where that gives the same loss.
    """

    def __init__(self, trainer: Any, packed: bool) -> None:
        self.trainer, self.packed = trainer, packed
        self.waiting: list[Micro] = []
        self._engine: Engine | None = None
        self._told = False

    def objective(self) -> Closure | list[Closure]:
        """The objective of the step that the waiting micro-batches make up."""
        step, self.waiting = self.waiting, []
        if self.packed:
            try:
                return self._packed_objectives(step)
            except BridgeError as error:
                self._tell(str(error))
        return functools.partial(self._loss, step)

    def _packed_objectives(self, step: list[Micro]) -> list[Closure]:
        if self._engine is None:
            self._engine = self._tried(step[0])
        engine = self._engine
        scored = [one for one in step if _carries_loss(one.inputs)]
        return [engine.objective_from(one.inputs) for one in scored or step]

    def _tried(self, first: Micro) -> Engine:
        """The engine, if its loss is this trainer's; otherwise packing is off from here on."""
        self.packed = False  # until all is well
        reason = _own_loss(self.trainer, first.model)
        if reason:
            raise BridgeError(reason)
        with warnings.catch_warnings(), self.trainer.accelerator.autocast():
            warnings.simplefilter("ignore", ZeroBlockWarning)  # this trial's own reason is told
            try:
                engine = Engine(self.trainer.model)
            except ZeroBlockError as error:
                raise BridgeError(str(error)) from error
            if not engine.packed:
                raise BridgeError(engine.reason)
            difference_allowed = tolerance(engine)
        self.packed = True  # a batch that the bridge refuses says nothing about the next
        objective = engine.objective_from(first.inputs)
        with torch.no_grad(), evaluation(self.trainer.model):
            packed, plain = float(objective()), self._loss([first._replace(items=None)], alone=True)
        if not abs(packed - plain) <= difference_allowed * max(1.0, abs(plain)):
            self.packed = False
            raise BridgeError(f"the loss is {plain:.6g} by compute_loss and {packed:.6g} on packed rows")
        return engine

    def _loss(self, step: list[Micro], alone: bool = False) -> float:
        """The loss of a step by the trainer's own ``compute_loss``, summed as the Trainer sums it."""
        trainer, total = self.trainer, 0.0
        for one in step:
            with _metrics_of_training(trainer), trainer.compute_loss_context_manager():
                total += value_of(
                    functools.partial(trainer.compute_loss, one.model, dict(one.inputs), num_items_in_batch=one.items)
                )
        return total if alone or self._summed(step) else total / len(step)

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
                f"steps are measured by compute_loss, without packed rows: {reason}. packed=False says that this "
                "is meant",
                ZeroBlockWarning,
                stacklevel=2,
            )


def _carries_loss(inputs: Mapping[str, Any]) -> bool:
    labels = inputs.get("labels")
    return labels is None or bool((torch.as_tensor(labels)[..., 1:] != IGNORED).any())


def _own_loss(trainer: Any, model: nn.Module) -> str:
    """Why a trainer's loss may differ from the mean over scored tokens; empty where it does not."""
    compute = trainer.compute_loss
    if (compute.__module__.partition(".")[0], compute.__qualname__) not in PLAIN_LOSSES:
        return f"{compute.__qualname__} is a loss of its own"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func is a loss of its own"
    if trainer.label_smoother is not None:
        return "label_smoothing_factor is a loss of its own"
    if getattr(trainer.args, "loss_type", "nll") != "nll" or getattr(trainer, "aux_loss_enabled", False):
        return "loss_type and auxiliary losses of experts are losses of their own"
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "output_router_logits", False):
        return f"{type(base).__name__} is no plain causal language model"
    loss = getattr(base, "loss_function", None)
    if getattr(loss, "__name__", "") != LANGUAGE_LOSS:
        return f"the loss of {type(base).__name__} is not that of a causal language model"
    return ""


@contextlib.contextmanager
def _metrics_of_training(trainer: Any) -> Iterator[None]:
    """TRL files metrics by the model's mode, which is evaluation while a step is measured; they belong to training."""
    metrics = getattr(trainer, "_metrics", None)
    if not isinstance(metrics, dict) or not {"train", "eval"} <= metrics.keys():
        yield
        return
    trainer._metrics = {**metrics, "eval": metrics["train"]}
    try:
        yield
    finally:
        trainer._metrics = metrics
