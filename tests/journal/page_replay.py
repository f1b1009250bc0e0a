"""From a journal to weights by ``docs/noise.md`` and ``docs/journal.md`` alone: numpy, and nothing of zeroblock.

Written as a stranger would who has the two pages and no source.  The sections named in comments are those of the pages.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).parents[2] / "docs"
NOISE_PAGE = (DOCS / "noise.md").read_text(encoding="utf-8")
F32 = np.float32
Shape = tuple[int, ...]


# noise.md, sections 1 and 2


def _table(name: str) -> list[np.float32]:
    rows = re.findall(rf"^\| {name} \d+ \| `(\S+)` \|", NOISE_PAGE, flags=re.MULTILINE)
    return [F32(float.fromhex(row)) for row in rows]


LOG, COS, SIN = _table("LOG"), _table("COS"), _table("SIN")


@dataclasses.dataclass(frozen=True)
class Address:
    """Of a noise vector: seed, step, probe, stream."""

    seed: int
    step: int
    probe: int = 0
    stream: int = 0


def philox(at: Address, first: int, count: int) -> np.ndarray:
    """The words of the counters first, first + 1, …; (count, 4)."""
    low = np.uint64(0xFFFFFFFF)
    index = (np.arange(count, dtype=np.uint64) + np.uint64(first)).astype(np.uint64)
    c = [index & low, index >> np.uint64(32)]
    c += [np.full_like(index, at.step), np.full_like(index, at.probe * 16 + at.stream)]
    k0, k1 = at.seed & 0xFFFFFFFF, at.seed >> 32
    for _ in range(10):
        p, q = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [
            (q >> np.uint64(32)) ^ c[1] ^ np.uint64(k0),
            q & low,
            (p >> np.uint64(32)) ^ c[3] ^ np.uint64(k1),
            p & low,
        ]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack(c, axis=1).astype(np.uint32)


def _groups(at: Address, offset: int, n: int) -> tuple[np.ndarray, int]:
    first = offset // 4
    return philox(at, first, (offset + n + 3) // 4 - first), offset - 4 * first


def words(at: Address, offset: int, n: int) -> np.ndarray:
    """One word per element."""
    groups, skip = _groups(at, offset, n)
    return groups.reshape(-1)[skip : skip + n]


def fma(a: Any, b: Any, c: Any) -> np.ndarray:
    """a·b + c with one rounding to single: the product is exact in double, and the sum is rounded to odd first."""
    a, b, c = (np.asarray(x, F32).astype(np.float64) for x in (a, b, c))
    with np.errstate(all="ignore"):
        product = a * b
        total = product + c
        back = total - product
        error = (product - (total - back)) + (c - back)
        even = (total.view(np.int64) & 1) == 0
        nudged = np.where((error > 0) == (total > 0), total.view(np.int64) + 1, total.view(np.int64) - 1)
        odd = np.where(np.isfinite(total) & (error != 0) & even, nudged, total.view(np.int64))
        return odd.view(np.float64).astype(F32)


def _horner(table: Sequence[np.float32], x: np.ndarray) -> np.ndarray:
    value = np.full_like(x, table[-1])
    for coefficient in reversed(table[:-1]):
        value = fma(value, x, coefficient)
    return value


def _pair(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    u = np.abs(a.view(np.int32).astype(F32)) + F32(0.5)
    n = u.view(np.int32)
    e = (n - np.int32(0x4EB504F3)) & np.int32(-0x00800000)
    f = fma((n - e).view(F32), F32(2.0**-31), F32(-(1 + 2.0**-23)))
    radius = np.sqrt(fma(e.astype(F32), F32(float.fromhex("-0x1.62e43p-23")), f * _horner(LOG, f)))
    radius = np.where(a >> np.uint32(31), -radius, radius).astype(F32)
    t = b.view(np.int32).astype(F32) * F32(2.0**-32)
    return radius * _horner(COS, t * t), radius * (t * _horner(SIN, t * t))


def noise(at: Address, offset: int, n: int, rademacher: bool) -> np.ndarray:
    """u of n elements, in single precision."""
    groups, skip = _groups(at, offset, n)
    if rademacher:
        values = np.where(groups >> np.uint32(31), F32(-1), F32(1)).astype(F32)
    else:
        values = np.stack([*_pair(groups[:, 0], groups[:, 1]), *_pair(groups[:, 2], groups[:, 3])], axis=1)
    return values.reshape(-1)[skip : skip + n]


# noise.md, section 3: rounding


def nearest(x: np.ndarray, dtype: str) -> np.ndarray:
    """To nearest even on the grid of a dtype."""
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        return np.where(np.isnan(x), x, rounded.view(F32))
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(F32) if dtype == "float16" else x


def rounded(x: np.ndarray, dtype: str, word: np.ndarray | None) -> np.ndarray:
    """Stochastically by each element's word, or to nearest without one."""
    x = np.ascontiguousarray(x, F32)
    if dtype == "float32":
        return x
    if word is not None:
        below = np.uint32(0xFFFF if dtype == "bfloat16" else 0x1FFF)
        bits = (x.view(np.uint32) + (word & below)) & ~below
        x = np.where(np.isnan(x), x, bits.view(F32))
    return nearest(x, dtype)


# journal.md: the file


@dataclasses.dataclass(frozen=True)
class Step:
    """A record, as far as the weights depend on it."""

    lr: float
    block: int
    coeffs: tuple[float, ...]
    curvatures: tuple[float, ...] = ()

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.coeffs))


def parse(data: bytes) -> tuple[dict[str, Any], list[Step]]:
    """Header and records."""
    magic, version, zero, length = struct.unpack_from("<8sHHI", data)
    assert (magic, version, zero) == (bytes.fromhex("895A424A0D0A1A0A"), 1, 0)
    (root,) = struct.unpack_from("<I", data, 16 + length)
    assert root == zlib.crc32(data[: 16 + length])
    header = json.loads(data[16 : 16 + length])
    estimator, probes = header["method"]["estimator"], header["probes"]
    curved = estimator["name"] == "Curvature"
    centres = probes if curved or (estimator["name"] == "TwoSided" and probes > 1) else 0
    layout = struct.Struct(f"<ddI{probes}f{centres}fI")
    steps = []
    for step, at in enumerate(range(20 + length, len(data) - layout.size + 1, layout.size)):
        _, lr, block, *numbers, crc = layout.unpack_from(data, at)
        body = data[at : at + layout.size - 4]
        assert crc == zlib.crc32(body, zlib.crc32(step.to_bytes(8, "little"), root))
        steps.append(Step(lr, block, tuple(numbers[:probes]), tuple(numbers[probes:]) if curved else ()))
    return header, steps


# journal.md: the blocks

OUTPUT_SIDE = re.compile(r"(^|\.)(final\w*|project_out|ln_f|lm_head|score|classifier|pooler)(\.|$)")


def _by_owner(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    groups: list[tuple[str, list[str]]] = []
    for name in names:
        owner = name.rpartition(".")[0] or name
        if groups and groups[-1][0] == owner:
            groups[-1][1].append(name)
        else:
            groups.append((owner, [name]))
    return groups


def members(header: dict[str, Any], shapes: dict[str, Shape], stacks: Sequence[str]) -> list[list[str]]:
    """The parameters of every block; ``stacks`` are the paths of the model's lists of layers."""
    cut = header["method"]["partition"]
    trainable = [name for name in shapes if name not in header["frozen"]]
    if cut["name"] == "explicit":
        return [params for _, params in cut["blocks"]]
    if cut["name"] == "whole":
        return [trainable]

    def layer_of(name: str) -> tuple[int, int] | None:
        for number, stack in enumerate(stacks):
            match = re.match(rf"{re.escape(stack)}\.(\d+)\.", name)
            if match:
                return number, int(match[1])
        return None

    first = next(i for i, name in enumerate(shapes) if layer_of(name))
    places = {name: i for i, name in enumerate(shapes)}
    before, after = [], []
    for owner, group in _by_owner([name for name in trainable if not layer_of(name)]):
        late = places[group[0]] > first or OUTPUT_SIDE.search(owner)
        (after if late else before).append(group)
    layers: dict[tuple[int, int], list[str]] = {}
    for number in range(len(stacks)):
        for name in trainable:
            place = layer_of(name)
            if place and place[0] == number:
                layers.setdefault(place, []).append(name)
    inner: list[list[str]] = []
    if cut["name"] == "layers":
        for number in range(len(stacks)):
            own = [group for (stack, _), group in layers.items() if stack == number]
            k = cut.get("k", 1)
            inner += [[name for group in own[a : a + k] for name in group] for a in range(0, len(own), k)]
    else:
        assert cut["name"] == "linears"
        for group in layers.values():
            blocks: list[list[str]] = []
            waiting: list[str] = []
            for _, names in _by_owner(group):
                if any(len(shapes[name]) >= 2 for name in names):
                    blocks.append(waiting + names)
                    waiting = []
                elif blocks:
                    blocks[-1] += names
                else:
                    waiting += names
            inner += blocks or [waiting]
    return before + inner + after


# journal.md: from records to weights


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a bᵀ, each product and each sum rounded, in order."""
    total = a[:, :1] * b[:, 0]
    for j in range(1, a.shape[1]):
        total = total + a[:, j : j + 1] * b[:, j]
    return total


class Replay:
    """The weights of a run, step by step.

    Args:
        header: of the journal.
        base: every parameter in the order of ``named_parameters()``, in single precision on the grid of its dtype.
        stacks: paths of the model's lists of layers.
    """

    def __init__(self, header: dict[str, Any], base: dict[str, np.ndarray], stacks: Sequence[str]) -> None:
        self.header, self.method = header, header["method"]
        self.shapes = {name: value.shape for name, value in base.items()}
        self.blocks = members(header, self.shapes, stacks)
        assert len(self.blocks) == len(header["blocks"])
        self.weights = {name: value.reshape(-1).astype(F32) for name, value in base.items()}
        self.offsets, total = {}, 0
        for name, value in self.weights.items():
            self.offsets[name], total = total, total + value.size
        self.dtype = header["dtype"]
        self.rademacher = self.method["distribution"] == "rademacher"
        self.interval, self.fold = self.method["interval"], self.method.get("fold", 1)
        self.rule, self.subspace, self.scales = self.method["rule"], self.method["subspace"], {}
        self.sizes: list[list[float]] = []
        if self.rule["name"] == "Normalized":
            self.rule, self.sizes = self.rule["rule"], [[0.0, 0.0] for _ in range(len(self.blocks) + 1)]
        if self.subspace["name"] == "Relative":
            self.quantile, self.subspace = self.subspace.get("quantile"), self.subspace["subspace"]
            self.scales = {name: self.scale(name) for name in self.weights}
        self.state: dict[str, dict[str, Any]] = {}
        self.held: dict[str, np.ndarray] = {}
        self.scores, self.turn = [0.0] * len(self.blocks), dict[int, float]()
        self.steps = 0
        self.thresholds = {}
        if self.subspace["name"] == "Sparse" and self.subspace["keep"] != 1:
            for name, value in self.weights.items():
                k = max(1, round(self.subspace["keep"] * value.size))
                self.thresholds[name] = np.sort(np.abs(value))[k - 1]

    # units

    def scale(self, name: str) -> float:
        """The size of a tensor's base weights over that of its direction, of eight bits."""
        n, low = self.weights[name].size, self.rank(name)
        if not n:
            return 1.0
        fan_in = n // self.shapes[name][0] if len(self.shapes[name]) > 1 else n
        size = math.sqrt(np.sum(self.weights[name].astype(np.float64) ** 2) / n)
        if self.quantile is not None and len(self.shapes[name]) <= 1:
            size = float(np.sort(np.abs(self.weights[name]))[max(1, round(self.quantile * n)) - 1])
        size = eight_bits(max(size, 0.25 / math.sqrt(fan_in)))
        return eight_bits(size / math.sqrt(low[2] if low else 1))

    def times(self, name: str, alphas: Sequence[float]) -> list[float]:
        scale = self.scales.get(name)
        return list(alphas) if scale is None else [float(F32(alpha) * F32(scale)) for alpha in alphas]

    def weighed(self, block: int, coeffs: Sequence[float]) -> list[float]:
        """Coefficients in units of their running size."""
        if not self.sizes:
            return list(coeffs)
        own, every = self.sizes[block], self.sizes[-1]

        def size() -> float:
            mean = (own[0] + (1 - 0.95) * (every[0] / every[1])) / (own[1] + (1 - 0.95)) if every[1] else 0.0
            return math.sqrt(math.pi / 2) * mean

        limit = 3 * size() or math.inf
        coeffs = [max(-limit, min(limit, c)) for c in coeffs]
        total = [abs(c) for c in coeffs]
        while len(total) > 1:
            half = len(total) // 2
            total = [total[i] + total[half + i] for i in range(half)] + total[2 * half :]
        mean = total[0] / max(1, sum(c != 0 for c in coeffs))
        for row in (own, every):
            row[0], row[1] = 0.95 * row[0] + (1 - 0.95) * mean, 0.95 * row[1] + (1 - 0.95)
        return [c / size() if size() else 0.0 for c in coeffs]

    # addresses

    def at(self, step: int, probe: int = 0, stream: int = 0) -> Address:
        return Address(self.header["seed"], step, probe, stream)

    def draw(self, name: str, at: Address, n: int) -> np.ndarray:
        return noise(at, self.offsets[name], n, self.rademacher)

    def word(self, name: str, at: Address, n: int | None = None) -> np.ndarray | None:
        if self.method["rounding"] == "nearest":
            return None
        return words(at, self.offsets[name], self.weights[name].size if n is None else n)

    # low rank

    def rank(self, name: str) -> tuple[int, int, int] | None:
        """m, n and r of a tensor that is moved in a low-rank subspace."""
        shape = self.shapes[name]
        if self.subspace["name"] not in ("LowRank", "Frames") or len(shape) < 2 or 0 in shape:
            return None
        m, n = shape[0], math.prod(shape[1:])
        return m, n, min(self.subspace["rank"], m, n)

    def grid(self, name: str) -> Shape:
        """The shape of a low-rank tensor's coordinates."""
        m, n, r = self.rank(name)
        if self.subspace["name"] == "LowRank":
            return m, r
        return (r, r) if self.subspace["both"] else (r, n)

    def frame(self, name: str, turn: int, side: int) -> np.ndarray:
        """U for side 0, V for side 1."""
        *sizes, r = self.rank(name)
        at = self.at(turn * self.interval, 1 - side, 1)
        drawn = noise(at, self.offsets[name], sizes[side] * r, False).reshape(sizes[side], r)
        q, upper = np.linalg.qr(drawn.astype(np.float64))
        return (q * np.where(np.diag(upper) < 0, -1.0, 1.0)).astype(F32)

    def lifted(self, name: str, z: np.ndarray, turn: int) -> tuple[np.ndarray, float]:
        """P z without its γ, and γ."""
        z = z.reshape(self.grid(name))
        if self.subspace["name"] == "LowRank":
            return product(z, self.factor(name, turn)), 1.0
        u, both = self.frame(name, turn, 0), self.subspace["both"]
        gain = math.sqrt(self.weights[name].size / z.size) if self.subspace["scaled"] else 1.0
        inner = product(u, z.T)
        return (product(inner, self.frame(name, turn, 1)) if both else inner), gain

    def factor(self, name: str, turn: int) -> np.ndarray:
        _, n, r = self.rank(name)
        return self.draw(name, self.at(turn * self.interval, 0, 1), n * r).reshape(n, r)

    def coordinates(self, name: str, step: int, probe: int, measured: bool = False) -> np.ndarray:
        """U of a probe, flat; as published, a step that draws V moves along another U than it measured."""
        size = math.prod(self.grid(name))
        stale = self.subspace.get("as_published") and step % self.interval == 0 and not measured
        return self.draw(name, self.at(step, probe + 1, 1) if stale else self.at(step, probe), size)

    def lift(self, name: str, z: np.ndarray, alpha: float, at: Address, decay: float) -> None:
        """W ← round(fma(P z, alpha, decay·W))."""
        delta, gain = self.lifted(name, z, at.step // self.interval)
        moved = fma(delta.reshape(-1), F32(alpha * gain), self.weights[name] * F32(decay))
        self.weights[name] = rounded(moved, self.dtype, self.word(name, at))

    # outer products

    def outer(self, name: str) -> bool:
        shape = self.shapes[name]
        return self.subspace["name"] == "Outer" and len(shape) >= 2 and 0 not in shape

    def product(self, name: str, step: int, probes: Sequence[int], alphas: Sequence[float]) -> np.ndarray:
        """Σₖ (alpha_k·A_k) B_kᵀ, flat."""
        shape = self.shapes[name]
        m, n = shape[0], math.prod(shape[1:])
        r, total = min(self.subspace["rank"], m, n), None
        for k, alpha in zip(probes, alphas, strict=True):
            a = fma(self.draw(name, self.at(step, k), m * r), F32(alpha), F32(0)).reshape(m, r)
            b = self.draw(name, self.at(step, k + (1 << 27)), n * r) * F32(1 / math.sqrt(r))
            for j in range(r):
                term = a[:, j : j + 1] * b.reshape(n, r)[:, j]
                total = term if total is None else total + term
        return total.reshape(-1)

    # masks

    def mask(self, name: str, step: int) -> np.ndarray | bool:
        keep = self.subspace.get("keep", 1)
        if keep == 1:
            return True
        if self.subspace["name"] == "Sparse":
            return np.abs(self.weights[name]) <= self.thresholds[name]
        first = step // self.interval * self.interval
        drawn = words(self.at(first, 0, 1), self.offsets[name], self.weights[name].size)
        return drawn <= math.ceil(keep * 2**32) - 1

    # several blocks

    def uniform(self, turn: int, probe: int, n: int) -> list[float]:
        return [int(word) / 2**32 for word in words(self.at(turn, probe, 2), 0, n)]

    def active(self, turn: int) -> dict[int, float] | None:
        """The blocks of a turn with their weights; None where the record names the only one."""
        schedule, n = self.method.get("schedule", {"name": "Shuffled"}), len(self.blocks)
        if schedule["name"] == "Subset":
            drawn = self.uniform(turn, 0, n)
            return dict.fromkeys(sorted(range(n), key=drawn.__getitem__)[: max(1, round(schedule["keep"] * n))], 1.0)
        if schedule["name"] != "Bandit":
            return None
        top, floor, k = max(self.scores), schedule["floor"], max(1, int(schedule["keep"] * n))
        x = [z / top if top > 1e-6 else z for z in self.scores]
        e = [math.exp((one - max(x)) / schedule["temperature"]) for one in x]
        p = [(1 - floor) * (one / math.fsum(e)) + floor / n for one in e]
        weights: dict[int, float] = {}
        for u in self.uniform(turn, 1, k):
            total, block = p[0], 0
            while u >= total and block < n - 1:
                block += 1
                total += p[block]
            weights[block] = weights.get(block, 0) + 1
        return {block: count * min(schedule["limit"], 1 / (k * p[block])) for block, count in weights.items()}

    def learn(self, coeffs: Sequence[float]) -> None:
        schedule = self.method.get("schedule", {"name": "Shuffled"})
        if schedule["name"] == "Bandit":
            decay = schedule["decay"]
            for block in self.turn:
                self.scores[block] = decay * (sum(map(abs, coeffs)) / len(coeffs)) + (1 - decay) * self.scores[block]

    # steps

    def step(self, record: Step) -> None:
        step = self.steps
        if step % self.interval == 0:
            self.turn = self.active(step // self.interval) or {record.block: 1.0}
            assert next(iter(self.turn)) == record.block
        block = [name for index in self.turn for name in self.blocks[index]]
        if (self.rule.get("reset") or self.rule["name"] == "AnchorSGD") and step % self.interval == 0:
            self.state.clear()
        if self.method["restore"] == "subtract":
            self.walk(block, step)
        if record.finite:
            clip = self.method.get("clip", math.inf)
            clamped = [max(-clip, min(clip, c)) for c in record.coeffs]
            share = [c / len(record.coeffs) for c in self.weighed(record.block, clamped)]
            self.pull = self.leaning(block, step) if self.rule["name"] == "Cone" else 0.0
            self.curvatures = record.curvatures
            for index, weight in self.turn.items():
                for name in self.blocks[index]:
                    self.move(name, step, record.lr * (weight / self.turn[record.block]), share)
            self.learn(clamped)
        self.steps += 1
        if self.fold > 1 and self.steps % self.fold == 0:
            self.fold_in(block)

    def settle(self) -> None:
        """Bring the weights to θ between two folds."""
        if self.fold > 1 and self.steps % self.fold:
            self.fold_in([name for block in self.blocks for name in block])

    def fold_in(self, block: Sequence[str]) -> None:
        for name in block:
            if name in self.held:
                self.lift(name, self.held.pop(name), 1.0, self.at(self.steps - 1, 0, 3), 1.0)

    def walk(self, block: Sequence[str], step: int) -> None:
        eps, two = self.method["estimator"]["eps"], self.method["estimator"]["name"] == "TwoSided"
        for probe in range(self.header["probes"]):
            for scale in (eps, -2 * eps, eps) if two else (eps, -eps):
                for name in block:
                    if self.rank(name):
                        (alpha,) = self.times(name, [scale])
                        z = fma(self.coordinates(name, step, probe, measured=True), F32(alpha), F32(0))
                        self.lift(name, z, 1.0, self.at(step, probe, 3), 1.0)
                    else:
                        self.add_noise(name, self.at(step, probe), self.times(name, [scale]), 1.0)

    def add_noise(self, name: str, at: Address, alphas: Sequence[float], decay: float) -> None:
        if decay == 1.0 and not any(alphas):
            return
        x, kept = self.weights[name], self.mask(name, at.step)
        size = x.size
        x = x * F32(decay)
        for k, alpha in enumerate(alphas):
            u = self.draw(name, dataclasses.replace(at, probe=at.probe + k), size)
            x = fma(np.where(kept, u, F32(0)), F32(alpha), x)
        self.weights[name] = rounded(x, self.dtype, self.word(name, at))

    def move(self, name: str, step: int, lr: float, share: Sequence[float]) -> None:
        decayed = self.header["decays"]
        applies = len(self.shapes[name]) >= 2 if decayed == "matrices" else name in decayed
        decay = 1 - lr * self.header["weight_decay"] if self.header["weight_decay"] and applies else 1.0
        low = self.rank(name)
        if self.rule["name"] == "SGD":
            self.descend(name, step, self.times(name, [-lr * s for s in share]), decay, low)
            return
        lr = lr * self.scales.get(name, 1.0)
        if self.rule["name"] == "Adam" and not low and not self.outer(name):
            self.adam(name, step, lr, share, decay)
        else:
            g = self.estimate(name, step, share, low)
            recalls = self.rule["name"] in ("RecallAdam", "AnchorSGD")
            delta = self.recall(name, step, g, share) if recalls else self.delta(name, step, g)
            if low and self.fold > 1:
                self.held[name] = fma(delta, F32(-lr), self.held.get(name, np.zeros_like(delta)))
            elif low:
                self.lift(name, delta, -lr, self.at(step, 0, 3), decay)
            else:
                moved = fma(delta, F32(-lr), self.weights[name] * F32(decay))
                self.weights[name] = rounded(moved, self.dtype, self.word(name, self.at(step, 0, 3)))

    def descend(
        self, name: str, step: int, alphas: Sequence[float], decay: float, low: tuple[int, int, int] | None
    ) -> None:
        if self.outer(name) and (decay != 1.0 or any(alphas)):
            used = [k for k, alpha in enumerate(alphas) if alpha] or [0]
            moved = self.product(name, step, used, [alphas[k] for k in used]) + self.weights[name] * F32(decay)
            self.weights[name] = rounded(moved, self.dtype, self.word(name, self.at(step, 0, 3)))
            return
        if not low:
            self.add_noise(name, self.at(step), alphas, decay)
            return
        if decay == 1.0 and not any(alphas):
            return
        zeros = np.zeros(math.prod(self.grid(name)), F32)
        z = self.held.get(name, zeros) if self.fold > 1 else zeros
        for k, alpha in enumerate(alphas):
            z = fma(self.coordinates(name, step, k), F32(alpha), z)
        if self.fold > 1:
            self.held[name] = z
        else:
            self.lift(name, z, 1.0, self.at(step, 0, 3), decay)

    def estimate(self, name: str, step: int, share: Sequence[float], low: Any) -> np.ndarray:
        """g = Σ share_k·z_k."""
        kept = True if low else self.mask(name, step)
        g = None
        for k, s in enumerate(share):
            if self.outer(name):
                z = self.product(name, step, [k], [1.0])
            elif low:
                z = self.coordinates(name, step, k)
            else:
                z = self.draw(name, self.at(step, k), self.weights[name].size)
            z = np.where(kept, z, F32(0))
            if self.rule["name"] == "Cone" and self.pull:
                z = fma(self.state[name]["m"], F32(self.pull), z * F32(math.sin(self.rule["theta"])))
            if self.rule["name"] == "Hessian":
                bend = F32(self.curvatures[k] / (2 * len(share))) * z * z
                self.bend = bend if g is None else self.bend + bend
            g = z * F32(s) if g is None else fma(z, F32(s), g)
        return g

    def moments(self, name: str, step: int, size: int, names: str) -> dict[str, Any]:
        turn = step // self.interval
        self.state.setdefault(name, {**{m: np.zeros(size, F32) for m in names}, "t": 0, "turn": turn})
        state = self.carried(name, turn)
        state["t"] += 1
        return state

    def carried(self, name: str, turn: int) -> dict[str, Any]:
        """A tensor's moments in the basis of this turn."""
        state = self.state[name]
        old, state["turn"] = state["turn"], turn
        if old != turn and self.rank(name) and "m" in state:
            m = state["m"].reshape(self.grid(name))
            if self.subspace["name"] == "LowRank":
                _, n, _ = self.rank(name)
                m = m @ (self.factor(name, old).T @ self.factor(name, turn) / F32(n))
            else:
                m = self.frame(name, turn, 0).T @ self.frame(name, old, 0) @ m
                if self.subspace["both"]:
                    m = m @ (self.frame(name, old, 1).T @ self.frame(name, turn, 1))
            state["m"] = m.reshape(-1)
        return state

    def leaning(self, block: Sequence[str], step: int) -> float:
        """cos θ·√d/‖m‖ of a block, 0 without momentum."""
        turn = step // self.interval
        moments = [self.carried(name, turn)["m"].astype(np.float64) for name in block if name in self.state]
        norm = float(F32(math.sqrt(sum(float((m * m).sum()) for m in moments))))
        d = sum(math.prod(self.grid(name)) if self.rank(name) else self.weights[name].size for name in block)
        return math.cos(self.rule["theta"]) * math.sqrt(d) / norm if norm else 0.0

    def matrix(self, name: str) -> Shape | None:
        if self.rank(name):
            return self.grid(name)
        shape = self.shapes[name]
        full = self.subspace["name"] == "Full" and len(shape) >= 2 and 0 not in shape
        return (shape[0], math.prod(shape[1:])) if full else None

    def recall(self, name: str, step: int, g: np.ndarray, share: Sequence[float]) -> np.ndarray:
        """δ of the rules that draw earlier estimates again; over full tensors and outer products."""
        state = self.moments(name, step, 0, "")
        past: list[tuple[int, Sequence[float]]] = state.setdefault("past", [])
        earlier = [self.estimate(name, *one, None) for one in past]
        if self.rule["name"] == "AnchorSGD":
            state["past"] = past or [(step, share)]
            return g + earlier[0] if earlier else g * F32(self.rule["boost"])
        window, (b1, b2) = self.rule["window"], self.rule["betas"]
        state["past"] = [(step, share), *past][: window - 1]
        if self.rule["as_published"] and state["t"] <= window + 1:
            return g
        m, v = g, g * g
        for age, one in enumerate(earlier, start=1):
            m, v = fma(one, F32(b1**age), m), v + F32(b2**age) * one * one
        if self.rule["as_published"]:
            return m * F32(100) / (np.sqrt(v) + F32(1e-5))
        first, second = (F32(sum(b**age for age in range(1 + len(earlier)))) for b in (b1, b2))
        return m / first / (np.sqrt(v / second) + F32(self.rule["eps"]))

    def delta(self, name: str, step: int, g: np.ndarray) -> np.ndarray:
        match self.rule["name"]:
            case "Sign":
                return np.sign(g)
            case "Momentum":
                state, beta = self.moments(name, step, g.size, "m"), self.rule["beta"]
                state["m"] = fma(g, F32(1 - beta), state["m"] * F32(beta))
                return state["m"]
            case "Cone":
                state, beta, warmup = self.moments(name, step, g.size, "m"), self.rule["beta"], self.rule["warmup"]
                if warmup and state["t"] <= warmup + 1:
                    p = max(0.0, (state["t"] - 1 - warmup / 10) / (warmup * 9 / 10))
                    beta -= (beta - 0.1) / (1 + 8 * p**1.8) ** 3
                state["m"] = fma(g, F32(1 - beta), state["m"] * F32(beta))
                return g
            case "Hessian":
                state, alpha = self.moments(name, step, g.size, "e"), F32(self.rule["alpha"])
                h, b = 1 + state["e"], np.abs(self.bend)
                published = self.rule["as_published"]
                state["e"] = state["e"] + alpha * (b / h - h if published else h * (b - 1))
                root = np.sqrt(1 + state["e"])
                return g * root if published else g / root
            case "Muon":
                if self.matrix(name) is None:
                    return g * F32(self.rule["vectors"])
                x = g.reshape(self.matrix(name)).astype(np.float64)
                x = x.T if (tall := x.shape[0] > x.shape[1]) else x
                x = x / (np.linalg.norm(x) + 1e-7)
                for _ in range(self.rule["iterations"]):
                    a = x @ x.T
                    x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
                return (x.T if tall else x).astype(F32).reshape(-1)
        state, (b1, b2) = self.moments(name, step, g.size, "mv"), self.rule["betas"]
        t = state["t"]
        state["m"] = fma(g, F32(1 - b1), state["m"] * F32(b1))
        state["v"] = state["v"] * F32(b2) + F32(1 - b2) * g * g
        root = np.sqrt(state["v"] / F32(1 - b2**t)) + F32(self.rule["eps"])
        return state["m"] / (root * F32(1 - b1**t))

    def adam(self, name: str, step: int, lr: float, share: Sequence[float], decay: float) -> None:
        g = self.estimate(name, step, share, None)
        state, (b1, b2) = self.moments(name, step, g.size, "mv"), self.rule["betas"]
        t = state["t"]
        m = fma(state["m"], F32(b1), F32(1 - b1) * g)
        v = fma(state["v"], F32(b2), F32(1 - b2) * (g * g))
        c1, c2 = F32(1 / (1 - b1**t)), F32(1 / (1 - b2**t))
        d = (m * c1) / (np.sqrt(v * c2) + F32(self.rule["eps"]))
        moved = fma(d, F32(-lr), self.weights[name] * F32(decay))
        self.weights[name] = rounded(moved, self.dtype, self.word(name, self.at(step)))
        if self.dtype != "float32":
            word = words(self.at(step, 0, 3), self.offsets[name], g.size)
            m, v = rounded(m, "bfloat16", word), rounded(v, "bfloat16", word >> np.uint32(16))
        state["m"], state["v"] = m, v


def eight_bits(scale: float) -> float:
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(round(mantissa * 256), exponent - 8)


def weights_of(data: bytes, base: dict[str, np.ndarray], stacks: Sequence[str]) -> dict[str, np.ndarray]:
    """The weights that a journal leads to."""
    header, steps = parse(data)
    replay = Replay(header, base, stacks)
    with np.errstate(over="ignore", invalid="ignore"):
        for step in steps:
            replay.step(step)
        replay.settle()
    return {name: value.reshape(replay.shapes[name]) for name, value in replay.weights.items()}
