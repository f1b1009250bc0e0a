"""Real architectures, tiny and random: a copy made just in time is the copy swapped in, for every weight read."""

from __future__ import annotations

import pytest
import torch

import zeroblock as zb
from toy import same, snapshot

transformers = pytest.importorskip("transformers")
SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2}
CONFIGS = {
    "OPT": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32},
    "Llama": GATED,
    "Qwen3": {**GATED, "head_dim": 8},
    "Gemma2": {**GATED, "head_dim": 8},
    "Gemma3Text": {**GATED, "head_dim": 8},
    "GPT2": {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "GPTNeoX": {**SMALL, "intermediate_size": 48},
    "Falcon": SMALL,
    "Mixtral": {**GATED, "num_local_experts": 4},
    "Qwen3Moe": {**GATED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def build(name: str) -> tuple[torch.nn.Module, object]:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_is_seen_perturbed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, loss = build(name)
    before = snapshot(model)
    just_in_time, swapped = zb.mezo(model, 0.0, eps=1e-2), zb.mezo(model, 0.0, eps=1e-2)
    swapped.weights.opaque = True
    for _ in range(2):
        just_in_time.step(loss)
        swapped.step(loss)
        assert just_in_time.record.losses == swapped.record.losses
        assert just_in_time.record.losses[0] != just_in_time.record.losses[1]
    assert same(snapshot(model), before)


@pytest.mark.parametrize("method", ["mezo_bcd", "lozo", "mezo_bcd_adam"])
@pytest.mark.parametrize("name", ["OPT", "Llama"])
def test_a_language_model_overfits_a_batch(name: str, method: str) -> None:
    model, loss = build(name)
    with torch.no_grad():
        start = float(loss())
    rate = {"mezo_bcd": 2e-2, "lozo": 3e-4, "mezo_bcd_adam": 3e-3}[method]
    optimizer = zb.METHODS[method](model, lr=rate)
    for _ in range(150):
        optimizer.step(loss)
    with torch.no_grad():
        assert float(loss()) < start - 0.05


def test_adapters_of_peft_move_and_nothing_else() -> None:
    peft = pytest.importorskip("peft")
    model, _ = build("Llama")
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    tokens = torch.arange(3, 21).view(2, 9)
    before = snapshot(model)
    optimizer = zb.mezo_bcd(model, lr=0.1, eps=1e-2)
    assert len(optimizer.blocks) == 2
    for _ in range(6):
        optimizer.step(lambda: model(input_ids=tokens, labels=tokens).loss)
    after = snapshot(model)
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    assert moved
    assert all("lora_" in n for n in moved)
