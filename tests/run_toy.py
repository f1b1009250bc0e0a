"""Tiny models with tokenizers in folders, tiny data, and what the tests of runs share."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SHAPES = {
    "Llama": {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2},
    "OPT": {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32},
}
WORDS = {0: ["dull", "bad", "sad", "slow"], 1: ["warm", "good", "fun", "fine"]}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level, one token a byte and a few merges, so that options have several tokens."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([word for words in WORDS.values() for word in words], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="</s>", eos_token="</s>")


def save_model(folder: Path, kind: str = "Llama", seed: int = 0, spread: float = 0.1) -> Path:
    """A random model of two layers with its tokenizer.

    Args:
        folder: where to.
        kind: Llama or OPT.
        seed: of the weights.
        spread: their standard deviation; large ones make decided, varied predictions.
    """
    words = tokenizer()
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(words), num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=256,
        tie_word_embeddings=True, initializer_range=spread, init_std=spread, dropout=0.0,
        bos_token_id=0, eos_token_id=0, pad_token_id=None, **SHAPES[kind],
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def save_sst2(folder: Path, train: int = 60, validation: int = 40) -> Path:
    """Sentences in the layout of SST-2 whose label a word gives away."""
    draw = random.Random(0)
    (folder / "sst2").mkdir(parents=True)
    for part, count in (("train", train), ("validation", validation)):
        rows = []
        for number in range(count):
            label = draw.randrange(2)
            rows.append({"sentence": f"{number} {draw.choice(WORDS[label])} {'x' * draw.randrange(4)}", "label": label})
        (folder / "sst2" / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def save_squad(folder: Path, train: int = 50, validation: int = 12) -> Path:
    """Questions in the layout of SQuAD, short ones and long ones."""
    draw = random.Random(1)
    (folder / "squad").mkdir(parents=True)
    for part, count in (("train", train), ("validation", validation)):
        rows = []
        for _ in range(count):
            word = draw.choice(WORDS[1])
            context = f"{word} " + "x " * draw.randrange(12)
            rows.append({"title": "t", "context": context, "question": "q?", "answers": {"text": [word, "a " + word]}})
        (folder / "squad" / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def opt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("opt"), "OPT")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    save_sst2(folder)
    return save_squad(folder)
