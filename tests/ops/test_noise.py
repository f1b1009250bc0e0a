"""Three implementations of one function, and the statistics of that function."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from ops_toy import DTYPES, GPU, MASKS, device, few_lanes, met, weights

import zeroblock as zb
from toy import bits
from zeroblock import ops
from zeroblock.noise import BASIS, NOISE, ROUNDING, SCHEDULE, Distribution, Draw, Key, RandomMask, Rounding
from zeroblock.ops import normal, uniform
from zeroblock.ops.noise import cpu, reference
from zeroblock.ops.shared import dispatch
from zeroblock.ops.shared.reference import noise as draw_noise
from zeroblock.ops.shared.reference import words

triton = pytest.importorskip("zeroblock.ops.noise.triton")

KERNELS = [pytest.param(cpu, id="cpu"), pytest.param(triton, id="triton")]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [1, 3, 8, 1025, 5000])
@pytest.mark.parametrize("offset", [0, 1, 6, 2**32 - 3, 2**33 + 7, 2**40])
def test_words_and_normals_agree_to_the_bit(kernel, n: int, offset: int) -> None:
    if kernel is triton and n > 1025 and GPU == "cpu":
        pytest.skip("the interpreter is slow; a whole and a ragged tile are covered")
    for distribution in Distribution:
        out = torch.empty(n, device=device(kernel))
        draw = Draw(Key(2**63 + 5, 2**31 + 1, 3), offset, distribution)
        kernel.fill_(out, draw, (1.0,))
        expected = torch.from_numpy(draw_noise(draw, n))
        assert torch.equal(bits(out), bits(expected))


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize(("n", "offset"), [(4096, 0), (4096 + 5, 2**33 + 7), (4093, 3)])
def test_whole_and_ragged_tiles_agree_to_the_bit(small: bool, n: int, offset: int, monkeypatch) -> None:
    """Large tensors are launched as a ragged, several whole and another ragged tile; here with few lanes per tile."""
    few_lanes(monkeypatch, small, n, offset)
    x, ours = weights(n, torch.float16), weights(n, torch.float16).to(GPU)
    for module, t in ((triton, ours), (reference, x)):
        module.add_noise_(t, t, Draw(Key(1, 2), offset), (1e-2,), decay=1.0, rounding=Rounding.STOCHASTIC)
    assert torch.equal(bits(ours), bits(x))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alphas", [(0.3,), (-2e-2, 0.1, 0.7)], ids=str)
def test_noise_is_written_scaled_and_in_any_dtype(kernel, dtype: torch.dtype, alphas: tuple[float, ...]) -> None:
    draw, n = Draw(Key(4, 9, 1), 13), 1031
    out = torch.full((n,), 7.0, dtype=dtype, device=device(kernel))
    kernel.fill_(out, draw, alphas)
    draws = [torch.from_numpy(draw_noise(draw.probe(k), n)).double() for k in range(len(alphas))]
    wide = dtype == torch.float64
    exact = sum(u * (a if wide else float(torch.tensor(a))) for u, a in zip(draws, alphas, strict=True))
    unit = torch.finfo(dtype).eps * (1 if len(alphas) == 1 else 4)
    assert ((out.cpu().double() - exact).abs() <= unit * exact.abs() + 1e-7).all()
    if len(alphas) == 1 and not wide:  # rounded once to fp32, once to nearest
        assert torch.equal(bits(out), bits((draws[0].float() * alphas[0]).to(dtype)))


@pytest.mark.parametrize("kernel", [*KERNELS, pytest.param(reference, id="reference")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.3, (-2e-2, 0.1, 0.7)], ids=str)
def test_noise_is_added_to_a_start_on_the_way_into_any_dtype(
    kernel, dtype: torch.dtype, alpha: Any, monkeypatch
) -> None:
    """In fp32, rounded to nearest at last; every implementation to the bit."""
    draw, start = Draw(Key(4, 9, 1), 13), torch.linspace(-2, 2, 1030).view(103, 10)
    wide = ops.add_noise_(start * 0.3, draw, alpha)
    monkeypatch.setattr(ops.noise, "backend", lambda operation, device: kernel)
    out = torch.full(start.shape, 7.0, dtype=dtype, device=device(kernel))
    ops.fill_(out, draw, alpha, start=start.to(out.device), decay=0.3)
    assert torch.equal(bits(out), bits(wide.to(dtype)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", Rounding)
def test_every_form_of_the_kernel_agrees_to_the_bit(kernel, dtype: torch.dtype, rounding: Rounding) -> None:
    half = DTYPES.index(dtype) + list(Rounding).index(rounding)
    cases = met(kernel, MASKS, Distribution, [(1e-3,), (0.1, -0.3, 0.2)], (False, True), half=half)
    for number, (mask, distribution, alphas, flip) in enumerate(cases):
        offset = (0, 5, 2**33 + 7)[number % 3]  # each beside every value of the others
        n = 2050 if mask is None and not distribution else 37
        x = weights(n, dtype)
        draw = Draw(Key(5, 6, 2), offset, distribution, mask)
        options = {"rounding": rounding, "flip": flip, "decay": 0.9 if len(alphas) > 1 else 1.0}
        results = []
        for module in (reference, kernel):
            source = x.to(device(module))
            out, minus = torch.full_like(source, 7), torch.full_like(source, 7)
            module.add_noise_(out, source, draw, alphas, minus=minus if len(alphas) == 1 else None, **options)
            results.append((bits(out), bits(minus)))
        for expected, got in zip(*results, strict=True):
            assert torch.equal(expected, got), (draw, options, alphas)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("alphas", [(1e-3,), (0.1, -0.3, 0.2)], ids=str)
def test_step_and_coefficients_read_on_the_device(dtype, mask, alphas) -> None:
    """A captured launch does not look at the steps of its keys."""
    x = weights(50, dtype)
    options = {"decay": 1.0, "rounding": Rounding.STOCHASTIC}
    expected = x.clone()
    reference.add_noise_(expected, expected, Draw(Key(5, 6), 3, mask=mask), alphas, **options)
    for module in (triton, cpu, reference):
        clock = torch.tensor([6, 4], device=device(module))
        stale = mask
        if isinstance(mask, RandomMask):
            stale = RandomMask(Key(5, 0, stream=BASIS, clock=clock), mask.limit)
        out = x.clone().to(device(module))
        numbers = torch.tensor(alphas, device=GPU) if module is triton else alphas
        draw = Draw(Key(5, 1, clock=clock), 3, mask=stale)
        module.add_noise_(out, out, draw, numbers, **options)
        assert torch.equal(bits(out), bits(expected))
        clock[0] = 7
        out.copy_(x)
        module.add_noise_(out, out, draw, numbers, **options)
        assert not torch.equal(bits(out), bits(expected))


def test_a_basis_reads_the_first_step_of_the_turn() -> None:
    clock = torch.tensor([6, 4], device=GPU)
    out, expected = torch.empty(20, device=GPU), torch.empty(20)
    triton.fill_(out, Draw(Key(5, 1, stream=BASIS, clock=clock)), (1.0,))
    reference.fill_(expected, Draw(Key(5, 4, stream=BASIS)), (1.0,))
    assert torch.equal(bits(out), bits(expected))


def test_a_mask_without_the_clock_of_its_noise_is_refused() -> None:
    x, clock = torch.zeros(4, device=GPU), torch.tensor([6, 4], device=GPU)
    draw = Draw(Key(5, 1, clock=clock), mask=RandomMask(Key(5, 1, stream=BASIS), 2**31))
    with pytest.raises(ValueError, match="share a clock"):
        triton.add_noise_(x, x, draw, (1.0,), decay=1.0, rounding=Rounding.NEAREST)


def test_a_clock_is_no_part_of_an_address() -> None:
    clocked = Key(5, 1, clock=torch.tensor([6, 4]))
    assert clocked == Key(5, 1)
    assert hash(clocked) == hash(Key(5, 1))
    assert repr(clocked) == repr(Key(5, 1))
    assert clocked.to(stream=BASIS).clock is clocked.clock


def test_coefficients_of_zero_on_the_device_change_not_even_signed_zeros() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0], device=GPU)
    before = bits(x).clone()
    triton.add_noise_(x, x, Draw(Key(0, 0)), torch.zeros(2, device=GPU), decay=1.0, rounding=Rounding.NEAREST)
    assert torch.equal(bits(x), before)


def test_the_vectors_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "noise.md").read_text()
    vectors = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL).group(1))
    assert len(vectors) >= 5
    for v in vectors:
        key, n = Key(v["seed"], v["step"], v["probe"], v["stream"]), len(v["words"])
        assert [f"{w:08x}" for w in words(key, v["offset"], n)] == v["words"]
        got = normal(Draw(key, v["offset"]), (n,))
        assert [f"{b & 0xFFFFFFFF:08x}" for b in bits(got).tolist()] == v["normal_bits"]
        np.testing.assert_allclose(got.numpy(), v["normals"], rtol=0, atol=1e-6)
        for dtype in ("bfloat16", "float16"):
            x = torch.full((n,), v["weight"], dtype=getattr(torch, dtype))
            ops.add_noise_(x, Draw(key, v["offset"]), v["alpha"])
            assert [f"{b & 0xFFFF:04x}" for b in bits(x).tolist()] == v[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(7, 5).t(),
        lambda: torch.randn(4, 6, 5)[:, 1::2],
        lambda: torch.randn(3, 2, 2, 2).permute(3, 1, 0, 2),
        lambda: torch.randn(()),
        lambda: torch.empty(0),
        lambda: torch.empty(3, 0, 2),
        lambda: torch.randn(2, 3, 4),
    ],
    ids=["transposed", "sliced", "permuted", "scalar", "empty", "empty 3-d", "3-d"],
)
def test_any_shape_and_strides(make, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "PIECE", 4)  # strided tensors go through small pieces
    x = make().to(dtype)
    dense, draw = x.contiguous().clone(), Draw(Key(1, 2), 3)
    assert ops.add_noise_(x, draw, 0.1) is x
    ops.add_noise_(dense, draw, 0.1)
    assert torch.equal(x, dense)
    for sign in (1, -1):
        copy = ops.perturb(x, draw, sign * 0.1)
        assert torch.equal(copy, ops.perturb(dense, draw, sign * 0.1))
        assert copy.is_contiguous()
    delta = torch.arange(x.numel(), dtype=torch.float32).reshape(x.shape)
    assert torch.equal(ops.add_(x, delta, 0.1, draw), ops.add_(dense, delta, 0.1, draw))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_at_large_offsets_are_slices_of_one_vector(dtype: torch.dtype) -> None:
    """Beyond 2**32, without allocating what lies before."""
    for start in (2**32 - 8, 2**34 + 1, 2**60):
        x = torch.ones(64, dtype=dtype)
        ops.add_noise_(x, Draw(Key(0, 1), start), 0.1)
        for a, b in ((0, 1), (5, 9), (13, 64)):
            part = torch.ones(b - a, dtype=dtype)
            ops.add_noise_(part, Draw(Key(0, 1), start).at(a), 0.1)
            assert torch.equal(part, x[a:b])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_pair_is_the_two_copies(dtype: torch.dtype) -> None:
    x = weights(3001, dtype)
    before, draw = x.clone(), Draw(Key(3, 4), 11)
    plus, minus = ops.perturb_pair(x, draw, 1e-3)
    assert torch.equal(bits(plus), bits(ops.perturb(x, draw, 1e-3)))
    assert torch.equal(bits(minus), bits(ops.perturb(x, draw, -1e-3)))
    assert torch.equal(bits(x), bits(before))
    assert not torch.equal(plus, minus)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_two_sides_are_mirror_images_in_16_bits(dtype: torch.dtype) -> None:
    """Complemented rounding bits move both copies equally far, but for binade edges."""
    x = torch.empty(4000).uniform_(1.1, 1.9, generator=torch.Generator().manual_seed(0)).to(dtype)
    plus, minus = ops.perturb_pair(x, Draw(Key(3, 4)), 1e-4)
    assert torch.equal((plus.double() - x.double()), (x.double() - minus.double()))
    assert 0 < (plus != x).float().mean() < 0.5  # far below one unit in the last place: rounded stochastically


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1.5, -0.02, 1.0, 0.125, 2.0**-13])
def test_stochastic_rounding_is_unbiased(dtype: torch.dtype, size: float) -> None:
    """An addend of 1/10 unit is kept on average, at binade edges too; rounding to nearest loses it all."""
    n = 400_000
    x = torch.full((n,), size, dtype=dtype)
    unit = 2.0 ** (math.floor(math.log2(abs(size))) - (10 if dtype == torch.float16 else 7))
    start, delta = x[0].double(), torch.ones(n)
    for sign in (1, -1):
        moved = ops.add_(x.clone(), delta, sign * unit / 10, Draw(Key(0, 1))).double().mean() - start
        assert float(moved) == pytest.approx(sign * unit / 10, rel=0.03)
        stuck = ops.add_(x.clone(), delta, sign * unit / 10, Draw(Key(0, 1)), rounding=Rounding.NEAREST)
        assert torch.equal(stuck, x)
    noise = ops.add_noise_(x.clone(), Draw(Key(0, 2)), unit / 10).double() - start
    u = normal(Draw(Key(0, 2)), (n,)).double()
    slope = float((noise * u).sum() / (u * u).sum())  # regression of the realised move on u
    assert slope == pytest.approx(unit / 10, rel=0.05)
    assert abs(float(noise.mean())) < 5 * float(noise.std()) / n**0.5


def test_a_step_of_zero_changes_not_even_signed_zeros() -> None:
    x = torch.tensor([-0.0, 0.0, 1.0])
    before = bits(x).clone()
    ops.add_noise_(x, Draw(Key(0, 0)), 0.0)
    ops.add_(x, torch.ones(3), 0.0, Draw(Key(0, 0)))
    ops.add_outer_(x, torch.ones(3, 2), torch.ones(1, 2), 0.0, Draw(Key(0, 0)))
    assert torch.equal(bits(x), before)


def test_wrong_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"int64 cannot be perturbed; supported: float32"):
        ops.add_noise_(torch.ones(3, dtype=torch.int64), Draw(Key(0, 0)), 1.0)


@pytest.mark.parametrize("field", [{"seed": -1}, {"seed": 2**64}, {"step": 2**32}, {"probe": 2**28}, {"stream": 16}])
def test_addresses_out_of_range_are_refused(field: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be in"):
        Key(**{"seed": 0, "step": 0, **field})


def test_moments_and_distribution() -> None:
    z = normal(Draw(Key(11, 7)), (1_000_000,)).numpy().astype(float)
    assert abs(z.mean()) < 4e-3
    assert abs(z.var() - 1) < 6e-3
    assert abs(scipy.stats.skew(z)) < 1e-2
    assert abs(scipy.stats.kurtosis(z)) < 2e-2
    assert scipy.stats.kstest(z, "norm").pvalue > 0.01
    assert scipy.stats.kstest(z[::2] * z[1::2], z[2_000:300_000:2] * z[7_001:305_001:2]).pvalue > 0.01
    assert scipy.stats.kstest(np.array(uniform(Key(11, 7, stream=SCHEDULE), 100_000)), "uniform").pvalue > 0.01
    r = normal(Draw(Key(11, 7), distribution=Distribution.RADEMACHER), (100_000,))
    assert set(r.tolist()) == {-1.0, 1.0}
    assert abs(float(r.mean())) < 0.015


def test_no_correlation_between_addresses() -> None:
    """Across steps, probes, streams, seeds, blocks and equal-shaped tensors: 5 standard errors."""
    n = 200_000
    keys = {
        "base": (Key(1, 1), 0), "step": (Key(1, 2), 0), "probe": (Key(1, 1, 1), 0), "seed": (Key(2, 1), 0),
        "stream": (Key(1, 1, stream=BASIS), 0), "rounding": (Key(1, 1, stream=ROUNDING), 0),
        "high seed": (Key(1 + 2**32, 1), 0), "next tensor": (Key(1, 1), n), "far": (Key(1, 1), 2**32),
        "swapped": (Key(1, 1, 2, NOISE), 0), "shifted": (Key(1, 1), 1),
    }  # fmt: skip
    draws = torch.stack([normal(Draw(key, offset), (n,)) for key, offset in keys.values()]).double()
    correlation = torch.corrcoef(draws)
    off = correlation - torch.eye(len(keys))
    assert off.abs().max() < 5 / n**0.5
    squares = torch.corrcoef(draws.square())  # dependence that a plain correlation would miss
    assert (squares - torch.eye(len(keys))).abs().max() < 5 / n**0.5


@pytest.mark.gpu
def test_a_large_fill_agrees_between_cpu_and_gpu() -> None:
    n, draw = 32_000_000, Draw(Key(1, 2), 2**34 + 1)
    assert torch.equal(bits(normal(draw, (n,), device="cuda")), bits(normal(draw, (n,), device="cpu")))


def test_a_draw_names_elements_and_probes() -> None:
    draw = Draw(Key(1, 2, 3), 7, Distribution.RADEMACHER)
    assert draw.at(5) == Draw(Key(1, 2, 3), 12, Distribution.RADEMACHER)
    assert draw.probe(2) == Draw(Key(1, 2, 5), 7, Distribution.RADEMACHER)
    assert draw.to(offset=0) == Draw(Key(1, 2, 3), 0, Distribution.RADEMACHER)
    assert draw.at(0) is draw
    assert draw.probe(0) is draw


def test_a_mask_on_noise_that_is_written_is_refused() -> None:
    with pytest.raises(ValueError, match="takes no mask"):
        ops.fill_(torch.empty(3), Draw(Key(0, 0), mask=MASKS[1]))


def test_keys_in_place_of_draws_are_accepted_for_a_release() -> None:
    """Each call of version 0.1 warns once, names the Draw to write instead, and gives the same bits."""
    key, mask, x = Key(3, 4), MASKS[1], weights(40, torch.bfloat16)
    signs = {"distribution": Distribution.RADEMACHER}
    draw = Draw(key, 11, Distribution.RADEMACHER, mask)
    old = {"offset": 11, "mask": mask, **signs}
    calls = (
        (lambda: zb.add_noise_(x.clone(), key, 0.1, **old), lambda: zb.add_noise_(x.clone(), draw, 0.1)),
        (lambda: zb.add_noise_(x.clone(), key=key, alpha=0.1, **old), lambda: zb.add_noise_(x.clone(), draw, 0.1)),
        (lambda: zb.perturb(x, key, 0.1, **old), lambda: zb.perturb(x, draw=draw, eps=0.1)),
        (lambda: zb.perturb_pair(x, key, 0.1, **old)[1], lambda: zb.perturb_pair(x, draw, 0.1)[1]),
        (lambda: zb.normal(key, 11, (9,), **signs), lambda: zb.normal(draw.to(mask=None), (9,))),
        (lambda: zb.normal(key, offset=11, shape=(9,), **signs), lambda: zb.normal(draw.to(mask=None), shape=(9,))),
    )
    for before, after in calls:
        with pytest.warns(zb.ZeroBlockWarning, match=r"pass Draw\(Key\(seed=3, .*offset=11") as caught:
            result = before()
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert torch.equal(bits(result), bits(after()))


def test_neither_draw_nor_key_is_refused() -> None:
    with pytest.raises(TypeError, match="perturb takes a Draw, got int"):
        zb.perturb(torch.ones(3), 4, 0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'offset'"):
        zb.perturb(torch.ones(3), Draw(Key(0, 0)), 0.1, offset=3)
