"""Quirks of model families, in one table: what a family does differently, and the name that identifies it.

Everything else in zeroblock relies on the modules and configurations that transformers' models
share.  A new family that needs special care gets a row here.

| family                        | quirk                                                     | identified by           |
|-------------------------------|-----------------------------------------------------------|-------------------------|
| OPT, BLOOM, GPT-2, BERT       | modules that run after the layers are registered before   | ``OUTPUT_SIDE``         |
| GPT-2, GPT-BigCode            | a linear layer stores its matrix transposed: y = xW       | ``TRANSPOSED_LINEARS``  |
| OPT, Gemma                    | an embedding shifts ids or scales rows                    | ``PLAIN_EMBEDDINGS``    |
| BLOOM, MPT, Falcon, GPT-Neo   | attention counts the places of a row, not positions       | ``COUNTS_PLACES``       |
| Mistral, Gemma, Phi-MoE, Llama 4 | attention looks back over a window or a chunk only     | ``WINDOWS``             |
| Phi-3 long, dynamic rotary    | the longest text of a row scales the positions of all     | ``SCALED_BY_ROW``       |
| GPT-OSS                       | attention adds learned sinks to its scores                | ``SINKS``               |
| BERT, RoBERTa, DistilBERT     | predicts a token at its own place, from both sides of it  | ``MASKED``              |
| RoBERTa, XLM-R, CamemBERT     | positions count from the one after that of padding        | ``POSITIONS``           |
| T5, BART, Pegasus             | an encoder reads the context, a decoder writes the answer | ``seq2seq``             |
| Mixtral, Qwen-MoE, Phi-MoE    | asks the host for tokens per expert, except in bf16       | ``EXPERTS``             |
"""

from __future__ import annotations

import math
import operator
import re
from typing import Any, Literal

import torch
from torch import nn

OUTPUT_SIDE = re.compile(r"(^|\.)(final\w*|project_out|ln_f|lm_head|score|classifier|pooler)(\.|$)")
"""Paths of modules that run after the layers, wherever they are registered."""

TRANSPOSED_LINEARS = ("Conv1D",)
"""Classes of linear layers that compute y = xW."""

PLAIN_EMBEDDINGS = (nn.Embedding,)
"""Classes of embeddings that only look up a row; subclasses may do more."""

COUNTS_PLACES = ("window_size", "alibi", "attn_config.alibi")
"""Fields of a configuration that are set if attention measures distances in places of the row."""

WINDOWS = {"attention_chunk_size": None, "sliding_window": "use_sliding_window"}
"""Fields of a configuration that hold the length of a window, each with the field that may switch it off."""

SCALED_BY_ROW = ("dynamic", "longrope")
"""Types of rotary positions that transformers scales by the largest position in the whole input."""

ORIGINAL = "original_max_position_embeddings"
"""The field with the length up to which such positions are not scaled."""

SINKS = ("s_aux",)
"""Arguments with which a layer passes attention sinks."""


MASKED = re.compile(r"ForMaskedLM$")
"""Classes of masked language models."""

EXPERTS = re.compile(r"Experts$")
"""Classes of modules that hold the matrices of all experts of a layer."""

POSITIONS = re.compile(r"(^|\.)position_embeddings$")
"""Paths of position tables in which padding may have its own row."""


def is_output_side(path: str) -> bool:
    """Whether a module runs after the layers although its model registers it before them.

    >>> is_output_side("model.decoder.final_layer_norm"), is_output_side("model.decoder.embed_tokens")
    (True, False)
    """
    return bool(OUTPUT_SIDE.search(path))


def product(module: nn.Module) -> Literal["linear", "transposed", "embedding"] | None:
    """How a module applies its matrix, if it does nothing else; None for every other module."""
    if type(module) is nn.Linear:
        return "linear"
    if type(module).__name__ in TRANSPOSED_LINEARS:
        return "transposed"
    if type(module) in PLAIN_EMBEDDINGS and getattr(module, "max_norm", None) is None:
        return "embedding"
    return None


def masked(model: nn.Module) -> bool:
    """Whether a model, or the one within an adapter, is a masked language model."""
    return any(MASKED.search(type(module).__name__) for module in model.modules())


def seq2seq(model: nn.Module) -> Any:
    """The text encoder-decoder that a model is, or that its adapter wraps; None for every other model."""
    for module in model.modules():
        known: Any = module
        config = getattr(known, "config", None)
        if not getattr(config, "is_encoder_decoder", False) or not hasattr(known, "get_output_embeddings"):
            continue
        writes = known.get_output_embeddings() is not None and getattr(known, "main_input_name", "") == "input_ids"
        return known if writes and known.can_generate() else None
    return None


def decoder_start(model: nn.Module) -> int | None:
    """The token that the decoder of an encoder-decoder begins with; None if no configuration names it."""
    for source in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        for name in ("decoder_start_token_id", "decoder.decoder_start_token_id", "decoder.bos_token_id"):
            if isinstance(token := _field(source, name), int):
                return token
    return None


def uncaptured(model: nn.Module) -> str:
    """The reason why steps of a model cannot be captured as CUDA graphs, if known beforehand; otherwise empty."""
    for module in model.modules():
        if not EXPERTS.search(type(module).__name__) or getattr(module, "config", None) is None:
            continue  # in Llama 4 every expert sees the same number of tokens
        how, weight = _field(module.config, "_experts_implementation"), next(module.parameters(), None)
        grouped = how == "grouped_mm" and weight is not None and weight.dtype == torch.bfloat16
        if not grouped and how != "batched_mm":
            return "its experts ask the host how many tokens each of them gets; in bf16, and not 'eager', they do not"
    return ""


def first_position(model: nn.Module) -> int:
    """The position id of a text's first token."""
    for path, module in model.named_modules():
        if POSITIONS.search(path) and getattr(module, "padding_idx", None) is not None:
            return int(module.padding_idx) + 1  # type: ignore[call-overload]
    return 0


def virtual_tokens(model: nn.Module) -> str:
    """The type of a PEFT adapter that puts virtual tokens before the text; empty for every other model."""
    config: Any = getattr(model, "active_peft_config", None)
    return str(config.peft_type.value) if config is not None and config.is_prompt_learning else ""


def counts_places(config: Any) -> bool:
    """Whether a model's own attention measures distances in places of the row."""
    return any(bool(_field(config, name)) for name in COUNTS_PLACES)


def windows(config: Any) -> set[int]:
    """Lengths of the windows and chunks of attention that a configuration names."""
    sizes = {_field(config, name) for name, switch in WINDOWS.items() if switch is None or _field(config, switch, True)}
    return {size for size in sizes if isinstance(size, int)}


def scaled_from(config: Any) -> float:
    """The length beyond which a text changes the rotary positions of all texts in its row; infinite for most models."""
    ropes = [rope for name in ("rope_parameters", "rope_scaling") if isinstance(rope := _field(config, name), dict)]
    ropes += [one for rope in ropes for one in rope.values() if isinstance(one, dict)]  # by type of layer
    lengths = [
        rope.get(ORIGINAL) or _field(config, ORIGINAL) or _field(config, "max_position_embeddings", math.inf)
        for rope in ropes
        if rope.get("rope_type", rope.get("type")) in SCALED_BY_ROW
    ]
    return min(lengths, default=math.inf)


def sinks(options: dict[str, Any]) -> bool:
    """Whether a layer passes sinks to its attention."""
    return any(options.get(name) is not None for name in SINKS)


def _field(config: Any, path: str, default: Any = None) -> Any:
    try:
        return operator.attrgetter(path)(config)
    except AttributeError:
        return default
