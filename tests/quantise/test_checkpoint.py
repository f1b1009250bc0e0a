"""Checkpoints that others have quantised: files in their layouts, written here, are read to the integer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from typer.testing import CliRunner

import run_toy
import zeroblock as zb
from zeroblock import forecast as forecasts
from zeroblock import model as models
from zeroblock.adapter import Lora
from zeroblock.bench import memory
from zeroblock.cli import app
from zeroblock.quantise import expand_, quantised_layers
from zeroblock.record import Record
from zeroblock.rerun import replay
from zeroblock.train import Config

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from decoder import decoder

GROUP = 16
Layer = dict[str, torch.Tensor]


def words(fields: np.ndarray, bits: int) -> torch.Tensor:
    """(…, 32 / bits) integers, the first one in the lowest bits → (…,) int32."""
    total = np.zeros(fields.shape[:-1], np.uint32)
    for place in range(fields.shape[-1]):
        total |= fields[..., place].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(total.view(np.int32))


def gptq(q: np.ndarray, z: np.ndarray, s: np.ndarray, bits: int) -> Layer:
    """q (n, m), z and s (groups, m), as AutoGPTQ packs them."""
    per = 32 // bits
    return {
        "qweight": words(q.reshape(-1, per, q.shape[1]).transpose(0, 2, 1), bits).contiguous(),
        "qzeros": words((z - 1).reshape(z.shape[0], -1, per), bits),
        "scales": torch.from_numpy(s).half(),
        "g_idx": torch.arange(q.shape[0], dtype=torch.int32) // (q.shape[0] // z.shape[0]),
    }


def awq(q: np.ndarray, z: np.ndarray, s: np.ndarray, bits: int) -> Layer:
    """The same as AutoAWQ packs them for its GEMM."""

    def packed(x: np.ndarray) -> torch.Tensor:
        return words(x.reshape(x.shape[0], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]], bits)

    return {"qweight": packed(q), "qzeros": packed(z), "scales": torch.from_numpy(s).half()}


def rows(q: np.ndarray, z: np.ndarray, s: np.ndarray, bits: int) -> Layer:
    """The same without zero points, as bitsandbytes stores them: one scale per row, times 127."""
    return {
        "weight": torch.from_numpy((q.T - 128).astype(np.int8)).contiguous(),
        "SCB": torch.from_numpy(s[0]).float() * 127,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


KINDS: dict[str, tuple[int, Callable[..., Layer], dict[str, Any]]] = {
    "gptq-4": (4, gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}),
    "gptq-8": (8, gptq, {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "sym": True, "desc_act": False}),
    "awq": (4, awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "bitsandbytes": (8, rows, {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}),
}


def written(folder: Path, kind: str, model: Any = None, **settings: Any) -> dict[str, torch.Tensor]:
    """Write a quantised checkpoint; the matrices that it stands for."""
    bits, pack, described = KINDS[kind]
    model = model or decoder("llama")
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": described | settings}))
    random, state, expected = np.random.default_rng(0), dict(model.state_dict()), {}
    for name, matrix in list(state.items()):
        if ".layers." not in name or matrix.dim() < 2 or "v_proj" in name:  # some layers may be left as they were
            continue
        m, n = matrix.shape
        groups = 1 if pack is rows else n // GROUP
        q = random.integers(1, 1 << bits, (n, m))
        z = np.full((groups, m), 128) if bits == 8 else random.integers(1, 16, (groups, m))
        s = random.uniform(0.001, 0.01, (groups, m)).astype(np.float16).astype(np.float32)
        s[0, 3] = 0.0  # as of a row or group of zeros
        layer = pack(q, z, s, bits)
        del state[name]
        state |= {f"{name.removesuffix('.weight')}.{field}": value for field, value in layer.items()}
        scales = (layer["SCB"] / 127)[None].numpy() if pack is rows else s
        repeated = (np.repeat(one, n // groups, axis=0) for one in (scales, z))
        s, z = repeated
        expected[name] = torch.from_numpy((s * (q - z)).astype(np.float32).T.copy())
    save_file({name: value.clone() for name, value in state.items()}, folder / "model.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(1)}, folder / "consolidated.safetensors")  # some lay it beside
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    return expected


@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_taken_as_they_are_and_move(kind: str, tmp_path: Path) -> None:
    bits, expected = KINDS[kind][0], written(tmp_path, kind)
    model = models.load(str(tmp_path), "fp32", "cpu", weights=f"int{bits}")
    layers = quantised_layers(model)
    assert {f"{path}.weight" for path in layers} == expected.keys()
    assert all(torch.equal(layer.expanded(), expected[f"{path}.weight"]) for path, layer in layers.items())
    assert next(iter(layers.values())).group == (32 if kind == "bitsandbytes" else GROUP)
    assert all((layer.scales > 0).all() for layer in layers.values()), "a group of zeros moves, too"
    optimizer, records = zb.mezo_bcd(model, 1e-2, 1e-3, weight_decay=0.1), list[Record]()
    optimizer.listener = records.append
    ids = torch.arange(3, 30)[None]
    for _ in range(5):
        optimizer.step(lambda: model(input_ids=ids, labels=ids).loss)
    again = models.load(str(tmp_path), "fp32", "cpu", weights=f"int{bits}")
    replay(zb.mezo_bcd(again, 1.0, 1e-3, weight_decay=0.1), records)
    dense = {path: layer.expanded() for path, layer in layers.items()}
    assert any(not torch.equal(value, expected[f"{path}.weight"]) for path, value in dense.items())
    assert all(torch.equal(value, quantised_layers(again)[path].expanded()) for path, value in dense.items())
    models.save(model, tmp_path / "export")
    exported = models.load(str(tmp_path / "export"), "fp32", "cpu")
    assert all(torch.equal(exported.get_submodule(path).weight, value) for path, value in dense.items())
    assert exported.generation_config.eos_token_id == [5, 7]
    assert torch.equal(expand_(again)(ids).logits, exported(ids).logits)


@pytest.mark.parametrize(
    ("kind", "settings", "how", "message"),
    [
        ("gptq-4", {}, "int8", "holds integers of 4 bits, not int8: give --weights int4"),
        ("gptq-4", {"bits": 3}, "int4", "they have 3 bits"),
        ("gptq-4", {"checkpoint_format": "bitblas"}, "int4", "in the layout bitblas"),
        ("gptq-8", {"pack_dtype": "int16"}, "int8", "packed into words of int16"),
        ("awq", {"version": "gemv"}, "int4", "in the layout gemv"),
        ("awq", {"version": None, "format": "gemv_fast"}, "int4", "in the layout gemv_fast"),
        ("bitsandbytes", {"load_in_8bit": False, "load_in_4bit": True}, "int4", "not integers"),
        ("bitsandbytes", {"quant_method": "torchao"}, "int8", "quantised by torchao.*leave out --weights"),
    ],
)
def test_what_cannot_be_taken_is_refused(kind: str, settings: Any, how: str, message: str, tmp_path: Path) -> None:
    decoder("llama").config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": KINDS[kind][2] | settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(zb.ZeroBlockError, match=message):
        models.load(str(tmp_path), "fp32", "cpu", weights=how)


def test_reordered_columns_are_refused() -> None:
    layer = gptq(np.ones((32, 8), np.int64), np.ones((2, 8), np.int64), np.ones((2, 8), np.float32), 4)
    layer["g_idx"] = layer["g_idx"].flip(0)
    with pytest.raises(ValueError, match="desc_act"):
        zb.quantise.checkpoint.gptq(layer, 4, 1)
    layer = gptq(np.ones((32, 8), np.int64), np.ones((3, 8), np.int64), np.ones((3, 8), np.float32), 4)
    with pytest.raises(ValueError, match=r"32 columns .* 3 groups of one size"):
        zb.quantise.checkpoint.gptq(layer, 4, 1)


def test_files_that_are_broken_or_do_not_fit_are_refused_in_a_line(tmp_path: Path) -> None:
    written(tmp_path, "gptq-4")
    file, path = tmp_path / "model.safetensors", "model.layers.0.self_attn.q_proj"
    whole = load_file(file)
    for changed, message in (
        ({f"{path}.qzeros": whole[f"{path}.qzeros"].repeat(1, 2)}, "its zero points are"),
        ({f"{path}.scales": torch.full_like(whole[f"{path}.scales"], torch.inf)}, "not finite in float32"),
    ):
        save_file(whole | changed, file)
        with pytest.raises(zb.ZeroBlockError, match=f"{path} cannot be read: .*{message}"):
            models.load(str(tmp_path), "fp32", "cpu", weights="int4")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(zb.ZeroBlockError, match="no model"):
        models.load(str(tmp_path), "fp32", "cpu", weights="int4")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    with pytest.raises(zb.ZeroBlockError, match="lacks model-2"):
        models.load(str(tmp_path), "fp32", "cpu", weights="int4")


def test_an_adapter_is_loaded_again_beside_the_integers(tmp_path: Path) -> None:
    written(tmp_path / "base", "gptq-4")
    model = models.load(str(tmp_path / "base"), "fp32", "cpu", weights="int4", adapter=Lora(2))
    models.save(model, tmp_path / "adapter")
    again = models.load(str(tmp_path / "adapter"), "fp32", "cpu", weights="int4")
    layers, expected = quantised_layers(again), quantised_layers(model)
    assert layers.keys() == expected.keys()
    assert all(torch.equal(layers[path].expanded(), layer.expanded()) for path, layer in expected.items())


def test_a_model_that_transformers_quantises_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(models, "is_quantised", lambda model: True)  # as with packed GGUF files
    with pytest.raises(zb.ZeroBlockError, match="quantised already: leave out --weights"):
        models.load(str(tmp_path), "fp32", "cpu", weights="int4")


def test_a_plan_counts_the_integers_of_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded, they are counted as they lie there; where the model does not fit, the plan says that it guesses."""
    run_toy.save_sst2(tmp_path / "data")
    run_toy.save_model(tmp_path / "model")
    written(tmp_path / "gptq", "gptq-4", models.load(str(tmp_path / "model"), "fp32", "cpu"))
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "gptq")
    config = Config(model=str(tmp_path / "gptq"), task="sst2", data=str(tmp_path / "data"), lr=1e-3, steps=2,
                    batch_size=2, train=4, dev=2, test=2, device="cpu", weights="int4")  # fmt: skip
    found = {one.method: one.cpu for one in forecasts.forecast(config, seconds=0.0).memory}
    model = models.load(config.model, "fp32", "cpu", weights="int4")
    table = {need.method: need.weights_bytes for need in memory.table(model, 4)}
    monkeypatch.setattr(forecasts, "free_memory", lambda device: 1000)
    guess = forecasts.forecast(config)
    guessed = {one.method: one.cpu for one in guess.memory}
    skeleton = models.skeleton(config.model, weights="int4")
    counted = {need.method: need.weights_bytes for need in memory.table(skeleton, 4)}
    assert guess.approximate
    assert counted["mezo_bcd"] != table["mezo_bcd"]  # another size of groups, zero points, a layer that was left alone
    assert guessed["mezo_bcd"] - found["mezo_bcd"] == counted["mezo_bcd"] - table["mezo_bcd"]
    shown = CliRunner().invoke(app, ["plan", "--model", config.model, "--task", "sst2", "--data", str(config.data),
                                     "--weights", "int4", "--device", "cpu"])  # fmt: skip
    assert "about: the checkpoint's integers were not read" in " ".join(shown.output.split())
