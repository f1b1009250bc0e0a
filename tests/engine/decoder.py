"""Tiny random decoders of many families, and examples of every shape."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import masked_toy
from zeroblock.task import Encoded

logging.getLogger("transformers").setLevel(logging.ERROR)

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OPT = {
    "vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 64, "word_embed_proj_dim": 32,
}  # fmt: skip

CONFIGS: dict[str, Callable[[], Any]] = {
    "opt": lambda: transformers.OPTConfig(**OPT),
    "opt-projected": lambda: transformers.OPTConfig(**{**OPT, "word_embed_proj_dim": 16}),
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "llama-tied": lambda: transformers.LlamaConfig(**COMMON, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=8),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=4),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON, head_dim=8, sliding_window=4, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**COMMON, head_dim=8, sliding_window=4),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**COMMON),
    "phi3": lambda: transformers.Phi3Config(**COMMON),
    "falcon": lambda: transformers.FalconConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, alibi=False
    ),
    "olmo2": lambda: transformers.Olmo2Config(**COMMON),
    "smollm3": lambda: transformers.SmolLM3Config(**COMMON),
    "mixtral": lambda: transformers.MixtralConfig(**COMMON, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24
    ),
}

BATCH = [
    Encoded((3, 4, 5, 6, 7, 11, 12), ((8, 9), (8, 7, 5))),  # options that begin alike
    Encoded((9,), ((4,), (5,), (6,))),  # a context of one token, options of one token
    Encoded((7, 6, 9, 13, 14, 15, 16, 17), ((3, 4, 8, 5), (2, 2))),  # options of several tokens
    Encoded((21, 22), ((23,),)),  # one option
]
LABELS = [1, 2, 0, 0]


def decoder(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model whose every weight matters, norms and biases too."""
    torch.manual_seed(0)
    plain = {"attn_implementation": "eager"} if name == "gemma2" else {}  # others of its forwards have had no soft cap
    return filled(transformers.AutoModelForCausalLM.from_config(CONFIGS[name](), **plain)).to(dtype).eval()


def filled(model: nn.Module) -> nn.Module:
    """The model with large random weights."""
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=generator)
        param.data = 0.3 * noise if param.dim() > 1 else param.data + 0.1 * noise
    return model


ENCODERS = ("Bert", "Roberta")
"""Names of masked language models, which ``specimen`` makes too."""


def specimen(name: str) -> tuple[nn.Module, list[Encoded], list[int]]:
    """A random decoder or encoder, and a batch of its kind with labels."""
    if name in ENCODERS:
        return masked_toy.masked(name), masked_toy.BATCH, masked_toy.LABELS
    return decoder(name), BATCH, LABELS
