"""Training arguments that mean something else without a backward pass: adapted, refused, or reported as ineffective."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..errors import ZeroBlockError, ZeroBlockWarning
from ..optimizer import ZeroOrder
from ..precision import small_eps

LEARNING_RATE = 5e-5
"""The Trainer's default, which is meant for AdamW."""
MAX_GRAD_NORM = 1.0
"""The Trainer's default, which does not show that the user asked for it."""


def check(args: Any, model: nn.Module, optimizer_cls_and_kwargs: object) -> None:
    """Refuse arguments that cannot work, each with its fix; list those without effect in one warning.

    Args:
        args: ``TrainingArguments``; settings for backward passes only are changed in place.
        model: the Trainer's model.
        optimizer_cls_and_kwargs: the Trainer's argument of this name.
    """
    if optimizer_cls_and_kwargs is not None:
        raise ZeroBlockError(
            "optimizer_cls_and_kwargs builds an optimizer from parameters, and a zeroth-order one needs the model: "
            "leave it out, and give method='mezo_bcd' and method_kwargs={...}"
        )
    if args.n_gpu > 1:
        raise ZeroBlockError(
            f"the Trainer would spread the model over {args.n_gpu} GPUs by DataParallel, whose copies of the weights "
            "are never perturbed: choose one, CUDA_VISIBLE_DEVICES=0"
        )
    if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
        raise ZeroBlockError(
            "DeepSpeed and FSDP shard gradients and their state, and there are none here: leave both out"
        )
    if args.fp16:
        raise ZeroBlockError(
            "fp16=True scales gradients, and there are none here: leave it out, and load the model in 16 bits, "
            "from_pretrained(..., dtype=torch.bfloat16), or give bf16=True, which runs forward passes in bf16"
        )
    if getattr(args, "torch_compile", False):
        raise ZeroBlockError("torch_compile=True hides the weights from their perturbation: leave it out")
    if args.bf16 and next((p.dtype for p in model.parameters()), None) == torch.float32:
        warnings.warn(
            "bf16=True rounds the forward passes of fp32 weights to 8 bits, and a step measures small differences of "
            "losses: give bf16=False (TRL's configs default to True), or load the model in bf16",
            ZeroBlockWarning,
            stacklevel=4,
        )
    args.gradient_checkpointing = False  # no activation is kept for a backward pass
    idle = []
    if args.max_grad_norm not in (None, 0, MAX_GRAD_NORM):
        idle.append("max_grad_norm (clamp coefficients with method_kwargs={'clip': ...})")
    if getattr(args, "neftune_noise_alpha", None):
        idle.append("neftune_noise_alpha (steps are measured in evaluation mode)")
    if not str(getattr(args.optim, "value", args.optim)).startswith("adamw_torch"):
        idle.append("optim (choose with method=)")
    if idle:
        warnings.warn(f"without gradients these have no effect: {'; '.join(idle)}", ZeroBlockWarning, stacklevel=4)


def check_lr(lr: float | None) -> None:
    """Warn of the Trainer's own learning rate, which most likely nobody chose.

    Args:
        lr: the learning rate of ``TrainingArguments``.
    """
    if lr == LEARNING_RATE:
        warnings.warn(
            f"learning_rate is {LEARNING_RATE:g}, the Trainer's default, which is meant for AdamW: give "
            "learning_rate=None, and zeroblock chooses the size of steps, or the rate of your method, such as 3e-4 for "
            "mezo_bcd on 135 million weights and 1e-5 on billions",
            ZeroBlockWarning,
            stacklevel=4,
        )


def check_eps(optimizer: ZeroOrder) -> None:
    """Warn of an ``eps`` that losses in bf16 do not resolve.

    Args:
        optimizer: the optimizer that the Trainer has built.
    """
    if (found := small_eps(optimizer)) is not None:
        told, better = found
        warnings.warn(
            f"{told}; give learning_rate=None, or method_kwargs={{'eps': {better:g}}}, or load the model in fp32",
            ZeroBlockWarning,
            stacklevel=4,
        )


@contextlib.contextmanager
def forward_only(model: object) -> Iterator[None]:
    """A context in which the Trainer accepts a quantised model whose trainable parameters are ordinary numbers.

    The Trainer refuses quantised models that have no adapters, or whose quantisation has no backward pass.
    Forward passes do not need either.
    """
    if not isinstance(model, nn.Module) or not getattr(model, "is_quantized", False):
        yield
        return
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    stuck = next((name for name, param in trainable if not param.is_floating_point()), None)
    if stuck is not None or not trainable:
        what = f"{stuck!r} is quantised and trainable" if stuck else "nothing in the quantised model is trainable"
        raise ZeroBlockError(f"{what}: freeze what is quantised, and attach an adapter (peft's LoRA) or unfreeze norms")
    vars(model)["is_quantized"] = False
    try:
        yield
    finally:
        vars(model)["is_quantized"] = True
