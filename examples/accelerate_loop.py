"""A loop of Accelerate without accelerator.backward: a DataLoader, micro-batches, packed rows, a saved state.

python examples/accelerate_loop.py
"""

import tempfile

import torch
import transformers
from accelerate import Accelerator

import zeroblock as zb

VOCABULARY, STEPS, MICRO_BATCHES = 16, 80, 2


def main(folder: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config)
    # Sequences that count upwards; the labels of the first half are -100, so only the second half carries loss.
    tokens = (torch.arange(VOCABULARY).unsqueeze(1) + torch.arange(8)) % VOCABULARY
    labels = tokens.masked_fill(torch.arange(8) < 4, -100)
    rows = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]

    accelerator = Accelerator(cpu=True)
    zero_order = zb.mezo_bcd(model, lr=2e-2, eps=1e-2, clip=5.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(zero_order, STEPS)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, zero_order, loader, scheduler)
    engine = zb.Engine(accelerator.unwrap_model(model))

    # accelerator.accumulate() would skip steps and drop their batches: collect the objectives of a step instead.
    losses, objectives = [], []
    while len(losses) < STEPS:
        for batch in loader:
            objectives.append(engine.objective_from(batch))  # or: lambda batch=batch: model(**batch).loss
            if len(objectives) == MICRO_BATCHES:
                optimizer.step(objectives)
                scheduler.step()
                losses.append(zero_order.record.loss)
                objectives = []

    accelerator.save_state(folder)
    trained = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer.step(engine.objective_from(batch))
    accelerator.load_state(folder)
    assert zero_order.steps == STEPS
    assert all(torch.equal(weight, trained[name]) for name, weight in model.state_dict().items())
    first, last = sum(losses[:20]) / 20, sum(losses[-20:]) / 20
    print(f"mean loss of the first 20 steps {first:.3f}, of the last 20 {last:.3f}")
    assert last < first


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
