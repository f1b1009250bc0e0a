"""The engine on your own examples: options share their context, and both losses come from one forked pass.

python examples/packed.py
"""

import torch
import transformers

import zeroblock as zb
from zeroblock.task import Encoded

WORDS = {0: ("dull", "slow", "sad"), 1: ("warm", "fun", "fine")}
ANSWERS = (" bad", " good")


def encode(text: str) -> tuple[int, ...]:
    """Bytes as token ids; take your model's tokenizer instead."""
    return tuple(text.encode())


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)

    # An example is a context and its options, as token ids, and the index of the right option.
    labels = [label for label, words in WORDS.items() for _ in words]
    contexts = [f"It was {word}:" for words in WORDS.values() for word in words]
    examples = [Encoded(encode(context), tuple(map(encode, ANSWERS))) for context in contexts]

    engine = zb.Engine(model)
    objective = engine.objective(examples, labels)
    optimizer = zb.mezo_bcd(model, lr=5e-2, eps=1e-2, clip=1.0, probes=4)

    def accuracy() -> float:
        right = 0
        for scores, label in zip(engine.scores(examples), labels, strict=True):
            means = [score.mean for score in scores]  # mean log-probability of an option's tokens
            right += means.index(max(means)) == label
        return right / len(labels)

    with torch.no_grad():
        before = float(objective())
    for _ in range(300):
        optimizer.step(objective)
    with torch.no_grad():
        after = float(objective())
    print(f"loss {before:.3f} before, {after:.3f} after; accuracy {accuracy():.2f}")
    assert after < 0.5 * before


if __name__ == "__main__":
    main()
