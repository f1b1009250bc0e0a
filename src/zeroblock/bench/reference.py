"""The published procedures, as plainly as they were published: what a ratio is a ratio to.

MeZO (its ``large_models``): every option of every example is a row, padded on the left to
the batch's longest and to a multiple of 8; the model gives logits at all positions; the
loss is taken in the logits' dtype; the weights are perturbed, perturbed back, restored and
moved in four passes, out of place, with ``torch.normal`` in the weights' dtype from a
re-seeded generator; the coefficient comes to the host.  LOZO's code is this with
``z = U Vᵀ``, the paper's MeZO-BCD is this on the active block, SparseMeZO is this under a mask.

The key-value cache that transformers fills unless told otherwise is left on, as there: 16 GB
for a batch of MultiRC at 13B, and next to no time.  The bookkeeping of transformers'
``Trainer`` around the step is left out, and attention is the model's own default.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..block import layers
from ..errors import ZeroBlockWarning
from ..schedule import Shuffled
from ..subspace import Sparse
from .batch import Batch, width

IGNORED = -100


@dataclass(frozen=True)
class Rows:
    """A padded batch.

    Args:
        ids: (rows, width), padded on the left.
        mask: (rows, width), 1 at tokens.
        lengths: (rows,), tokens of the option at the end of each.
        labels: (rows,), the right option of the row's example.
        counts: (rows,), options of the row's example; None for teacher forcing.
    """

    ids: Tensor
    mask: Tensor
    lengths: Tensor
    labels: Tensor
    counts: Tensor | None

    @classmethod
    def of(cls, batch: Batch, pad: int) -> Rows:
        """Collate on the host."""
        rows = batch.rows
        columns = width(len(ids) for ids, _ in rows)
        blank = [columns - len(ids) for ids, _ in rows]
        per = [len(one.options) if batch.over == "options" else 1 for one in batch.encoded]
        spread = list(itertools.chain.from_iterable([i] * n for i, n in enumerate(per)))
        return cls(
            torch.tensor([[pad] * n + list(ids) for n, (ids, _) in zip(blank, rows, strict=True)]),
            torch.tensor([[0] * n + [1] * (columns - n) for n in blank]),
            torch.tensor([length for _, length in rows]),
            torch.tensor([batch.labels[i] for i in spread]),
            torch.tensor([per[i] for i in spread]) if batch.over == "options" else None,
        )

    def to(self, device: torch.device) -> Rows:
        """The same on a device."""
        return Rows(
            self.ids.to(device),
            self.mask.to(device),
            self.lengths.to(device),
            self.labels.to(device),
            None if self.counts is None else self.counts.to(device),
        )


def loss(model: nn.Module, rows: Rows) -> Tensor:
    """MeZO's loss, in the dtype of the logits.

    Cross-entropy over options, the logit of each the mean log-probability of its tokens;
    or, for teacher forcing, the mean over all the answers' tokens of the batch.

    Args:
        model: a causal language model.
        rows: on its device.
    """
    logits = model(input_ids=rows.ids, attention_mask=rows.mask).logits[..., :-1, :].contiguous()
    targets = rows.ids[..., 1:].clone()
    for row, length in enumerate(rows.lengths):  # a tensor on the device: the host waits for each, as there
        targets[row, :-length] = IGNORED
    if rows.counts is None:
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=IGNORED)
    log_probs = F.log_softmax(logits, dim=-1)
    mask = targets != IGNORED
    targets[~mask] = 0
    chosen = log_probs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    scores = (chosen * mask).sum(-1) / mask.sum(-1)  # (rows,)
    count = rows.counts[0]
    if any(other != count for other in rows.counts):
        total, start, examples = torch.zeros_like(scores[0]), 0, 0
        while start < len(scores):
            end = start + int(rows.counts[start])
            total = total + F.cross_entropy(scores[None, start:end], rows.labels[start, None])
            start, examples = end, examples + 1
        return total / examples
    return F.cross_entropy(scores.view(-1, int(count)), rows.labels.view(-1, int(count))[:, 0])


class MeZO:
    """Malladi et al.'s step.

    Args:
        model: every trainable parameter is perturbed and moved, in 16 bits not quite back to where it was.
        lr: learning rate.
        eps: how far to either side.
        seed: of the steps' seeds.
    """

    cycle = 1
    """Steps until every block has had its turn."""
    weight_decay = 0.0

    def __init__(self, model: nn.Module, lr: float, eps: float = 1e-3, seed: int = 0) -> None:
        self.model, self.lr, self.eps, self.seed = model.eval(), lr, eps, seed
        self.params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        self.device = next(iter(self.params.values())).device
        self.pad = int(getattr(getattr(model, "config", None), "pad_token_id", None) or 0)
        self.steps = 0
        self._seeds = np.random.RandomState(seed)
        self._generator = torch.Generator(self.device)

    def step(self, batch: Batch) -> float:
        """Measure and move; the coefficient."""
        rows = Rows.of(batch, self.pad)
        self.begin()
        chosen = int(self._seeds.randint(1_000_000_000))
        self.perturb(chosen, 1)
        up = self.forward(rows)
        self.perturb(chosen, -2)
        down = self.forward(rows)
        coeff = float(((up - down) / (2 * self.eps)).item())
        if not math.isfinite(coeff):
            # as published this would ruin the weights, which others are still to be measured on
            warnings.warn(f"the loss of {type(self).__name__} is not finite", ZeroBlockWarning, stacklevel=2)
            coeff = 0.0
        self.perturb(chosen, 1)
        self.update(chosen, coeff)
        self.steps += 1
        return coeff

    @torch.inference_mode()
    def forward(self, rows: Rows) -> Tensor:
        """The loss; the batch is brought to the device for each of the two, as there."""
        return loss(self.model, rows.to(self.device))

    def perturb(self, seed: int, scale: float) -> None:
        """θ ← θ + scale·ε·z."""
        self._generator.manual_seed(seed)
        for name in self.active():
            param = self.params[name]
            z = self.noise(name, param)
            param.data = param.data + scale * z * self.eps

    def update(self, seed: int, coeff: float) -> None:
        """θ ← θ - lr·(c·z + λθ), with the term in λ computed though it is nought, as there."""
        self._generator.manual_seed(seed)
        for name in self.active():
            param = self.params[name]
            z = self.update_noise(name, param)
            if "bias" in name or "layer_norm" in name or "layernorm" in name:
                param.data = param.data - self.lr * (coeff * z)
            else:
                param.data = param.data - self.lr * (coeff * z + self.weight_decay * param.data)

    def begin(self) -> None:
        """What precedes a step's first perturbation."""

    def active(self) -> Iterable[str]:
        """Names of the parameters of this step."""
        return self.params

    def noise(self, name: str, param: Tensor) -> Tensor:
        """z of one tensor, the next from the generator."""
        return self.gauss(param, param.shape)

    def update_noise(self, name: str, param: Tensor) -> Tensor:
        """z of one tensor in the update."""
        return self.noise(name, param)

    def gauss(self, like: Tensor, shape: Iterable[int]) -> Tensor:
        """Normal numbers drawn in a tensor's dtype."""
        size = tuple(shape)
        return torch.normal(0.0, 1.0, size, generator=self._generator, device=like.device, dtype=like.dtype)


class LOZO(MeZO):
    """Chen et al.'s step: z = U Vᵀ for matrices, V held for ``interval`` steps.

    On the steps that draw V the update does not, so that it moves along another U than was
    measured: as published.
    """

    rank = 2
    interval = 50

    def __init__(self, model: nn.Module, lr: float, eps: float = 1e-3, seed: int = 0) -> None:
        super().__init__(model, lr, eps, seed)
        self._factors: dict[str, Tensor] = {}

    def noise(self, name: str, param: Tensor) -> Tensor:
        if param.dim() >= 2 and self.steps % self.interval == 0:
            self._factors[name] = self.gauss(param, (param.shape[1], self.rank))
        return self.update_noise(name, param)

    def update_noise(self, name: str, param: Tensor) -> Tensor:
        if param.dim() < 2:
            return self.gauss(param, param.shape)
        return self.gauss(param, (param.shape[0], self.rank)) @ self._factors[name].t()


class SparseMeZO(MeZO):
    """Liu et al.'s step: z only where a weight is small, by a threshold of its tensor from before training.

    The mask is found once a step, from unperturbed weights, and held: a byte a weight.
    """

    sparsity = 0.75

    def __init__(self, model: nn.Module, lr: float, eps: float = 1e-3, seed: int = 0) -> None:
        super().__init__(model, lr, eps, seed)
        self._thresholds = {name: Sparse(self.sparsity).initial(param) for name, param in self.params.items()}

    def begin(self) -> None:
        self._masks = {name: param.data.abs() <= self._thresholds[name] for name, param in self.params.items()}

    def noise(self, name: str, param: Tensor) -> Tensor:
        return super().noise(name, param) * self._masks[name]


class MeZOBCD(MeZO):
    """Park et al.'s step: MeZO on one block, each once a cycle in a random order."""

    def __init__(self, model: nn.Module, lr: float, eps: float = 1e-3, seed: int = 0) -> None:
        super().__init__(model, lr, eps, seed)
        self.blocks = layers(model)
        self.cycle = len(self.blocks)

    def begin(self) -> None:
        self._block = Shuffled().pick(self.steps, len(self.blocks), self.seed, [0.0] * len(self.blocks))

    def active(self) -> Iterable[str]:
        return self.blocks[self._block].params


REFERENCES: dict[str, type[MeZO]] = {
    "mezo-reference": MeZO,
    "lozo-reference": LOZO,
    "sparse_mezo-reference": SparseMeZO,
    "mezo_bcd-reference": MeZOBCD,
}
