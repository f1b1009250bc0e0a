"""Replaced forwards of every family, with plain torch in place of the kernels: the same losses, forked or not."""

from __future__ import annotations

import contextlib

import peft
import pytest
import torch
import transformers
from decoder import BATCH, CONFIGS, LABELS, decoder
from torch import nn

import zeroblock as zb
from zeroblock.engine import Engine
from zeroblock.engine.fuse import Fusions, find
from zeroblock.family import uncaptured

LLAMAS = ("llama", "llama-tied", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "olmo2", "smollm3")


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_the_models_own(name: str) -> None:
    model = decoder(name)
    plain, fused = Engine(model), Engine(model)
    fused.fusions = find(model, "cpu")
    kinds = {type(module).__name__ for module, _ in fused.fusions.forwards}
    if name in LLAMAS:
        assert any("RMSNorm" in kind for kind in kinds)
        assert any("MLP" in kind for kind in kinds)
        assert "Linear" in kinds
        assert fused.fusions.rotations
    for method in ("mezo_bcd", "lozo") if name in ("llama-tied", "gemma3", "opt") else ("mezo_bcd",):
        optimizer = zb.METHODS[method](model, lr=0.0, eps=1e-2)
        for _ in optimizer.blocks:
            points = optimizer.plan().points
            try:
                expected = plain.objective(BATCH, LABELS).losses(points)
            except zb.ZeroBlockError:  # experts that see some of the tokens
                break
            torch.testing.assert_close(fused.objective(BATCH, LABELS).losses(points), expected, rtol=1e-5, atol=1e-5)
            optimizer.step(plain.objective(BATCH, LABELS))
    assert all("forward" not in vars(module) for module in model.modules())


def test_forwards_are_put_back_after_an_error() -> None:
    model = decoder("llama")
    fusions = find(model, "cpu")
    file = fusions.rotations[0][0]
    own = file.apply_rotary_pos_emb
    with contextlib.suppress(RuntimeError), torch.no_grad(), fusions.running():
        assert file.apply_rotary_pos_emb is not own
        raise RuntimeError
    assert file.apply_rotary_pos_emb is own
    assert all("forward" not in vars(module) for module in model.modules())


def test_gradients_run_the_models_own_forwards() -> None:
    model = decoder("llama")
    fusions = find(model, "cpu")
    with fusions.running():
        assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("change", ["lora", "hook", "forward"])
def test_a_model_that_changed_since_runs_its_own_forwards(change: str) -> None:
    """An engine may be older than an adapter; a fused neighbour would leave the adapter out."""
    model = decoder("llama")
    engine = Engine(model)
    engine.fusions = find(model, "cpu")
    mlp = model.model.layers[1].mlp
    if change == "lora":
        config = peft.LoraConfig(target_modules=["gate_proj"], init_lora_weights=False)
        peft.get_peft_model(model, config)
    elif change == "hook":
        mlp.gate_proj.register_forward_hook(lambda module, args, out: 2 * out)
    else:
        own = mlp.gate_proj.forward
        mlp.gate_proj.forward = lambda x: 2 * own(x)
    with torch.no_grad():
        expected = engine.objective(BATCH, LABELS)()
        engine.fusions = Fusions()
        assert torch.equal(engine.objective(BATCH, LABELS)(), expected)


class DoubledRMSNorm(nn.Module):
    """Looks like a norm of the usual kind and is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x * self.weight


def test_a_module_that_computes_something_else_is_left_alone() -> None:
    assert find(DoubledRMSNorm(), "cpu") == Fusions()


FALCON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}


@pytest.mark.parametrize("kind", [{"multi_query": True}, {"new_decoder_architecture": True, "num_kv_heads": 2}])
def test_falcon_takes_its_heads_apart_without_indices_from_the_host(kind: dict) -> None:
    model = transformers.AutoModelForCausalLM.from_config(transformers.FalconConfig(**FALCON, **kind)).eval()
    attention = model.transformer.h[0].self_attention
    fused = torch.randn(2, 3, attention.query_key_value.out_features)
    own = attention._split_heads(fused)
    fusions = find(model, "cpu")
    assert len(fusions.splits) == 2
    with torch.no_grad(), fusions.running():
        storage = fused.untyped_storage().data_ptr()
        query, key, value = attention._split_heads(fused)
        if "multi_query" in kind:  # an index would have copied them
            assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() == storage
        for expected, got in zip(own, (query, key, value), strict=True):
            assert torch.equal(got, expected)
    assert "_split_heads" not in vars(attention)


def test_attention_with_other_names_than_falcons_is_left_alone() -> None:
    class Attention(torch.nn.Linear):  # the first code of Falcon, which came with its checkpoints, says num_kv
        multi_query, num_heads, num_kv, head_dim = True, 2, 1, 2

        def _split_heads(self, fused_qkv: torch.Tensor) -> None:
            raise AssertionError

    assert find(Attention(2, 2), "cpu") == Fusions()


@pytest.mark.parametrize(("name", "dtype", "says"), [
    ("mixtral", torch.float32, "ask the host"), ("mixtral", torch.bfloat16, ""), ("llama", torch.float32, ""),
])  # fmt: skip
def test_a_model_that_cannot_be_captured_says_why(name: str, dtype: torch.dtype, says: str) -> None:
    assert says in uncaptured(decoder(name, dtype))
    assert bool(uncaptured(decoder(name, dtype))) == bool(says)


def test_a_down_projection_of_zeros_hides_no_activation() -> None:
    """All activations would fit a layer that multiplies them by zero, and layers of one shape share the answer."""
    model = decoder("gemma3")
    kept = [layer.mlp.down_proj.weight.data.clone() for layer in model.model.layers]
    model.model.layers[0].mlp.down_proj.weight.data.zero_()
    fused = find(model, "cpu")
    for layer, weight in zip(model.model.layers, kept, strict=True):
        layer.mlp.down_proj.weight.data.copy_(weight)
    x = torch.randn(1, 5, 32)
    with torch.no_grad():
        plain = [layer.mlp(x) for layer in model.model.layers]
        with fused.running():
            mine = [layer.mlp(x) for layer in model.model.layers]
    torch.testing.assert_close(mine, plain, rtol=1e-5, atol=1e-5)
