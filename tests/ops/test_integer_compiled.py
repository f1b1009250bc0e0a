"""The kernels on integers, compiled for a GPU without one: the interpreter takes code that the compiler does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeroblock.ops.integer import triton as kernels

POINTERS = {"out_ptr": "*fp16", "minus_ptr": "*fp16", "scales_ptr": "*fp16", "zeros_ptr": "*i8", "clock_ptr": "*i64",
            "coeffs_ptr": "*fp32", "alpha": "fp32", "fading": "fp32"}
FORM = {"GROUP": 64, "LANES": True, "ALIGNED": True, "CLOCK": True, "PAIR": True, "PROBES": 2, "MASK": 2,
        "RADEMACHER": False, "STOCHASTIC": True, "FADES": True, "STREAM": 3, "GROUPS": 512}

def compiled(kernel, bits):
    types = POINTERS | {"codes_ptr": "*i8" if bits == 8 else "*i32"}
    constants = FORM | {"BITS": bits, "ZEROS": bits == 4}
    signature, known, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else types.get(name, "i32")
        if name in constants:
            known[(i,)] = constants[name]
        elif name == "n" or signature[name].startswith("*"):  # as launches find them: 16 divides it
            attributes[(i,)] = [["tt.divisibility", 16]]
    options = {"num_warps": 4, "enable_fp_fusion": False}
    source = ASTSource(kernel, signature, known, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]

for kernel in (kernels._perturb, kernels._move):
    assert not next(one for one in kernel.params if one.name == "n").do_not_specialize  # its divisors are looked at
for bits in (8, 4):
    for kernel, wide in ((kernels._expand, "st.global.v4.b32"), (kernels._perturb, "st.global.v4.b32"),
                         (kernels._move, "st.global.v2.b32" if bits == 8 else "st.global.b32")):
        ptx = compiled(kernel, bits)
        assert wide in ptx, (kernel, bits)
        assert "st.global.b8 " not in ptx and "st.global.b16 " not in ptx, (kernel, bits)
print("done")
"""


def test_every_kernel_compiles_and_stores_whole_words(tmp_path: object) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout == "done\n", ran.stderr
