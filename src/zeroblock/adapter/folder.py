"""Adapters in folders, as PEFT saves and loads them."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import atomic
from ..errors import ZeroBlockError

if TYPE_CHECKING:
    from torch import nn

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of an adapter, as PEFT names them."""
START = "start"
"""The folder within a run's folder that keeps its initial prefix, as PEFT saves it."""


def is_adapted(model: object) -> bool:
    """Whether a model is wrapped in a PEFT adapter."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def virtual_tokens(model: object) -> int:
    """The number of positions of the context that an adapter's virtual tokens take."""
    return getattr(getattr(model, "active_peft_config", None), "num_virtual_tokens", None) or 0


def is_folder(name: str) -> bool:
    """Whether a name is that of a folder that PEFT saved."""
    return (Path(name).expanduser() / CONFIG).is_file()


def base_of(folder: str) -> str:
    """The name of the model that a saved adapter belongs to."""
    path = Path(folder).expanduser()
    try:
        name = json.loads((path / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
        if not name or not isinstance(name, str):
            raise ValueError("base_model_name_or_path is empty")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = "it lacks base_model_name_or_path" if isinstance(error, KeyError) else error
        raise ZeroBlockError(
            f'{path / CONFIG} does not name the adapter\'s base ({reason}): add "base_model_name_or_path"'
        ) from error
    if is_folder(name):
        raise ZeroBlockError(f"{folder} is an adapter of {name}, which is an adapter itself: merge that one first")
    return str(name)


def load(model: nn.Module, folder: str) -> nn.Module:
    """Put a saved adapter into its base, ready to be trained further.

    Args:
        model: the base; on the meta device it gets only the adapter's shapes.
        folder: the adapter's folder, as PEFT saved it; weights are read from safetensors, never from a pickle.
    """
    from .attach import by_layer, require, wrap

    peft = require()
    path = Path(folder).expanduser()
    try:
        config = peft.PeftConfig.from_pretrained(str(path))
    except Exception as error:  # PEFT raises various errors for a file that is not its own
        raise ZeroBlockError(f"{path / CONFIG} cannot be read ({' '.join(str(error).split())})") from error
    if config.is_prompt_learning and config.peft_type != "PREFIX_TUNING":
        raise ZeroBlockError(
            f"{folder} is an adapter of type {config.peft_type.value}: give one of LoRA or of prefix tuning"
        )
    if config.task_type not in (None, "CAUSAL_LM"):
        raise ZeroBlockError(f"{folder} is an adapter for {config.task_type}: give one of a causal language model")
    if config.peft_type == "PREFIX_TUNING":
        config.prefix_projection = False  # the file holds prefixes that are projected already
    config.inference_mode = False
    base, config.base_model_name_or_path = config.base_model_name_or_path, None  # PEFT would overwrite it
    adapted = wrap(model, config)
    config.base_model_name_or_path = base
    if not next(model.parameters()).is_meta:
        _fill_(adapted, path)
    return by_layer(adapted)


def _fill_(adapted: Any, folder: Path) -> None:
    """Give an adapter the tensors of its file; refuse missing and unknown ones, which PEFT would skip."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from .attach import require

    peft, file = require(), folder / WEIGHTS
    if not file.is_file():
        raise ZeroBlockError(f"{folder} lacks {WEIGHTS}: save the adapter again with PEFT, as safetensors")
    try:
        tensors = load_file(file)
        expected = set(peft.get_peft_model_state_dict(adapted, save_embedding_layers=False))
        if odd := sorted(expected ^ set(tensors)):
            raise ValueError(f"it {'lacks' if odd[0] in expected else 'has the unexpected tensor'} {odd[0]}")
        peft.set_peft_model_state_dict(adapted, tensors)
    except (OSError, SafetensorError, RuntimeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ZeroBlockError(
            f"{file} does not fit its base ({reason}): save the adapter again, for this base"
        ) from error


def save(model: Any, folder: str | Path) -> None:
    """Save an adapter as PEFT does, for ``PeftModel.from_pretrained(base, folder)``.

    Args:
        model: the model with the adapter.
        folder: the folder to write.
    """
    model.save_pretrained(folder, save_embedding_layers=False)  # by default PEFT asks the hub about that


def keep(model: Any, folder: Path) -> None:
    """Save an adapter within a run's folder, each file whole or not at all, and never through a link.

    Args:
        model: the model with the adapter.
        folder: the folder to write; it is made if needed.
    """
    with tempfile.TemporaryDirectory() as draft:
        save(model, draft)
        atomic.make_folder(folder)
        for name in (CONFIG, WEIGHTS):
            atomic.write(folder / name, (Path(draft) / name).read_bytes())


def restart_(model: Any, run: Path) -> None:
    """Give a prefix the values that it had when its run began, if the run kept them; other adapters need no file.

    Args:
        model: the model, with a newly made adapter.
        run: the run's folder.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = run / START / WEIGHTS
    encoder = getattr(model, "prompt_encoder", None)
    if encoder is None or not file.exists():
        return
    layers = encoder["default"].embedding.layers
    try:
        parts = load_file(file)["prompt_embeddings"].chunk(len(layers), 1)
        with torch.no_grad():
            for layer, part in zip(layers, parts, strict=True):
                if layer.weight.shape != part.shape:
                    raise ValueError(f"its shape is {tuple(part.shape)}, not {tuple(layer.weight.shape)}")
                layer.weight.copy_(part)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ZeroBlockError(
            f"{file}, the start of the run's prefix, is damaged ({error}): restore it, or remove it to compute it again"
        ) from error


def describe(model: nn.Module) -> str:
    """One line that says how much of a model an adapter trains."""
    sizes = [(param.numel(), param.requires_grad) for param in model.parameters()]
    trained, total = sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)
    kind: Any = model.peft_config["default"].peft_type  # type: ignore[union-attr,index]
    return (
        f"{kind.value.lower().replace('_', ' ')}: {trained:,} of {total:,} weights are trained, the others are frozen"
    )
