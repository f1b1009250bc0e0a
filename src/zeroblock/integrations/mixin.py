"""Zeroth-order steps for Hugging Face's Trainer and the trainers that descend from it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import method as methods
from .. import model as models
from ..budget import MEAN_SQUARE, Budget
from ..composition import begin_as
from ..errors import ZeroBlockError
from ..journal.format import locate
from ..optimizer import ZeroOrder
from ..quantise import quantised_layers
from ..ranks.wrapper import unwrapped
from ..rerun import replay
from . import argument
from .ledger import Ledger
from .micro import Micro, MicroBatches

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

WEIGHTS = ("model.safetensors*", "pytorch_model.bin*", "adapter_model.*", "*/adapter_model.*")


class ZeroOrderMixin(Base):  # type: ignore[misc]
    """Makes a Trainer take zeroth-order steps: forward passes only, no gradients, no optimizer state.

    >>> class ZOSFTTrainer(ZeroOrderMixin, SFTTrainer):                                          # doctest: +SKIP
    ...     pass
    >>> ZOSFTTrainer(model=model, args=args, train_dataset=rows, method="mezo_bcd").train()      # doctest: +SKIP

    The Trainer's loop, schedulers, callbacks, evaluation and checkpoints stay as they are.  The micro-batches of
    ``gradient_accumulation_steps`` make one step, whose loss is the mean over the scored tokens of all of them.
    ``learning_rate``, ``weight_decay``, ``seed`` and the scheduler come from ``TrainingArguments``.

    Under torchrun or ``accelerate launch`` the ranks share the data: each measures its own micro-batches, and all take
    the step that one process would take with the micro-batches of all of them.

    A checkpoint holds what the Trainer saves, and ``journal.zbj``, the record of every step since the base weights.

    Args:
        method: a name out of ``zb.METHODS``, a function from a model to a ``ZeroOrder`` that takes ``lr``,
            ``seed``, ``weight_decay`` and ``method_kwargs``, or an optimizer that is built already on this model.
        method_kwargs: options of the method: ``{"eps": 1e-3, "probes": 2, "clip": 5.0}``.
        packed: measure language models on packed rows, which gives the same loss faster: by default if
            ``compute_loss`` is transformers' or TRL's own; True trusts that another one is the mean over the scored
            tokens, too; False always calls ``compute_loss``.
        save_weights: False writes checkpoints without the weights.  Resuming then replays the journal on the base
            weights.
        args, kwargs: the Trainer's arguments.
    """

    args: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        method: str | Callable[..., ZeroOrder] | ZeroOrder = "mezo_bcd",
        method_kwargs: Mapping[str, Any] | None = None,
        packed: bool | None = None,
        save_weights: bool = True,
        **kwargs: Any,
    ) -> None:
        self.ledger: Ledger | None = None
        self._method, self._method_kwargs = method, dict(method_kwargs or {})
        self._save_weights = save_weights
        self._finds_lr = False
        """Whether zeroblock sizes the steps, in units of the weights."""
        self._checkpoint: Path | None = None
        """The checkpoint that this call of ``train`` resumes from."""
        with argument.forward_only(kwargs.get("model", args[0] if args else None)):
            super().__init__(*args, **kwargs)
        self.args = copy.copy(self.args)  # the caller may use the same arguments for another trainer
        argument.check(self.args, self.model, self.optimizer_cls_and_kwargs)
        self._finite = self.args.logging_nan_inf_filter
        self.args.logging_nan_inf_filter = False  # the Trainer's filter waits for the GPU; ``log`` filters instead
        if not save_weights and (self.args.save_only_model or self.args.load_best_model_at_end):
            raise ZeroBlockError(
                "save_weights=False leaves the weights out of checkpoints, which save_only_model and "
                "load_best_model_at_end need: leave one of them out"
            )
        self._micro_batches = MicroBatches(self, packed)
        if self.optimizer is not None:
            self._method, self.optimizer = self.optimizer, None
        if isinstance(self._method, ZeroOrder) or not isinstance(self._method, torch.optim.Optimizer):
            return
        raise ZeroBlockError(f"{type(self._method).__name__} needs gradients: give a ZeroOrder, or method='mezo_bcd'")

    @property
    def zero_order(self) -> ZeroOrder:
        """The optimizer itself, which Accelerate wraps in ``trainer.optimizer``."""
        if self.ledger is None:
            raise ZeroBlockError("the optimizer is built when training starts: call train() or create_optimizer()")
        return self.ledger.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; ``resume_from_checkpoint`` continues bit for bit on the CPU."""
        self._checkpoint = None
        output = super().train(*args, **kwargs)
        assert self.ledger is not None
        return output._replace(training_loss=self.ledger.loss()) if output.global_step else output

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Build the method on the model; the Trainer calls this."""
        self._micro_batches.waiting.clear()
        if self.optimizer is None:
            self.optimizer = self._built()
            self.optimizer.register_step_pre_hook(self._supply)
            self._micro_batches = MicroBatches(self, self._micro_batches.trusted)
            name = str(getattr(getattr(self.model, "config", None), "name_or_path", ""))
            self.ledger = Ledger(self.optimizer, base=self._checkpoint is None, model=name)
        assert self.ledger is not None
        self.ledger.begin()
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Build the Trainer's scheduler; if no learning rate was given, it starts from one that fits the run."""
        if self._finds_lr and self.lr_scheduler is None:
            falls = str(getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type))
            falls = falls if falls in MEAN_SQUARE else "constant"  # others fall, too, and use less of the budget
            self.zero_order.lr = Budget.of(self.zero_order).rate(num_training_steps, falls)
        return super().create_scheduler(num_training_steps, optimizer)

    def _built(self) -> ZeroOrder:
        given, options = self._method, dict(self._method_kwargs)
        if isinstance(given, ZeroOrder):
            if options:
                raise ZeroBlockError("method_kwargs are for a method that is still to be built; give one or the other")
            optimizer = given
        else:
            factory = methods.get(given) if isinstance(given, str) else given
            common = {"seed": self.args.seed, "weight_decay": self.args.weight_decay}
            if "lr" not in options:
                argument.check_lr(self.args.learning_rate)
            lr = options.pop("lr", self.args.learning_rate)
            optimizer = factory(self.model, lr, **{**common, **options})
            self._finds_lr = lr is None and optimizer.subspace.relative and optimizer.length is None
            argument.check_eps(optimizer)
        if optimizer.model is not self.model:
            raise ZeroBlockError(
                f"the optimizer was built on another {type(optimizer.model).__name__} than the Trainer's: give method= "
                "the method's name, or a function from a model to an optimizer, and the Trainer builds it"
            )
        if self.args.world_size > 1 and optimizer.team is None:
            raise ZeroBlockError(
                f"{self.args.world_size} processes would each measure their own data and their weights would drift "
                "apart: give method= a name or a function, so that the optimizer is built when the processes are up, "
                "and leave parallel=None out"
            )
        if optimizer.fold > 1:
            raise ZeroBlockError(
                "fold keeps steps outside the weights, where evaluation would not see them: leave it out"
            )
        return optimizer

    def _supply(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give the Trainer's ``optimizer.step()`` the micro-batches that wait for it."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None or not self._micro_batches.waiting:
            return None
        return (optimizer, self._micro_batches.objective()), {}

    def get_train_dataloader(self) -> Any:
        """The Trainer's loader, whose batches stay on the host, where they are packed while the GPU works."""
        loader = super().get_train_dataloader()
        if hasattr(loader, "device"):
            loader.device = None
        return loader

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Collect a micro-batch; the Trainer's ``optimizer.step()`` measures all of them."""
        model.train()
        self._micro_batches.add(Micro(unwrapped(model), inputs, num_items_in_batch))
        return torch.zeros((), device=self.args.device)  # ``log`` reports the loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the Trainer's numbers, with the loss, the coefficient and the block of the steps."""
        if self.ledger is not None:
            self.ledger.amend(logs, finite=self._finite)
        super().log(logs, *args, **kwargs)

    def _clip_grad_norm(self, *args: Any, **kwargs: Any) -> None:
        """There is no gradient to clip."""

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> None:
        """There is no gradient to log."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as the Trainer does; a checkpoint without weights gets its folder only.

        Weights that are stored as integers are saved as the numbers they stand for, except in checkpoints, which
        training continues from.
        """
        if _internal_call and not self._save_weights and output_dir is not None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            return
        super().save_model(output_dir, _internal_call)
        if not _internal_call and self.args.should_save and quantised_layers(self.model):
            models.save(self.model, output_dir or self.args.output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        assert self.ledger is not None
        if self.args.should_save:  # one rank writes
            self.ledger.save(Path(output_dir))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        self._checkpoint = Path(resume_from_checkpoint)
        if _holds_weights(self._checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)
        elif not locate(self._checkpoint).exists():
            raise ZeroBlockError(f"{resume_from_checkpoint} holds neither weights nor a journal to resume from")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self.ledger is not None:
            contents = self.ledger.load(Path(checkpoint))
            if contents is not None and not _holds_weights(Path(checkpoint)):
                begin_as(self.zero_order, contents.header.parts.get("subspace"))
                contents.header.check(self.zero_order)
                replay(self.zero_order, contents.records)
        super()._load_optimizer_and_scheduler(checkpoint)


def _holds_weights(checkpoint: Path) -> bool:
    return any(any(checkpoint.glob(pattern)) for pattern in WEIGHTS)
