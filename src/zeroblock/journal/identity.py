"""The fingerprint of the weights that a journal starts from: fast at any size, and the same on any device."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ZeroBlockError
from ..shard import is_spread, whole
from ..weights import Weights

PIECES, PIECE_BYTES = 16, 4096
"""A tensor of more than PIECES·PIECE_BYTES bytes is sampled: PIECES evenly spaced pieces of it are hashed."""

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32"}
"""Names of dtypes in safetensors files; others keep the file's name."""

MAX_SAFETENSORS_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""


class Leaf(NamedTuple):
    """One tensor: its name, type and size, and a way to read its bytes, row-major and little-endian."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: Callable[[list[int], int], bytes]


def fingerprint(weights: nn.Module | str | Path) -> str:
    """A hash of the parameters' names, shapes, dtypes and sampled bytes: 16 pieces of 4 KiB of every tensor.

    Every tensor is sampled, so a fine-tune of the same model has another fingerprint; a change of a few weights
    between the samples goes unnoticed.  The order of the tensors does not matter.

    Args:
        weights: a model on any device, or a folder (or file) of safetensors, of which only the sampled bytes are
            read.  The two agree for a folder that ``save_pretrained`` wrote in the model's dtype.  If a model's
            weights are sharded, every process has to call this.

    Returns:
        32 hexadecimal digits.

    >>> fingerprint(nn.Linear(2, 2)) == fingerprint(nn.Linear(2, 2))
    False
    """
    leaves = _of_module(weights) if isinstance(weights, nn.Module) else _of_folder(Path(weights))
    digest = hashlib.blake2b(digest_size=16)
    for leaf in sorted(leaves, key=lambda leaf: leaf.name):
        digest.update(json.dumps([leaf.name, leaf.dtype, leaf.shape]).encode())
        digest.update(hashlib.blake2b(_sampled(leaf)).digest())
    return digest.hexdigest()


def order(model: nn.Module) -> str:
    """A hash of names and shapes in the order of ``named_parameters()``, which determines every weight's noise."""
    listed = [[name, *param.shape] for name, param in model.named_parameters()]
    return hashlib.blake2b(json.dumps(listed).encode(), digest_size=16).hexdigest()


def sizes(weights: Weights) -> str:
    """A hash of the sizes computed from other tensors, and from numbers that are not weights, such as LoRA's alpha."""
    initial: dict[str, Any] = weights.initial
    listed = [[name, initial[name][0]] for name in sorted(weights.sizes)]
    return hashlib.blake2b(json.dumps(listed).encode(), digest_size=16).hexdigest()


def _sampled(leaf: Leaf) -> bytes:
    if leaf.nbytes <= PIECES * PIECE_BYTES:
        return leaf.pieces([0], leaf.nbytes)
    last = (leaf.nbytes - PIECE_BYTES) // 8 * 8  # aligned to elements of any dtype
    return leaf.pieces([last * i // (PIECES - 1) // 8 * 8 for i in range(PIECES)], PIECE_BYTES)


def _of_module(model: nn.Module) -> Iterator[Leaf]:
    for name, param in model.named_parameters():
        if param.is_meta:
            raise ZeroBlockError(f"{name!r} is on the meta device; load the weights first")
        yield from _of_tensor(name, param)


def _of_tensor(name: str, tensor: Tensor) -> Iterator[Leaf]:
    """A tensor as one leaf; one that wraps others (quantised numbers and their scales) as their leaves."""
    if hasattr(tensor, "__tensor_flatten__") and not is_spread(tensor):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _of_tensor(f"{name}.{part}", getattr(tensor, part))
        return

    def pieces(starts: list[int], length: int) -> bytes:
        flat, width = whole(tensor).reshape(-1), tensor.element_size()
        taken = torch.cat([flat[a // width : (a + length) // width] for a in starts])
        return taken.view(torch.uint8).cpu().numpy().tobytes() if taken.numel() else b""

    yield Leaf(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes, pieces)


def _of_folder(place: Path) -> Iterator[Leaf]:
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    if not files:
        raise ZeroBlockError(f"no *.safetensors in {str(place)!r}")
    for file in files:
        yield from _of_file(file)


def _of_file(file: Path) -> Iterator[Leaf]:
    """The tensors of a safetensors file: 8 bytes of length, a JSON table, then the data."""
    try:
        data = np.memmap(file, dtype=np.uint8, mode="r")
        length = int.from_bytes(data[:8].tobytes(), "little")
        if len(data) < 8 or length > min(len(data) - 8, MAX_SAFETENSORS_HEADER):
            raise ValueError("its table is longer than the file")
        table = json.loads(data[8 : 8 + length].tobytes())
        entries = {name: entry for name, entry in table.items() if name != "__metadata__"}
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            start, stop = 8 + length + begin, 8 + length + end
            if not 8 + length <= start <= stop <= len(data):
                raise ValueError(f"{name!r} lies outside the file")

            def pieces(starts: list[int], length: int, first: int = start) -> bytes:
                return b"".join(data[first + a : first + a + length].tobytes() for a in starts)

            yield Leaf(name, DTYPES.get(entry["dtype"], entry["dtype"]), shape, stop - start, pieces)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ZeroBlockError(f"{str(file)!r} is not a safetensors file ({error})") from error
