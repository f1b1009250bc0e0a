"""Bases whose coordinates are one small matrix, in which steps can be held."""

from __future__ import annotations

import abc
import dataclasses
from typing import Self

import torch
from torch import Tensor

from .. import ops
from ..noise import Draw, Key, Rounding
from .base import Alphas, Basis, Site


class Held(Basis):
    """Pz for a small matrix z; subclasses are frozen dataclasses with these two fields.

    With ``held``, B in fp32, a step writes B and not the whole tensor W: θ is W + PB until :meth:`fold_` adds PB to W.
    """

    site: Site
    """The tensor's place among the weights."""
    held: Tensor | None
    """B, if steps are held."""

    carries = True

    @property
    @abc.abstractmethod
    def grid(self) -> tuple[int, int]:
        """The shape of the coordinates."""

    @abc.abstractmethod
    def write_(self, param: Tensor, z: Tensor, alpha: float, key: Key, decay: float, flip: bool = False) -> None:
        """W ← decay·W + alpha·Pz; ``key`` addresses the rounding bits, which ``flip`` complements."""

    def update_key(self, key: Key) -> Key:
        """The address at which the update draws z, by default the measurement's."""
        return key

    @property
    def size(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def rounding(self) -> Rounding:
        return self.site.rounding

    @property
    def behind(self) -> bool:
        return self.held is not None

    def matrix(self, param: Tensor) -> tuple[int, int]:
        return self.grid

    def draw(self, key: Key) -> Draw:
        """The tensor's noise at an address."""
        return Draw(key, self.site.offset, self.site.distribution)

    def coordinates(self, key: Key) -> Draw:
        """The draw of the coordinates."""
        return self.draw(key)

    def new(self, device: torch.device) -> Tensor:
        """An uninitialised tensor for coordinates, in fp32 whatever torch's default dtype is."""
        return torch.empty(self.grid, dtype=torch.float32, device=device)

    def add_(self, param: Tensor, key: Key, alphas: Alphas, decay: float) -> None:
        if decay == 1.0 and not isinstance(alphas, Tensor) and not any(alphas):
            return
        draw = self.coordinates(self.update_key(key))
        if self.held is not None:
            ops.add_noise_(self.held, draw, alphas)
            return
        self.write_(param, ops.fill_(self.new(param.device), draw, alphas), 1.0, key, decay)

    def coords(self, param: Tensor, key: Key, span: slice) -> Tensor:
        return ops.fill_(self.new(param.device), self.coordinates(self.update_key(key))).view(-1)[span]

    def lift_(self, param: Tensor, delta: Tensor, span: slice, alpha: float, key: Key, decay: float) -> None:
        z = delta.view(self.grid)
        if self.held is not None:
            self.held.add_(z, alpha=alpha)
            return
        self.write_(param, z, alpha, key, decay)

    def holding(self, held: Tensor | None) -> Self:
        return dataclasses.replace(self, held=held)  # type: ignore[type-var]

    def empty(self, device: torch.device) -> Tensor | None:
        return self.new(device).zero_()

    def fold_(self, param: Tensor, key: Key) -> None:
        """W ← W + PB, B ← 0."""
        assert self.held is not None
        self.write_(param, self.held, 1.0, key, 1.0)
        self.held.zero_()
