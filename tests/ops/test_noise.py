"""Three implementations of one function, and the statistics of that function."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from toy import bits
from zeroblock import ops
from zeroblock.noise import BASIS, NOISE, ROUNDING, SCHEDULE, Distribution, Key, Rounding, normal, uniform
from zeroblock.ops import cpu, reference
from zeroblock.ops.spec import Bernoulli, Magnitude

triton = pytest.importorskip("zeroblock.ops.triton")

KERNELS = [pytest.param(cpu, id="cpu"), pytest.param(triton, id="triton")]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHERE = "cuda" if torch.cuda.is_available() else "cpu"
MASKS = (None, Magnitude(0.5), Bernoulli(Key(5, 4, stream=BASIS), 2**31))


def device(kernel: object) -> str:
    return WHERE if kernel is triton else "cpu"


def weights(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Magnitudes from subnormal fp16 to 1, both signs, some zeros."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, generator=generator) * torch.logspace(-9, 0, n)
    x[::17] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n", [1, 3, 8, 1025, 5000])
@pytest.mark.parametrize("offset", [0, 1, 6, 2**32 - 3, 2**33 + 7, 2**40])
def test_words_and_normals_agree_to_the_bit(kernel, n: int, offset: int) -> None:
    if kernel is triton and n > 1025 and WHERE == "cpu":
        pytest.skip("the interpreter is slow; a whole and a ragged tile are covered")
    for distribution in Distribution:
        out = torch.empty(n, device=device(kernel))
        key = Key(2**63 + 5, 2**31 + 1, 3)
        kernel.fill_(out, key, (1.0,), offset=offset, distribution=distribution)
        expected = torch.from_numpy(reference.draw(key, offset, n, distribution))
        assert torch.equal(bits(out), bits(expected))


def test_the_reference_fma_at_the_ends_of_the_range() -> None:
    inf, big = np.float32(np.inf), np.float32(3e38)
    cases = [(1, 1, -inf, -inf), (-inf, 1, 1, -inf), (inf, 1, 1, inf), (big, big, 1, inf), (big, -big, -1, -inf)]
    for a, b, c, expected in cases:
        assert reference.fma(np.array([a], np.float32), np.float32(b), np.float32(c))[0] == expected
    assert np.isnan(reference.fma(np.array([inf], np.float32), np.float32(1), -inf)[0])


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize(("n", "offset"), [(4096, 0), (4096 + 5, 2**33 + 7), (4093, 3)])
def test_whole_and_ragged_tiles_agree_to_the_bit(small: bool, n: int, offset: int, monkeypatch) -> None:
    """Large tensors are launched as a ragged, several whole and another ragged tile; here with few lanes a tile."""
    monkeypatch.setattr(triton, "SMALL", 1 << 18 if small else 0)
    monkeypatch.setattr(triton, "GROUPS", 64)
    monkeypatch.setattr(triton, "FEW", 4)
    launches = triton._tiles(n, offset, 64)[1]
    assert [whole for _, _, whole in launches].count(True) == 1
    x, key = weights(n, torch.float16), Key(1, 2)
    for run in (
        lambda module, t: module.add_noise_(
            t, t, key, (1e-2,), offset=offset, decay=1.0, mask=None, distribution=Distribution.NORMAL,
            rounding=Rounding.STOCHASTIC,
        ),
        lambda module, t: module.add_(
            t, torch.linspace(-1, 1, n, device=t.device), 0.1, key.to(stream=ROUNDING), offset=offset, decay=0.9,
            rounding=Rounding.STOCHASTIC,
        ),
    ):  # fmt: skip
        ours, theirs = x.to(WHERE).clone(), x.clone()
        run(triton, ours)
        run(reference, theirs)
        assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("alphas", [(0.3,), (-2e-2, 0.1, 0.7)], ids=str)
def test_noise_is_written_scaled_and_in_any_dtype(kernel, dtype: torch.dtype, alphas: tuple[float, ...]) -> None:
    key, n = Key(4, 9, 1), 1031
    out = torch.full((n,), 7.0, dtype=dtype, device=device(kernel))
    kernel.fill_(out, key, alphas, offset=13, distribution=Distribution.NORMAL)
    draws = [torch.from_numpy(reference.draw(key.to(probe=1 + k), 13, n)).double() for k in range(len(alphas))]
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
    key, start = Key(4, 9, 1), torch.linspace(-2, 2, 1030).view(103, 10)
    wide = ops.add_noise_(start * 0.3, key, alpha, offset=13)
    monkeypatch.setattr(ops, "backend", lambda device: kernel)
    out = torch.full(start.shape, 7.0, dtype=dtype, device=device(kernel))
    ops.fill_(out, key, alpha, offset=13, start=start.to(out.device), decay=0.3)
    assert torch.equal(bits(out), bits(wide.to(dtype)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rounding", Rounding)
def test_every_form_of_the_kernel_agrees_to_the_bit(kernel, dtype: torch.dtype, rounding: Rounding) -> None:
    cases = itertools.product((0, 5, 2**33 + 7), MASKS, Distribution, [(1e-3,), (0.1, -0.3, 0.2)], (False, True))
    for offset, mask, distribution, alphas, flip in cases:
        n = 2050 if offset == 0 and mask is None and not distribution else 37
        x = weights(n, dtype)
        options = {
            "offset": offset, "mask": mask, "distribution": distribution, "rounding": rounding, "flip": flip,
            "decay": 0.9 if len(alphas) > 1 else 1.0,
        }  # fmt: skip
        results = []
        for module, where in ((reference, "cpu"), (kernel, device(kernel))):
            source = x.to(where)
            out, minus = torch.full_like(source, 7), torch.full_like(source, 7)
            module.add_noise_(
                out, source, Key(5, 6, 2), alphas, minus=minus if len(alphas) == 1 else None, **options
            )  # fmt: skip
            delta = torch.linspace(-1, 1, n, device=where)
            added = source.clone()
            module.add_(added, delta, 1e-3, Key(5, 6, stream=ROUNDING), offset=offset, decay=options["decay"],
                        rounding=rounding, flip=flip)  # fmt: skip
            results.append((bits(out), bits(minus), bits(added)))
        for expected, got in zip(*results, strict=True):
            assert torch.equal(expected, got), (options, alphas)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "rank", "offset"), [((3, 5), 1, 0), ((7, 33), 2, 11), ((300, 9), 4, 2**33 + 8)])
def test_an_outer_product_is_added_as_the_product_would_be(dtype, shape, rank, offset) -> None:
    m, n = shape
    generator = torch.Generator().manual_seed(m)
    z, v = torch.randn(m, rank, generator=generator), torch.randn(n, rank, generator=generator)
    x = weights(m * n, dtype).view(m, n)
    product = sum(torch.outer(z[:, k], v[:, k]) for k in range(rank))
    for decay, flip in ((1.0, False), (0.9, True)):
        options = {"offset": offset, "decay": decay, "rounding": Rounding.STOCHASTIC, "flip": flip}
        expected = ops.add_(x.clone(), product, -1e-2, Key(5, 6), **options)
        assert torch.equal(bits(ops.add_outer_(x.clone(), z, v, -1e-2, Key(5, 6), **options)), bits(expected))
        fused = x.clone().to(WHERE)
        triton.add_outer_(
            fused.view(-1), z.to(WHERE), v.to(WHERE), -1e-2, Key(5, 6, stream=ROUNDING), **options
        )  # fmt: skip
        assert torch.equal(bits(fused), bits(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("alphas", [(1e-3,), (0.1, -0.3, 0.2)], ids=str)
def test_step_and_coefficients_read_on_the_device(dtype, mask, alphas) -> None:
    """What a captured launch does: the step of its Key is not looked at."""
    x = weights(50, dtype)
    options = {"offset": 3, "decay": 1.0, "mask": mask, "distribution": Distribution.NORMAL}
    expected, out = x.clone(), x.clone().to(WHERE)
    reference.add_noise_(expected, expected, Key(5, 6), alphas, rounding=Rounding.STOCHASTIC, **options)
    stale = {**options, "mask": Bernoulli(Key(5, 0, stream=BASIS), 2**31) if isinstance(mask, Bernoulli) else mask}
    with triton.clocked(torch.tensor([6, 4], device=WHERE)):
        triton.add_noise_(
            out, out, Key(5, 1), torch.tensor(alphas, device=WHERE), rounding=Rounding.STOCHASTIC, **stale
        )  # fmt: skip
    assert torch.equal(bits(out), bits(expected))


def test_coefficients_of_zero_on_the_device_change_not_even_signed_zeros() -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0], device=WHERE)
    before = bits(x).clone()
    options = {"offset": 0, "decay": 1.0, "mask": None, "distribution": Distribution.NORMAL}
    triton.add_noise_(x, x, Key(0, 0), torch.zeros(2, device=WHERE), rounding=Rounding.NEAREST, **options)
    assert torch.equal(bits(x), before)


def test_known_answers_of_philox() -> None:
    """The vectors that Random123 ships for philox4x32-10."""

    def run(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
        c0, c1 = (np.array([c], np.uint32) for c in counter[:2])
        return [int(x[0]) for x in reference.philox(c0, c1, *counter[2:], *key)]

    ones = 0xFFFFFFFF
    assert run((0,) * 4, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert run((ones,) * 4, (ones, ones)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert run((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)) == [
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1,
    ]  # fmt: skip


def test_the_vectors_of_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "noise.md").read_text()
    vectors = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL).group(1))
    assert len(vectors) >= 5
    for v in vectors:
        key, n = Key(v["seed"], v["step"], v["probe"], v["stream"]), len(v["words"])
        assert [f"{w:08x}" for w in reference.words(key, v["offset"], n)] == v["words"]
        got = normal(key, v["offset"], (n,))
        assert [f"{b & 0xFFFFFFFF:08x}" for b in bits(got).tolist()] == v["normal_bits"]
        np.testing.assert_allclose(got.numpy(), v["normals"], rtol=0, atol=1e-6)
        for dtype in ("bfloat16", "float16"):
            x = torch.full((n,), v["weight"], dtype=getattr(torch, dtype))
            ops.add_noise_(x, key, v["alpha"], offset=v["offset"])
            assert [f"{b & 0xFFFF:04x}" for b in bits(x).tolist()] == v[dtype]


def test_box_muller_is_accurate() -> None:
    """Against float64 logarithms and cosines, within 1e-6 up to the rarest words."""
    a, b = np.random.default_rng(0).integers(0, 2**32, (2, 300_000), dtype=np.uint32)
    a[:8] = [0, 1, 2, 2**32 - 1, 2**31, 255, 2**24, 2**8]
    x, y = reference.box_muller(a, b)
    u = (np.abs(a.view(np.int32).astype(np.float32)) + np.float32(0.5)).astype(float)
    e = np.floor(np.log2(u / 2**31 / math.sqrt(0.5)))
    m = u / 2**31 / 2**e
    radius = np.sqrt(-2 * (e * math.log(2) + np.log(m - 2.0**-23))) * np.where(a >> 31, -1, 1)
    angle = b.view(np.int32) / 2**32 * np.pi
    assert np.abs(x - radius * np.cos(angle)).max() < 1e-6
    assert np.abs(y - radius * np.sin(angle)).max() < 1e-6
    assert np.abs(x).max() > 6


def test_an_exact_fma() -> None:
    from fractions import Fraction

    rng = np.random.default_rng(1)
    a, b, c = (rng.normal(size=4000).astype(np.float32) * 2.0 ** rng.integers(-20, 20, 4000) for _ in range(3))
    a, b, c = (v.astype(np.float32) for v in (a, b, c))
    c[::2] = -(a * b)[::2]  # cancellation leaves the product's rounding error alone
    got = reference.fma(a, b, c)
    for i in range(0, 4000, 7):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        best = np.float32(float(exact))  # float() of a Fraction rounds once to 53 bits, ample for these cancellations
        assert abs(Fraction(float(got[i])) - exact) <= abs(Fraction(float(best)) - exact)


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
    monkeypatch.setattr(ops, "PIECE", 4)  # strided tensors go through small pieces
    x = make().to(dtype)
    dense = x.contiguous().clone()
    assert ops.add_noise_(x, Key(1, 2), 0.1, offset=3) is x
    ops.add_noise_(dense, Key(1, 2), 0.1, offset=3)
    assert torch.equal(x, dense)
    for sign in (1, -1):
        copy = ops.perturb(x, Key(1, 2), sign * 0.1, offset=3)
        assert torch.equal(copy, ops.perturb(dense, Key(1, 2), sign * 0.1, offset=3))
        assert copy.is_contiguous()
    delta = torch.arange(x.numel(), dtype=torch.float32).reshape(x.shape)
    assert torch.equal(ops.add_(x, delta, 0.1, Key(1, 2)), ops.add_(dense, delta, 0.1, Key(1, 2)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_at_large_offsets_are_slices_of_one_vector(dtype: torch.dtype) -> None:
    """Beyond 2**32, without allocating what lies before."""
    for start in (2**32 - 8, 2**34 + 1, 2**60):
        x = torch.ones(64, dtype=dtype)
        ops.add_noise_(x, Key(0, 1), 0.1, offset=start)
        for a, b in ((0, 1), (5, 9), (13, 64)):
            part = torch.ones(b - a, dtype=dtype)
            ops.add_noise_(part, Key(0, 1), 0.1, offset=start + a)
            assert torch.equal(part, x[a:b])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_pair_is_the_two_copies(dtype: torch.dtype) -> None:
    x = weights(3001, dtype)
    before = x.clone()
    plus, minus = ops.perturb_pair(x, Key(3, 4), 1e-3, offset=11)
    assert torch.equal(bits(plus), bits(ops.perturb(x, Key(3, 4), 1e-3, offset=11)))
    assert torch.equal(bits(minus), bits(ops.perturb(x, Key(3, 4), -1e-3, offset=11)))
    assert torch.equal(bits(x), bits(before))
    assert not torch.equal(plus, minus)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_two_sides_are_mirror_images_in_16_bits(dtype: torch.dtype) -> None:
    """Complemented rounding bits move both copies equally far, but for binade edges."""
    x = torch.empty(4000).uniform_(1.1, 1.9, generator=torch.Generator().manual_seed(0)).to(dtype)
    plus, minus = ops.perturb_pair(x, Key(3, 4), 1e-4)
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
        moved = ops.add_(x.clone(), delta, sign * unit / 10, Key(0, 1)).double().mean() - start
        assert float(moved) == pytest.approx(sign * unit / 10, rel=0.03)
        stuck = ops.add_(x.clone(), delta, sign * unit / 10, Key(0, 1), rounding=Rounding.NEAREST)
        assert torch.equal(stuck, x)
    noise = ops.add_noise_(x.clone(), Key(0, 2), unit / 10).double() - start
    u = normal(Key(0, 2), 0, (n,)).double()
    slope = float((noise * u).sum() / (u * u).sum())  # regression of the realised move on u
    assert slope == pytest.approx(unit / 10, rel=0.05)
    assert abs(float(noise.mean())) < 5 * float(noise.std()) / n**0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_all_65536_values_survive_a_vanishing_step(dtype: torch.dtype) -> None:
    """A representable weight that moves by nothing stays, whatever the rounding bits; infinities and NaNs too."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for rounding, step in itertools.product(Rounding, range(4)):
        y = ops.add_(x.clone(), torch.zeros(x.shape), 1.0, Key(0, step), rounding=rounding)
        finite = x.isfinite()
        assert torch.equal(y[finite], x[finite])
        assert y[x.isnan()].isnan().all()
        assert torch.equal(y[x.isinf()], x[x.isinf()])


def test_a_step_of_zero_changes_not_even_signed_zeros() -> None:
    x = torch.tensor([-0.0, 0.0, 1.0])
    before = bits(x).clone()
    ops.add_noise_(x, Key(0, 0), 0.0)
    ops.add_(x, torch.ones(3), 0.0, Key(0, 0))
    assert torch.equal(bits(x), before)


def test_wrong_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"int64 cannot be perturbed; supported: float32"):
        ops.add_noise_(torch.ones(3, dtype=torch.int64), Key(0, 0), 1.0)


@pytest.mark.parametrize("field", [{"seed": -1}, {"seed": 2**64}, {"step": 2**32}, {"probe": 2**28}, {"stream": 16}])
def test_addresses_out_of_range_are_refused(field: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be in"):
        Key(**{"seed": 0, "step": 0, **field})


def test_moments_and_distribution() -> None:
    z = normal(Key(11, 7), 0, (1_000_000,)).numpy().astype(float)
    assert abs(z.mean()) < 4e-3
    assert abs(z.var() - 1) < 6e-3
    assert abs(scipy.stats.skew(z)) < 1e-2
    assert abs(scipy.stats.kurtosis(z)) < 2e-2
    assert scipy.stats.kstest(z, "norm").pvalue > 0.01
    assert scipy.stats.kstest(z[::2] * z[1::2], z[2_000:300_000:2] * z[7_001:305_001:2]).pvalue > 0.01
    assert scipy.stats.kstest(np.array(uniform(Key(11, 7, stream=SCHEDULE), 100_000)), "uniform").pvalue > 0.01
    r = normal(Key(11, 7), 0, (100_000,), distribution=Distribution.RADEMACHER)
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
    draws = torch.stack([normal(key, offset, (n,)) for key, offset in keys.values()]).double()
    correlation = torch.corrcoef(draws)
    off = correlation - torch.eye(len(keys))
    assert off.abs().max() < 5 / n**0.5
    squares = torch.corrcoef(draws.square())  # dependence that a plain correlation would miss
    assert (squares - torch.eye(len(keys))).abs().max() < 5 / n**0.5


def test_rounding_bits_do_not_depend_on_the_noise() -> None:
    """An element's rounding bits are the low bits of its own word: uniform whatever its normal is."""
    n = 400_000
    z, low = reference.draw(Key(3, 3), 0, n), (reference.words(Key(3, 3), 0, n) & np.uint32(0x1FFF)) / 8192
    for lo, hi in ((-9, -2), (-2, -1), (-1, 0), (0, 0.5), (0.5, 2), (2, 3), (3, 9)):
        part = low[(z > lo) & (z <= hi)]
        assert scipy.stats.kstest(part, "uniform").pvalue > 0.002
    assert abs(np.corrcoef(z, low)[0, 1]) < 5 / n**0.5
    assert abs(np.corrcoef(np.abs(z), low)[0, 1]) < 5 / n**0.5
    assert abs(np.corrcoef(low[::2], low[1::2])[0, 1]) < 5 / (n / 2) ** 0.5


@pytest.mark.gpu
def test_a_large_fill_agrees_between_cpu_and_gpu() -> None:
    n, offset = 32_000_000, 2**34 + 1
    assert torch.equal(
        bits(normal(Key(1, 2), offset, (n,), device="cuda")), bits(normal(Key(1, 2), offset, (n,), device="cpu"))
    )


@pytest.mark.gpu
def test_the_root_is_correctly_rounded_on_the_gpu() -> None:
    """All 251,658,240 floats between 2**-24 and 2**6."""
    import triton as compiler
    import triton.language as tl

    @compiler.jit
    def roots(fast, exact, start, BLOCK: tl.constexpr):  # noqa: N803
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = (start + i).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(fast + i, triton._sqrt(x))
        tl.store(exact + i, tl.sqrt_rn(x))

    low, high = (int(torch.tensor(v).view(torch.int32)) for v in (2.0**-24, 2.0**6))
    fast, exact = (torch.empty(high - low, device="cuda") for _ in range(2))
    roots[((high - low) // 1024,)](fast, exact, low, BLOCK=1024, enable_fp_fusion=False)
    assert torch.equal(fast, exact)
