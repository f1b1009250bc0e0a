"""Tiny random masked language models with tokenizers, and examples with a mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn

from zeroblock.task import Encoded

SPECIAL = {
    "Roberta": {
        "bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "cls_token": "<s>",
        "sep_token": "</s>",
    },
    "Bert": {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"},
}  # fmt: skip
TEXT = ["It was terrible. It was great. Yes, No, Maybe? dull bad sad slow warm good fun fine 0123456789"] * 3

BATCH = [
    Encoded((3, 4, 5, 6, 7), ((8,), (9,)), mask=2),
    Encoded((9, 2), ((4,), (5,), (6,)), mask=0),
    Encoded((7, 6, 9, 13, 14, 15, 16, 17), ((3,),), mask=7),
]
LABELS = [0, 2, 0]


def config(kind: str, words: int = 64, **more: Any) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return getattr(transformers, f"{kind}Config")(
        vocab_size=words, max_position_embeddings=66, pad_token_id=1, **(shape | more)
    )


def masked(kind: str, **more: Any) -> nn.Module:
    """A random model whose every weight matters, norms and biases too."""
    model = transformers.AutoModelForMaskedLM.from_config(config(kind, **more))
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=generator)
        param.data = 0.3 * noise if param.dim() > 1 else param.data + 0.1 * noise
    return model.eval()


def tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """RoBERTa's kind: bytes that merge, spaces with the word after them.  BERT's kind: pieces of words."""
    special = SPECIAL[kind]
    tokens = list(dict.fromkeys(special.values()))
    inner: Tokenizer
    if kind == "Roberta":
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=360, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False
        )
        mask = transformers.AddedToken("<mask>", lstrip=True, special=True)
    else:
        inner = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=tokens, show_progress=False)
        mask = transformers.AddedToken("[MASK]", special=True)
    inner.train_from_iterator(TEXT, trainer)
    first, last = special["cls_token"], special["sep_token"]
    ids = [(token, inner.token_to_id(token)) for token in (first, last)]
    inner.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", special_tokens=ids)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, mask_token=mask, **special)


def save(folder: Path, kind: str) -> Path:
    """A random model in a folder, with its tokenizer."""
    words = tokenizer(kind)
    torch.manual_seed(0)
    shape = config(kind, len(words), initializer_range=0.1)
    transformers.AutoModelForMaskedLM.from_config(shape).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
