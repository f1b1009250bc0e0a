"""The numbers of a step, by name."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Numbers:
    """The numbers of a step, in fp64: one buffer, so that one copy brings them all to the host.

    Args:
        flat: (1 + points + probes,) the loss, the losses, the coefficients.
        points: number of losses.
    """

    flat: Tensor
    points: int

    @classmethod
    def of(cls, loss: Tensor, losses: Tensor, coeffs: Tensor, out: Tensor | None = None) -> Numbers:
        """Join the fields; all are converted to fp64, in which fp32 coefficients are exact.

        Args:
            loss: a scalar.
            losses: (points,).
            coeffs: (probes,).
            out: (1 + points + probes,) fp64 to write them to; a new tensor by default.
        """
        return cls(torch.cat([loss.double()[None], losses.double(), coeffs.double()], out=out), len(losses))

    @property
    def loss(self) -> Tensor:
        """() the reported loss."""
        return self.flat[0]

    @property
    def losses(self) -> Tensor:
        """(points,) every loss that was measured."""
        return self.flat[1 : 1 + self.points]

    @property
    def coeffs(self) -> Tensor:
        """(probes,) one coefficient per direction."""
        return self.flat[1 + self.points :]

    def like(self, flat: Tensor) -> Numbers:
        """The same fields over another buffer."""
        return Numbers(flat, self.points)
