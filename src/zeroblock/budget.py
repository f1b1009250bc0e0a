"""The size of steps without a given learning rate: a displacement budget in units of the weights.

The noise of all steps adds up to a random walk, and a model that has walked too far from its weights is
ruined, long before a single step is too large.  So a run has a budget B: the root mean square of the
distance that a tensor may walk, relative to that of its elements.  It is spread over the visits of a block, with
a learning rate that falls linearly to zero:

    lr_t = B·√(3 / visits)·(1 - t/T)        Σ lr_t² over the visits of a block = B²

With :class:`~zeroblock.subspace.Relative` directions and :class:`~zeroblock.rule.Normalized` coefficients
a step of lr moves a tensor by about lr of its size, so B is one pure number for all models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

from torch import nn

from .adapter.pair import pairs
from .block import Block
from .estimator import Estimator
from .rule import Normalized, Rule
from .schedule import Schedule
from .subspace import Relative, Subspace

DISPLACEMENT = 0.05
"""B; calibrate it here and nowhere else.

Measured on SmolLM2-135M: on sst2, 20,000 steps with an lr of 0.046 in these units ended at 83.2 %, with twice that at
80.4 % (results/smollm2 and dev/LOG.md, with clip, lr linear to 0); on review sentences, 150 steps of batch 16 with
0.06 learned faster than with 0.03 (dev/LOG.md).  Qwen2.5-1.5B's good lr comes to 0.05 if its coefficients are near
8, which no one has recorded.  Gemma-3-270M: 200 steps of fzoo_bcd, batch 8, take sst2 from 60.0 to 83.0 % on 200 dev
sentences.  Other tasks and methods, on SmolLM2 and Qwen2.5-1.5B: docs/race.md."""
EPS = 0.04
"""Distance of the points from θ, in units of the weights.

Measured on SmolLM2-135M, sst2, batch 16, coefficients of rms 0.4: their error in fp32 (compared with eps 0.001) has an
rms of 0.005 at eps 0.02, 0.02 at 0.04 and 0.11 at 0.1; in bf16, where the losses themselves are rounded, 0.36 at 0.01,
0.30 at 0.02, 0.13 at 0.04 and 0.11 at 0.1."""
QUANTILE = 0.1
"""The size of a norm or a bias is this quantile of its elements' magnitudes.

Norms of Gemma-3-270M have elements of up to 524, with a median of 27 and a root mean square of 42.  Losses on 24
sentences of sst2 (0.45 before) after tensors moved at random by 5 % of their size: all matrices of the layers 0.43,
embedding 0.50; norms 1.60 with the root mean square as their size, 1.10 with the median, 0.48 with this quantile, 0.48
with the size of each element."""
PRODUCT: float | None = 2.0
"""The size of LoRA's product, in units of the matrix next to it; the size of B follows from it.

Measured on SmolLM2-135M, 100 steps of fzoo_bcd on review sentences, batch 8, r 8, loss on 200 dev sentences: on q and v
0.87 with 0.5, 0.61 and 0.64 with 1, 0.51 and 0.49 with 2, 0.58 and 0.50 with 4 (two seeds); on every matrix 0.54 with
1 and with 2, 0.72 with 4; 1.11 to 1.15 with the floor.  Qwen2.5-1.5B, sst2, 5,000 steps of mezo_bcd on q and v with 2:
59 to 83 % of test, 86 % where all weights move."""
UNKNOWN_VISITS = 1000
"""Visits per block within which a constant learning rate keeps the budget, if the length of the run is unknown."""
COARSE = 4 * DISPLACEMENT
"""Integers that walk farther cause a warning.  With a toy model of two layers and 2,000 steps, int8 walked 0.11 and
learned like fp32; int4 walked 0.44 and learned less than half as much."""
MEAN_SQUARE = {"constant": 1.0, "linear": 1 / 3, "cosine": 3 / 8}
"""The mean of (lr_t / lr_0)² over a run, by learning-rate schedule."""


class Composition(Protocol):
    """The parts of an optimizer that determine the size of its steps."""

    estimator: Estimator
    schedule: Schedule
    interval: int

    @property
    def blocks(self) -> Sequence[Block]: ...
    @property
    def rule(self) -> Rule: ...


@dataclasses.dataclass(frozen=True)
class Budget:
    """The displacement that a run may spend, and the learning rates that spend it.

    >>> Budget(blocks=32).rate(steps=3200, lr_schedule="linear")
    0.008660254037844388

    Args:
        blocks: number of blocks that take turns, or of sets of blocks that move together.
        probes: directions per step; the mean over n of them is √n shorter than one, so lr may be √n larger.
        weight: root mean square of the weights that a schedule gives to a block's visits.
        displacement: B; smaller if the steps of a turn go the same way, and so lead further than a random walk.
    """

    blocks: int
    probes: int = 1
    weight: float = 1.0
    displacement: float = DISPLACEMENT

    @classmethod
    def of(cls, optimizer: Composition) -> Budget:
        """The budget of an optimizer; the steps of Sign and Adam have one size, whatever the number of probes."""
        probes = 1 if optimizer.rule.unscaled else optimizer.estimator.probes**2 // optimizer.estimator.moving
        together = getattr(optimizer.schedule, "most", lambda n: 1)(len(optimizer.blocks))
        weight = getattr(optimizer.schedule, "weight", lambda n: 1.0)(len(optimizer.blocks))
        displacement = DISPLACEMENT / optimizer.rule.stride(optimizer.interval)
        return cls(math.ceil(len(optimizer.blocks) / together), probes, weight, displacement)

    def rate(self, steps: int, lr_schedule: str = "constant") -> float:
        """The initial learning rate of a run of ``steps`` steps: at most B·√probes / weight, however short the run."""
        visits = steps * MEAN_SQUARE[lr_schedule] / self.blocks
        return self.displacement * math.sqrt(self.probes / max(1.0, visits)) / self.weight

    @property
    def constant(self) -> float:
        """The learning rate of a run whose length is unknown."""
        return self.rate(UNKNOWN_VISITS * self.blocks)

    def walk(self, spacing: float) -> float:
        """The distance that weights on a grid walk at the constant rate, relative to their size.

            walk² = B² + 2/π·spacing·Σ lr

        A step much smaller than the spacing is rounded to the whole spacing with a probability of step/spacing, and
        otherwise to nothing, so that a weight's variance grows with the length of the steps, not with its square.

        Args:
            spacing: the spacing of the grid, in units of the weights.
        """
        rounding = 2 / math.pi * spacing * self.displacement * math.sqrt(UNKNOWN_VISITS)
        return math.sqrt(self.displacement**2 + rounding)

    def rest(self, spent: float, steps: float) -> float:
        """The learning rate of the next step if it falls linearly to zero over the steps that are left.

        In a run of known length this is the linear decay itself; if the length is an estimate, the run
        keeps the budget however wrong the estimate is.

        Args:
            spent: Σ lr² of the steps taken.
            steps: number of steps left.
        """
        left = max(0.0, self.displacement**2 - spent / (self.blocks * self.probes))
        visits = steps * MEAN_SQUARE["linear"] / self.blocks
        return math.sqrt(left * self.probes / max(1.0, visits)) / self.weight


def unscaled(subspace: Subspace, rule: Rule, model: nn.Module) -> tuple[Subspace, Rule]:
    """The same parts in units of the weights and of the coefficients' own size, so that eps and lr are pure numbers.

    Args:
        subspace: the subspace that directions are drawn in.
        rule: the rule of the updates.
        model: the model to train; if it has no LoRA, journals need not name the size of its product.
    """
    product = PRODUCT if any(pair.still.requires_grad for pair in pairs(model)) else None
    sized = rule.unscaled or rule.block_numbers
    relative = subspace if subspace.relative else Relative(subspace, QUANTILE, product)
    return relative, rule if sized else Normalized(rule)
