"""One step of Adam: three implementations of it, and what they compute."""

from __future__ import annotations

import math

import pytest
import torch
from ops_toy import GPU, MASKS, device, met
from torch import Tensor

from toy import bits
from zeroblock import ops
from zeroblock.noise import BASIS, Distribution, Draw, Key, RandomMask, Rounding, SmallMask
from zeroblock.ops import normal
from zeroblock.ops.adam import cpu, reference
from zeroblock.ops.shared import dispatch

triton = pytest.importorskip("zeroblock.ops.adam.triton")
shared = pytest.importorskip("zeroblock.ops.shared.triton")

KERNELS = [pytest.param(cpu, id="cpu"), pytest.param(triton, id="triton")]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOMENTS = (torch.float32, torch.bfloat16)
BETAS, EPS = (0.9, 0.999), 1e-8
CONSTANTS = (0.9, 1 - 0.9, 0.999, 1 - 0.999, EPS)
KEY = Key(5, 6, 2)
SHARES = ((0.3,), (0.1, -0.3, 0.2))


def scalars(t: int, lr: float, shares: tuple[float, ...], betas: tuple[float, float] = BETAS) -> tuple[float, ...]:
    return (1.0, -lr, *(1 / (1 - b**t) for b in betas), *shares)


def start(n: int, dtype: torch.dtype, moment: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and moments of many magnitudes: some of each are 0, some moments subnormal."""
    tiny = 1e-40 if moment == torch.float32 or GPU == "cuda" else 1e-30  # the interpreter cuts subnormal bf16 to 0
    generator = torch.Generator().manual_seed(n)
    x, m, v = (torch.randn(n, generator=generator) * torch.logspace(-9, 0, n) for _ in range(3))
    x[::17], m[::11], v[::11] = 0.0, 0.0, 0.0
    m[3::19], v[3::19] = -tiny, tiny
    return x.to(dtype), m.to(moment), v.abs().to(moment)


def update(module, tensors: tuple[Tensor, ...], numbers, key: Key = KEY, **options) -> list[Tensor]:
    """The bits of weights and moments after a step; the options are those of the draw and of the function."""
    copies = [x.clone().to(device(module)) for x in tensors]
    how = {name: options.pop(name, default) for name, default in (("decay", 1.0), ("rounding", Rounding.STOCHASTIC))}
    module.adam_(*copies, Draw(key, **options), numbers, CONSTANTS, **how)
    return [bits(x) for x in copies]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_every_form_of_the_kernel_agrees_to_the_bit(kernel, dtype: torch.dtype, moment: torch.dtype) -> None:
    places = ((2**33 + 7, Rounding.STOCHASTIC), (5, Rounding.NEAREST))
    half = DTYPES.index(dtype) + MOMENTS.index(moment)
    for (offset, rounding), mask, distribution, shares in met(kernel, places, MASKS, Distribution, SHARES, half=half):
        n = 1031 if mask is None and not distribution else 37
        options = {
            "offset": offset, "mask": mask, "distribution": distribution, "rounding": rounding,
            "decay": 0.9 if len(shares) > 1 else 1.0,
        }  # fmt: skip
        tensors = start(n, dtype, moment)
        numbers = scalars(3, 1e-2, shares)
        got, expected = (update(module, tensors, numbers, **options) for module in (kernel, reference))
        assert equal(got, expected), (options, shares)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("n", "offset"), [(1, 0), (3, 2), (6 * 1024, 0), (6 * 1024 + 5, 2**33 + 7)])
def test_whole_and_ragged_tiles_agree_to_the_bit(kernel, n: int, offset: int, monkeypatch) -> None:
    monkeypatch.setattr(shared, "MIN_WHOLE_TILES", 4)
    tensors, numbers = start(n, torch.bfloat16, torch.bfloat16), scalars(1, 1e-3, (0.3,))
    assert equal(
        update(kernel, tensors, numbers, offset=offset), update(reference, tensors, numbers, offset=offset)
    )  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_step_and_scalars_read_on_the_device(moment: torch.dtype, mask, shares) -> None:
    """A captured launch does not look at the step of its key."""
    tensors, numbers = start(50, torch.bfloat16, moment), scalars(3, 1e-2, shares)
    expected = update(reference, tensors, numbers, Key(5, 6), mask=mask, offset=3)
    on_device = torch.tensor(numbers, device=GPU)
    assert equal(update(triton, tensors, on_device, Key(5, 6), mask=mask, offset=3), expected)
    for module, given in ((triton, on_device), (cpu, numbers), (reference, numbers)):
        for clock, same in ((torch.tensor([6, 4], device=device(module)), True), (None, False)):
            stale = RandomMask(Key(5, 0, stream=BASIS, clock=clock), 2**31) if isinstance(mask, RandomMask) else mask
            got = update(module, tensors, given, Key(5, 1, clock=clock), mask=stale, offset=3)
            assert equal(got, expected) == same


@pytest.mark.parametrize("kernel", [pytest.param(reference, id="reference"), *KERNELS])
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_step_that_is_not_taken_changes_not_a_bit(kernel, moment: torch.dtype) -> None:
    tensors = start(50, torch.float16, moment)
    tensors[0][:2] = torch.tensor([0.0, -0.0])
    numbers = (0.0, -1e-2, 1.0, 1.0, math.nan, math.inf)
    before = [bits(x) for x in tensors]
    assert equal(update(kernel, tensors, numbers, decay=0.9), before)
    if kernel is triton:
        assert equal(update(kernel, tensors, torch.tensor(numbers, device=GPU), decay=0.9), before)
    assert not equal(update(kernel, tensors, (1.0, -1e-2, 1.0, 1.0, 0.3), decay=0.9), before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(7, 5).t(),
        lambda: torch.randn(4, 6, 5)[:, 1::2],
        lambda: torch.randn(3, 2, 2, 2).permute(3, 1, 0, 2),
        lambda: torch.randn(()),
        lambda: torch.empty(3, 0, 2),
        lambda: torch.randn(2, 3, 4),
    ],
    ids=["transposed", "sliced", "permuted", "scalar", "empty", "3-d"],
)
def test_any_shape_and_strides(make, dtype: torch.dtype, moment: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PIECE", 4)  # strided tensors go through small pieces
    x = make().to(dtype)
    dense = x.contiguous().clone()
    m, v = torch.full(x.shape, 0.1, dtype=moment), torch.full(x.shape, 0.2, dtype=moment)
    flat_m, flat_v = m.clone().view(-1), v.clone().view(-1)
    options, draw = {"betas": BETAS, "eps": EPS}, Draw(Key(1, 2), 3)
    assert ops.adam_(x, m, v, draw, scalars(2, 1e-2, (0.3,)), **options) is x
    ops.adam_(dense, flat_m, flat_v, draw, torch.tensor(scalars(2, 1e-2, (0.3,))), **options)
    assert torch.equal(x, dense)
    assert torch.equal(m.view(-1), flat_m)
    assert torch.equal(v.view(-1), flat_v)


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_slices_are_slices_of_one_vector(moment: torch.dtype) -> None:
    whole = start(3000, torch.bfloat16, moment)
    numbers, options = scalars(2, 1e-2, SHARES[1]), {"betas": BETAS, "eps": EPS}
    for a, b in ((0, 1), (5, 9), (1021, 3000)):
        part = [x[a:b].clone() for x in whole]
        ops.adam_(*part, Draw(Key(0, 1), 2**34 + 1 + a), numbers, **options)
        every = [x.clone() for x in whole]
        ops.adam_(*every, Draw(Key(0, 1), 2**34 + 1), numbers, **options)
        assert equal([bits(x) for x in part], [bits(x[a:b]) for x in every])


@pytest.mark.parametrize(("betas", "eps"), [(BETAS, EPS), ((0.0, 0.5), 1e-3)], ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("shares", [0.3, 1e-4], ids=str)
def test_it_is_adam(betas: tuple[float, float], eps: float, weight_decay: float, shares: float) -> None:
    """Against torch's, fed with the gradient that is never materialised here."""
    n, lr = 2000, 1e-2
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    theirs = torch.nn.Parameter(x.clone())
    optimizer = torch.optim.AdamW([theirs], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    m, v = torch.zeros(n), torch.zeros(n)
    for t in range(1, 51):
        coefficients = (shares * math.cos(t), -2 * shares * math.sin(t))
        theirs.grad = sum(c * normal(Draw(Key(7, t, k), 11), (n,)) for k, c in enumerate(coefficients))
        optimizer.step()
        ops.adam_(
            x, m, v, Draw(Key(7, t), 11), scalars(t, lr, coefficients, betas), betas=betas, eps=eps,
            decay=1 - lr * weight_decay,
        )  # fmt: skip
    state = optimizer.state[theirs]
    torch.testing.assert_close(x, theirs.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(m, state["exp_avg"], rtol=1e-5, atol=1e-6 * shares)
    torch.testing.assert_close(v, state["exp_avg_sq"], rtol=1e-5, atol=0)


def test_outside_the_mask_moments_decay_and_weights_follow_them() -> None:
    x, m, v = torch.full((64,), 2.0), torch.full((64,), 0.1), torch.full((64,), 0.04)
    x[::2] = 0.1
    before = x.clone()
    draw = Draw(Key(1, 2), mask=SmallMask(1.0))
    ops.adam_(x, m, v, draw, (1.0, -0.5, 1.0, 1.0, 0.3), betas=BETAS, eps=EPS)
    outside = before == 2.0
    torch.testing.assert_close(m[outside], torch.full((32,), 0.09))
    torch.testing.assert_close(v[outside], torch.full((32,), 0.04 * 0.999))
    torch.testing.assert_close(x[outside], torch.full((32,), 2.0 - 0.5 * 0.09 / math.sqrt(0.04 * 0.999)))
    g = 0.3 * normal(Draw(Key(1, 2)), (64,))[~outside]
    torch.testing.assert_close(m[~outside], 0.09 + 0.1 * g)


def test_moments_in_bf16_are_unbiased() -> None:
    """Over 200 steps of a constant coefficient and 200 of a small one; v to nearest is 0.5 % off, then stays: 23 %."""
    n = 20_000
    shares = [0.3] * 200 + [0.3e-2] * 200
    runs = {moment: (torch.zeros(n), torch.zeros(n, dtype=moment), torch.zeros(n, dtype=moment)) for moment in MOMENTS}
    for t, share in enumerate(shares, 1):
        for x, m, v in runs.values():
            ops.adam_(x, m, v, Draw(Key(3, t)), scalars(t, 1e-3, (share,)), betas=BETAS, eps=EPS)
        if t in (200, 400):
            (x, m, v), (narrow_x, narrow_m, narrow_v) = ([y.double() for y in run] for run in runs.values())
            assert float(narrow_v.mean() / v.mean()) == pytest.approx(1, abs=1e-3)
            assert float((narrow_m * m).sum() / (m * m).sum()) == pytest.approx(1, abs=2e-3)
            assert float((narrow_x * x).sum() / (x * x).sum()) == pytest.approx(1, abs=2e-3)
            errors = torch.corrcoef(torch.stack((narrow_m - m, narrow_v - v)))
            assert abs(float(errors[0, 1])) < 5 / n**0.5  # the halves of a word are independent


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"param": torch.ones(3, dtype=torch.float64)}, TypeError, "would cut fp64 weights"),
        ({"param": torch.ones(3, dtype=torch.int64)}, TypeError, "int64 cannot be perturbed"),
        ({"m": torch.ones(3, dtype=torch.float16)}, TypeError, "both float32 or both bfloat16, got torch.float16"),
        ({"v": torch.ones(3, dtype=torch.bfloat16)}, TypeError, "both float32 or both bfloat16, got torch.float32"),
        ({"v": torch.ones(4)}, ValueError, r"the 3 elements of the weights, got shape \(4,\)"),
        ({"m": torch.ones(6)[::2]}, ValueError, r"must be contiguous .* strides \(2,\)"),
        ({"scalars": (1.0, -1e-3, 1.0, 1.0)}, ValueError, "at least one share, got 4"),
        ({"scalars": torch.ones(5, dtype=torch.float64)}, TypeError, "scalars must be float32, got torch.float64"),
    ],
    ids=["fp64", "integer", "fp16 moments", "mixed moments", "size", "strided moments", "no share", "fp64 scalars"],
)
def test_what_does_not_fit_is_refused(changes, error: type[Exception], message: str) -> None:
    given = {"param": torch.ones(3), "m": torch.zeros(3), "v": torch.zeros(3), "scalars": scalars(1, 1e-3, (0.3,))}
    with pytest.raises(error, match=message):
        ops.adam_(draw=Draw(Key(0, 0)), betas=BETAS, eps=EPS, **{**given, **changes})


@pytest.mark.gpu
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_a_large_update_agrees_between_cpu_and_gpu(moment: torch.dtype) -> None:
    """Roots and quotients of 8,000,000 different moments."""
    tensors = start(8_000_000, torch.bfloat16, moment)
    numbers = scalars(3, 1e-2, SHARES[1])
    assert equal(
        update(triton, tensors, numbers, offset=2**34 + 1), update(cpu, tensors, numbers, offset=2**34 + 1)
    )  # fmt: skip
