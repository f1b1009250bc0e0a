"""Tiny random encoder-decoders with a tokenizer, and examples for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import masked_toy
from zeroblock.task import Encoded

T5 = {
    "vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
BART = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "decoder_start_token_id": 2, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip

CONFIGS: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5Config(**T5),
    "t5-untied": lambda: transformers.T5Config(**T5, tie_word_embeddings=False),  # and unscaled before the head
    "flan-t5": lambda: transformers.T5Config(**T5, tie_word_embeddings=False, feed_forward_proj="gated-gelu"),
    "mt5": lambda: transformers.MT5Config(**T5),
    "umt5": lambda: transformers.UMT5Config(**T5),
    "bart": lambda: transformers.BartConfig(**BART),
    "mbart": lambda: transformers.MBartConfig(**BART),
    "pegasus": lambda: transformers.PegasusConfig(**BART | {"decoder_start_token_id": 0, "pad_token_id": 0}),
    "marian": lambda: transformers.MarianConfig(**BART | {"decoder_start_token_id": 1}),
    "m2m_100": lambda: transformers.M2M100Config(**BART),
}

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "sliding_window": 4,
}  # fmt: skip
PLACES = {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}
OTHERS: dict[str, Callable[[], Any]] = {
    "blenderbot": lambda: transformers.BlenderbotConfig(**BART),  # a table of positions without a row per string
    "longt5": lambda: transformers.LongT5Config(**T5, local_radius=3),
    "led": lambda: transformers.LEDConfig(**BART, **PLACES, attention_window=4),  # queries with the tokens first
    "t5gemma": lambda: transformers.T5GemmaConfig(encoder=SMALL, decoder=SMALL, vocab_size=64),
    "fsmt": lambda: transformers.FSMTConfig(
        langs=["en", "de"], src_vocab_size=64, tgt_vocab_size=64, **{k: v for k, v in BART.items() if k != "vocab_size"}
    ),
    "prophetnet": lambda: transformers.ProphetNetConfig(
        vocab_size=64, hidden_size=32, encoder_ffn_dim=48, num_encoder_layers=1, num_encoder_attention_heads=4,
        decoder_ffn_dim=48, num_decoder_layers=1, num_decoder_attention_heads=4, decoder_start_token_id=0,
    ),
}  # fmt: skip

UNTIED = ("t5-untied", "flan-t5", "umt5")

BATCH = [
    Encoded((3, 4, 5, 6, 7, 11, 12), ((8, 9), (8, 7, 5)), seq2seq=True),  # options that begin alike
    Encoded((9,), ((4,), (5,), (6,)), seq2seq=True),  # a context of one token, options of one token
    Encoded((7, 6, 9, 13, 14, 15, 16, 17), ((3, 4, 8, 5), (3, 2)), seq2seq=True),
    Encoded((21, 22), ((20, 23, 24),), scored=((False, True, True),), seq2seq=True),  # an opening without loss
]
LABELS = [1, 2, 0, 0]


def seq2seq(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A random model whose every weight matters, norms and biases too."""
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config((CONFIGS | OTHERS)[name]())
    if name in UNTIED:
        untie(model)
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=generator)
        param.data = 0.3 * noise if param.dim() > 1 else param.data + 0.1 * noise
    return model.to(dtype).eval()


def untie(model: nn.Module) -> None:
    """Give a model a head of its own, as Flan-T5 has; in transformers 5 the checkpoint says so, not its config."""
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def own_loss(model: nn.Module, context: tuple[int, ...], option: tuple[int, ...], marks: tuple[bool, ...]) -> float:
    """The model's own loss on one option alone, whose labels it shifts itself where it begins as its config says."""
    labels, more = torch.tensor([option]), {}
    if not all(marks) or model.config.model_type in ("mbart", "fsmt"):  # which begin with the last label, or with all
        more["decoder_input_ids"] = torch.tensor([(model.config.decoder_start_token_id, *option[:-1])])
        labels = labels.masked_fill(~torch.tensor([marks]), -100)
    with torch.no_grad():
        return float(model(input_ids=torch.tensor([context]), labels=labels, **more).loss)


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Bytes that merge, and T5's way with texts: ``</s>`` after each, nothing before it."""
    from tokenizers import processors

    words = masked_toy.tokenizer("Roberta")
    end = ("</s>", words.eos_token_id)
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[end])
    return words


def save(folder: Path, name: str = "t5") -> Path:
    """A random model in a folder, with its tokenizer; BART's puts ``<s>`` before a text, too."""
    words = masked_toy.tokenizer("Roberta") if name == "bart" else tokenizer()
    config = CONFIGS[name]()
    special = {"pad_token_id": words.pad_token_id, "eos_token_id": words.eos_token_id}
    start = words.eos_token_id if name == "bart" else words.pad_token_id
    config.update(
        {"vocab_size": len(words), "decoder_start_token_id": start, "max_position_embeddings": 512, **special}
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config)
    if name in UNTIED:
        untie(model)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
