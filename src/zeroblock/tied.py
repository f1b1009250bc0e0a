"""Whether a model's head is its embedding, as its checkpoint says.

Configurations of T5 1.1, Flan-T5 and mT5 say that the two are tied.  transformers ties them when it loads a model,
unless the checkpoint holds both with different values.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def untie_(model: Any) -> bool:
    """Give a model on the meta device its own head; return False and change nothing if it has one, or has no head."""
    head = model.get_output_embeddings()
    if head is None or _names(model, head) is None:
        return False
    head.weight = nn.Parameter(torch.empty_like(head.weight))
    return True


def is_untied(model: Any, source: str) -> bool:
    """Whether a checkpoint has a head of its own although a model on the meta device shares it with the embedding.

    Args:
        model: a model of transformers.
        source: a folder or a hub id, whose files are looked up in the cache.
    """
    head = model.get_output_embeddings()
    names = None if head is None else _names(model, head)
    if names is None:
        return False
    found = _tensors(source, names)
    return len(found) == 2 and not torch.equal(*found)


def _names(model: nn.Module, head: nn.Module) -> tuple[str, str] | None:
    """The head's weight and the tensor that it is tied to, by their names; None if it is tied to nothing."""
    own = next((f"{path}.weight" for path, module in model.named_modules() if module is head), "")
    other = next((name for name, param in model.named_parameters() if param is getattr(head, "weight", None)), own)
    return None if other == own else (own, other)


def _tensors(source: str, names: Sequence[str]) -> list[Tensor]:
    """The tensors with these names that a checkpoint holds."""
    from safetensors import safe_open

    if (index := _file(source, INDEX)) is not None:
        places = json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
    else:
        places = dict.fromkeys(names, WEIGHTS)
    found = []
    for name in names:
        file = _file(source, places[name]) if name in places else None
        if file is not None:
            with safe_open(file, "pt") as stored:
                found += [stored.get_tensor(name)] if name in stored.keys() else []  # noqa: SIM118
    return found


def _file(source: str, name: str) -> Path | None:
    """A file of a folder, or of a hub id in the cache; None if it is not there."""
    from transformers.utils import cached_file

    with contextlib.suppress(OSError, ValueError):
        found = cached_file(source, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)
    return None
