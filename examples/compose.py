"""A method of your own: choose each of the five parts, here for the LoRA adapters that PEFT puts on a model.

python examples/compose.py
"""

import peft
import torch
import transformers

import zeroblock as zb


def main() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    lora = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    model = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}

    optimizer = zb.ZeroOrder(
        model,
        lr=0.1,
        partition=zb.layers,  # frozen weights belong to no block; adapters are grouped by layer
        schedule=zb.FlipFlop(),
        subspace=zb.LowRank(2),
        estimator=zb.TwoSided(eps=1e-2, probes=2),
        rule=zb.Momentum(0.8, reset=True),
        interval=10,  # steps that a block is held for
        clip=5.0,
    )
    print(optimizer)
    print(f"{len(optimizer.blocks)} blocks: {', '.join(block.name for block in optimizer.blocks)}")

    tokens = torch.arange(16).repeat(4, 1)
    losses = [float(optimizer.step(lambda: model(input_ids=tokens, labels=tokens).loss)) for _ in range(200)]
    print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")
    assert losses[-1] < losses[0]
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)


if __name__ == "__main__":
    main()
