"""Adapters: made by a seed, trained, resumed and replayed to the bit, and loaded by PEFT."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from loop_toy import Kill, kept, settings
from quantised import save_quantised
from torch import Tensor, nn
from typer.testing import CliRunner

import zeroblock as zb
from toy import same, snapshot
from zeroblock import adapter, journal
from zeroblock import model as models_of
from zeroblock.adapter import Lora, Prefix
from zeroblock.adapter import attach as attaching
from zeroblock.cli import app
from zeroblock.errors import ZeroBlockError, ZeroBlockWarning
from zeroblock.ops.noise import uniform
from zeroblock.sweep.grid import Grid
from zeroblock.train import Config, resume, run

LORA = "r=3,targets=q,v"
TOKENS = torch.tensor([[5, 9, 40, 3, 77]])


@pytest.fixture(scope="module")
def quantised(opt: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_quantised(opt, tmp_path_factory.mktemp("quantised"))


def call(*arguments: Any) -> str:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False).output


def base_of(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS)).logits


def trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad}


def weights(folder: Path) -> bytes:
    return (folder / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "'8' is not of the form r=8,alpha=16,targets=q,v"),
        ("alpha=8", "give the rank, as in r=8"),
        ("r=8,rank=2", "unknown setting of lora: 'rank'"),
        ("r=8,r=2", "r is given twice"),
        ("r=eight", "r and alpha are numbers"),
        ("r=1.5", "r is a whole number, got 1.5"),
        ("r=0", "r must be from 1 to 4096"),
        ("r=8,alpha=0", "alpha must be positive"),
        ("r=8,targets=", "name the modules to adapt"),
        ("r=8,dropout=0.1", "leave out dropout"),
    ],
)
def test_mistakes_in_lora_name_the_fix(text: str, message: str) -> None:
    with pytest.raises(ZeroBlockError) as caught:
        Lora.parse(text)
    assert message in str(caught.value)


def test_all_spellings_are_one_configuration(tmp_path: Path) -> None:
    base: dict[str, Any] = {"model": "m", "task": "sst2", "lr": 1.0, "seed": 7}
    config = Config.of({**base, "lora": " r=8, targets=q, v ,dropout=0"})
    assert config == Config.of({**base, "lora": "r=8,alpha=16,targets=q,v"})
    assert config.adapter == Lora(8, 16.0, ("q", "v"), seed=7)
    (tmp_path / "config.toml").write_text(config.dump())
    assert Config.load(tmp_path / "config.toml") == config
    assert Config.of({**base, "prefix": 5}).adapter == Prefix(5, seed=7)
    for wrong, message in (
        ({"lora": LORA, "prefix": 5}, "give --lora or --prefix, not both"),
        ({"lora": LORA, "method": "zero-shot", "lr": None}, "zero-shot does not train: leave out"),
        ({"prefix": 0}, "prefix must be at least 1"),
    ):
        with pytest.raises(ZeroBlockError, match=message):
            Config.of({**base, **wrong})


def test_a_sweep_takes_adapters() -> None:
    """The paper's rows: MeZO with LoRA and with a prefix beside full tuning."""
    cases = [{"name": "LoRA", "lora": [LORA, "r=8"]}, {"name": "prefix", "prefix": 5, "eps": 0.1}, {"name": "full"}]
    file = {"run": {"model": "m", "lr": 1e-4}, "grid": {"task": ["sst2"]}, "case": cases}
    cells = Grid.of(file, {}).cells()
    made = [cell.candidates[0][1][0].adapter for cell in cells]
    assert made == [Lora(3), Lora(8), Prefix(5), None]
    assert cells[0].row == "LoRA, lora r=3,targets=q,v"


def test_targets_by_the_names_of_each_family() -> None:
    small: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    found = {}
    for name in ("llama", "opt", "gpt_neox", "phi3", "gpt2"):
        sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2} if name == "gpt2" else small
        config = transformers.AutoConfig.for_model(name, **sizes, pad_token_id=0)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        found[name] = attaching.resolve(model, ("q", "v"))
        if name == "llama":
            assert len(attaching.resolve(model, ("all",))) == 7
            assert attaching.resolve(model, ("self_attn.o_proj", "up", "lm_head"))[1:] == ("up_proj", "lm_head")
            with pytest.raises(ZeroBlockError, match="no module 'fc9'; targets are q_proj, k_proj, v_proj, o_proj"):
                attaching.resolve(model, ("fc9",))
        if name == "gpt2":
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # PEFT warns of matrices that are stored transposed
                Lora().attach(model)
    assert found == {
        "llama": ("q_proj", "v_proj"), "opt": ("q_proj", "v_proj"), "gpt_neox": ("query_key_value",),
        "phi3": ("qkv_proj",), "gpt2": ("c_attn",),
    }  # fmt: skip


def test_an_adapter_of_unknown_size_is_warned_about_without_a_learning_rate(
    llama: Path, quantised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroblock.composition.ADAPTED", 1)  # the toy's adapter is large beside the toy
    with pytest.warns(zb.ZeroBlockWarning, match=r"lora_B.*starts at zero.*give a learning rate and an eps"):
        zb.mezo_bcd(Lora(3).attach(base_of(quantised)))  # its matrices are packed by torchao
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zb.mezo_bcd(Lora(3).attach(base_of(llama)))  # beside matrices that can be read
        zb.mezo_bcd(Lora(3).attach(base_of(llama)), lr=1e-2)
        zb.mezo_bcd(base_of(llama))


def test_lora_begins_at_the_base_with_noise_of_its_seed(llama: Path) -> None:
    before = logits(base_of(llama))
    state = torch.get_rng_state()
    one = Lora(3, seed=5).attach(base_of(llama))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert same(snapshot(one), snapshot(Lora(3, seed=5).attach(base_of(llama))))
    assert not same(snapshot(one), snapshot(Lora(3, seed=6).attach(base_of(llama))))
    assert torch.equal(logits(one), before)  # B is zero
    matrices = [p for name, p in one.named_parameters() if ".lora_A." in name]
    u = uniform(zb.Key(5, 0, stream=5), 3 * 32 * 2)
    expected = torch.tensor([(2 * (x + 2**-33) - 1) / 32**0.5 for x in u], dtype=torch.float64).float()
    assert torch.equal(torch.cat([m.flatten() for m in matrices[:2]]), expected)
    assert all("lora_" in name for name in trained(one))


@pytest.mark.parametrize(("kind", "dtype"), [("opt", "fp32"), ("llama", "bf16")])
def test_lora_is_resumed_and_replayed_to_the_bit(
    kind: str, dtype: str, data: Path, tmp_path: Path, models: list[Any], request: pytest.FixtureRequest
) -> None:
    base = request.getfixturevalue(kind)
    config = settings(base, data, steps=6, eval_every=3, eps=1e-2, lr=0.1, lora=LORA, dtype=dtype)
    run(config, tmp_path / "whole")
    run(config, tmp_path / "run", Kill(4))
    assert resume(tmp_path / "run").summary is not None
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")
    assert weights(tmp_path / "run" / "adapter") == weights(tmp_path / "whole" / "adapter")
    final = models[0]
    assert same(trained(final), trained(models[-1]))

    extra = journal.read(tmp_path / "run").header.extra
    assert extra["adapter"] == {"kind": "lora", "r": 3, "alpha": 16.0, "targets": ["q_proj", "v_proj"], "seed": 0}
    assert {p.dtype for p in trained(final).values()} == {torch.float32}
    assert "lora: " in (tmp_path / "run" / "summary.md").read_text()
    torch.manual_seed(1234)
    call("replay", tmp_path / "run", "--step", "last", "--out", tmp_path / "out", "--device", "cpu")
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {"adapter_config.json", "tokenizer.json"}
    assert not list((tmp_path / "out").glob("model*"))
    selected = json.loads((tmp_path / "run" / "summary.json").read_text())["selected_step"]
    call("replay", tmp_path / "run", "--step", selected, "--out", tmp_path / "best", "--device", "cpu")
    assert weights(tmp_path / "best") == weights(tmp_path / "run" / "adapter")
    loaded = peft.PeftModel.from_pretrained(base_of(base, dtype=models_of.DTYPES[dtype]), tmp_path / "out").eval()
    assert torch.equal(logits(loaded), logits(final))

    journal.export(tmp_path / "run", tmp_path / "run.zbj")
    elsewhere = shutil.copytree(base, tmp_path / "elsewhere")
    call("apply", tmp_path / "run.zbj", "--model", elsewhere, "--out", tmp_path / "applied", "--device", "cpu")
    assert weights(tmp_path / "applied") == weights(tmp_path / "out")
    bare = base_of(base, dtype=models_of.DTYPES[dtype])
    with pytest.raises(ZeroBlockError, match=r"trained an adapter: first model = zeroblock\.adapter\.recorded"):
        zb.load(bare, tmp_path / "run.zbj")
    made = adapter.recorded(journal.read(tmp_path / "run.zbj").header.extra)
    assert made is not None
    adapted = made.attach(bare)
    zb.load(adapted, tmp_path / "run.zbj")
    assert same(trained(adapted), trained(final))


def test_an_adapter_is_a_model_to_train_further(opt: Path, data: Path, tmp_path: Path, models: list[Any]) -> None:
    first = Lora(2, targets=("q_proj", "fc1"), seed=3).attach(base_of(opt))
    with torch.no_grad():
        for param in first.parameters():
            param += 0.1 * param.requires_grad
    first.peft_config["default"].base_model_name_or_path = str(opt)  # type: ignore[union-attr,index]
    models_of.save(first, tmp_path / "first")
    folder = str(tmp_path / "first")
    assert torch.equal(logits(models_of.load(folder, device="cpu")), logits(first))
    shapes = {name: p.shape for name, p in models_of.skeleton(folder).named_parameters()}
    assert shapes == {name: p.shape for name, p in first.named_parameters()}
    assert "2 blocks" in call("blocks", "--model", folder)

    config = settings(tmp_path / "first", data, steps=4, eval_every=4, lr=0.1)
    run(config, tmp_path / "run", Kill(2))
    precious = tmp_path / "precious"
    precious.mkdir()
    (tmp_path / "run" / "adapter").symlink_to(precious)  # the folder may come from anyone
    with pytest.raises(ZeroBlockError, match="adapter is a link"):
        resume(tmp_path / "run")
    assert not list(precious.iterdir())
    (tmp_path / "run" / "adapter").unlink()
    resume(tmp_path / "run")
    final = models[-1]
    assert not same(trained(final), trained(first))
    frozen = {n: p for n, p in snapshot(first).items() if n not in trained(first)}
    assert same({n: p for n, p in snapshot(final).items() if n in frozen}, frozen)
    call("replay", tmp_path / "run", "--step", "last", "--out", tmp_path / "out", "--device", "cpu")
    assert adapter.base_of(str(tmp_path / "out")) == str(opt)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base_of(opt), tmp_path / "out")), logits(final))

    with pytest.raises(ZeroBlockError, match="is an adapter, which is trained further as it is: leave out --lora"):
        run(config.replace(lora=LORA), tmp_path / "again")
    content = json.loads((tmp_path / "first" / "adapter_config.json").read_text())
    for change, message in (
        ({"base_model_name_or_path": ""}, 'add "base_model_name_or_path"'),
        ({"base_model_name_or_path": folder}, "an adapter itself"),
        ({"target_modules": ["q_proj", "fc1", "fc2"]}, r"lacks base_model.model.model.decoder.layers.0.fc2.lora_A"),
        ({"peft_type": "PROMPT_TUNING"}, "give one of LoRA or of prefix tuning"),
        ({"task_type": "SEQ_CLS"}, "give one of a causal language model"),
    ):
        (tmp_path / "first" / "adapter_config.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(ZeroBlockError, match=message):
            models_of.load(folder, device="cpu")
    (tmp_path / "first" / "adapter_config.json").write_text(json.dumps(content))
    (tmp_path / "first" / "adapter_model.safetensors").unlink()
    with pytest.raises(ZeroBlockError, match="as safetensors"):
        models_of.load(folder, device="cpu")


@pytest.mark.parametrize("kind", ["opt", "llama"])
def test_a_prefix_begins_as_random_tokens_before_the_text(kind: str, request: pytest.FixtureRequest) -> None:
    base = base_of(request.getfixturevalue(kind))
    words = base.config.vocab_size
    before = torch.tensor([[int(u * words) for u in uniform(zb.Key(4, 0, 1, stream=5), 5)]])
    with torch.no_grad():
        expected = base(input_ids=torch.cat([before, TOKENS], 1)).logits[:, 5:]
    prefixed = Prefix(5, seed=4).attach(base)
    torch.testing.assert_close(logits(prefixed), expected, rtol=1e-5, atol=1e-5)
    assert [block.name[-8:] for block in zb.layers(prefixed)] == ["layers.0", "layers.1"]


def test_a_prefix_is_resumed_and_replayed_to_the_bit(
    llama: Path, data: Path, tmp_path: Path, models: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where its start would be computed with other last bits, as on another machine."""
    config = settings(llama, data, steps=6, eval_every=3, eps=0.1, lr=0.1, prefix=5, accumulate=2)
    with pytest.warns(ZeroBlockWarning, match="which a packed row does not support") as caught:
        run(config, tmp_path / "whole")
    assert len([one for one in caught if one.category is ZeroBlockWarning]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZeroBlockWarning)
        run(config, tmp_path / "run", Kill(4))
        activations = attaching._activations
        monkeypatch.setattr(attaching, "_activations", lambda *given: activations(*given) * (1 + 1e-6))
        resume(tmp_path / "run")
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")
    call("replay", tmp_path / "run", "--step", "last", "--out", tmp_path / "out", "--device", "cpu")
    final = models[0]
    loaded = peft.PeftModel.from_pretrained(base_of(llama), tmp_path / "out").eval()
    assert torch.equal(logits(loaded), logits(final))
    again: Any = models_of.load(str(tmp_path / "out"), device="cpu")
    assert same(trained(again), trained(final))

    journal.export(tmp_path / "run", tmp_path / "run.zbj")
    apply = ["apply", tmp_path / "run.zbj", "--model", llama, "--out", tmp_path / "applied", "--device", "cpu"]
    with pytest.raises(ZeroBlockError, match=r"accept with --force .* other last bits on another machine"):
        call(*apply)
    call(*apply, "--force")
    (tmp_path / "run" / "start" / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ZeroBlockError, match="the start of the run's prefix, is damaged"):
        call("replay", tmp_path / "run", "--out", tmp_path / "other", "--device", "cpu")


def test_prompts_within_the_text_are_refused(llama: Path) -> None:
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ZeroBlockError, match="use LoRA or prefix tuning"):
        zb.Engine(peft.get_peft_model(base_of(llama), prompts))


def test_lora_on_a_quantised_base(quantised: Path, data: Path, tmp_path: Path, models: list[Any]) -> None:
    config = settings(quantised, data, steps=6, eval_every=3, eps=1e-2, lr=0.1, lora=LORA)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ZeroBlockWarning)  # it is packed and forked like any other
        run(config, tmp_path / "whole")
        run(config, tmp_path / "run", Kill(3))
        resume(tmp_path / "run")
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")
    final = models[-1]
    assert torch.int8 in {param.dtype for param in final.parameters()}
    assert all("lora_" in name for name in trained(final))
    header = journal.read(tmp_path / "run").header
    assert (header.dtype, header.extra["dtype"], len(header.blocks)) == ("mixed", "fp32", 2)
    call("replay", tmp_path / "run", "--step", "last", "--out", tmp_path / "out", "--device", "cpu")
    assert torch.equal(logits(models_of.load(str(tmp_path / "out"), device="cpu")), logits(final))
    fingerprint = journal.fingerprint(final)
    final.base_model.model.model.decoder.layers[0].fc1.weight[3, 4] += 1
    assert journal.fingerprint(final) != fingerprint
    with pytest.raises(ZeroBlockError, match="is quantised, so its matrices cannot move: add --lora"):
        run(config.replace(lora=None), tmp_path / "full")


class Wrapped(Tensor):
    """A quantised tensor as torchao has them: numbers and scales inside, nothing of its own."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)  # type: ignore[attr-defined]

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(func)


def test_a_wrapped_tensor_is_fingerprinted_and_not_trained() -> None:
    wrapped = Wrapped(torch.arange(6, dtype=torch.int8).view(2, 3), torch.ones(2, 1))
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(3, 2), nn.Linear(2, 2)])})
    model["layers"][0].weight = nn.Parameter(wrapped, requires_grad=False)  # type: ignore[index]
    before = journal.fingerprint(model)
    with pytest.warns(ZeroBlockWarning, match="1 packed weights, the first 'layers.0.weight', cannot move"):
        zb.mezo_bcd(model, lr=1.0)
    wrapped.numbers[1, 1] += 1
    assert journal.fingerprint(model) != before
    model["layers"][0].weight.requires_grad_(True)  # type: ignore[index]
    with pytest.raises(ZeroBlockError, match=r"is packed as Wrapped and cannot move: freeze it .* train an adapter"):
        zb.mezo_bcd(model, lr=1.0)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ZeroBlockError, match="is packed as Wrapped"):
        zb.ZeroOrder(model, 1.0, partition=[names])


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "lora", "r": "8"},
        {"kind": "lora", "r": True},
        {"kind": "lora", "seed": -1},
        {"kind": "lora", "targets": [1]},
        {"kind": "prefix", "size": 5},
        {"kind": "poem"},
        {"kind": []},
        "lora",
        7,
    ],
)
def test_forged_adapters_are_refused(data: Any) -> None:
    with pytest.raises(ZeroBlockError, match="the journal's adapter is not one that zeroblock knows"):
        adapter.recorded({"adapter": data})
