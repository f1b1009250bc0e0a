"""The GPU kernel (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import Act

SIZE = 1024


@triton.jit
def activate(x, GELU: tl.constexpr):
    """act(x) in fp32."""
    if GELU:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * tl.sigmoid(2.0 * inner)  # (1 + tanh t)/2 = σ(2t)
    return x * tl.sigmoid(x)


@triton.jit
def _gated(gate_ptr, up_ptr, out_ptr, n, GELU: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    act = activate(gate, GELU).to(DTYPE).to(tl.float32)  # rounded twice, as torch does
    tl.store(out_ptr + at, (act * up).to(DTYPE), mask=inside)


def gated(gate: Tensor, up: Tensor, act: Act) -> Tensor:
    """See ``reference.py``."""
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    with torch.cuda.device_of(gate):
        _gated[(triton.cdiv(gate.numel(), SIZE),)](
            gate, up, out, gate.numel(), GELU=act is Act.GELU_TANH, SIZE=SIZE, num_warps=4
        )
    return out
