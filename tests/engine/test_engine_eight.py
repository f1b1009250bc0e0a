"""Products of 8-bit numbers after the active block, against a plain transcription of their formula."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from decoder import BATCH, COMMON, LABELS, OPT, decoder
from torch import Tensor, nn

import seq2seq_toy
import zeroblock as zb
from zeroblock.direction import Point
from zeroblock.engine import Engine, eight, fuse, objective
from zeroblock.engine.eight import Eight
from zeroblock.errors import ZeroBlockError
from zeroblock.ops.shared.dispatch import backend
from zeroblock.quantise import quantise_
from zeroblock.task import Encoded

PLACES = {"streams": False, "spread": False, "scattered": False}


def transcribed(linear: nn.Linear, points: int) -> Callable[[Tensor], Tensor]:
    """The formula, with all points in one tensor and nothing shared."""

    def rounded(x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
        return (x * (torch.full_like(largest, 448.0) / largest)).to(torch.float8_e4m3fn).float(), largest * (1 / 448)

    def product(x: Tensor, weight: Tensor) -> Tensor:
        (numbers, scale), (matrix, scales) = rounded(x), rounded(weight)
        return ((numbers @ matrix.T) * scale * scales.T).bfloat16().float()

    def forward(x: Tensor) -> Tensor:
        rows, weight = x.float().reshape(points, -1, linear.in_features), linear.weight.float()
        y = product(torch.cat([rows[:1], rows[1:] - rows[:1]]).flatten(0, 1), weight).view(points, rows.shape[1], -1)
        y = torch.cat([y[:1], y[1:] + y[:1]])
        y = y if linear.bias is None else y + linear.bias.float()
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    return forward


@contextlib.contextmanager
def formula(layers: list[nn.Module], active: int, points: int) -> Iterator[None]:
    """The layers after the active one compute as the transcription does."""
    changed = [m for layer in layers[active + 1 :] for m in layer.modules() if eight._wide(m)]
    changed = [m for m in changed if type(m) is nn.Linear]
    for linear in changed:
        linear.forward = transcribed(linear, points)
    try:
        yield
    finally:
        for linear in changed:
            del linear.forward


def active_layer(plan: Any, layers: int) -> int:
    """The place of a plan's block: -1 before all layers, their number after them."""
    found = re.search(r"layers\.(\d+)\.", plan.members[0].name)
    return int(found[1]) if found else -1 if "embed" in plan.members[0].name else layers


def rounding(model: nn.Module, fused: bool = False) -> Engine:
    """An engine on the CPU with the reference of the 8-bit products, which ``Engine(gemm=)`` keeps for GPUs."""
    engine = Engine(model)
    engine.eight = Eight(engine.anatomy.layers, backend("eight", "reference"))
    if fused:
        engine.fusions = fuse.find(model, "cpu")
        assert engine.fusions.forwards
    return engine


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models and short rows count as large."""
    monkeypatch.setattr(eight, "MIN_FP8_TOKENS", 1)
    monkeypatch.setattr(eight, "MIN_FP8_WIDTH", 16)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("method", "probes"), [("mezo_bcd", 1), ("mezo_bcd", 2), ("fzoo_bcd", 3)]
)  # the last has one side
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_forked_losses_are_those_of_the_formula(name: str, method: str, probes: int) -> None:
    model = decoder(name, torch.bfloat16)
    plain, engine = Engine(model), rounding(model)
    optimizer = zb.METHODS[method](model, lr=1e-4, eps=1e-2, schedule=zb.Ascending(), interval=1, probes=probes)
    layers, seen = plain.anatomy.layers, set()
    for _ in range(len(optimizer.blocks)):
        plan = optimizer.plan()
        active = active_layer(plan, len(layers))
        got = engine.objective(BATCH, LABELS).measure(plan.points)
        bf16 = plain.objective(BATCH, LABELS).measure(plan.points)
        with formula(layers, active, len(plan.points)):
            expected = plain.objective(BATCH, LABELS).measure(plan.points)
        assert torch.equal(got, expected)
        assert torch.equal(got, bf16) == (active >= len(layers) - 1)
        assert got.tolist() == pytest.approx(bf16.tolist(), abs=0.5)
        seen.add(active)
        optimizer.step(engine.objective(BATCH, LABELS))
    assert {0, 1, 2} <= seen
    assert engine.forked


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", ["llama", "opt", "qwen2"])
def test_fused_forwards_before_the_block_stay_and_after_it_give_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(name, torch.bfloat16)
    engine, plain = rounding(model, fused=True), Engine(model)
    plain.fusions = engine.fusions
    optimizer = zb.METHODS["mezo_bcd"](model, lr=0.0, eps=1e-2, schedule=zb.Ascending(), interval=1)
    layers, outs, calls = engine.anatomy.layers, [], []
    product = engine.eight.ops.product
    monkeypatch.setattr(engine.eight.ops, "product", lambda *given: calls.append(1) or product(*given))
    for layer in layers:
        hook = layer.register_forward_hook(
            lambda module, args, out: outs.append(out[0] if isinstance(out, tuple) else out)
        )
        hook_of = layer._forward_hooks[hook.id]
        hook_of.transparent = True  # fusions go on beside it
    for _ in range(len(optimizer.blocks)):
        plan = optimizer.plan()
        active = active_layer(plan, len(layers))
        calls.clear()
        outs.clear()
        losses = engine.objective(BATCH, LABELS).measure(plan.points)
        assert len(calls) == sum(len(engine.eight.linears[id(one)]) for one in layers[active + 1 :])
        plain_losses = plain.objective(BATCH, LABELS).measure(plan.points)
        same = [torch.equal(a, b) for a, b in zip(outs[: len(layers)], outs[len(layers) :], strict=True)]
        assert same == [i <= active for i in range(len(layers))]
        with formula(layers, active, len(plan.points)):
            expected = plain.objective(BATCH, LABELS).measure(plan.points)
        assert losses.tolist() == pytest.approx(expected.tolist(), abs=0.05)
        assert losses.tolist() == pytest.approx(plain_losses.tolist(), abs=0.5)
        assert not any("forward" in vars(module) for module in model.modules())
        optimizer.step(engine.objective(BATCH, LABELS))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_equal_points_have_equal_losses(name: str) -> None:
    model = decoder(name, torch.bfloat16)
    engine = rounding(model)
    optimizer = zb.METHODS["mezo_bcd"](model, lr=0.0, schedule=zb.Ascending(), interval=1)
    optimizer.step(engine.objective(BATCH, LABELS))
    direction = optimizer.plan().points[0].direction
    first, *others = engine.objective(BATCH, LABELS).measure([Point(direction, 0.0)] * 4).tolist()
    assert others == [first] * 3


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_one_sided_points_are_rounded_as_differences_from_the_weights(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = decoder(name, torch.bfloat16)
    engine = rounding(model)
    optimizer = zb.METHODS["fzoo_bcd"](model, lr=0.0, eps=1e-2, probes=5, schedule=zb.Ascending(), interval=1)
    optimizer.step(engine.objective(BATCH, LABELS))  # from the embedding to the first layer
    points = optimizer.plan().points
    batch = engine.objective(BATCH, LABELS)
    together = batch.measure(points)
    assert len(together) == len(points) == 6
    assert points[0].scale == 0
    for share in ([0, 1], [2], [3, 4], [5]):  # as ranks that share the probes measure them
        assert torch.equal(batch.measure([points[i] for i in share]), together[share])
    backward = batch.measure(points[::-1])  # the weights as they are come last
    assert torch.equal(backward, together.flip(0))
    monkeypatch.setattr(objective, "POINT_TOKENS", 1)  # two points per pass
    assert torch.equal(batch.measure(points), together)


@pytest.mark.usefixtures("narrow")
def test_a_forward_that_somebody_puts_on_a_product_is_called() -> None:
    losses = []
    for gemm in (True, False):
        model = decoder("opt", torch.bfloat16)
        engine = rounding(model, fused=True) if gemm else Engine(model)
        points = zb.METHODS["mezo_bcd"](model, lr=0.0, eps=1e-2, schedule=zb.Ascending()).plan().points
        products = [m for m in model.modules() if type(m) is nn.Linear and m.in_features >= 16][:-1]
        for linear in products:
            linear.forward = lambda x, own=linear.forward: own(x) * 0
        losses.append(engine.objective(BATCH, LABELS).measure(points))
        assert all("forward" in vars(linear) for linear in products)
    assert torch.equal(*losses)


@pytest.mark.usefixtures("narrow")
def test_an_input_that_changes_is_rounded_again() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            inputs, x = eight._Inputs(backend("eight", "reference"), 2), torch.randn(4, 32)
            before = inputs.rounded(x)
            assert (inputs.rounded(x) is before) == (mode is torch.no_grad)
            x.mul_(4)
            assert torch.equal(inputs.rounded(x)[1], 4 * before[1])


@pytest.mark.usefixtures("narrow")
def test_steps_that_perturb_every_layer_are_warned_about_once(recwarn: pytest.WarningsRecorder) -> None:
    model = decoder("llama", torch.bfloat16)
    engine, plain = rounding(model), Engine(model)
    points = zb.METHODS["mezo"](model, lr=0.0, eps=1e-2).plan().points
    for _ in range(2):
        got = engine.objective(BATCH, LABELS).measure(points)
        assert torch.equal(got, plain.objective(BATCH, LABELS).measure(points))
    assert [str(one.message)[:25] for one in recwarn] == ["gemm='fp8' rounds nothing"]
    assert engine.eight.products == 0


OPERATIONS = ("rounded", "product", "join_")


class Trial:
    """The reference's operations, with one of them replaced."""

    def __init__(self, **replaced: Callable[..., Any]) -> None:
        vars(self).update({name: getattr(backend("eight", "reference"), name) for name in OPERATIONS} | replaced)


def test_the_trial_finds_every_kernel_that_is_wrong() -> None:
    reference, cpu = backend("eight", "reference"), torch.device("cpu")
    eight._try(Trial(), cpu)

    def finite(x: Tensor, tokens: int = 0) -> Any:
        return reference.rounded(x.nan_to_num(0.0), tokens)

    def scaled(x: Tensor, tokens: int = 0) -> Any:
        numbers, scales = reference.rounded(x, tokens)
        return numbers, scales * 1.1

    def failing(*given: Any) -> Any:
        raise Exception("no such instruction\nline 3")  # Triton's errors derive from it

    wrong = {
        "loses NaN": {"rounded": finite},
        "other scales": {"rounded": scaled},
        "points apart": {"rounded": lambda x, tokens=0: reference.rounded(x)},
        "no first point": {"join_": lambda y, tokens, bias: y + bias},
        "no bias": {"join_": lambda y, tokens, bias: reference.join_(y, tokens, None)},
        "other order": {"product": lambda x, weight: reference.product(x, weight).flip(1)},
    }
    for name, replaced in wrong.items():
        print(name)  # shown if the next line fails
        with pytest.raises(ZeroBlockError, match="computes wrong products"):
            eight._try(Trial(**replaced), cpu)
    with pytest.raises(ZeroBlockError, match=r"does not run .*no such instruction line 3"):
        eight._try(Trial(product=failing), cpu)


def test_short_rows_and_passes_without_points_are_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight, "MIN_FP8_WIDTH", 16)
    model = decoder("llama", torch.bfloat16)
    engine, plain = rounding(model), Engine(model)
    points = zb.METHODS["mezo_bcd"](model, lr=0.0, schedule=zb.Ascending()).plan().points
    assert torch.equal(engine.objective(BATCH, LABELS).measure(points), plain.objective(BATCH, LABELS).measure(points))
    monkeypatch.setattr(eight, "MIN_FP8_TOKENS", 1)
    assert not torch.equal(
        engine.objective(BATCH, LABELS).measure(points), plain.objective(BATCH, LABELS).measure(points)
    )
    assert engine.scores(BATCH) == plain.scores(BATCH)
    assert torch.equal(engine.objective(BATCH, LABELS)(), plain.objective(BATCH, LABELS)())


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama", torch.bfloat16)

    def refused(message: str, build: Callable[[], Any]) -> None:
        with pytest.raises(ZeroBlockError, match=message):
            build()

    refused("unknown gemm 'fp4'", lambda: Engine(model, gemm="fp4"))
    refused("fork is off .*leave it out", lambda: Engine(model, fork=False, gemm="fp8"))
    refused("encoder-decoder", lambda: Engine(seq2seq_toy.seq2seq("t5"), gemm="fp8"))
    if not torch.cuda.is_available():
        refused("needs a CUDA device of capability 8.9 or newer", lambda: Engine(model, gemm="fp8"))
    integers = decoder("llama", torch.bfloat16)
    quantise_(integers, "int8")
    refused("leave out --weights", lambda: Engine(integers, gemm="fp8"))

    def find(model: nn.Module, **places: bool) -> Eight:
        return eight.find(model, Engine(model).anatomy, torch.device("cuda"), **(PLACES | places))

    refused("leave out --offload", lambda: find(model, streams=True))
    refused("leave out --shard", lambda: find(model, spread=True))
    refused("without a device_map", lambda: find(model, scattered=True))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    refused("8.9 or newer", lambda: find(model))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    refused("both sides at least 1,024 and multiples of 16", lambda: find(model))
    monkeypatch.setattr(eight, "MIN_FP8_WIDTH", 16)
    refused("--dtype bf16", lambda: find(decoder("llama")))


WIDE = {"hidden_size": 1024, "num_attention_heads": 8}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**{**COMMON, **WIDE, "intermediate_size": 2048}),
    "opt": lambda: transformers.OPTConfig(**{**OPT, **WIDE, "ffn_dim": 2048, "word_embed_proj_dim": 1024}),
}


def large(name: str) -> tuple[nn.Module, list[Encoded], list[int]]:
    """A model with matrices that are wide enough, and a batch of enough tokens."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(3, 64, (40, 38), generator=torch.Generator().manual_seed(0)).tolist()
    return model, [Encoded(tuple(some[2:]), ((some[0],), (some[1],))) for some in ids], [0, 1] * 20


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_the_formula_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, labels = large(name)
    engine, plain = Engine(model, gemm="fp8"), Engine(model, graphs=False)
    plain.fusions = fuse.Fusions()
    optimizer = zb.METHODS["mezo_bcd"](model, lr=0.0, eps=1e-2, schedule=zb.Ascending(), interval=1)
    layers, calls = plain.anatomy.layers, []
    product = engine.eight.ops.product
    monkeypatch.setattr(engine.eight.ops, "product", lambda *given: calls.append(1) or product(*given))
    for _ in range(len(optimizer.blocks)):
        plan, tokens = optimizer.plan(), engine.objective(batch, labels).rows[0][0].tokens
        assert len(tokens) >= eight.MIN_FP8_TOKENS
        active = active_layer(plan, len(layers))
        calls.clear()
        got = engine.objective(batch, labels).measure(plan.points)
        assert len(calls) == sum(len(engine.eight.linears[id(one)]) for one in layers[active + 1 :])
        with formula(layers, active, len(plan.points)):
            expected = plain.objective(batch, labels).measure(plan.points)
        assert got.tolist() == pytest.approx(expected.tolist(), abs=2e-2)
        optimizer.step(plain.objective(batch, labels))
    equal = engine.objective(batch, labels).measure([Point(optimizer.plan().points[0].direction, 0.0)] * 2)
    assert equal[0] == equal[1]
    assert engine.forked


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["mezo_bcd", "fzoo_bcd"])
@pytest.mark.parametrize("name", CONFIGS)
def test_whole_steps_on_a_gpu(name: str, method: str) -> None:
    runs = []
    for gemm in ("fp8", None):
        model, batch, labels = large(name)
        engine = Engine(model, gemm=gemm)
        optimizer = zb.METHODS[method](model, lr=1e-6, eps=1e-2, seed=3)
        records = []
        optimizer.listener = records.append
        for _ in range(6):
            optimizer.step(engine.objective(batch, labels))
        optimizer.flush()
        assert engine.forked
        runs.append([record.losses for record in records])
    for rounded, plain in zip(*runs, strict=True):
        assert rounded == pytest.approx(plain, abs=3e-2)
