"""The parts that the operations share: the counter, its normals, fused products and roots."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import torch

from zeroblock.noise import Draw, Key
from zeroblock.ops.shared import reference


def test_the_reference_fma_at_the_ends_of_the_range() -> None:
    inf, big = np.float32(np.inf), np.float32(3e38)
    cases = [(1, 1, -inf, -inf), (-inf, 1, 1, -inf), (inf, 1, 1, inf), (big, big, 1, inf), (big, -big, -1, -inf)]
    for a, b, c, expected in cases:
        assert reference.fma(np.array([a], np.float32), np.float32(b), np.float32(c))[0] == expected
    assert np.isnan(reference.fma(np.array([inf], np.float32), np.float32(1), -inf)[0])


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


def test_rounding_bits_do_not_depend_on_the_noise() -> None:
    """An element's rounding bits are the low bits of its own word: uniform whatever its normal is."""
    n = 400_000
    z, low = reference.noise(Draw(Key(3, 3)), n), (reference.words(Key(3, 3), 0, n) & np.uint32(0x1FFF)) / 8192
    for lo, hi in ((-9, -2), (-2, -1), (-1, 0), (0, 0.5), (0.5, 2), (2, 3), (3, 9)):
        part = low[(z > lo) & (z <= hi)]
        assert scipy.stats.kstest(part, "uniform").pvalue > 0.002
    assert abs(np.corrcoef(z, low)[0, 1]) < 5 / n**0.5
    assert abs(np.corrcoef(np.abs(z), low)[0, 1]) < 5 / n**0.5
    assert abs(np.corrcoef(low[::2], low[1::2])[0, 1]) < 5 / (n / 2) ** 0.5


@pytest.mark.gpu
def test_the_root_is_correctly_rounded_on_the_gpu() -> None:
    """All 251,658,240 floats between 2**-24 and 2**6."""
    import triton as compiler
    import triton.language as tl

    from zeroblock.ops.shared.triton import sqrt

    @compiler.jit
    def roots(fast, exact, start, BLOCK: tl.constexpr):  # noqa: N803
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = (start + i).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(fast + i, sqrt(x))
        tl.store(exact + i, tl.sqrt_rn(x))

    low, high = (int(torch.tensor(v).view(torch.int32)) for v in (2.0**-24, 2.0**6))
    fast, exact = (torch.empty(high - low, device="cuda") for _ in range(2))
    roots[((high - low) // 1024,)](fast, exact, low, BLOCK=1024, enable_fp_fusion=False)
    assert torch.equal(fast, exact)


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        ("pass", False),
        ("torch.backends.cuda.matmul.allow_tf32 = True", True),
        ("torch.set_float32_matmul_precision('high')", True),
        ("torch.backends.fp32_precision = 'tf32'", True),  # as transformers sets it
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", True),
        ("torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'", False),
    ],
)
def test_tf32_is_read_whichever_way_it_was_set(setting: str, allowed: bool) -> None:
    """Torch raises an error where one way of asking meets the other way of setting."""
    if "fp32_precision" in setting and not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("torch before 2.9")
    code = f"import torch; {setting}; from zeroblock.ops.shared.dispatch import tf32_allowed; print(tf32_allowed())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(allowed)
