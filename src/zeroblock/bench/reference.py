"""The published procedures, transcribed as plainly as they were published: the baseline of every ratio.

MeZO (its ``large_models``): every option of every example is a row, padded on the left to
the batch's longest and to a multiple of 8; the model gives logits at all positions; the
loss is taken in the logits' dtype; the weights are perturbed, perturbed back, restored and
moved in four passes, out of place, with ``torch.normal`` in the weights' dtype from a
re-seeded generator; the coefficient is copied to the host.  LOZO's code does the same
with ``z = U Vᵀ``, the paper's MeZO-BCD on the active block, SparseMeZO under a mask.

The key-value cache, which transformers fills by default, stays on as in the published code: it takes
16 GB for a batch of MultiRC at 13B, and almost no time.  The bookkeeping of transformers' ``Trainer``
around the step is left out, and attention is the model's own default.
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

IGNORED_TOKEN = -100


@dataclass(frozen=True)
class Rows:
    """A padded batch.

    Args:
        ids: (rows, width), padded on the left.
        mask: (rows, width), 1 at tokens.
        lengths: (rows,), number of tokens of the option at the end of each row.
        labels: (rows,), index of the right option of the row's example.
        counts: (rows,), number of options of the row's example; None for teacher forcing.
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
        """The same batch on a device."""
        return Rows(
            self.ids.to(device),
            self.mask.to(device),
            self.lengths.to(device),
            self.labels.to(device),
            None if self.counts is None else self.counts.to(device),
        )


def loss(model: nn.Module, rows: Rows) -> Tensor:
    """MeZO's loss, in the dtype of the logits.

    It is the cross-entropy over options, where the logit of an option is the mean log-probability of
    its tokens; for teacher forcing it is the mean over all tokens of the answers.

    Args:
        model: a causal language model.
        rows: the batch, on the model's device.
    """
    logits = model(input_ids=rows.ids, attention_mask=rows.mask).logits[..., :-1, :].contiguous()
    targets = rows.ids[..., 1:].clone()
    for row, length in enumerate(
        rows.lengths
    ):  # a tensor on the device, so the host waits for each, as in the published code
        targets[row, :-length] = IGNORED_TOKEN
    if rows.counts is None:
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=IGNORED_TOKEN)
    log_probs = F.log_softmax(logits, dim=-1)
    mask = targets != IGNORED_TOKEN
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
        model: its trainable parameters are all perturbed and moved; 16 bits do not restore them exactly.
        lr: learning rate.
        eps: distance of the two evaluations from the weights.
        seed: the seed from which the seeds of the steps are drawn.
    """

    cycle = 1
    """Number of steps in which every block has its turn."""
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
        """Take a step; returns the coefficient."""
        rows = Rows.of(batch, self.pad)
        self.begin()
        chosen = int(self._seeds.randint(1_000_000_000))
        self.perturb(chosen, 1)
        up = self.forward(rows)
        self.perturb(chosen, -2)
        down = self.forward(rows)
        coeff = float(((up - down) / (2 * self.eps)).item())
        if not math.isfinite(coeff):
            # as published, this would ruin the weights, on which other variants are still to be measured
            warnings.warn(f"the loss of {type(self).__name__} is not finite", ZeroBlockWarning, stacklevel=2)
            coeff = 0.0
        self.perturb(chosen, 1)
        self.update(chosen, coeff)
        self.steps += 1
        return coeff

    @torch.inference_mode()
    def forward(self, rows: Rows) -> Tensor:
        """The loss. The batch is copied to the device for each of the two evaluations, as published."""
        return loss(self.model, rows.to(self.device))

    def perturb(self, seed: int, scale: float) -> None:
        """θ ← θ + scale·ε·z."""
        self._generator.manual_seed(seed)
        for name in self.active():
            param = self.params[name]
            z = self.noise(name, param)
            param.data = param.data + scale * z * self.eps

    def update(self, seed: int, coeff: float) -> None:
        """θ ← θ - lr·(c·z + λθ); the term in λ is computed although λ is 0, as published."""
        self._generator.manual_seed(seed)
        for name in self.active():
            param = self.params[name]
            z = self.update_noise(name, param)
            if "bias" in name or "layer_norm" in name or "layernorm" in name:
                param.data = param.data - self.lr * (coeff * z)
            else:
                param.data = param.data - self.lr * (coeff * z + self.weight_decay * param.data)

    def begin(self) -> None:
        """Prepare a step, before its first perturbation."""

    def active(self) -> Iterable[str]:
        """Names of the parameters that this step moves."""
        return self.params

    def noise(self, name: str, param: Tensor) -> Tensor:
        """z of one tensor for a perturbation, drawn from the generator."""
        return self.gauss(param, param.shape)

    def update_noise(self, name: str, param: Tensor) -> Tensor:
        """z of one tensor for the update."""
        return self.noise(name, param)

    def gauss(self, like: Tensor, shape: Iterable[int]) -> Tensor:
        """Normal numbers drawn in a tensor's dtype."""
        size = tuple(shape)
        return torch.normal(0.0, 1.0, size, generator=self._generator, device=like.device, dtype=like.dtype)


class LOZO(MeZO):
    """Chen et al.'s step: z = U Vᵀ for matrices, V held for ``interval`` steps.

    On the steps that draw V the update does not draw it, so it moves along another U than the one that
    was measured, as in the published code.
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
    """Liu et al.'s step: z only where a weight is below a threshold, which is set per tensor before training.

    The mask is computed once per step, from unperturbed weights, and held: one byte per weight.
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
    """Park et al.'s step: MeZO on one block; each block once per cycle, in a random order."""

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
