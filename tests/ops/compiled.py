"""Compiles every Triton kernel for an H200 that is not there: ``python compiled.py`` prints one line per compilation.

The interpreter runs kernels that no compiler takes.  Here launches of the real functions become compilations
to machine code; nothing runs, and no GPU is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.jit import JITFunction

from zeroblock.engine.pack import pack
from zeroblock.noise import Distribution, Draw, Key, Mask, RandomMask, Rounding, Rows, SmallMask
from zeroblock.ops.adam.triton import adam_
from zeroblock.ops.attention.triton import packed
from zeroblock.ops.gate import Act
from zeroblock.ops.gate.triton import gated
from zeroblock.ops.integer import Integers
from zeroblock.ops.integer import triton as integer
from zeroblock.ops.noise.taker import Taker
from zeroblock.ops.noise.triton import add_noise_, add_noise_together_, fill_, laid_out
from zeroblock.ops.norm import Scaling
from zeroblock.ops.norm.triton import layer_norm, rms_norm
from zeroblock.ops.outer.triton import add_, add_outer_
from zeroblock.ops.project.triton import project, project_gated
from zeroblock.ops.replay import Matrix, Piece, Pieces, Steps, advance_
from zeroblock.ops.rotary.triton import rotate
from zeroblock.ops.score import Loss
from zeroblock.ops.score.triton import losses, totals
from zeroblock.ops.weigh.triton import weigh
from zeroblock.task.encoding import Encoded

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
SIZE, OFFSET = 50 * 101, 13
KEY = Key(3, 5)


class Absent(DriverBase):
    """Says what there would be to compile for."""

    def __init__(self) -> None:
        pass

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise AssertionError("there is nothing to run on")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_instead(kernel: JITFunction, grid: object) -> Any:
    def launch(*args: Any, **options: Any) -> None:
        built = kernel.run(*args, grid=grid, warmup=True, **options)
        print(kernel.__name__, len(built.asm["cubin"]))

    return launch


def masks(dtype: torch.dtype) -> tuple[Mask | None, ...]:
    """No mask, and with one dtype every kind."""
    return (None, SmallMask(0.1), RandomMask(KEY, 7)) if dtype == torch.bfloat16 else (None,)


def one_step(dtype: torch.dtype) -> None:
    x = torch.zeros(SIZE, dtype=dtype)
    how: dict[str, Any] = {"decay": 0.5, "rounding": Rounding.STOCHASTIC}
    draw = Draw(KEY, OFFSET)
    fill_(x, draw, (1.0,))
    for mask in masks(dtype):
        add_noise_(x, x, draw.to(mask=mask), (0.1, 0.2), **how)
    signs = draw.to(distribution=Distribution.RADEMACHER)
    plain = {**how, "decay": 1.0}
    add_noise_(x, x, signs, (0.1,), minus=x.clone(), **plain)
    add_(x, torch.zeros(SIZE), 0.1, draw, **how)
    add_outer_(x, torch.zeros(50, 3), torch.zeros(101, 3), 0.1, draw, **how)
    if dtype != torch.float64:
        clock = torch.zeros(2, dtype=torch.int64)
        add_noise_(x, x, signs.to(key=KEY.to(clock=clock)), torch.zeros(2), **plain)
        add_outer_(x, torch.zeros(50, 3), torch.zeros(101, 3), 0.1, draw.to(key=KEY.to(clock=clock)), **how)
        moment = torch.zeros(SIZE, dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16)
        constants = (0.9, 0.1, 0.999, 0.001, 1e-8)
        adam_(x, moment, moment.clone(), signs, (1.0,) * 5, constants, **plain)
        if dtype == torch.bfloat16:
            cut = signs.to(rows=Rows(101, 333))
            add_noise_(x, x, cut, (0.1,), **how)
            add_outer_(x, torch.zeros(50, 3), torch.zeros(101, 3), 0.1, cut, **how)
            adam_(x, moment, moment.clone(), cut, (1.0,) * 5, constants, **plain)


def many_tensors(dtype: torch.dtype) -> None:
    for n, clock in ((64, None), (61, torch.zeros(2, dtype=torch.int64))):  # aligned, and not
        draw = Draw(KEY.to(clock=clock), 16)
        takers = [Taker(torch.zeros(n, dtype=dtype), draw, Rounding.STOCHASTIC, 0.1) for _ in range(3)]
        table = laid_out(takers)
        assert table is not None
        copies = torch.zeros(table.about.size, dtype=dtype)
        add_noise_together_(takers, table, (1.0,), copies, copies.clone())
        add_noise_together_(takers, table, torch.zeros(2))
    decaying = [taker._replace(decay=0.9, draw=draw.to(distribution=Distribution.RADEMACHER)) for taker in takers]
    add_noise_together_(decaying, table, (0.1,))


def many_steps(dtype: torch.dtype) -> None:
    x = torch.zeros(SIZE, dtype=dtype)
    step = np.arange(5)
    steps = Steps(step, step // 2 * 2, np.ones((5, 2)), np.ones(5))
    for mask in masks(dtype):
        advance_(Pieces([Piece(x, Draw(KEY, OFFSET, mask=mask))]), steps, Rounding.STOCHASTIC)
    advance_(Matrix(x, Draw(KEY, OFFSET), 101, 3, fold=5), steps, Rounding.STOCHASTIC)


def attend(dtype: torch.dtype) -> None:
    row = pack([Encoded((1, 2, 3), ((4, 5), (6,)))])
    for size, window, cap in ((64, None, None), (80, 2, 30.0)):
        query, key = torch.zeros(2, 4, len(row.tokens), size, dtype=dtype), torch.zeros(2, 2, len(row.tokens), size)
        packed(query, key.to(dtype), key.to(dtype), row, 0.1, window, cap)


def layer(dtype: torch.dtype) -> None:
    x, vector, matrix = (
        torch.zeros(1, 5, 48, dtype=dtype),
        torch.zeros(48, dtype=dtype),
        torch.zeros(70, 48, dtype=dtype),
    )
    rms_norm(x, vector, 1e-5, Scaling.ROUNDED)
    layer_norm(x, vector, vector, 1e-5)
    heads = x.view(1, 5, 3, 16).transpose(1, 2)
    rotate(heads, heads, x[..., :16], x[..., :16])
    gated(x, x, Act.GELU_TANH)
    project(x, [matrix, matrix], [None, None])
    project_gated(x, matrix, matrix, Act.SILU)


def score(dtype: torch.dtype) -> None:
    row = pack([Encoded((1, 2, 3), ((4, 5), (6,)))])
    for words in (50257, 50272, 262144):
        found = totals(torch.zeros(2, len(row.keep), words, dtype=dtype), row)
    for loss in Loss:
        losses(found, row, torch.zeros(1, dtype=torch.int64), loss)


def integers(dtype: torch.dtype) -> None:
    draw, clock = Draw(KEY, 16), torch.zeros(2, dtype=torch.int64)
    for bits, codes in ((8, torch.zeros(3, 128, dtype=torch.int8)), (4, torch.zeros(3, 64, dtype=torch.uint8))):
        stored = Integers(codes, bits, torch.ones(3, 2, dtype=dtype), torch.zeros(3, 2, dtype=torch.int8))
        integer.expand(stored)
        timed = draw.to(key=KEY.to(clock=clock))
        integer.perturb_pair(stored, timed, 1e-3, Rounding.STOCHASTIC)
        integer.add_noise_(stored, timed, torch.zeros(2), 0.9, Rounding.STOCHASTIC)
    integer.perturb(stored._replace(zeros=None), draw.at(3), -1e-3, Rounding.NEAREST)


if __name__ == "__main__":
    triton.runtime.driver.set_active(Absent())
    JITFunction.__getitem__ = compile_instead  # type: ignore[method-assign]
    for dtype in DTYPES:
        one_step(dtype)
        if dtype != torch.float64:
            many_tensors(dtype)
        if dtype in (torch.float32, torch.bfloat16):  # what depends on the dtype otherwise is in one_step, too
            many_steps(dtype)
            attend(dtype)
            layer(dtype)
            score(dtype)
    integers(torch.bfloat16)
    for probes in (1, 8, 64):
        numbers = torch.zeros(probes, dtype=torch.float64)
        weigh(numbers, torch.tensor([True]), torch.zeros(3, 2, dtype=torch.float64), 1)
