"""The size of LoRA's B where nobody gives a learning rate: that at which the product is as large as the matrix."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import zeroblock as zb
from lora_toy import DTYPES, METHODS, STEPS, Toy, adapted, built, digest, loss, ruled_
from toy import Tiny, same, snapshot
from zeroblock import budget, composition
from zeroblock.adapter.pair import pairs
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import Header, read
from zeroblock.quantise import quantise_
from zeroblock.size import root_mean_square, rounded

FOLDER = Path(__file__).parent / "fixtures" / "lora"
DIGESTS: dict[str, str] = json.loads(FOLDER.joinpath("weights.json").read_text())
B = "base_model.model.layers.0.q.lora_B.default.weight"


class Layers(nn.Module):
    """Layers of all kinds that LoRA goes beside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.conv = nn.Conv1d(64, 48, 3)
        self.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(64, 64), "v": Conv1D(96, 64)}) for _ in range(2))


def layered(*targets: str, base: nn.Module | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=8, target_modules=list(targets), **options)
    return peft.get_peft_model(base or Layers(), config).eval()  # type: ignore[arg-type]


def halved(model: nn.Module) -> nn.Module:
    """In bf16, the adapter, too."""
    return model.to(torch.bfloat16)


def as_integers(kind: str) -> Callable[[nn.Module], nn.Module]:
    def stored(model: nn.Module) -> nn.Module:
        quantise_(model, kind)
        return model

    return stored


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: layered("q"), None),
        (lambda: layered("q", lora_alpha=128), None),
        (lambda: layered("q", use_rslora=True), None),
        (lambda: layered("q", init_lora_weights="gaussian"), None),
        (lambda: layered("q", "v", rank_pattern={"v": 2}), None),
        (lambda: layered("v", fan_in_fan_out=True), None),
        (lambda: layered("embed"), None),
        (lambda: layered("conv"), None),
        (lambda: layered("q", use_dora=True), None),
        (lambda: layered("q"), halved),
        (lambda: layered("q"), as_integers("int8")),
        (lambda: layered("q"), as_integers("int4")),
    ],
    ids=[
        "linear",
        "alpha",
        "rslora",
        "gaussian",
        "ranks",
        "transposed",
        "embedding",
        "conv",
        "dora",
        "bf16",
        "int8",
        "int4",
    ],
)
def test_at_this_size_the_product_is_as_large_as_the_matrix(
    make: Callable[[], nn.Module], change: Callable[[nn.Module], nn.Module] | None
) -> None:
    """By PEFT's own product of a B that is drawn at that size; all other tensors keep theirs."""
    model = make()
    model = model if change is None else change(model)
    weights = zb.mezo_bcd(model).weights
    names = {id(param): name for name, param in weights.params.items()}
    beside = list(pairs(model))
    assert set(weights.sizes) == {names[id(pair.still)] for pair in beside}
    for name, param in weights.params.items():
        alone = zb.Relative(quantile=0.1).initial(param)
        share = budget.PRODUCT or 0.0
        given = name in weights.sizes
        assert weights.initial[name] == ((rounded(share * weights.sizes[name]), None) if given else alone)
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "get_delta_weight")]
    assert len(layers) == len(beside) >= 1
    for layer, pair in zip(layers, beside, strict=True):
        before = pair.still.detach().clone()
        assert not before.any()
        draws = torch.Generator().manual_seed(1)
        pair.still.data = weights.sizes[names[id(pair.still)]] * torch.randn(before.shape, generator=draws).to(before)
        matrix: Any = pair.layer.weight if not hasattr(pair.layer, "expanded") else pair.layer.expanded()
        assert root_mean_square(layer.get_delta_weight("default")) == pytest.approx(root_mean_square(matrix), rel=0.15)


def test_a_run_moves_the_product_by_its_share_of_the_matrix() -> None:
    model = layered("q")
    optimizer = zb.zo_sign(model, steps=1)
    optimizer.step(lambda: sum(p.double().sum() for p in model.parameters() if p.requires_grad))
    for layer in (module for module in model.modules() if hasattr(module, "get_delta_weight")):
        product, matrix = layer.get_delta_weight("default"), layer.get_base_layer().weight  # type: ignore[operator]
        share = optimizer.lr * (budget.PRODUCT or 0.0)
        assert root_mean_square(product) == pytest.approx(share * root_mean_square(matrix), rel=0.3)


def test_a_b_that_is_not_zero_has_the_larger_of_two_sizes() -> None:
    """One that was trained a little moves as a fresh one does."""
    model = adapted()
    fresh = zb.mezo_bcd(model).weights.initial[B]
    param = dict(model.named_parameters())[B]
    ruled_(param, 5, share=0.1)
    assert zb.mezo_bcd(model).weights.initial[B] == fresh
    ruled_(param, 5, share=100.0)
    own = zb.mezo_bcd(model).weights.initial[B]
    assert own == zb.Relative().initial(param)
    assert own > fresh


def test_only_what_moves_is_sized_and_every_adapter_has_its_own() -> None:
    model: Any = adapted()
    model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=1, target_modules=["q"]))
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name and "layers.0" in name)
    sizes = zb.mezo_bcd(model).weights.sizes
    assert sorted(name.split(".")[-2] for name in sizes) == ["default", "second"]
    assert sizes[B.replace("default", "second")] > 2 * sizes[B]
    assert all("layers.0" in name for name in sizes)
    assert not zb.mezo_bcd(model, lr=1e-2).weights.sizes
    assert not zb.mezo_bcd(model, subspace=zb.Relative()).weights.sizes


class Wrapped(Tensor):
    """A tensor that holds its numbers in others, as those of quantisers do."""

    def __tensor_flatten__(self) -> Any:
        return [], None


@pytest.mark.parametrize("how", ["packed", "wrapped", "fp8", "meta", "local", "zero", "elsewhere", "adalora"])
def test_where_the_matrix_cannot_be_read_there_is_the_floor_and_a_warning(how: str) -> None:
    """As before."""
    model: Any = adapted()
    for layer in (module for module in model.modules() if hasattr(module, "get_delta_weight")):
        base = layer.get_base_layer()
        weight = base.weight.detach()
        if how == "packed":
            base.weight = nn.Parameter(weight.to(torch.uint8), requires_grad=False)
        elif how == "wrapped":
            base.weight = nn.Parameter(weight.as_subclass(Wrapped), requires_grad=False)
        elif how == "fp8":
            base.weight = nn.Parameter(weight.to(torch.float8_e4m3fn), requires_grad=False)
        elif how == "meta":
            base.weight = nn.Parameter(weight.to("meta"), requires_grad=False)
        elif how == "local":
            base._hf_device_mesh = object()
        elif how == "zero":
            weight.zero_()
        elif how == "elsewhere":
            del base.weight
    name = B
    if how == "adalora":
        model, name = peft.get_peft_model(Toy(), peft.AdaLoraConfig(target_modules=["q"], total_step=10)), ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composition, "ADAPTED", 0)  # the toy's adapter is large beside the toy
        with pytest.warns(zb.ZeroBlockWarning, match="starts at zero and its intended size is unknown"):
            weights = zb.mezo_bcd(model).weights
        assert not weights.sizes
        assert not name or weights.initial[name] == (0.25 / 2, None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            zb.mezo_bcd(adapted())


@pytest.mark.parametrize("method", ["mezo_bcd", "fzoo_bcd", "mezo_bcd_adam", "lozo", "zo_sign"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_runs_are_replayed_and_resumed_to_the_bit(method: str, dtype: torch.dtype) -> None:
    model = adapted(dtype)
    optimizer = built(method, model)
    assert "product=" in optimizer.parts["subspace"]
    records = [step(optimizer) for _ in range(STEPS)]
    replayed = Header.of(built(method, adapted(dtype))).rebuild(adapted(dtype))
    assert replayed.subspace == optimizer.subspace
    zb.replay(replayed, records)
    assert digest(replayed.model) == digest(model)

    half, resumed = built(method, adapted(dtype)), built(method, adapted(dtype))
    for _ in range(STEPS // 2):
        step(half)
    resumed.model.load_state_dict(half.model.state_dict())
    resumed.load_state_dict(half.state_dict())
    assert [step(resumed) for _ in range(STEPS // 2)] == records[STEPS // 2 :]
    assert digest(resumed.model) == digest(model)


def step(optimizer: zb.ZeroOrder) -> zb.Record:
    optimizer.step(lambda: loss(optimizer.model))
    assert optimizer.record is not None
    return optimizer.record


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", DTYPES)
def test_journals_of_before_are_replayed_and_continued_as_they_were(method: str, kind: str) -> None:
    """Until 2026-11-18 B had the floor, and no header said so."""
    contents = read(FOLDER / f"{method}.{kind}.zbj")
    assert contents.header.parts["subspace"] == "Relative(subspace=Full(), quantile=0.1)"
    model = adapted(DTYPES[kind])
    zb.replay(contents.header.rebuild(model), contents.records)
    assert digest(model) == DIGESTS[f"{method}.{kind}"]

    today = built(method, adapted(DTYPES[kind]))
    with pytest.raises(ZeroBlockError, match="the journal was written with subspace"):
        contents.header.check(today)
    composition.begin_as(today, contents.header.parts["subspace"])
    contents.header.check(today)
    zb.replay(today, contents.records[: STEPS // 2])
    for record in contents.records[STEPS // 2 :]:
        taken = step(today)
        assert (taken.coeffs, taken.lr, taken.loss) == (record.coeffs, record.lr, record.loss)
    assert digest(today.model) == DIGESTS[f"{method}.{kind}"]


def test_states_of_before_are_continued_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(budget, "PRODUCT", None)
        optimizer = built("mezo_bcd", adapted())
    for _ in range(4):
        step(optimizer)
    state, weights = optimizer.state_dict(), snapshot(optimizer.model)
    records = [step(optimizer) for _ in range(4)]
    today = built("mezo_bcd", adapted())
    today.model.load_state_dict(weights, strict=False)
    own = today.subspace
    with pytest.raises(ZeroBlockError, match="seed"):
        today.load_state_dict({**state, "seed": 8})
    assert today.subspace == own  # a state that is refused changes nothing
    today.load_state_dict(state)
    assert [step(today) for _ in range(4)] == records
    assert same(snapshot(today.model), snapshot(optimizer.model))
    assert today.parts == optimizer.parts


@pytest.mark.parametrize("began", [None, 1.0, 0.125])
def test_runs_go_on_in_the_units_that_they_began_with(began: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the default becomes."""
    with monkeypatch.context() as before:
        before.setattr(budget, "PRODUCT", began)
        optimizer = built("mezo_bcd", adapted())
        header = Header.of(optimizer)
    records = [step(optimizer) for _ in range(4)]
    state, weights = optimizer.state_dict(), snapshot(optimizer.model)
    records += [step(optimizer) for _ in range(4)]
    replayed, resumed, loaded = adapted(), built("mezo_bcd", adapted()), built("mezo_bcd", adapted())
    zb.replay(header.rebuild(replayed), records)
    assert same(snapshot(replayed), snapshot(optimizer.model))
    with pytest.raises(ZeroBlockError, match="the journal was written with subspace"):
        header.check(resumed)
    composition.begin_as(resumed, header.parts["subspace"])
    header.check(resumed)
    zb.replay(resumed, records)
    assert same(snapshot(resumed.model), snapshot(optimizer.model))
    loaded.model.load_state_dict(weights, strict=False)
    loaded.load_state_dict(state)
    assert [step(loaded) for _ in range(4)] == records[4:]


def test_units_of_words() -> None:
    now = zb.Relative(zb.LowRank(2), 0.1, product=2.0)
    for other in (zb.Relative(zb.LowRank(2)), zb.Relative(zb.LowRank(2), 0.25), zb.Relative(zb.LowRank(2), None, 1e-5)):
        assert now.in_units(repr(other)) == other
    for other in (zb.Relative(), zb.Relative(zb.LowRank(3), 0.1), zb.Full()):
        assert now.in_units(repr(other)) is now
    assert zb.Full().in_units(repr(now)) == zb.Full()
    assert repr(zb.Relative(product=2.0)) == "Relative(subspace=Full(), product=2.0)"
    with pytest.raises(ZeroBlockError, match="product"):
        zb.Relative(product=0.0)


def test_units_that_the_user_chose_are_kept() -> None:
    state = built("mezo_bcd", adapted()).state_dict()
    chosen = zb.mezo_bcd(adapted(), subspace=zb.Relative(quantile=0.1, product=4.0), seed=state["seed"])
    with pytest.raises(ZeroBlockError, match="the state was saved with subspace"):
        chosen.load_state_dict(state)


def test_a_journal_is_not_replayed_with_another_alpha() -> None:
    """The weights are the same ones, but B has another size."""
    header = Header.of(zb.mezo_bcd(layered("q", lora_alpha=16)))
    header.rebuild(layered("q", lora_alpha=16))
    with pytest.raises(ZeroBlockError, match="alpha"):
        header.rebuild(layered("q", lora_alpha=8))
    assert Header.decode(header.encode()) == header


def test_a_model_without_lora_has_the_journal_that_it_had() -> None:
    header = Header.of(zb.mezo_bcd(Tiny()))
    assert header.method["subspace"] == {"name": "Relative", "subspace": {"name": "Full"}, "quantile": 0.1}
    assert Header.of(zb.mezo_bcd(adapted())).method["subspace"] == {
        **header.method["subspace"],
        "product": budget.PRODUCT,
    }


def test_weights_in_a_file_have_the_same_sizes(tmp_path: Path) -> None:
    resident = zb.mezo_bcd(adapted()).weights.initial
    model = adapted()
    zb.shelve(model, "disk", device="cpu", folder=tmp_path)
    assert zb.mezo_bcd(model).weights.initial == resident
