"""Are matrix products of 8-bit numbers (e4m3) good enough for zeroth-order steps?

    python results/fp8/measure.py --model DIR --data DIR --task sst2 --parts A,B,C --out OUT

A, agreement: on a real trajectory of ``mezo_bcd`` without a learning rate, the coefficient of every step is measured
   several times at the same weights, along the same direction, on the same batch: with bf16 products (the run's own),
   in fp32, and with several ways of rounding to 8 bits.
B, curves: the same run with bf16 products and with 8-bit ones, evaluated on dev with bf16 products.
C, time: the products of an OPT-13B layer, and what rounding their operands takes; only on a GPU.

A coefficient is a small difference of two large losses, so the question is not how exact a product is, but how much of
its error is the same at both points.  The ways of rounding (``VARIANTS``) differ in that:

    all           every layer but the active one; each point is rounded by itself
    suffix        the layers after the active block alone, as what comes before it is the same for both points
    all-diff      as all, but after the block y2 = y1 + Q(x2 - x1) W: the difference is rounded with its own scale
    suffix-diff   as suffix, in the same way

Inputs have a scale per token and weights one per output.  The active layer, whose weights are perturbed copies, the
embedding and the head stay in bf16.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import dataclasses
import itertools
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from zeroblock.budget import Budget
from zeroblock.closure import evaluation
from zeroblock.direction import Point, Swapped
from zeroblock.engine import Engine
from zeroblock.engine.fork import restore
from zeroblock.engine.fuse import Fusions
from zeroblock.engine.objective import BatchObjective
from zeroblock.exclusive import exclusive
from zeroblock.method import METHODS
from zeroblock.optimizer import ZeroOrder
from zeroblock.plan import Plan
from zeroblock.step import Objective
from zeroblock.train import Config
from zeroblock.train.batch import Batches
from zeroblock.train.cache import caching
from zeroblock.train.workload import Workload, prepare, resolve

EIGHT = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
TINY = 1e-30
"""Rows whose largest magnitude is below this are taken to have it, so that no scale is zero."""
VARIANTS = ("all", "all-diff", "suffix", "suffix-diff")
PAD = 256
"""Scales lie in buffers of a multiple of this: torch's row-wise kernel was seen to read past their end (#133334)."""


# --------------------------------------------------------------------------------------------------------- rounding


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(x_ptr, out_ptr, scale_ptr, n, half, diff: tl.constexpr, wide: tl.constexpr):  # type: ignore
    """A program per row, which it reads once; with ``diff`` rows from ``half`` on are less the row ``half`` above."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, wide)
    inside = column < n
    at = row * n + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if diff:
        x -= tl.load(x_ptr + at - half * n, mask=inside & (at >= half * n), other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1e-30) / 448.0
    tl.store(scale_ptr + row, scale)
    tl.store(out_ptr + at, (x / scale).to(out_ptr.dtype.element_ty), mask=inside)


def quantise_triton(x: Tensor, half: int = 0) -> tuple[Tensor, Tensor]:
    """See :func:`quantise`; on a GPU (or in Triton's interpreter)."""
    rows, n = x.shape
    out = torch.empty(x.shape, dtype=EIGHT, device=x.device)
    scale = torch.empty(-(-rows // PAD) * PAD, dtype=torch.float32, device=x.device)[:rows]
    wide = triton.next_power_of_2(n)
    warps = max(1, min(16, wide // 1024))
    _quantise[(rows,)](x, out, scale, n, half, diff=half > 0, wide=wide, num_warps=warps)
    return out, scale[:, None]


def quantise(x: Tensor, half: int = 0) -> tuple[Tensor, Tensor]:
    """Round rows to 8 bits, each with the scale that takes its largest magnitude to the largest number.

    Args:
        x: (rows, n), contiguous.
        half: if not 0, row half + i is rounded as its difference from row i.

    Returns:
        (rows, n) in e4m3, and (rows, 1) the scales in fp32.
    """
    if x.is_cuda:
        return quantise_triton(x, half)
    wide = x.float()
    if half:
        wide = torch.cat([wide[:half], wide[half:] - wide[:half]])
    scale = wide.abs().amax(1, keepdim=True).clamp(min=TINY) / LARGEST
    return (wide / scale).to(EIGHT), scale


class Multiply:
    """Products of 8-bit numbers with a scale per row of each operand: torch's kernel, or the same in 16 bits.

    Args:
        device: where products run; the kernel is tried there, and what it says is printed.
        fast: accumulate as fast as the tensor cores can, with some 14 bits (``use_fast_accum``).
    """

    def __init__(self, device: torch.device, fast: bool) -> None:
        self.fast, self.native = fast, True
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(n, 256, generator=generator).to(device, torch.bfloat16) for n in (80, 128))
        a, b = quantise(x), quantise(w)
        expected = (a[0].float() * a[1]) @ (b[0].float() * b[1]).T
        try:
            error = _relative(self(a, b).float(), expected)
        except (RuntimeError, ValueError, NotImplementedError) as reason:
            error, told = math.inf, f" ({' '.join(str(reason).split())[:200]})"
        else:
            told = ""
        self.native = error < 0.02
        print(
            f"8-bit products on {device}: {'torch._scaled_mm' if self.native else 'emulated in bf16'}, "
            f"its error {error:.4f}{told}, of rounding itself {_relative(expected, x.float() @ w.float().T):.4f}",
            flush=True,
        )

    def __call__(self, a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> Tensor:
        """(m, k) and (n, k), each with its scales → (m, n) in bf16."""
        (x, x_scale), (w, w_scale) = a, b
        if self.native:
            return torch._scaled_mm(
                x, w.t(), scale_a=x_scale, scale_b=w_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=self.fast
            )
        exact = torch.bfloat16 if x.is_cuda else torch.float32  # either holds e4m3 exactly
        return (F.linear(x.to(exact), w.to(exact)).float() * x_scale * w_scale.t()).bfloat16()


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


class EightBit:
    """The products of a model's layers, which can be computed in 8 bits for the length of a pass.

    Args:
        engine: of the model, without fusions: these would compute products in kernels of their own.
        multiply: the product.
    """

    def __init__(self, engine: Engine, multiply: Multiply) -> None:
        self.multiply = multiply
        found = [[m for m in layer.modules() if type(m) is nn.Linear] for layer in engine.anatomy.layers]
        self.linears = [[m for m in some if _fits(m)] for some in found]
        """By layer: those whose sizes the kernel takes."""
        left = sum(map(len, found)) - sum(map(len, self.linears))
        if left:
            print(f"{left} products keep 16 bits: their sizes are no multiples of 16", flush=True)
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def forget(self, layer: int | None = None) -> None:
        """Drop the 8-bit weights of a layer that has moved, or all; they are rounded again when they are needed."""
        for linear in self.linears[layer] if layer is not None else (m for some in self.linears for m in some):
            self._weights.pop(id(linear), None)

    def layers(self, variant: str, active: int) -> tuple[range, range]:
        """Which layers before and after the active one a variant rounds.

        Args:
            variant: one of ``VARIANTS``, or another word for none.
            active: the active layer; -1 for a block before all layers, their number for one after them.
        """
        if variant not in VARIANTS:
            return range(0), range(0)
        before = range(active) if variant.startswith("all") else range(0)
        return before, range(active + 1, len(self.linears))

    @contextlib.contextmanager
    def running(self, variant: str, active: int) -> Iterator[None]:
        """A context in which the model's passes, forked at two points, run as a variant says."""
        before, after = self.layers(variant, active)
        changed: list[nn.Module] = []
        try:
            for some, diff in ((before, False), (after, variant.endswith("diff"))):
                for linear in (m for i in some for m in self.linears[i]):
                    vars(linear)["forward"] = self._forward(linear, diff)
                    changed.append(linear)
            yield
        finally:
            for module in changed:
                restore(module, None)

    def _forward(self, linear: nn.Linear, diff: bool) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            weight = self._weights.get(id(linear))
            if weight is None:
                weight = self._weights[id(linear)] = quantise(linear.weight.detach())
            flat = x.flatten(0, -2).contiguous()
            parted = x.dim() < 3 or x.shape[0] > 1  # the rows of one point, then those of the other
            half = len(flat) // 2 if diff and parted else 0
            y = self.multiply(quantise(flat, half), weight)
            if half or linear.bias is not None:  # in fp32, so that every sum is rounded once
                wide = y.float()
                if half:
                    wide[half:] += wide[:half]
                y = (wide if linear.bias is None else wide + linear.bias).to(x.dtype)
            return y.view(*x.shape[:-1], -1)

        return forward


def _fits(linear: nn.Linear) -> bool:
    return linear.in_features % 16 == 0 and linear.out_features % 16 == 0


# ---------------------------------------------------------------------------------------------------------- workload


class Bench:
    """A task on a model in bf16, whose weights can be put back.

    Args:
        args: of the command line.
        task: its name.
    """

    def __init__(self, args: argparse.Namespace, task: str) -> None:
        began = time.perf_counter()
        config = Config(
            model=args.model, task=task, data=args.data, data_seed=args.seed, seed=args.seed, dtype="bf16",
            batch_size=args.batch_size, graphs="off", train=args.train, dev=args.dev,
        )  # fmt: skip
        self.work: Workload = prepare(resolve(config), splits=("dev",))
        self.model, self.seed, self.task = self.work.model, args.seed, task
        self.plain = Engine(self.model, graphs=False)
        self.plain.fusions = Fusions()  # every product is the forward of its own module
        self.eight = EightBit(self.plain, Multiply(self.plain.device, args.fast_accum))
        self._weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._batches = Batches(len(self.work.train), args.batch_size, args.seed)
        self.sync()
        print(
            f"{task}: {len(self.eight.linears)} layers, packed {self.plain.packed}, forked {self.plain.forked}, "
            f"ready after {time.perf_counter() - began:.1f} s",
            flush=True,
        )
        if not self.plain.forked:
            raise RuntimeError(f"the passes of this model are not forked: {self.plain.reason}")

    def sync(self) -> None:
        """Wait for the device."""
        if self.plain.device.type == "cuda":
            torch.cuda.synchronize()

    def start(self) -> ZeroOrder:
        """A fresh optimizer, on the model's own weights."""
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(self._weights[name])
        self.eight.forget()
        return METHODS["mezo_bcd"](self.model, lr=None, seed=self.seed)

    def objective(self, step: int, engine: Engine) -> BatchObjective:
        """The objective of a step, measured by an engine."""
        encoded, labels = zip(*(self.work.train[i] for i in self._batches.at(step)), strict=True)
        return engine.objective(encoded, labels, over=self.work.task.over)

    def active(self, optimizer: ZeroOrder, plan: Plan) -> int:
        """The layer that a plan's block is: -1 for a block before all layers, their number for one after them."""
        anatomy, blocks, index = self.plain.anatomy, optimizer.blocks, plan.turn.block
        layer = anatomy.layer.get(blocks[index].params[0])
        if layer is not None:
            return next(i for i, one in enumerate(anatomy.layers) if one is layer)
        first = next(i for i, block in enumerate(blocks) if block.params[0] in anatomy.layer)
        return -1 if index < first else len(anatomy.layers)

    def moved(self, active: int) -> None:
        """A step has moved the active block."""
        if 0 <= active < len(self.eight.linears):
            self.eight.forget(active)

    def measure(self) -> tuple[float, float]:
        """Dev loss and dev metric of the weights as they are, with bf16 products."""
        found = self.work.evaluator(self.work.exams["dev"])
        return found.loss, found.value


class Rate:
    """The learning rate of a run that gives none: the default budget, falling to zero over the run.

    Args:
        optimizer: whose rate is set.
        steps: of the run.
    """

    def __init__(self, optimizer: ZeroOrder, steps: int) -> None:
        self.optimizer, self.steps, self.budget, self.spent = optimizer, steps, Budget.of(optimizer), 0.0

    def set(self, step: int) -> None:
        """Set it for a step."""
        lr = self.budget.rest(self.spent, max(1.0, self.steps - step))
        self.spent += (lr * self.budget.weight) ** 2
        self.optimizer.lr = lr


@torch.no_grad()
def losses(objective: BatchObjective, points: Sequence[Point]) -> Tensor:
    """(points,) the losses in fp64; unlike ``measure``, whatever goes wrong is raised and not measured otherwise."""
    with exclusive(objective.model), evaluation(objective.model):
        return objective.losses(points).double().cpu()


def coefficient(plan: Plan, found: Tensor) -> float:
    """The coefficient of a step from the losses at its points."""
    return float(plan.shape(found).coeffs[0])


@dataclasses.dataclass(frozen=True)
class Rounded(Objective):
    """An objective whose points are measured with the products of a variant.

    Args:
        inner: on an engine without fusions.
        eight: the model's products.
        variant: see ``VARIANTS``.
        active: see :meth:`EightBit.layers`.
    """

    inner: BatchObjective
    eight: EightBit
    variant: str
    active: int

    def __call__(self) -> Any:
        return self.inner()

    @property
    def weight(self) -> tuple[str, float]:
        return self.inner.weight

    @property
    def model(self) -> nn.Module:
        return self.inner.model

    def measure(self, points: Sequence[Point]) -> Tensor:
        with self.eight.running(self.variant, self.active):
            return losses(self.inner, points)


class Rows:
    """A CSV that is written row by row, so that a run that is stopped leaves what it has.

    Args:
        path: of the file, which is overwritten.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._columns = path, list[str]()

    def add(self, row: dict[str, Any]) -> None:
        """Write a row; all have the columns of the first."""
        first = not self._columns
        self._columns = self._columns or list(row)
        with self._path.open("w" if first else "a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=self._columns)
            if first:
                writer.writeheader()
            writer.writerow(row)


# --------------------------------------------------------------------------------------------------------- agreement


class Single:
    """A copy of a model in fp32 that follows the weights of the run.

    Args:
        model: in bf16.
    """

    def __init__(self, model: nn.Module) -> None:
        self.engine = Engine(nn.Module.float(copy.deepcopy(model)), graphs=False)  # GGUF refuses .float()
        self.own, self.run = (dict(m.named_parameters()) for m in (self.engine.model, model))

    def points(self, plan: Plan) -> list[Point]:
        """The points of a plan, which lie on the fp32 grid here: θ ± ε·u without the rounding of 16-bit copies."""
        directions: dict[int, Swapped] = {}
        for direction in plan.directions:
            members = tuple(member._replace(param=self.own[member.name]) for member in direction.members)
            directions[id(direction)] = Swapped(direction.key, members, direction.paired)
        return [Point(directions[id(point.direction)], point.scale) for point in plan.points]

    def coefficient(self, plan: Plan, objective: BatchObjective) -> float:
        """The coefficient of a plan in fp32; the objective is on this engine."""
        return coefficient(plan, losses(objective, self.points(plan)))

    @torch.no_grad()
    def follow(self, names: Sequence[str]) -> None:
        """Take over tensors that have moved."""
        for name in names:
            self.own[name].copy_(self.run[name])


def agreement(bench: Bench, args: argparse.Namespace) -> None:
    """Part A."""
    optimizer = bench.start()
    single = Single(bench.model)
    rate, rows = Rate(optimizer, args.steps), Rows(args.out / f"agreement-{bench.task}.csv")
    layers = len(bench.eight.linears)
    table: list[dict[str, float]] = []
    places: list[int] = []
    seconds: dict[str, float] = {}
    began = time.perf_counter()

    def timed(name: str, run: Callable[..., float], *given: Any) -> float:
        since = time.perf_counter()
        value = run(*given)  # ends with losses on the host, so the device is done
        if table:  # the first step compiles kernels
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - since
        return value

    for step in range(args.steps):
        if time.perf_counter() - began > args.limit_s:
            print(f"stopped by --limit-s after {step} of {args.steps} steps", flush=True)
            break
        rate.set(step)
        plan = optimizer.plan()
        active, block = bench.active(optimizer, plan), optimizer.blocks[plan.turn.block]
        plain, fused = (bench.objective(step, engine) for engine in (bench.plain, bench.work.engine))
        found: dict[str, float] = {}
        for variant in ("bf16-plain", *VARIANTS):
            rounded = Rounded(plain, bench.eight, variant, active)
            found[variant] = timed(variant, _rounded, plan, rounded)
        found["fp32"] = timed("fp32", single.coefficient, plan, bench.objective(step, single.engine))
        found["bf16"] = timed("bf16", _stepped, optimizer, fused)  # the last one: it moves the weights
        bench.moved(active)
        single.follow(block.params)
        table.append(found)
        places.append(active)
        tokens = sum(row.tokens.numel() for row, _ in plain.rows)
        rows.add({"step": step, "block": block.name, "active": active, "tokens": tokens, **found})
        if step in (0, 1, 9) or (step + 1) % 50 == 0:
            took = time.perf_counter() - began
            shown = ", ".join(f"{name} {value:+.4f}" for name, value in found.items())
            print(f"  step {step + 1}, {took:.1f} s, {tokens} tokens, {block.name}: {shown}", flush=True)
    if len(table) < 3:
        print("too few steps to compare", flush=True)
        return
    each = ", ".join(f"{name} {1e3 * total / (len(table) - 1):.0f}" for name, total in seconds.items())
    print(f"ms per measurement (eager; bf16 with its update): {each}")
    subsets = {
        "all steps": [True] * len(places),
        "block is a layer": [0 <= at < layers for at in places],
        "suffix rounds something": [at < layers - 1 for at in places],
    }
    for title, chosen in subsets.items():
        some = [row for row, wanted in zip(table, chosen, strict=True) if wanted]
        print(f"\n{bench.task}, {title}: {len(some)} steps", flush=True)
        if len(some) >= 3:
            _compare(some)


def _rounded(plan: Plan, objective: Rounded) -> float:
    """The coefficient that a variant measures."""
    return coefficient(plan, objective.measure(plan.points))


def _stepped(optimizer: ZeroOrder, objective: Objective) -> float:
    """Take a step; its coefficient."""
    optimizer.step(objective)
    optimizer.flush()
    assert optimizer.record is not None
    return optimizer.record.coeffs[0]


def _compare(table: Sequence[dict[str, float]]) -> None:
    """Print how the coefficients of each kind agree with bf16's and with fp32's; slopes go through the origin."""
    print(f"  {'':12} {'against':8} {'corr':>7} {'slope':>7} {'rel rms':>8} {'signs':>6} {'larger half':>12}")
    for name in ("bf16", *(name for name in table[0] if name != "bf16")):  # first what the others are judged by
        for reference in ("fp32", "bf16"):
            if name in (reference, "fp32"):
                continue
            pairs = np.array([(row[name], row[reference]) for row in table])
            pairs = pairs[np.isfinite(pairs).all(1)]
            lost = len(table) - len(pairs)
            y, x = pairs.T
            large = np.abs(x) >= np.median(np.abs(x))
            same = np.sign(x) == np.sign(y)
            print(
                f"  {name:12} {reference:8} {_correlation(x, y):7.4f} {(x @ y) / (x @ x):7.4f} "
                f"{math.sqrt(np.sum((y - x) ** 2) / (x @ x)):8.4f} {same.mean():6.3f} {same[large].mean():12.3f}"
                + (f"  {lost} not finite" if lost else "")
            )
    print(f"  rms of the coefficients in fp32: {math.sqrt(statistics.fmean(r['fp32'] ** 2 for r in table)):.4f}")
    sys.stdout.flush()


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = math.sqrt((x @ x) * (y @ y))
    return float(x @ y) / size if size else math.nan


# ------------------------------------------------------------------------------------------------------------ curves


def curves(bench: Bench, args: argparse.Namespace) -> None:
    """Part B."""
    names = ["bf16", *(name for name in args.variant if name != "bf16")]
    rows = Rows(args.out / f"curves-{bench.task}.csv")
    found: dict[str, dict[int, tuple[float, float]]] = {}
    every = max(1, args.curve_steps // 4)
    for name in names:
        optimizer = bench.start()
        rate, marks, trained = Rate(optimizer, args.curve_steps), found.setdefault(name, {}), 0.0
        began = time.perf_counter()
        since = began
        for step in range(args.curve_steps + 1):
            if step % every == 0 or step == args.curve_steps:
                optimizer.flush()
                bench.sync()
                trained += time.perf_counter() - since
                marks[step] = bench.measure()
                loss, metric = marks[step]
                row = {"products": name, "step": step, "dev_loss": round(loss, 5), "dev": round(metric, 5)}
                rows.add(row | {"seconds": round(trained, 2)})
                print(f"  {name:12} step {step:5}: dev loss {loss:.4f}, dev {metric:.1%}, {trained:.1f} s", flush=True)
                since = time.perf_counter()
            if step == args.curve_steps:
                break
            if time.perf_counter() - began > args.limit_s / len(names):
                print(f"  {name}: stopped by --limit-s after {step} of {args.curve_steps} steps", flush=True)
                break
            rate.set(step)
            active = bench.active(optimizer, optimizer.plan())
            if name == "bf16-fused":
                optimizer.step(bench.objective(step, bench.work.engine))
            else:
                optimizer.step(Rounded(bench.objective(step, bench.plain), bench.eight, name, active))
            bench.moved(active)
    print(f"\n{bench.task}, dev loss and metric by step, evaluated with bf16 products")
    print("  step   " + "".join(f"{name:>20}" for name in names))
    for step in found["bf16"]:
        cells = (found[name].get(step) for name in names)
        print(f"  {step:5}  " + "".join(f"{'' if c is None else f'{c[0]:.4f}  {c[1]:6.1%}':>20}" for c in cells))
    sys.stdout.flush()


# -------------------------------------------------------------------------------------------------------------- time

SHAPES = {"attention": (5120, 5120, 4), "fc1": (5120, 20480, 1), "fc2": (20480, 5120, 1)}
"""The products of an OPT-13B layer: inputs, outputs, how many."""
INPUTS = {"attention": 2, "fc1": 1, "fc2": 1}
"""How many inputs have to be rounded for them: q, k and v share theirs."""
LAYERS = 40
RING_BYTES = 256 << 20
"""Operands take turns in at least this much memory, so that none waits in the cache."""
WARM, ROUNDS = 10, 20
"""Rounds before the timed ones, in which the clocks settle, and timed ones."""


def speed(args: argparse.Namespace) -> None:
    """Part C."""
    if not torch.cuda.is_available():
        print("part C needs a GPU: skipped", flush=True)
        return
    rows, multiply = Rows(args.out / "time.csv"), Multiply(torch.device("cuda"), True)
    found: dict[tuple[str, str, int], float] = {}
    for shape, (inputs, outputs, _) in SHAPES.items():
        for count in (2304, 4608):
            for name, ms in _times(inputs, outputs, count, multiply).items():
                found[shape, name, count] = ms
                rows.add(
                    {"shape": shape, "in": inputs, "out": outputs, "rows": count, "what": name, "ms": round(ms, 5)}
                )
            torch.cuda.empty_cache()
            flop = 2 * count * inputs * outputs
            told = ", ".join(f"{name} {found[shape, name, count]:.4f}" for name in TIMED)
            rates = ", ".join(f"{n} {flop / found[shape, n, count] / 1e9:.0f}" for n in ("bf16", "fp8", "fp8 exact"))
            print(f"  {shape} {inputs}->{outputs}, {count} rows, ms: {told}; TFLOP/s: {rates}", flush=True)
    _estimate(found, args.step_ms)


TIMED = ("bf16", "fp8", "fp8 exact", "round x", "round x diff", "join", "round w")


def _times(inputs: int, outputs: int, count: int, multiply: Multiply) -> dict[str, float]:
    """Milliseconds of one product in 16 and in 8 bits, and of what comes with it."""
    ring = max(2, min(8, -(-RING_BYTES // (inputs * outputs))))
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    xs = [torch.randn(count, inputs, **options) for _ in range(ring)]
    ws = [torch.randn(outputs, inputs, **options) * inputs**-0.5 for _ in range(ring)]
    ys = [torch.randn(count, outputs, **options) for _ in range(ring)]
    x8, w8 = [quantise(x) for x in xs], [quantise(w) for w in ws]
    exact = copy.copy(multiply)
    exact.fast = False
    half = count // 2
    calls: dict[str, Callable[[int], object]] = {
        "bf16": lambda i: F.linear(xs[i], ws[i]),
        "fp8": lambda i: multiply(x8[i], w8[i]),
        "fp8 exact": lambda i: exact(x8[i], w8[i]),
        "round x": lambda i: quantise(xs[i]),
        "round x diff": lambda i: quantise(xs[i], half),
        "join": lambda i: ys[i][half:].add_(ys[i][:half]),
        "round w": lambda i: quantise(ws[i]),
    }
    graphs = {name: _captured(call, ring) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(WARM + ROUNDS):  # in turns, so that a clock that falls falls for all
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(graphs) + 1)]
        marks[0].record()
        for graph, mark in zip(graphs.values(), marks[1:], strict=True):
            graph.replay()
            mark.record()
        torch.cuda.synchronize()
        for some, (start, end) in zip(samples.values(), itertools.pairwise(marks), strict=True):
            some.append(float(start.elapsed_time(end)) / ring)
    return {name: statistics.median(some[WARM:]) for name, some in samples.items()}


def _captured(call: Callable[[int], object], ring: int) -> torch.cuda.CUDAGraph:
    """A call on each of the operands as one graph: launches take longer than the smallest of these kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(ring):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(ring):
            call(i)
    return graph


def _estimate(found: dict[tuple[str, str, int], float], step_ms: float) -> None:
    """Print what a step of OPT-13B on boolq would save, with the arithmetic."""

    def layer(name: str, count: int, each: dict[str, int]) -> float:
        return sum(times * found[shape, name, count] for shape, times in each.items())

    products = {shape: times for shape, (_, _, times) in SHAPES.items()}
    print("\nOne layer of OPT-13B, ms (its 6 products, their 4 different inputs, its 6 matrices):")
    sums: dict[tuple[str, int], float] = {}
    for count in (2304, 4608):
        for name in TIMED:
            sums[name, count] = layer(name, count, INPUTS if name.startswith("round x") else products)
        print(f"  {count} rows: " + ", ".join(f"{name} {sums[name, count]:.3f}" for name in TIMED))
    one, two, weights = 2304, 4608, sums["round w", 4608]
    side = (LAYERS - 1) / 2
    first = sums["bf16", one] - sums["fp8", one] - sums["round x", one]
    second = sums["bf16", two] - sums["fp8", two] - sums["round x", two]
    diff = sums["bf16", two] - sums["fp8", two] - sums["round x diff", two] - sums["join", two]
    print(
        f"A step's block is one of {LAYERS} layers: {side:g} come before it with {one} rows, {side:g} after with {two}."
    )
    print(
        "Saved per layer, ms, before rounding weights:\n"
        f"  before the block             bf16 - fp8 - round x = {first:.3f}\n"
        f"  after it, points apart       bf16 - fp8 - round x = {second:.3f}\n"
        f"  after it, differences        bf16 - fp8 - round x diff - join = {diff:.3f}\n"
        f"  rounding a layer's weights   {weights:.3f}"
    )
    for title, saved in (
        ("(i)   all layers, points apart, weights rounded every step", side * (first + second) - 2 * side * weights),
        ("(i')  all layers, differences, weights rounded every step", side * (first + diff) - 2 * side * weights),
        ("(ii)  layers after the block, differences, weights rounded every step", side * (diff - weights)),
        (
            "(iii) all layers, differences, 8-bit copies kept: one layer rounded per step",
            side * (first + diff) - weights,
        ),
        ("(iv)  layers after the block, differences, 8-bit copies kept", side * diff - weights),
    ):
        print(f"{title}: saves {saved:+.1f} ms, {saved / step_ms:+.1%} of a step of {step_ms:g} ms")
    print(
        "(bf16 products only; fp16, which OPT has, needs another output dtype. The norm or activation before a product "
        "could round its output for nothing, and the residual could join the points: then round x and join are gone.)",
        flush=True,
    )


def _parts(text: str) -> list[str]:
    parts = text.upper().split(",")
    if not parts or not set(parts) <= set("ABC"):
        raise argparse.ArgumentTypeError(f"parts are A, B and C with commas between, got {text!r}")
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=_parts, default=["A", "B", "C"], help="as in A,C")
    parser.add_argument("--model", help="a folder or a name, as of zeroblock train; A and B need it")
    parser.add_argument("--data", help="the folder with TASK/train.jsonl and TASK/validation.jsonl")
    parser.add_argument("--task", nargs="+", default=["sst2"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200, help="A: steps of the trajectory")
    parser.add_argument("--variant", nargs="+", default=["suffix-diff"], choices=[*VARIANTS, "bf16-fused"],
                        help="B: run beside bf16; bf16-fused has the library's own kernels, so that it shows how far "
                             "runs of the same precision part")  # fmt: skip
    parser.add_argument("--curve-steps", type=int, default=600, help="B: steps of each run")
    parser.add_argument("--train", type=int, help="training rows; the task's default otherwise")
    parser.add_argument("--dev", type=int, default=200, help="dev rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=120.0, help="seconds after which A, or B, of a task stops")
    parser.add_argument("--fast-accum", action="store_true", help="A and B: accumulate 8-bit products fast")
    parser.add_argument("--step-ms", type=float, default=146.0, help="C: of a step of OPT-13B on boolq (dev/LOG.md)")
    parser.add_argument("--out", type=Path, default=Path("fp8-out"), help="the folder of the CSV files")
    args = parser.parse_args()
    if args.model is None and set("AB") & set(args.parts):
        parser.error("parts A and B need --model")
    torch.backends.cuda.matmul.allow_tf32 = False  # fp32 is what the others are judged by
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(versions + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", CPU"), flush=True)
    failed = 0

    def attempt(title: str, run: Callable[[], Any]) -> Any:
        """Run a part; if it fails, say so and let the others run."""
        nonlocal failed
        print(f"\n== {title}", flush=True)
        began = time.perf_counter()
        try:
            return run()
        except Exception:
            failed += 1
            traceback.print_exc(file=sys.stdout)
        finally:
            print(f"== {title}: {time.perf_counter() - began:.1f} s", flush=True)

    with caching():  # the second task finds the model loaded
        for task in args.task if set("AB") & set(args.parts) else []:
            bench = attempt(f"loading {task}", lambda name=task: Bench(args, name))  # type: ignore
            if bench is None:
                continue
            for part, run in (("A", agreement), ("B", curves)):
                if part in args.parts:
                    attempt(f"{part}, {task}", lambda one=bench, do=run: do(one, args))  # type: ignore
            del bench
    if "C" in args.parts:
        attempt("C", lambda: speed(args))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
