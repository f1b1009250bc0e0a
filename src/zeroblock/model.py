"""Models by name: the shapes of OPT built in, everything else by transformers."""

from __future__ import annotations

import difflib
import logging
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


def config(name: str) -> Any:
    """The transformers configuration of a built-in shape, a local folder or a hub id."""
    from transformers import AutoConfig, OPTConfig

    if name in OPT:
        shape = OPT[name]
        return OPTConfig(vocab_size=50272, word_embed_proj_dim=shape["hidden_size"], **shape)
    if "/" not in name and difflib.get_close_matches(name, OPT, cutoff=0.8):
        raise unknown("model", name, OPT)
    if name.startswith((".", "/", "~")) and not Path(name).expanduser().is_dir():
        raise ZeroBlockError(f"no folder {name!r}")
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it reports every retry
    try:
        return AutoConfig.from_pretrained(str(Path(name).expanduser()) if name.startswith("~") else name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ZeroBlockError(
            f"no model {name!r}: give one of {', '.join(OPT)}, a folder with a config.json, or a hub id ({reason})"
        ) from error


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
