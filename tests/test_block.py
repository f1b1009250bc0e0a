"""Partitions on real architectures, by exact names."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from toy import Tiny
from zeroblock.block import Block, by_name, explicit, layers, linears, whole
from zeroblock.errors import ZeroBlockError
from zeroblock.model import skeleton

transformers = pytest.importorskip("transformers")


def on_meta(config: object, auto: str = "AutoModelForCausalLM") -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, auto).from_config(config)


def check(model: nn.Module, blocks: tuple[Block, ...]) -> None:
    """Every trainable parameter in exactly one block."""
    listed = [name for block in blocks for name in block.params]
    assert sorted(listed) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert len({b.name for b in blocks}) == len(blocks)


def test_opt_1_3b_has_27_blocks() -> None:
    """PROTOCOL, ambiguity 1: embed_tokens with the tied head, embed_positions, 24 layers, final_layer_norm."""
    model = skeleton("opt-1.3b")
    blocks = layers(model)
    check(model, blocks)
    decoder = "model.decoder."
    assert [b.name for b in blocks] == [
        f"{decoder}embed_tokens",
        f"{decoder}embed_positions",
        *(f"{decoder}layers.{i}" for i in range(24)),
        f"{decoder}final_layer_norm",
    ]
    assert blocks[0].params == (f"{decoder}embed_tokens.weight",)
    assert len(blocks[5].params) == 16
    assert sum(p.numel() for p in model.parameters()) == 1_315_758_080


def test_pairs_of_layers_and_a_shorter_last_block() -> None:
    model = skeleton("opt-125m")
    blocks = layers(model, k=5)
    check(model, blocks)
    assert [b.name.rpartition("layers.")[2] for b in blocks[2:5]] == ["0-4", "5-9", "10-11"]
    assert len(layers(model, k=2)) == 2 + 6 + 1


def test_linears_of_opt() -> None:
    model = skeleton("opt-125m")
    blocks = linears(model)
    check(model, blocks)
    assert len(blocks) == 2 + 6 * 12 + 1
    layer = "model.decoder.layers.3"
    mine = [b for b in blocks if b.name.startswith(f"{layer}.")]
    assert [b.name.removeprefix(f"{layer}.") for b in mine] == [
        "self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj", "fc1", "fc2",
    ]  # fmt: skip
    assert set(mine[3].params) >= {f"{layer}.self_attn.out_proj.weight", f"{layer}.self_attn_layer_norm.weight"}


ARCHITECTURES = {
    "Llama": {"num_key_value_heads": 2}, "Qwen2": {"num_key_value_heads": 2}, "Mistral": {"num_key_value_heads": 2},
    "Gemma2": {"num_key_value_heads": 2, "head_dim": 8}, "GPTNeoX": {},
    "Phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decoders_from_input_to_output(name: str, tied: bool) -> None:
    config = getattr(transformers, f"{name}Config")(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        tie_word_embeddings=tied, **ARCHITECTURES[name],
    )  # fmt: skip
    model = on_meta(config)
    model.tie_weights()
    for cut in (layers, linears, whole):
        check(model, cut(model))
    blocks = layers(model)
    assert "embed" in blocks[0].name
    assert [".layers." in b.name for b in blocks[1:4]] == [True] * 3
    assert "norm" in blocks[4].name
    assert len(blocks) == (5 if tied else 6), "an untied head is a block of its own"
    if not tied:
        assert blocks[5].name.endswith(("lm_head", "embed_out"))


def test_gpt2_and_its_conv1d() -> None:
    model = on_meta(transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=40))
    model.tie_weights()
    assert [b.name for b in layers(model)] == [f"transformer.{x}" for x in ("wte", "wpe", "h.0", "h.1", "ln_f")]
    assert len(linears(model)) == 2 + 4 * 2 + 1


def test_encoders() -> None:
    config = transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    model = on_meta(config, "AutoModelForSequenceClassification")
    blocks = layers(model)
    check(model, blocks)
    assert [b.name for b in blocks] == [
        *(f"bert.embeddings.{x}_embeddings" for x in ("word", "position", "token_type")), "bert.embeddings.LayerNorm",
        "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler.dense", "classifier",
    ]  # fmt: skip


def test_an_encoder_and_a_decoder() -> None:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=40)
    model = on_meta(config, "AutoModelForSeq2SeqLM")
    blocks = layers(model)
    check(model, blocks)
    assert [b.name for b in blocks if "block." in b.name] == [
        "encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1",
    ]  # fmt: skip


def test_a_model_without_a_causal_form(tmp_path) -> None:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=40)
    config.save_pretrained(tmp_path)
    assert [b.name for b in layers(skeleton(str(tmp_path)))][:2] == ["shared", "encoder.block.0"]


def test_adapters_of_peft_by_layer() -> None:
    peft = pytest.importorskip("peft")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    blocks = layers(model)
    check(model, blocks)
    assert len(blocks) == 3
    assert all("lora_" in name for b in blocks for name in b.params)
    assert blocks[1].name.endswith("layers.1")
    assert len(linears(model)) == 3 * 4


def test_frozen_parameters_are_nowhere_and_tied_ones_once() -> None:
    model = Tiny()
    model.embed.requires_grad_(False)
    blocks = layers(model)
    check(model, blocks)
    assert [b.name for b in blocks] == ["layers.0", "layers.1", "layers.2", "norm"]
    assert layers(Tiny())[0].name == "embed"
    assert layers(Tiny(tied=False))[-1].name == "head"


def test_a_list_at_the_root_and_lists_within_layers() -> None:
    model = nn.ModuleList([nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2)] * 1)}), nn.Linear(2, 2)])
    assert [b.name for b in layers(model)] == ["0", "1"]
    assert [b.name for b in layers(model, k=2)] == ["0-1"]


def test_a_parameter_of_the_root() -> None:
    class Rooted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.layers = nn.ModuleList([nn.Linear(2, 2)])

    assert [b.name for b in layers(Rooted())] == ["scale", "layers.0"]


def test_no_layers_is_a_clear_error() -> None:
    with pytest.raises(ZeroBlockError, match=r"Sequential has no nn.ModuleList of layers; use partition=whole"):
        layers(nn.Sequential(nn.Linear(2, 2)))
    assert len(whole(nn.Sequential(nn.Linear(2, 2)))) == 1
    with pytest.raises(ZeroBlockError, match="no trainable parameter"):
        whole(nn.Linear(2, 2).requires_grad_(False))


def test_explicit_blocks_are_checked() -> None:
    model = Tiny()
    names = [n for n, _ in model.named_parameters()]
    assert [b.params for b in explicit(model, [names[:3], Block("rest", tuple(names[3:]))])] == [
        tuple(names[:3]),
        tuple(names[3:]),
    ]
    with pytest.raises(ZeroBlockError, match=r"2 trainable parameters are in no block, the first 'norm.weight'"):
        explicit(model, [[n for n in names if not n.startswith("norm.")]])
    with pytest.raises(ZeroBlockError, match="is in two blocks: 'block 0' and 'block 1'"):
        explicit(model, [names, names[:1]])
    with pytest.raises(ZeroBlockError, match=r"did you mean 'embed.weight'"):
        explicit(model, [["embed.weigth", *names[1:]]])
    with pytest.raises(ZeroBlockError, match="frozen, or tied"):
        explicit(model, [["head.weight", *names]])
    with pytest.raises(ZeroBlockError, match="has no parameters"):
        explicit(model, [names, []])


def test_partitions_by_name() -> None:
    assert by_name("linears") is linears
    assert isinstance(by_name("layers:3"), functools.partial)
    for text, message in (("layer", "did you mean 'layers'"), ("layers:x", "layers:2"), ("whole:2", "only layers")):
        with pytest.raises(ZeroBlockError, match=message):
            by_name(text)
    with pytest.raises(ZeroBlockError, match="at least one layer"):
        layers(Tiny(), k=0)
