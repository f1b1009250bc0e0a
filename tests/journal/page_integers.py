"""Weights that are stored as integers, from a journal by ``docs/journal.md`` alone: numpy, and nothing of zeroblock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from page_replay import F32, Replay, fma, nearest, parse, rounded, words


def stored(matrix: np.ndarray, largest: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Integers and scales of a matrix."""
    m, n = matrix.shape
    groups = matrix.astype(F32).reshape(m, -1, 64 if n % 64 == 0 else n)
    scales = nearest(np.abs(groups).max(-1) / F32(largest), dtype)
    assert scales.all()
    integers = np.clip(np.rint(groups / scales[..., None]), -largest, largest)
    return integers.reshape(m, n).astype(F32), scales


class IntegerReplay(Replay):
    """A replay of which some weights are integers.

    Args:
        header: of the journal.
        base: as the model is loaded.
        stacks: paths of the model's lists of layers.
        linears: paths of the linear layers in them.
        dtype: of the base; that of the header is mixed.
    """

    def __init__(
        self,
        header: dict[str, Any],
        base: dict[str, np.ndarray],
        stacks: Sequence[str],
        linears: Sequence[str],
        dtype: str,
    ) -> None:
        assert header["dtype"] == "mixed"
        kind, _, scales_move = header["extra"]["weights"].partition(":")
        assert not scales_move
        self.largest = {"int8": 127, "int4": 7}[kind]
        self.scales_of: dict[str, np.ndarray] = {}
        listed: dict[str, np.ndarray] = {}
        for name, value in base.items():
            path = name.rpartition(".")[0]
            if path not in linears or (kind == "int4" and base[f"{path}.weight"].shape[1] % 2):
                listed[name] = value
            elif name.endswith(".weight"):
                integers, scales = stored(value, self.largest, dtype)
                if f"{path}.bias" in base:
                    listed[f"{path}.bias"] = base[f"{path}.bias"]
                listed[name], listed[f"{path}.scales"] = integers, scales
                self.scales_of[name] = np.repeat(scales, value.shape[1] // scales.shape[1], axis=1).reshape(-1)
        super().__init__(header, listed, stacks)
        self.dtype = dtype

    def descend(self, name: str, step: int, alphas: Sequence[float], decay: float, low: Any) -> None:
        if name not in self.scales_of:
            super().descend(name, step, alphas, decay, low)
            return
        x = np.zeros(self.weights[name].size, F32)
        for k, alpha in enumerate(alphas):
            u = np.where(self.mask(name, step), self.draw(name, self.at(step, k), x.size), F32(0))
            x = fma(u, F32(alpha), x)
        self.shift(name, step, x, decay)

    def move(self, name: str, step: int, lr: float, share: Sequence[float]) -> None:
        if name not in self.scales_of or self.rule["name"] == "SGD":
            super().move(name, step, lr, share)
            return
        decay = 1 - lr * self.header["weight_decay"]
        delta = self.delta(name, step, self.estimate(name, step, share, None))
        self.shift(name, step, delta * F32(-lr), decay)

    def shift(self, name: str, step: int, x: np.ndarray, decay: float) -> None:
        """The integers of w + x."""
        q, y = self.weights[name], x / self.scales_of[name]
        if decay != 1:
            y = y + F32(decay - 1) * q
        word = words(self.at(step, 0, 3), self.offsets[name], q.size)
        moved = rounded(fma(y, F32(1), q + F32(1536)), "float16", word) - F32(1536)
        self.weights[name] = np.clip(moved, -self.largest, self.largest)


def weights_of(
    data: bytes, base: dict[str, np.ndarray], stacks: Sequence[str], linears: Sequence[str], dtype: str
) -> dict[str, np.ndarray]:
    """The weights that a journal leads to; integers as such."""
    header, steps = parse(data)
    replay = IntegerReplay(header, base, stacks, linears, dtype)
    for step in steps:
        replay.step(step)
    return {name: value.reshape(replay.shapes[name]) for name, value in replay.weights.items()}
