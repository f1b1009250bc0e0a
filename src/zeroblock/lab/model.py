"""The theory's quantities on a model: per block Tr(H_B), λmax, ρ_B, ‖∇_B L‖² and the variance of the coefficient.

There are two ways to measure them, on the same objective, a mean over batches:

    backward    Hessian-vector products: Hutchinson for the trace, Lanczos for λmax, the gradient itself
    forward     the losses of ``ZeroOrder`` at lr = 0, which measures but does not move:
                (L(θ+εz) - L(θ-εz))/2ε = ∇Lᵀz        (L(θ+εz) + L(θ-εz) - 2L(θ))/ε² = zᵀHz

The forward way only brackets λmax: with t_p = Tr(H_Bᵖ), √(t₄/t₂) ≤ |λ|max ≤ t₄^(1/4), and t_p is
estimated without bias from losses at θ ± ε(zᵢ ± zⱼ).  A product Hv would take as many losses as the block has weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..block import Block, Partition, layers
from ..direction import Swapped
from ..errors import ZeroBlockError
from ..estimator import TwoSided
from ..noise import Distribution, Draw, Key
from ..ops import normal
from ..optimizer import ZeroOrder

Closure = Callable[[], Tensor]
"""The loss of one batch, a scalar; the backward way needs it to be differentiable."""

TOGETHER_BYTES = 1 << 29
"""Bytes of the vectors that one pass multiplies by H; the pass needs a few times as much memory."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number and its standard error (for λmax: the Ritz residual, or the uncertainty of the bracket)."""

    value: float
    error: float

    @classmethod
    def of(cls, samples: Tensor) -> Estimate:
        """Mean and standard error of samples, (n,)."""
        n = samples.numel()
        error = float(samples.double().std() / math.sqrt(n)) if n > 1 else math.nan
        return cls(float(samples.double().mean()), error)

    @classmethod
    def square(cls, samples: Tensor) -> Estimate:
        """E[c²] of samples c, (n,) or (batches, n), near normal with mean zero; its error is √(2/n)·E[c²].

        The standard error of the squares is too small when the squares happen to be small: 60 samples gave
        0.025 ± 0.004 where 0.042 was right.
        """
        value = float(samples.double().square().mean())
        return cls(value, value * math.sqrt(2 / samples.shape[-1]))

    def over(self, other: Estimate) -> Estimate:
        """The ratio of two estimates; errors add to first order."""
        value = self.value / other.value
        relative = (self.error / other.value) ** 2 + (value * other.error / other.value) ** 2
        return Estimate(value, math.sqrt(relative))


@dataclasses.dataclass(frozen=True)
class Measure:
    """The measurements of one block.

    Args:
        name: the block's name.
        size: number of its weights.
        trace: Tr(H_B).
        top: λmax(H_B).
        gradient: ‖∇_B L‖² of the mean loss over the batches.
        variance: E[c²], the variance of the coefficient c = ∇L_iᵀz over directions z and batches i; c has mean zero.
    """

    name: str
    size: int
    trace: Estimate
    top: Estimate
    gradient: Estimate
    variance: Estimate


@dataclasses.dataclass(frozen=True)
class Only:
    """A schedule that stays on one block."""

    block: int
    learns = False

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        return self.block

    def observe(self, scores: list[float], block: int, coeffs: tuple[float, ...]) -> None:
        pass


def _check(closures: Sequence[object], probes: int) -> None:
    if not closures:
        raise ZeroBlockError("measuring a model needs at least one batch")
    if probes < 2:
        raise ZeroBlockError(f"an error bar needs at least 2 probes, got {probes}")


def _offsets(model: nn.Module) -> dict[str, int]:
    """Global offset of every parameter, as the optimizer counts them."""
    offsets, total = {}, 0
    for name, param in model.named_parameters():
        offsets[name] = total
        total += param.numel()
    return offsets


@dataclasses.dataclass
class Curvature:
    """The Hessian of the mean loss in some parameters, as an operator on vectors.

    The graph of the gradient is built once per batch and kept, so that a product is one pass through the part of it
    that leads to these parameters.  It takes the memory of a few backward passes, so batches should be small.

    Args:
        params: the parameters, by name.
        gradients: the gradient of every batch, in the order of ``params``.
    """

    params: Mapping[str, Tensor]
    gradients: Sequence[Sequence[Tensor]]

    @classmethod
    def of(cls, model: nn.Module, closures: Sequence[Closure]) -> Curvature:
        """Differentiate every batch's loss with respect to all trainable parameters."""
        _check(closures, 2)
        params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = []
        with torch.enable_grad():
            for closure in closures:
                loss = closure()
                if not loss.requires_grad:
                    raise ZeroBlockError("the loss carries no gradient; measure forward only (--forward)")
                gradients.append(torch.autograd.grad(loss, list(params.values()), create_graph=True))
        return cls(params, gradients)

    def part(self, names: Sequence[str]) -> Curvature:
        """The diagonal block of H that belongs to some of the parameters."""
        places = {name: i for i, name in enumerate(self.params)}
        chosen = [places[name] for name in names]
        return Curvature({n: self.params[n] for n in names}, [[g[i] for i in chosen] for g in self.gradients])

    @property
    def size(self) -> int:
        """Number of weights."""
        return sum(p.numel() for p in self.params.values())

    def norms(self) -> tuple[float, Tensor]:
        """‖∇L‖² of the mean loss, and of each batch's loss, (batches,)."""
        mean = sum(
            float(torch.stack([g[i].detach().double() for g in self.gradients]).mean(0).square().sum())
            for i in range(len(self.params))
        )
        each = [sum(float(t.detach().double().square().sum()) for t in g) for g in self.gradients]
        return float(mean), torch.tensor(each, dtype=torch.float64)

    def start(self, noise: Sequence[Tensor]) -> list[Tensor]:
        """The start vector of Lanczos: the mean gradient plus noise of a tenth of its length.

        Gradients lie near the top eigenvectors.  From noise alone, six products do not find λmax on a layer of SmolLM2.
        """
        mean = [torch.stack([g[i].detach() for g in self.gradients]).mean(0) for i in range(len(self.params))]
        length, other = math.sqrt(_dot(mean, mean)), math.sqrt(_dot(noise, noise))
        share = 0.1 * length / other if length > 0 else 1.0
        return [g + share * z for g, z in zip(mean, noise, strict=True)]

    def __matmul__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H v, tensor by tensor."""
        return self._times(vectors, batched=False)

    def together(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H times several vectors in one pass, (n, *shape) per parameter; a small model's passes are launch-bound."""
        try:
            return self._times(vectors, batched=True)
        except RuntimeError:  # too little memory for all at once, or the model does something that vmap cannot batch
            each = [self @ [v[k] for v in vectors] for k in range(len(vectors[0]))]
            return [torch.stack(found) for found in zip(*each, strict=True)]

    def _times(self, vectors: Sequence[Tensor], batched: bool) -> list[Tensor]:
        total = [torch.zeros_like(v) for v in vectors]
        for gradient in self.gradients:
            products = torch.autograd.grad(
                gradient, list(self.params.values()), grad_outputs=list(vectors), retain_graph=True,
                allow_unused=True, is_grads_batched=batched,
            )  # fmt: skip
            for t, product in zip(total, products, strict=True):
                if product is not None:  # a loss that is linear in a parameter has no curvature there
                    t.add_(product.detach(), alpha=1 / len(self.gradients))
        return total


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return sum(float(torch.dot(x.reshape(-1), y.reshape(-1))) for x, y in zip(a, b, strict=True))


def hutchinson(curvature: Curvature, draw: Callable[[int], Sequence[Tensor]], probes: int) -> Estimate:
    """Tr(H) from zᵀHz over random signs z = draw(0), draw(1), …; one pass takes ``TOGETHER_BYTES`` of them."""
    width = max(1, TOGETHER_BYTES // (4 * max(1, curvature.size)))
    found = []
    for first in range(0, probes, width):
        some = [draw(k) for k in range(first, min(first + width, probes))]
        stacked = [torch.stack(each) for each in zip(*some, strict=True)]
        pairs = zip(stacked, curvature.together(stacked), strict=True)
        found.append(torch.stack([(z * hz).flatten(1).sum(1) for z, hz in pairs]).sum(0))
    return Estimate.of(torch.cat(found).cpu())


def lanczos(curvature: Curvature, start: Sequence[Tensor], iterations: int) -> Estimate:
    """λmax(H): the largest Ritz value after ``iterations`` products, and the norm of its residual.

    Only three vectors are kept.  Orthogonality is lost as the top value converges; this duplicates the value and does
    not move it.
    """
    norm = math.sqrt(_dot(start, start))
    current = [x / norm for x in start]
    previous = [torch.zeros_like(x) for x in start]
    diagonal: list[float] = []
    off: list[float] = []
    for _ in range(max(1, iterations)):
        image = curvature @ current
        diagonal.append(_dot(current, image))
        beta_before = off[-1] if off else 0.0
        rest = [w - diagonal[-1] * v - beta_before * u for w, v, u in zip(image, current, previous, strict=True)]
        beta = math.sqrt(_dot(rest, rest))
        off.append(beta)
        if beta <= 1e-10 * max(1.0, abs(diagonal[0])):
            break
        previous, current = current, [r / beta for r in rest]
    small = torch.diag(torch.tensor(diagonal, dtype=torch.float64))
    for i, beta in enumerate(off[:-1]):
        small[i, i + 1] = small[i + 1, i] = beta
    values, vectors = torch.linalg.eigh(small)
    return Estimate(float(values[-1]), abs(off[-1] * float(vectors[-1, -1])))


def _drawn(curvature: Curvature, offsets: dict[str, int], key: Key, distribution: Distribution) -> list[Tensor]:
    return [
        normal(Draw(key, offsets[name], distribution), tuple(p.shape), device=p.device, dtype=p.dtype)
        for name, p in curvature.params.items()
    ]


def backward(
    model: nn.Module,
    curvature: Curvature,
    partition: Partition = layers,
    *,
    probes: int = 8,
    iterations: int = 8,
    seed: int = 0,
) -> Iterator[Measure]:
    """Measure one block after another by Hessian-vector products.

    Args:
        model: a model in evaluation mode; its attention must be twice differentiable (``eager`` in transformers).
        curvature: the model's curvature.
        partition: divides the model into blocks.
        probes: number of random sign vectors z for the trace.
        iterations: number of Lanczos iterations.
        seed: the seed of z.
    """
    _check(curvature.gradients, probes)
    offsets = _offsets(model)
    for block in partition(model):
        part = curvature.part(block.params)
        norm, each = part.norms()

        def signs(k: int, part: Curvature = part) -> list[Tensor]:
            return _drawn(part, offsets, Key(seed, 0, k), Distribution.RADEMACHER)

        yield Measure(
            block.name, part.size, hutchinson(part, signs, probes), _top(part, offsets, iterations, seed),
            Estimate(norm, 0.0), Estimate.of(each),
        )  # fmt: skip


def top(model: nn.Module, curvature: Curvature, *, iterations: int = 8, seed: int = 0) -> Estimate:
    """λmax(H) of the whole model, by Lanczos: the denominator of every ρ_B."""
    return _top(curvature, _offsets(model), iterations, seed)


def _top(curvature: Curvature, offsets: dict[str, int], iterations: int, seed: int) -> Estimate:
    start = curvature.start(_drawn(curvature, offsets, Key(seed, 1), Distribution.NORMAL))
    return lanczos(curvature, start, iterations)


def forward(
    model: nn.Module,
    closures: Sequence[Closure],
    partition: Partition = layers,
    *,
    probes: int = 8,
    sketch: int = 0,
    eps: float = 1e-3,
    seed: int = 0,
) -> Iterator[Measure]:
    """Measure one block after another by losses alone, through ``ZeroOrder``: 2·probes evaluations per batch and block.

    Args:
        model: any model.
        closures: one per batch.
        partition: divides the model into blocks.
        probes: number of random sign vectors z; they are the same for every batch.
        sketch: number m of vectors for the bracket of λmax, which takes 2m(m-1) more evaluations; 0 leaves it NaN.
        eps: the ε of the finite differences.
        seed: the seed of z.
    """
    _check(closures, probes)
    with torch.no_grad():
        still = torch.tensor([float(closure()) for closure in closures], dtype=torch.float64)
    blocks = partition(model)
    for index, block in enumerate(blocks):
        coeffs, sides = [], []
        for closure in closures:
            optimizer = _standing(model, blocks, index, probes, eps, seed)
            optimizer.step(closure)
            assert optimizer.record is not None
            coeffs.append(torch.tensor(optimizer.record.coeffs, dtype=torch.float64))
            sides.append(torch.tensor(optimizer.record.losses, dtype=torch.float64).view(probes, 2).sum(1))
        c = torch.stack(coeffs)  # (batches, probes)
        curved = (torch.stack(sides) - 2 * still.unsqueeze(1)).mean(0) / eps**2  # zᵀHz, (probes,)
        bracket = Estimate(math.nan, math.nan)
        if sketch:
            bracket = _bracket(_standing(model, blocks, index, sketch, eps, seed + 1), closures, sketch, eps)
        size = sum(p.numel() for _, p, _ in _standing(model, blocks, index, 1, eps, seed).members)
        yield Measure(block.name, size, Estimate.of(curved), bracket, Estimate.square(c.mean(0)), Estimate.square(c))


def _standing(model: nn.Module, blocks: Sequence[Block], index: int, probes: int, eps: float, seed: int) -> ZeroOrder:
    """An optimizer that measures on one block and does not move: lr = 0."""
    return ZeroOrder(
        model, 0.0, partition=blocks, schedule=Only(index), estimator=TwoSided(eps, probes), seed=seed,
        distribution=Distribution.RADEMACHER,
    )  # fmt: skip


def _bracket(optimizer: ZeroOrder, closures: Sequence[Closure], m: int, eps: float) -> Estimate:
    """The middle of √(t₄/t₂) ≤ |λ|max(H_B) ≤ t₄^(1/4); its error is half the width plus the ends' jackknife error."""
    gram = _gram(optimizer, closures, m, eps)
    ends = _ends(gram)
    kept = [[i for i in range(m) if i != left] for left in range(m)]
    again = torch.stack([_ends(gram[k][:, k]) for k in kept])
    jackknife = ((m - 1) / m * (again - again.mean(0)).square().sum(0)).sqrt()
    return Estimate(float(ends.mean()), float((ends[1] - ends[0]).abs() / 2 + jackknife.max()))


def _ends(gram: Tensor) -> Tensor:
    """√(t₄/t₂) and t₄^(1/4), (2,); NaN where the estimate of a moment is not positive."""
    second, fourth = schatten(gram, 2), schatten(gram, 4)
    low = math.sqrt(fourth / second) if fourth > 0 and second > 0 else math.nan
    return torch.tensor([low, fourth**0.25 if fourth > 0 else math.nan], dtype=torch.float64)


def _gram(optimizer: ZeroOrder, closures: Sequence[Closure], m: int, eps: float) -> Tensor:
    """zᵢᵀHzⱼ for i < j, (m, m), from losses at θ ± ε(zᵢ ± zⱼ): one direction is applied within the other."""
    gram = torch.zeros(m, m, dtype=torch.float64)
    with torch.no_grad():
        for i in range(m):
            for j in range(i + 1, m):
                first, second = (Swapped(Key(optimizer.seed, 0, k), optimizer.members) for k in (i, j))
                for a in (1, -1):
                    with first:
                        first.move(a * eps)
                        for b in (1, -1):
                            with second:
                                second.move(b * eps)
                                value = sum(float(closure()) for closure in closures) / len(closures)
                            gram[i, j] += a * b * value / (4 * eps**2)
    return gram


def schatten(gram: Tensor, p: int) -> float:
    """An unbiased estimate of Tr(Hᵖ) from zᵢᵀHzⱼ, i < j, of m ≥ p random vectors.

    It is the mean over i₁ < … < i_p of (zᵢ₁ᵀHzᵢ₂)·…·(zᵢ_pᵀHzᵢ₁), which is Tr(Tᵖ⁻¹A)/C(m, p) for the strict upper
    triangle T of A (Kong and Valiant 2017).
    """
    m = gram.shape[0]
    if m < p:
        raise ZeroBlockError(f"Tr(H^{p}) needs at least {p} vectors, got {m}")
    upper = gram.triu(1)
    return float((torch.linalg.matrix_power(upper, p - 1) @ (upper + upper.T)).trace()) / math.comb(m, p)
