"""The base of a journal: the model that its header names, loaded with the care that a stranger's file requires."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import adapter
from .. import model as models
from ..errors import ZeroBlockError, shown
from ..offload import shelve
from ..quantise import recorded, stored_bytes
from ..tied import untie_
from . import identity
from .header import Header


@dataclass(frozen=True)
class Base:
    """The base of a journal, checked when the object is made and loaded on request.

    Args:
        header: the header of the journal.
        model: the name of the base; by default the one in the header.
        device: auto, cpu, cuda or cuda:N.
        trust_remote_code: run the code that comes with the model.
        random_weights: whether the header may ask for random weights, which take any amount of memory.
        run: the folder of the run, if the journal lies in it; it keeps the start of a prefix.
    """

    header: Header
    model: str | None = None
    device: str = "auto"
    trust_remote_code: bool = False
    random_weights: bool = False
    run: Path | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ZeroBlockError("the journal does not name its base: give --model (in Python, load it yourself)")
        if self.model is None and shown(self.name, 4096) != self.name:
            raise ZeroBlockError(
                f"the journal names its base '{shown(self.name)}', which is not a valid name: give --model"
            )
        if self._dtype is None:
            raise ZeroBlockError("the base has several dtypes: load it in Python, then zeroblock.load(model, FILE)")
        if self.model in models.OPT:
            raise ZeroBlockError(f"{self.model} is a shape without weights: give the base that the run began with")
        if self._random and not self.random_weights:
            raise ZeroBlockError(
                f"the file asks for random weights in the shape of {self.name}, which may take any amount of memory: "
                "give the base with --model, or allow it with --force"
            )

    @property
    def name(self) -> str:
        """A folder, a GGUF file, a hub id, or one of zeroblock's names."""
        return self.model or self.header.model

    @property
    def _random(self) -> bool:
        return self.model is None and self.header.extra.get("random_weights") is True

    @property
    def _dtype(self) -> torch.dtype | None:
        """The dtype of the base; an adapter may have another one, and then the header names the base's."""
        if self.header.dtype != "mixed":
            known: torch.dtype = getattr(torch, self.header.dtype)  # one of four, as the header's reader has checked
            return known
        named = self.header.extra.get("dtype")
        return models.DTYPES.get(named) if isinstance(named, str) else None

    def check(self) -> None:
        """Compare names and shapes with the header, before any memory is taken for the weights."""
        if not self.trust_remote_code and not models.is_stored_quantised(self.name):
            made = adapter.recorded(self.header.extra)
            skeleton = models.skeleton(self.name, adapter=made, weights=recorded(self.header.extra))
            if identity.order(skeleton) != self.header.order:
                untie_(skeleton)  # the checkpoint, which may not be here yet, may have a head of its own
            self.header.check_order(skeleton)  # this runs no code of the model

    def load(self) -> nn.Module:
        """Load the base weights in the dtype of the run; stream them if the GPU does not have enough memory."""
        assert self._dtype is not None
        device = models.find_device(self.device)
        streams = self._exceeds(device)
        with _out_of_memory(f"{self.name} in {self.header.dtype}"):
            loaded: nn.Module = models.load(
                self.name,
                self._dtype,
                "cpu" if streams else device,
                random_weights=self._random,
                seed=self.header.seed,
                trust_remote_code=self.trust_remote_code,
                adapter=adapter.recorded(self.header.extra),
                weights=recorded(self.header.extra),
                lazy=streams,
            )
            if self.run is not None:
                adapter.restart_(loaded, self.run)
            if streams:
                shelve(loaded, "host", device=device, dtype=self._dtype)
        return loaded

    def _exceeds(self, device: torch.device) -> bool:
        """Whether the weights exceed the free memory of a GPU."""
        if device.type != "cuda" or self._random or models.is_stored_quantised(self.name):
            return False
        assert self._dtype is not None
        skeleton = models.skeleton(
            self.name, trust_remote_code=self.trust_remote_code, adapter=adapter.recorded(self.header.extra),
            weights=recorded(self.header.extra),
        )  # fmt: skip
        return stored_bytes(skeleton, self._dtype.itemsize) > torch.cuda.mem_get_info(device)[0]

    def tokenizer(self) -> Any:
        """Load the tokenizer of the base."""
        return models.tokenizer(self.name, trust_remote_code=self.trust_remote_code)


@contextlib.contextmanager
def _out_of_memory(weights: str) -> Iterator[None]:
    """Turn an out-of-memory error into one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "can't allocate memory" not in str(error):
            raise
        raise ZeroBlockError(
            f"{weights} does not fit into the memory of this device: choose another --device, or a larger machine"
        ) from error
