"""Weights of 8 and 4 bits: what they stand for, how they move, and that their steps replay."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

import zeroblock as zb
from zeroblock.basis import Elementwise, Grid, Site
from zeroblock.bench.memory import table
from zeroblock.budget import UNKNOWN_VISITS, Budget
from zeroblock.cli import app
from zeroblock.noise import Key
from zeroblock.quantise import (
    KINDS,
    QuantisedLinear,
    elements,
    expand_,
    quantise_,
    quantised,
    quantised_layers,
    stored_bytes,
)
from zeroblock.record import Record
from zeroblock.rerun import replay

TOKENS = torch.arange(10)


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, 10)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


def net(kind: str, moves: str = "integers", dtype: torch.dtype = torch.float32) -> Net:
    model = Net().to(dtype)
    quantise_(model, kind, moves)  # type: ignore[arg-type]
    return model


def loss(model: nn.Module) -> Any:
    return lambda: F.cross_entropy(model(TOKENS).float(), TOKENS.roll(1))


def bits(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone().view(torch.uint8) for param in model.parameters()]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(5, 64), (3, 128), (4, 6), (1, 2)])
def test_integers_stand_for_the_nearest_numbers(kind: str, shape: tuple[int, int]) -> None:
    linear = nn.Linear(shape[1], shape[0]).requires_grad_(False)
    linear.weight[0] = 0  # a group without a scale of its own
    layer = QuantisedLinear(linear, KINDS[kind])
    assert layer.weight.nbytes * KINDS[kind].per_byte == elements(layer.weight) == linear.weight.numel()
    error = (layer.expanded() - linear.weight).unflatten(1, (-1, layer.group)).abs().amax(-1)
    assert (error <= 0.5001 * layer.scales).all()
    x = torch.randn(7, shape[1])
    torch.testing.assert_close(layer(x), F.linear(x, layer.expanded(), linear.bias), rtol=0, atol=0)
    unpacked = KINDS[kind].unpacked(layer.weight)
    assert torch.equal(KINDS[kind].packed(unpacked).view(torch.uint8), layer.weight.detach().view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_rounded_to_the_grid_with_their_mean_kept(kind: str) -> None:
    integers, scales = quantised(torch.randn(4, 4096), KINDS[kind], 64)
    grid = Grid(Elementwise(integers.numel(), Site(7)), KINDS[kind], scales, 64)
    inside = integers.abs() < KINDS[kind].limit
    for fraction in (0.001, 0.25, -0.7, 1.5):
        delta = (fraction * scales.repeat_interleave(64, 1)).flatten()
        moved = KINDS[kind].packed(integers.clone())
        grid.lift_(moved, delta, slice(0, integers.numel()), 1.0, Key(3, 5), 1.0)
        change = (KINDS[kind].unpacked(moved) - integers)[inside].float()
        assert set(change.unique().tolist()) <= {float(int(fraction // 1)), float(int(fraction // 1) + 1)}
        spread = 0.5 / inside.sum().item() ** 0.5
        assert abs(change.mean().item() - fraction) < 5 * spread
    moved = KINDS[kind].packed(torch.full((1, 64), KINDS[kind].limit))
    small = Grid(Elementwise(64, Site(0)), KINDS[kind], torch.ones(1, 1), 64)
    small.lift_(moved, torch.full((64,), 3.0), slice(0, 64), 1.0, Key(0, 0), 1.0)
    assert (KINDS[kind].unpacked(moved) == KINDS[kind].limit).all(), "an integer at the end of its range stays there"


@pytest.mark.parametrize(
    ("method", "lr", "kind", "moves", "dtype"),
    [
        ("mezo", 0.03, "int8", "integers", torch.bfloat16),
        ("mezo", 0.03, "int4", "integers", torch.float32),
        ("mezo_bcd", 0.1, "int8", "integers", torch.float32),
        ("mezo_bcd", 0.1, "int4", "integers", torch.bfloat16),
        ("mezo_bcd_adam", 0.03, "int4", "integers", torch.bfloat16),
        ("zo_momentum", 0.05, "int8", "integers", torch.float32),
        ("mezo_bcd", 3e-6, "int8", "scales", torch.float32),
        ("mezo_bcd", 1e-3, "int4", "scales", torch.bfloat16),
    ],
)
def test_training_descends_replays_and_resumes(
    method: str, lr: float, kind: str, moves: str, dtype: torch.dtype
) -> None:
    eps = 1e-2 if moves == "integers" else 1e-4
    build = functools.partial(getattr(zb, method), eps=eps, clip=5.0 if moves == "integers" else None)
    model = net(kind, moves, dtype)
    optimizer, records = build(model, lr), list[Record]()
    optimizer.listener = records.append
    before = loss(model)().item()
    for _ in range(40):
        optimizer.step(loss(model))
    half, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    for _ in range(40):
        optimizer.step(loss(model))
    after = [record.loss for record in records[-20:]]
    assert sum(after) / 20 < before - (0.3 if moves == "integers" else 0.01)
    again = net(kind, moves, dtype)
    replay(build(again, 1.0), records)
    assert same_bits(bits(again), bits(model))
    resumed = net(kind, moves, dtype)
    later = build(resumed, lr)
    resumed.load_state_dict(weights)
    later.load_state_dict(half)
    for _ in range(40):
        later.step(loss(resumed))
    assert same_bits(bits(resumed), bits(model))


def test_what_moves_is_as_chosen() -> None:
    integers, scales = net("int8"), net("int8", "scales")
    moved = {name for name, param in integers.named_parameters() if param.requires_grad}
    assert moved == {name for name, _ in Net().named_parameters()}
    moved = {name for name, param in scales.named_parameters() if param.requires_grad}
    assert moved == {f"layers.{i}.scales" for i in range(3)}
    frozen = Net().requires_grad_(False)
    frozen.head.requires_grad_(True)
    quantise_(frozen, "int4")
    assert {name for name, param in frozen.named_parameters() if param.requires_grad} == {"head.weight", "head.bias"}


def test_integers_stay_integers_when_a_model_is_cast_moved_copied_or_saved(tmp_path: Any) -> None:
    model = net("int4")
    codes = [layer.weight.detach().clone().view(torch.uint8) for layer in quantised_layers(model).values()]
    other = copy.deepcopy(model).to(torch.bfloat16)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    loaded = net("int4")
    for layer in quantised_layers(loaded).values():
        layer.weight.data.view(torch.uint8).zero_()
    loaded.load_state_dict(torch.load(tmp_path / "state.pt"))
    for one in (other, loaded):
        found = [layer.weight.detach().view(torch.uint8) for layer in quantised_layers(one).values()]
        assert all(map(torch.equal, found, codes))
    assert other.layers[0].scales.dtype == torch.bfloat16
    dense = expand_(copy.deepcopy(model))
    assert not quantised_layers(dense)
    torch.testing.assert_close(dense(TOKENS), model(TOKENS), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda m: zb.lozo(m, 1e-3), "low-rank or sparse"),
        (lambda m: zb.sparse_mezo(m, 1e-3), "low-rank or sparse"),
        (lambda m: zb.mezo(m, 1e-3, restore="subtract"), "restore='copy'"),
        (lambda m: zb.hizoo(m, 1e-3), "Hessian needs whole tensors of numbers, and some are integers"),
        (lambda m: zb.mezo_svrg(m, 1e-3), "anchor is a copy of the numbers"),
        (lambda m: quantise_(Net(), "int3"), "unknown kind of weights 'int3'"),
        (lambda m: quantise_(nn.Linear(2, 2), "int8"), "no linear layers"),
    ],
)
def test_what_cannot_work_says_so(build: Any, message: str) -> None:
    with pytest.raises(zb.ZeroBlockError, match=message):
        build(net("int8"))


@pytest.mark.parametrize("kind", KINDS)
def test_addresses_of_noise_never_overlap(kind: str) -> None:
    """Four bits take half the bytes, and as many addresses as other weights."""
    optimizer = zb.mezo(net(kind), 1e-3)
    params = dict(optimizer.model.named_parameters())
    places = sorted((offset, elements(params[name])) for name, offset in optimizer.offsets.items())
    assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(places))
    assert sum(size for _, size in places) > sum(param.numel() for param in Net().parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_counted_as_it_is_stored(kind: str) -> None:
    model, plain = net(kind, dtype=torch.bfloat16), Net()
    held = sum(param.nbytes for param in model.parameters())
    assert stored_bytes(model, 2) == held < stored_bytes(plain, 2)
    need = next(one for one in table(model, 2) if one.method == "mezo_bcd")
    assert need.weights_bytes == held
    assert need.total_bytes == held + 2 * 10 * 8, "a copy is of numbers, and the largest tensor is the head"
    dense = next(one for one in table(plain, 2) if one.method == "mezo_bcd")
    assert dense.weights_bytes == 2 * sum(param.numel() for param in plain.parameters())


def test_the_published_procedure_is_not_timed_on_integers() -> None:
    given = ["bench", "run", "--task", "sst2", "--model", "opt-125m", "--weights", "int4"]
    result = CliRunner().invoke(app, given)
    assert "add --no-reference" in str(result.exception)


def relative(model: nn.Module, before: dict[str, Tensor]) -> float:
    """Root mean square of what the matrices of the layers have moved by, beside their own."""
    moved, size = (
        torch.cat([matrix.double().flatten() for matrix in some]).square().mean().sqrt()
        for some in ([now - before[path] for path, now in matrices(model).items()], before.values())
    )
    return float(moved / size)


def matrices(model: nn.Module) -> dict[str, Tensor]:
    return {path: layer.expanded() for path, layer in quantised_layers(model).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_scales_without_a_learning_rate_move_in_units_of_themselves(kind: str) -> None:
    """A scale is a hundredth of the weights: in units of 1/√fan-in, a step would be many times its size."""
    model = quantise_(Net(64), kind, "scales")
    before = matrices(model)
    optimizer = zb.zo_sign(model)
    optimizer.step(loss(model))
    assert relative(model, before) == pytest.approx(optimizer.lr, rel=0.01)


def test_a_grid_that_is_too_coarse_for_steps_without_a_learning_rate_is_said() -> None:
    """Rounding moves the weights, too: what is foretold is how far they walk."""
    torch.manual_seed(0)
    fine = quantise_(nn.Sequential(nn.ModuleList([nn.Linear(64, 16, bias=False)])), "int8")
    layer, x, before = fine[0][0], torch.randn(64), matrices(fine)
    optimizer = zb.mezo(fine)
    for _ in range(UNKNOWN_VISITS):
        optimizer.step(lambda: layer(x).square().sum())
    assert relative(fine, before) == pytest.approx(Budget.of(optimizer).walk(optimizer.weights.spacing), rel=0.2)
    for kind, moves, lr in (("int4", "scales", None), ("int4", "integers", 1e-4), ("int8", "integers", None)):
        zb.mezo_bcd(quantise_(Net(64), kind, moves), lr)  # which warnings would fail
    with pytest.warns(zb.ZeroBlockWarning, match=r"integers are \d\d% of it apart.*int4:scales"):
        zb.mezo_bcd(quantise_(Net(64), "int4"))


@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_never_taken_for_numbers_nor_numbers_for_integers(kind: str) -> None:
    """Their bytes are a matrix of 8-bit floats, which an ordinary layer would copy."""
    model, other, plain = net(kind), net(kind), Net()
    for _ in range(3):
        zb.mezo(model, lr=1e-2).step(loss(model))
    assert not same_bits(bits(model), bits(other))
    other.load_state_dict(model.state_dict())
    assert same_bits(bits(model), bits(other))
    earlier = {name: value.squeeze(-1) if value.dim() == 3 else value for name, value in model.state_dict().items()}
    net(kind).load_state_dict(earlier)  # of a version that saved matrices of bytes
    with pytest.raises(RuntimeError, match=r"size mismatch for layers\.0\.weight"):
        plain.load_state_dict(model.state_dict(), strict=False)
    with pytest.raises(RuntimeError, match="stores integers: load them before quantise_"):
        other.load_state_dict(plain.state_dict(), strict=False)
    assert all(map(torch.equal, matrices(model).values(), matrices(other).values()))


def test_matrices_that_are_tied_stay_tied_and_as_they_are() -> None:
    model = Net()
    model.layers[1].weight = model.layers[0].weight
    model.layers.extend([model.layers[2], nn.Linear(8, 8)])  # of which the first runs twice
    quantise_(model, "int8")
    assert set(quantised_layers(model)) == {"layers.4"}
    assert model.layers[1].weight is model.layers[0].weight
    assert model.layers[3] is model.layers[2]
    zb.mezo(model, lr=1e-3).step(loss(model))
