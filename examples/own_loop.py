"""Fine-tune a model in your own loop: an optimizer, a closure that returns the loss, and no backward pass.

python examples/own_loop.py
"""

import torch
import transformers

import zeroblock as zb

VOCABULARY, STEPS = 16, 300


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)

    # Sequences that count upwards: each token is the one before it plus one.
    starts = torch.arange(VOCABULARY).unsqueeze(1)
    tokens = (starts + torch.arange(8)) % VOCABULARY  # (16, 8)

    optimizer = zb.mezo_bcd(model, lr=2e-2, eps=1e-2, probes=2, clip=5.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        batch = tokens[torch.randperm(VOCABULARY)[:8]]
        loss = optimizer.step(lambda batch=batch: model(input_ids=batch, labels=batch).loss)
        scheduler.step()
        losses.append(float(loss))
        if step % 100 == 0:
            print(f"step {step}: loss {losses[-1]:.3f}")

    first, last = sum(losses[:20]) / 20, sum(losses[-20:]) / 20
    print(f"mean loss of the first 20 steps {first:.3f}, of the last 20 {last:.3f}")
    assert last < 0.8 * first


if __name__ == "__main__":
    main()
