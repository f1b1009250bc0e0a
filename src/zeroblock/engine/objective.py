"""The objective of a batch: packed rows, whose log-probabilities it turns into one loss."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ..closure import evaluation
from ..direction import Member, Point
from ..errors import ZeroBlockError
from ..exclusive import BusyError, exclusive
from ..ops import score
from ..plan import Plan
from ..shard import is_lost
from ..step import Call, Objective, Staged, Tape
from .anatomy import ForkError
from .fork import scratch
from .forward import Forward
from .pack import Padded, Row
from .pair import Pairs

Over = Literal["options", "answer"]
"""The loss of an example: cross-entropy over its options, or the negative log-probability of its answer."""
Reduction = Literal["tokens", "examples"]
"""The items over which the loss of a batch is the mean."""

POINT_TOKENS = 1 << 14
"""Most tokens in a pass, all points together: in OPT-13B's widest layer their activations take 0.7 GB."""


@dataclass(frozen=True)
class BatchObjective(Objective):
    """The mean loss of a batch of examples.

    Args:
        forward: the forward pass that runs the rows.
        rows: the rows, each with the labels of its examples.
        over: see :meth:`Engine.objective`.
        reduction: see :meth:`Engine.objective`.
        examples: the number of examples in all rows.
    """

    forward: Forward
    rows: Sequence[tuple[Row | Padded | Pairs, Tensor]]
    over: Over
    reduction: Reduction
    examples: int

    def __call__(self) -> Tensor:
        """The loss at the weights as they are: a scalar in fp32, differentiable where gradients are on."""
        with exclusive(self.forward.model), evaluation(self.forward.model):
            return self.losses(())[0]

    @property
    def weight(self) -> tuple[str, float]:
        if self._by_token:
            return "tokens", float(sum(int(row.lengths.sum()) for row, _ in self.rows))
        return "examples", float(self.examples)

    @property
    def model(self) -> nn.Module:
        return self.forward.model

    @property
    def submits(self) -> bool:
        return self.forward.graphs is not None and self.forward.forked

    @torch.no_grad()
    def measure(self, points: Sequence[Point]) -> Tensor:
        if self.forward.forked:
            self._check_alike()
            try:
                return self.losses(points).double().cpu()
            except (torch.OutOfMemoryError, BusyError):
                raise
            except Exception as error:  # models of any family may fail on the rows of several points
                if self.forward.spread and is_lost(error):
                    raise
                self.forward.unfork(str(error) if isinstance(error, ForkError) else one_line(error))
        return super().measure(points)

    @torch.no_grad()
    def submit(self, points: Sequence[Point]) -> Tensor | None:
        try:
            return self.losses(points)
        except (torch.OutOfMemoryError, BusyError):
            raise
        except Exception:  # ``measure`` will run into it again, and report it
            return None

    def stage(self) -> Staged | None:
        graphs, (row, labels) = self.forward.graphs, self.rows[0]
        if graphs is None or len(self.rows) != 1 or not isinstance(row, Row):
            return None
        if not graphs.pays(len(row.tokens), self.forward.numel):
            return None
        tokens, batch = len(row.tokens), torch.cat([*row.parts, labels])
        return Staged(
            graphs,
            (tokens,),
            (row.shapes, self.over, self.reduction),
            batch,
            functools.partial(self._bound, row, len(batch) - len(labels)),
            1 if self.forward.cuts is None else self.forward.cuts.pieces,
            self._active,
            functools.partial(self._reserved, tokens, len(row.keep)),
            self.forward.device,
            at_once(tokens, self.forward.shelf.pass_tokens),
            self.weight,
        )

    def _bound(self, row: Row, size: int, batch: Tensor) -> BatchObjective:
        """This objective on a batch in a buffer on the device: the row's fields, then the labels."""
        return replace(self, rows=[(row.view(batch[:size]), batch[size:])])

    def layers(self) -> contextlib.AbstractContextManager[None]:
        """A context in which layers can run one by one on this objective's only row."""
        row = self._placed[0][0]
        assert isinstance(row, Row)
        return self.forward.layers(row)

    def layer(self, i: int, hidden: Tensor, call: Call, points: Sequence[Point], parted: bool) -> Tensor:
        """See :class:`step.Staging`."""
        return self.forward.layer(i, hidden, call, points, parted)

    def _active(self, plan: Plan) -> dict[int, list[Member]]:
        """The tensors of a plan's block by the piece of the pass that reads them."""
        assert self.forward.cuts is not None
        pieces: dict[int, list[Member]] = {}
        for module, members in self.forward.anatomy.stages(plan.members):
            pieces.setdefault(self.forward.cuts.piece(module), []).extend(members)
        return pieces

    def _reserved(self, tokens: int, scored: int, plan: Plan) -> int:
        """Bytes of any block's copies, and of the largest result that a layer or the head computes next to them."""
        params, inside = plan.weights.params, self.forward.anatomy.layer
        widest = max((max(params[name].shape, default=1) for name in inside if name in params), default=1)
        rows = len(plan.points)
        # a layer's widest product, before and after its activation
        beside = 2 * rows * tokens * widest * self.forward.dtype.itemsize
        blocks = (plan.weights.members(block, plan.turn.number) for block in range(len(plan.weights.blocks)))
        words = max((getattr(config, "vocab_size", None) or 0 for config in self.forward.configs), default=0)
        logits = rows * scored * words * (self.forward.dtype.itemsize + 4)  # as computed, and in fp32
        return scratch(self.forward.anatomy, blocks, plan.points, tokens) + max(beside, logits)

    def losses(self, points: Sequence[Point], tape: Tape | None = None) -> Tensor:
        """(points,) the loss at each point in fp32; without points, (1,) the loss at the weights as they are."""
        sums, tokens = [], []
        for row, labels in self._placed:
            tokens_each = POINT_TOKENS if self.forward.spread else row.tokens.numel()  # equally many passes per process
            limit = self.forward.shelf.pass_tokens
            if limit is not None and isinstance(row, Pairs):
                tokens_each += row.inputs.numel()
            some = [points] if tape is not None else passes(points, tokens_each, limit)
            totals = _joined([self.forward.totals(row, part, tape=tape) for part in some])
            sums.append(score.losses(totals, row, labels, self._loss))
            if self._by_token:
                tokens.append(row.lengths.sum())
        return _sum(sums) / (_sum(tokens) if self._by_token else self.examples)

    def _check_alike(self) -> None:
        """Refuse rows that only some of the processes would measure one point after another."""
        if self.forward.spread and any(isinstance(row, Padded) for row, _ in self.rows):
            raise ZeroBlockError(
                f"an example is longer than the model's window of {self.forward.max_length:,} tokens and "
                "cannot be forked, but processes that share its weights must run the same passes: leave such examples "
                "out (--train-tokens), or measure one point after another (--engine sequential)"
            )

    @property
    def _by_token(self) -> bool:
        """Whether the loss is a mean over the tokens of all answers."""
        return self.over == "answer" and self.reduction == "tokens"

    @property
    def _loss(self) -> score.Loss:
        """The losses that are added up over a row."""
        return score.Loss.TOKENS if self._by_token else score.Loss(self.over)

    @functools.cached_property
    def _placed(self) -> list[tuple[Row | Padded | Pairs, Tensor]]:
        """The rows on the device."""
        device = self.forward.device
        return [(row.to(device), _sent(labels, device)) for row, labels in self.rows]


def passes(points: Sequence[Point], tokens: int, limit: int | None = None) -> list[Sequence[Point]]:
    """The points of each pass, as many as memory allows; both sides of a direction stay together.

    Every pass runs the modules before the block again.

    Args:
        points: all points of a step.
        tokens: the number of tokens of the row that will run.
        limit: the most tokens of a pass, all points together, if the memory for rows is limited.
    """
    most = at_once(tokens, limit)
    return [points[a : a + most] for a in range(0, len(points), most)] or [points]


def at_once(tokens: int, limit: int | None = None) -> int:
    """The number of points that run in one pass: even, and at least two.

    Args:
        tokens: the number of tokens of the row.
        limit: see :func:`passes`.
    """
    most = POINT_TOKENS if limit is None else min(limit, POINT_TOKENS)
    return 2 * max(1, most // (2 * max(1, tokens)))


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """The same tensor on a device, by an asynchronous copy."""
    if device.type == "cuda" and not x.is_cuda:
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts end to end; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def one_line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
