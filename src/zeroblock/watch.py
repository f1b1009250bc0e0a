"""The watch: notices that a model and its optimizer no longer agree, before a step goes wrong silently.

It keeps asking two cheap questions.  Does the model still hold the parameters that
the optimizer moves, as they were when it was built?  Does the objective read the weights that a
step perturbs?  It asks the first before every step, by comparing identities and flags, and the
second at the first turn of every block, and again if the coefficients stay at zero.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .direction import UNREAD, UNREAD_FIX
from .errors import ZeroBlockError, ZeroBlockWarning
from .plan import Plan
from .reads import Reading, watched
from .record import Record
from .step import Objective
from .weights import Weights, adapted, hidden

ZERO_STEPS = 32
"""Steps in a row with coefficients of exactly zero after which the objective's reads are checked again."""

_flag = operator.attrgetter("requires_grad")
_kind = operator.attrgetter("dtype", "device", "shape")
AFTER = "first change the model, then build the optimizer"


class Watch:
    """Compares a model with the one its optimizer was built on, and the objective with the weights it should read.

    Args:
        weights: the optimizer's weights.
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._adapted, self._hidden = adapted(weights.model), hidden(weights.model)
        self._look()
        self._blocks = [[weights.params[name] for name in block.params] for block in weights.blocks]
        self._kinds = [list(map(_kind, params)) for params in self._blocks]
        self._unseen = set(range(len(weights.blocks)))
        """Blocks for which the objective's reads are not known yet."""
        self._measured: nn.Module | None = None
        """The model of the last objective that knows its model."""
        self._readings: dict[int, Reading] = {}
        """Notes of the steps whose numbers are not known yet."""
        self._zeros, self._limit = 0, ZERO_STEPS
        self._fault = False
        self._remark: str | None = None
        """A warning that has not been shown yet; an empty string once it has; None before there is one."""

    def check(self, block: int, fresh: bool) -> bool:
        """Raise if the model is no longer the one that the optimizer was built on.

        Args:
            block: index of the active block.
            fresh: whether no step has been taken yet.

        Returns:
            Whether the model has moved to another device, which is allowed before the first step.
        """
        self.weights.release()
        if not self._unchanged():
            self._compare()
            self._look()  # whatever changed, the trainable parameters are the same
        if list(map(_kind, self._blocks[block])) == self._kinds[block]:
            return False
        for index, params in enumerate(self._blocks):
            for name, param, (dtype, device, shape) in zip(
                self.weights.blocks[index].params, params, self._kinds[index], strict=True
            ):
                if (param.dtype, param.shape) != (dtype, shape):
                    raise ZeroBlockError(
                        f"{name!r} was {dtype} of {tuple(shape)} when the optimizer was built and is {param.dtype} of "
                        f"{tuple(param.shape)} now, which no journal could replay; {AFTER}"
                    )
                if param.device != device and not fresh:
                    raise ZeroBlockError(
                        f"{name!r} moved from {device} to {param.device} in the middle of a run: move it back, or take "
                        "optimizer.state_dict(), build another optimizer on the moved model and load the state there"
                    )
        self._kinds = [list(map(_kind, params)) for params in self._blocks]
        return True

    def over(self, objective: Objective, plan: Plan) -> Objective:
        """The objective of a step, with its reads noted if they are not known yet."""
        if objective.model is not None:
            self._recognise(objective.model)
            return objective
        again = self._zeros >= self._limit and not objective.submits
        if self._hidden or not (again or plan.turn.block in self._unseen):
            return objective
        reading = Reading(self.weights.params.values(), plan.members, plan.directions)
        self._readings[plan.turn.step] = reading
        return watched(objective, reading)

    def _recognise(self, model: nn.Module) -> None:
        """Raise unless an objective measures a model that holds the weights."""
        if model is not self._measured:
            own = set(map(id, model.parameters()))
            if not all(id(param) in own for param in self.weights.params.values()):
                raise ZeroBlockError(f"{UNREAD}; the engine was built on another model")
            self._measured = model

    def see(self, record: Record) -> None:
        """Receive the record of a step, and judge the reads noted during it."""
        reading = self._readings.pop(record.step, None)
        if not record.finite:
            return
        still = not any(record.coeffs)
        self._zeros = self._zeros + 1 if still else 0
        lasting = self._zeros >= self._limit
        if reading is None or reading.traced:
            if lasting and (self._hidden or reading is not None):
                self._limit *= 2
                self._say(
                    f"the coefficients of {self._zeros} steps in a row are exactly 0, and compiled, scripted or "
                    "sharded code hides whether it reads the weights of this model: unless the objective is flat or "
                    f"eps is tiny, {UNREAD_FIX}"
                )
        elif reading.any or not still:
            self._unseen.discard(record.block)
            self._limit = 2 * self._limit if lasting else self._limit
            if still and not reading.block:
                self._say(
                    f"the objective reads no weight of block {self.weights.blocks[record.block].name!r}, whose turns "
                    "change nothing: freeze what it does not use with requires_grad_(False) before building the "
                    "optimizer; further blocks of this kind are not named"
                )
        elif reading.called or lasting:
            self._fault = True

    def complain(self) -> None:
        """Raise if the objective reads no weight at all; warn once if it is only suspicious."""
        if self._fault:
            self._fault = False
            raise ZeroBlockError(UNREAD)
        if self._remark:
            remark, self._remark = self._remark, ""
            warnings.warn(remark, ZeroBlockWarning, stacklevel=4)

    def _say(self, remark: str) -> None:
        self._remark = remark if self._remark is None else self._remark

    def _look(self) -> None:
        """Remember which parameters and modules the model holds, and which are trainable."""
        model = self.weights.model
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        places: list[dict[str, Any]] = [d for m in modules for d in (m._parameters, m._modules)]
        self._empty, self._filled = [p for p in places if not p], [p for p in places if p]
        self._held = list(itertools.chain.from_iterable(map(dict.values, self._filled)))
        self._params: list[Tensor] = list(model.parameters())
        self._flags = list(map(_flag, self._params))

    def _unchanged(self) -> bool:
        """Whether the model holds the same objects; one microsecond per five parameters."""
        held = itertools.chain.from_iterable(map(dict.values, self._filled))
        return (
            not any(self._empty)
            and sum(map(len, self._filled)) == len(self._held)
            and all(map(operator.is_, held, self._held))
            and list(map(_flag, self._params)) == self._flags
        )

    def _compare(self) -> None:
        """Raise unless the trainable parameters are those of the optimizer."""
        ours, now = self.weights.params, dict(self.weights.model.named_parameters())
        known, present = {id(p) for p in ours.values()}, {id(p) for p in now.values()}
        gone = [name for name, p in ours.items() if id(p) not in present]
        frozen = [name for name, p in ours.items() if not p.requires_grad]
        new = [name for name, p in now.items() if p.requires_grad and id(p) not in known]
        if (gone or frozen) and adapted(self.weights.model) and not self._adapted:
            raise ZeroBlockError(
                "PEFT was applied to the model after the optimizer was built: call get_peft_model first, then build "
                "the optimizer on the model that it returns"
            )
        if any(now[name].is_meta for name in gone if name in now):
            raise ZeroBlockError(
                f"{_some(gone)} was moved to the meta device after the optimizer was built (offloaded by Accelerate, "
                "or moved by model.to('meta')): keep the weights loaded while the model trains"
            )
        if gone:
            raise ZeroBlockError(
                f"the model no longer holds {_some(gone)}: a new head, resize_token_embeddings, a change of tying or "
                f"load_state_dict(assign=True) replaced it by a tensor that no step would move; {AFTER}"
            )
        if frozen:
            raise ZeroBlockError(
                f"{_some(frozen)} was frozen after the optimizer was built, which would still move it; {AFTER}"
            )
        if new:
            raise ZeroBlockError(
                f"{_some(new)} became trainable after the optimizer was built and is in none of its blocks; {AFTER}"
            )


def _some(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return repr(names[0]) if len(names) == 1 else f"{names[0]!r} (and {len(names) - 1} more)"
