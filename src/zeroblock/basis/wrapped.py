"""The common part of bases that wrap another basis."""

from __future__ import annotations

from collections.abc import Iterator

from ..noise import Rounding
from .base import Basis


class Wrapped(Basis):
    """A basis with the coordinates of another one; subclasses are frozen dataclasses with this field."""

    inner: Basis
    """The wrapped basis."""

    @property
    def size(self) -> int:
        return self.inner.size

    @property
    def rounding(self) -> Rounding:
        return self.inner.rounding

    def spans(self) -> Iterator[slice]:
        return self.inner.spans()
