"""One record in bytes: little-endian, of a size that the header fixes, with a checksum of what, where and whose.

loss f64 · lr f64 · block u32 · coeffs f32 a probe [· centres f32 a probe] · crc32 u32
"""

from __future__ import annotations

import dataclasses
import functools
import struct
import zlib
from typing import Any

import numpy as np

from ..errors import ZeroBlockError
from ..record import Record
from . import spec
from .header import Header

CRC = struct.Struct("<I")
STEP = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the records of one journal are written.

    Losses are not stored: they follow from the loss and the coefficients, to about 1e-7 of
    what a perturbation changes.  Several probes of central differences need one number more
    each, a centre: how far the mean of their two losses lies from the mean of all.

    Args:
        probes: coefficients a record.
        sides: of the estimator: 2, 1, or 0 for one whose losses are unknown.
        eps: of the estimator.
        root: checksum of the header, which every record's begins with.
    """

    probes: int
    sides: int
    eps: float
    root: int

    @classmethod
    def of(cls, header: Header, root: int) -> Layout:
        """The layout that a header fixes."""
        estimator: dict[str, Any] = header.method["estimator"] or {}
        sides = {"TwoSided": 2, "OneSided": 1}.get(str(estimator.get("name")), 0)
        eps = estimator.get("eps", 0.0)
        if not spec.fits(eps, float):
            raise ZeroBlockError(f"the header's eps cannot be {str(eps)[:100]}")
        return cls(header.probes, sides, float(eps), root)

    @property
    def centred(self) -> bool:
        """Whether records have centres."""
        return self.sides == 2 and self.probes > 1

    @functools.cached_property
    def body(self) -> struct.Struct:
        """A record without its checksum."""
        return struct.Struct(f"<ddI{self.probes * (2 if self.centred else 1)}f")

    @property
    def size(self) -> int:
        """Bytes of a record."""
        return self.body.size + CRC.size

    def checksum(self, step: int, body: bytes | memoryview) -> bytes:
        """crc32 of the header's checksum, the step and the body: a record is right in its own place only."""
        return CRC.pack(zlib.crc32(body, zlib.crc32(STEP.pack(step), self.root)))

    def encode(self, record: Record) -> bytes:
        """A record in bytes."""
        if len(record.coeffs) != self.probes:
            raise ZeroBlockError(f"step {record.step} has {len(record.coeffs)} coefficients, the header {self.probes}")
        coeffs = _single(record.coeffs)
        if any(a != b for a, b in zip(coeffs, record.coeffs, strict=True) if b == b):
            raise ZeroBlockError(f"step {record.step}: coefficients must be fp32 numbers, got {record.coeffs}")
        centres = _single(self._centres(record)) if self.centred else ()
        body = self.body.pack(record.loss, record.lr, record.block, *coeffs, *centres)
        return body + self.checksum(record.step, body)

    def decode(self, step: int, data: bytes | memoryview) -> Record | None:
        """The record of a step, or None where the bytes are not one."""
        body = data[: self.body.size]
        if self.checksum(step, body) != data[self.body.size :]:
            return None
        loss, lr, block, *numbers = self.body.unpack(body)
        coeffs, centres = tuple(numbers[: self.probes]), numbers[self.probes :] or [0.0] * self.probes
        return Record(step, block, coeffs, lr, self._losses(loss, coeffs, centres), loss)

    def _centres(self, record: Record) -> list[float]:
        pairs = list(zip(record.losses[::2], record.losses[1::2], strict=False))
        if len(pairs) != self.probes:
            return [0.0] * self.probes
        return [(plus + minus) / 2 - record.loss for plus, minus in pairs]

    def _losses(self, loss: float, coeffs: tuple[float, ...], centres: list[float]) -> tuple[float, ...]:
        if self.sides == 1:
            return (loss, *(loss + self.eps * c for c in coeffs))
        if self.sides == 2:
            return tuple(
                loss + centre + sign * self.eps * c
                for c, centre in zip(coeffs, centres, strict=True)
                for sign in (1, -1)
            )
        return ()


def _single(values: tuple[float, ...] | list[float]) -> list[float]:
    with np.errstate(over="ignore", invalid="ignore"):
        return [float(np.float32(value)) for value in values]
