"""The memory in which weights rest: pinned memory of the host, or a private file of the run."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..amount import words
from ..errors import ZeroBlockError
from .layout import PAGE_BYTES, Span


class Region:
    """One mapping of bytes.

    Args:
        mapping: an anonymous mapping, or a mapping of a file.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.flat: Tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        """All of its bytes."""
        self.pinned = False
        """Whether a GPU can read it without the host's help."""

    @classmethod
    def memory(cls, nbytes: int) -> Region:
        """Memory of the host.

        It is private, because Linux makes huge pages only of private memory: 512 times fewer to touch and to pin.
        """
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
        try:
            mapping = mmap.mmap(-1, max(nbytes, PAGE_BYTES), **private)
        except (OSError, OverflowError) as error:
            raise ZeroBlockError(
                f"the host cannot provide {words(nbytes)} of memory for the weights: give --offload disk"
            ) from error
        with contextlib.suppress(AttributeError, OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)  # pinning takes time per page
        return cls(mapping)

    @classmethod
    def file(cls, nbytes: int, folder: str | Path) -> Region:
        """An unnamed file in a folder: no one else can open it, and it disappears when this process ends or dies.

        Args:
            nbytes: the size of the file.
            folder: a folder on the disk to use; if it does not exist, the nearest folder above it that does.
        """
        place = Path(folder).expanduser().resolve()
        while not place.is_dir():
            place = place.parent
        nbytes = max(nbytes, PAGE_BYTES)
        try:
            with tempfile.TemporaryFile(dir=place, prefix=".zeroblock-weights-") as file:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, nbytes)  # a full disk fails here, not with a bus error later
                else:
                    os.ftruncate(file.fileno(), nbytes)
                return cls(mmap.mmap(file.fileno(), nbytes))
        except OSError as error:
            raise ZeroBlockError(
                f"the run's own copy of the weights takes {words(nbytes)} in {place} "
                f"({error.strerror or error}): free some space, or give an --out on another disk"
            ) from error

    def pin(self, spans: Iterable[Span], device: torch.device) -> bool:
        """Let a GPU read these parts without the host's help; False if the system refuses.

        torch's own pinned memory would round every layer up to a power of two.

        Args:
            spans: the parts, which share no page.
            device: the GPU.
        """
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        done: list[int] = []
        for start, stop in spans:
            address = self.flat.data_ptr() + start
            if int(cudart.cudaHostRegister(address, stop - start, 0)):
                for known in done:
                    cudart.cudaHostUnregister(known)
                with contextlib.suppress(RuntimeError):  # the next call of CUDA reports the refusal once more
                    torch.zeros(1, device=device)
                return False
            done.append(address)
        # otherwise a fork may give us new pages, while the GPU keeps the old ones
        self._advise("MADV_DONTFORK", (0, len(self.flat)))
        weakref.finalize(self, _unpin, self.flat, done, device).atexit = False  # keeps the memory alive until it runs
        self.pinned = True
        return True

    def soon(self, span: Span) -> None:
        """Ask the system to read a part ahead."""
        self._advise("MADV_WILLNEED", span)

    def drop(self, span: Span) -> None:
        """Return the memory of a part to the system; a part of a file stays in the file."""
        self._advise("MADV_DONTNEED", span)

    def _advise(self, name: str, span: Span) -> None:
        option = getattr(mmap, name, None)
        if option is not None and span[1] > span[0]:
            with contextlib.suppress(OSError):  # only advice
                self._mapping.madvise(option, span[0], span[1] - span[0])


def _unpin(flat: Tensor, addresses: list[int], device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies that were started ahead may still run when garbage is collected
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for address in addresses:
        cudart.cudaHostUnregister(address)
