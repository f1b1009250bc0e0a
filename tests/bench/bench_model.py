"""Small decoders and batches that the tests of the benchmark share."""

from __future__ import annotations

import torch
import transformers

from zeroblock.bench.batch import Batch, Pool
from zeroblock.task import Encoded

CONFIGS = {
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Llama": {"intermediate_size": 48, "num_key_value_heads": 2},
}


def build(name: str = "OPT") -> transformers.PreTrainedModel:
    """Two layers of 32, 50 tokens, weights large enough for the loss to depend on all of them."""
    torch.manual_seed(0)
    common = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(**common, **CONFIGS[name], max_position_embeddings=64)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for param in model.parameters():
        param.data.add_(torch.randn(param.shape) * 0.1)
    return model


def ids(length: int, start: int) -> tuple[int, ...]:
    return tuple((7 * start + 3 * i * i + i) % 46 + 4 for i in range(length))


SINGLE = Batch(
    (Encoded(ids(5, 1), ((9,), (11,))), Encoded(ids(11, 2), ((9,), (11,))), Encoded(ids(1, 3), ((9,), (11,)))),
    (0, 1, 1),
    "options",
)
RAGGED = Batch(
    (Encoded(ids(5, 1), ((9, 8), (11,), (4, 5, 6))), Encoded(ids(11, 2), ((9,), (11, 12, 13, 14)))), (2, 1), "options"
)
ANSWER = Batch((Encoded(ids(5, 1), ((9, 8, 7),)), Encoded(ids(11, 2), ((9,),))), (0, 0), "answer")


def pool(count: int = 24, over: str = "options") -> Pool:
    encoded = tuple(Encoded(ids(2 + i % 9, i), ((9,), (11,))) for i in range(count))
    return Pool(encoded, tuple(i % 2 for i in range(count)), over)
