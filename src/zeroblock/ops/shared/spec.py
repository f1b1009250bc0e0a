"""The constants of ``docs/noise.md``, shared by all implementations of it.

The three polynomials are minimax fits, rounded to fp32:

    -2·ln(1 + f) = f·LOG(f)       on [√½ - 1, √2 - 1], relative error 2.6e-8
    sin(π·t)     = t·SIN(t²)      on [-½, ½],          relative error 5.3e-9
    cos(π·t)     =   COS(t²)      on [-½, ½],          absolute error 4.7e-8

so any accurate log, sin and cos reproduce the normals to 1e-6, and these
coefficients reproduce them to the bit.
"""

from __future__ import annotations

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def _f32(*hexes: str) -> tuple[float, ...]:
    return tuple(float.fromhex(h) for h in hexes)


LOG_BREAK = 0x4EB504F3  # bits of √½·2**31: mantissas are taken from [√½, √2)
LN_U = float.fromhex("-0x1.62e430p-23")  # -2·ln 2 / 2**23, for exponents that are left in place
ONE = 1 + 2.0**-23  # just above 1, so that no logarithm is 0
LOG = _f32(
    "-0x1.0p+1",
    "0x1.fffff8p-1",
    "-0x1.555792p-1",
    "0x1.00057p-1",
    "-0x1.98b748p-2",
    "0x1.5332a4p-2",
    "-0x1.3238fp-2",
    "0x1.263ba6p-2",
    "-0x1.65448ep-3",
)
SIN = _f32("0x1.921fb6p+1", "-0x1.4abbc2p+2", "0x1.4668bp+1", "-0x1.324ccap-1", "0x1.3daff6p-4")
COS = _f32("0x1.fffffep-1", "-0x1.3bd3a6p+2", "0x1.03bd06p+2", "-0x1.54f61ap+0", "0x1.c1f066p-3")
