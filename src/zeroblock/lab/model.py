"""The theory's quantities on a model: per block Tr(H_B), λmax, ρ_B, ‖∇_B L‖² and the variance of the coefficient.

Two ways, for the same objective, a mean over batches:

    backward    Hessian-vector products: Hutchinson for the trace, Lanczos for λmax, the gradient itself
    forward     the losses of ``ZeroOrder`` at lr = 0, which measures and moves nothing:
                (L(θ+εz) - L(θ-εz))/2ε = ∇Lᵀz        (L(θ+εz) + L(θ-εz) - 2L(θ))/ε² = zᵀHz

The forward way knows λmax only from two sides: with t_p = Tr(H_Bᵖ), √(t₄/t₂) ≤ |λ|max ≤ t₄^(1/4), and t_p is
estimated without bias from losses at θ ± ε(zᵢ ± zⱼ).  A vector Hv would take as many losses as the block has weights.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

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
"""The loss of one batch, a scalar; differentiable where the backward way measures it."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A number and its standard error (for λmax: the Ritz residual, or a bracket's)."""

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
        """E[c²] of samples c, (n,) or (batches, n), near normal with mean zero: its error is √(2/n) of it.

        The standard error of the squares themselves is small where they happen to be: 60 of them gave 0.025 ± 0.004
        for 0.042.
        """
        value = float(samples.double().square().mean())
        return cls(value, value * math.sqrt(2 / samples.shape[-1]))

    def over(self, other: Estimate) -> Estimate:
        """A ratio, errors added to first order."""
        value = self.value / other.value
        relative = (self.error / other.value) ** 2 + (value * other.error / other.value) ** 2
        return Estimate(value, math.sqrt(relative))


@dataclasses.dataclass(frozen=True)
class Measure:
    """The measurements of one block.

    Args:
        name: of the block.
        size: its weights.
        trace: Tr(H_B).
        top: λmax(H_B).
        gradient: ‖∇_B L‖² of the mean over the batches.
        variance: of the coefficient c = ∇L_iᵀz over directions z and batches i; its mean is zero, so E[c²].
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


def _check(closures: Sequence[Closure], probes: int) -> None:
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
    """H of the mean loss, applied to vectors of some parameters.

    The graph of the gradient is built once per batch and kept, so that a product is one pass through it.
    Memory is that of a few backward passes: meant for small batches.
    """

    params: Sequence[Tensor]
    gradients: Sequence[Sequence[Tensor]]

    @classmethod
    def of(cls, params: Sequence[Tensor], closures: Sequence[Closure]) -> Curvature:
        """Differentiate every batch's loss with respect to ``params``."""
        gradients = []
        with torch.enable_grad():
            for closure in closures:
                loss = closure()
                if not loss.requires_grad:
                    raise ZeroBlockError("the loss carries no gradient; measure forward only (--forward)")
                gradients.append(torch.autograd.grad(loss, params, create_graph=True))
        return cls(params, gradients)

    def norms(self) -> tuple[float, Tensor]:
        """‖∇L‖² of the mean loss, and of each batch's, (batches,)."""
        mean = sum(
            float(torch.stack([g[i].detach().double() for g in self.gradients]).mean(0).square().sum())
            for i in range(len(self.params))
        )
        each = [sum(float(t.detach().double().square().sum()) for t in g) for g in self.gradients]
        return float(mean), torch.tensor(each, dtype=torch.float64)

    def start(self, noise: Sequence[Tensor]) -> list[Tensor]:
        """Where Lanczos begins: the mean gradient with a tenth of its length in noise.

        Gradients lie near the top eigenvectors.  From noise alone, six products on a layer of SmolLM2 find nothing.
        """
        mean = [torch.stack([g[i].detach() for g in self.gradients]).mean(0) for i in range(len(self.params))]
        length, other = math.sqrt(_dot(mean, mean)), math.sqrt(_dot(noise, noise))
        share = 0.1 * length / other if length > 0 else 1.0
        return [g + share * z for g, z in zip(mean, noise, strict=True)]

    def __matmul__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H v, tensor by tensor."""
        total = [torch.zeros_like(p) for p in self.params]
        for gradient in self.gradients:
            products = torch.autograd.grad(
                gradient, self.params, grad_outputs=list(vectors), retain_graph=True, allow_unused=True
            )
            for t, product in zip(total, products, strict=True):
                if product is not None:  # a loss that is linear in a parameter has no curvature there
                    t.add_(product.detach(), alpha=1 / len(self.gradients))
        return total


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return sum(float(torch.dot(x.reshape(-1), y.reshape(-1))) for x, y in zip(a, b, strict=True))


def hutchinson(curvature: Curvature, draws: Sequence[Sequence[Tensor]]) -> Estimate:
    """Tr(H) from zᵀHz over random signs z."""
    return Estimate.of(torch.tensor([_dot(z, curvature @ z) for z in draws], dtype=torch.float64))


def lanczos(curvature: Curvature, start: Sequence[Tensor], iterations: int) -> Estimate:
    """λmax(H): the largest Ritz value after some products, and the norm of its residual.

    Three vectors are kept; orthogonality is lost as the top value converges, which repeats it and does not move it.
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


def _draw(
    params: Sequence[tuple[str, Tensor]], offsets: dict[str, int], key: Key, distribution: Distribution
) -> list[Tensor]:
    return [
        normal(Draw(key, offsets[name], distribution), tuple(p.shape), device=p.device, dtype=p.dtype)
        for name, p in params
    ]


def backward(
    model: nn.Module,
    closures: Sequence[Closure],
    partition: Partition = layers,
    *,
    probes: int = 8,
    iterations: int = 8,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> list[Measure]:
    """Measure every block by Hessian-vector products.

    Args:
        model: in evaluation mode; attention must be one that differentiates twice (``eager`` in transformers).
        closures: one per batch.
        partition: into blocks.
        probes: random signs z for the trace.
        iterations: of Lanczos.
        seed: of z.
        tick: called after each block.
    """
    _check(closures, probes)
    named, offsets = dict(model.named_parameters()), _offsets(model)
    measures = []
    for block in partition(model):
        params = [(name, named[name]) for name in block.params]
        curvature = Curvature.of([p for _, p in params], closures)
        norm, each = curvature.norms()
        draws = [_draw(params, offsets, Key(seed, 0, k), Distribution.RADEMACHER) for k in range(probes)]
        start = curvature.start(_draw(params, offsets, Key(seed, 1), Distribution.NORMAL))
        variance = Estimate.of(each)
        measures.append(
            Measure(
                block.name, _size(params), hutchinson(curvature, draws), lanczos(curvature, start, iterations),
                Estimate(norm, 0.0), variance,
            )
        )  # fmt: skip
        del curvature
        tick()
    return measures


def _size(params: Sequence[tuple[str, Tensor]]) -> int:
    return sum(p.numel() for _, p in params)


def top(model: nn.Module, closures: Sequence[Closure], *, iterations: int = 8, seed: int = 0) -> Estimate:
    """λmax(H) of the whole model, by Lanczos: the denominator of every ρ_B."""
    _check(closures, 2)
    offsets = _offsets(model)
    params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    curvature = Curvature.of([p for _, p in params], closures)
    start = curvature.start(_draw(params, offsets, Key(seed, 1), Distribution.NORMAL))
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
    tick: Callable[[], None] = lambda: None,
) -> list[Measure]:
    """Measure every block by losses alone, through ``ZeroOrder``: 2·probes evaluations per batch and block.

    Args:
        model: any.
        closures: one per batch.
        partition: into blocks.
        probes: random signs z; the same for every batch.
        sketch: vectors m of the bracket of λmax, 2m(m-1) evaluations more; none leaves it unknown (NaN).
        eps: of the differences.
        seed: of z.
        tick: called after each block.
    """
    _check(closures, probes)
    with torch.no_grad():
        still = torch.tensor([float(closure()) for closure in closures], dtype=torch.float64)
    measures = []
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
        measures.append(
            Measure(
                block.name, size, Estimate.of(curved), bracket, Estimate.square(c.mean(0)), Estimate.square(c),
            )
        )  # fmt: skip
        tick()
    return measures


def _standing(model: nn.Module, blocks: Sequence[Block], index: int, probes: int, eps: float, seed: int) -> ZeroOrder:
    """An optimizer that measures on one block and does not move: lr = 0."""
    return ZeroOrder(
        model, 0.0, partition=blocks, schedule=Only(index), estimator=TwoSided(eps, probes), seed=seed,
        distribution=Distribution.RADEMACHER,
    )  # fmt: skip


def _bracket(optimizer: ZeroOrder, closures: Sequence[Closure], m: int, eps: float) -> Estimate:
    """|λ|max(H_B) between √(t₄/t₂) and t₄^(1/4): the middle; half the width and the jackknife's error of the ends."""
    gram = _gram(optimizer, closures, m, eps)
    ends = _ends(gram)
    kept = [[i for i in range(m) if i != left] for left in range(m)]
    again = torch.stack([_ends(gram[k][:, k]) for k in kept])
    jackknife = ((m - 1) / m * (again - again.mean(0)).square().sum(0)).sqrt()
    return Estimate(float(ends.mean()), float((ends[1] - ends[0]).abs() / 2 + jackknife.max()))


def _ends(gram: Tensor) -> Tensor:
    """√(t₄/t₂) and t₄^(1/4), (2,); NaN where an estimate of a moment came out negative."""
    second, fourth = schatten(gram, 2), schatten(gram, 4)
    low = math.sqrt(fourth / second) if fourth > 0 and second > 0 else math.nan
    return torch.tensor([low, fourth**0.25 if fourth > 0 else math.nan], dtype=torch.float64)


def _gram(optimizer: ZeroOrder, closures: Sequence[Closure], m: int, eps: float) -> Tensor:
    """zᵢᵀHzⱼ for i < j, (m, m), from losses at θ ± ε(zᵢ ± zⱼ): one direction stands inside another."""
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
    """Tr(Hᵖ) from zᵢᵀHzⱼ, i < j, of m ≥ p random vectors, without bias.

    The mean over i₁ < … < i_p of (zᵢ₁ᵀHzᵢ₂)·…·(zᵢ_pᵀHzᵢ₁): Tr(Tᵖ⁻¹A)/C(m, p), T the strict upper triangle of A
    (Kong and Valiant 2017).
    """
    m = gram.shape[0]
    if m < p:
        raise ZeroBlockError(f"Tr(H^{p}) needs at least {p} vectors, got {m}")
    upper = gram.triu(1)
    return float((torch.linalg.matrix_power(upper, p - 1) @ (upper + upper.T)).trace()) / math.comb(m, p)
