"""The GPU kernels (Triton): norms of pieces of the vocabulary, totals by option, losses by point.

Their shapes depend only on the vocabulary, and they are not specialised on a row's numbers and tables, so one row
compiles the kernels for all: later rows are captured without a trial.  The order of sums depends only on
shapes.  A log-probability is (x - max) - log Σ exp(x - max), which is more exact than x minus a norm in fp32:
with logits around 30, such a norm is exact only to 2e-6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import Loss, Scored

WORDS, WORDS_WARPS = 8192, 8  # a piece of the vocabulary: 32 numbers per thread, all read at once
TOKENS = 128  # of an option at a time
EXAMPLES, OPTIONS = 32, 16  # of a row at a time
KINDS = {Loss.OPTIONS: 0, Loss.ANSWER: 1, Loss.TOKENS: 2}


@triton.jit
def finite(x):
    """x with 0 in place of infinities, whose difference would be NaN; torch.logsumexp does the same."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@triton.jit(do_not_specialize=["places", "row_at", "place_at"])
def _norms(
    logits_ptr, tops_ptr, sums_ptr, words, places, row_at, place_at, ALIGNED: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """max x and Σ exp(x - max) of a piece of the vocabulary at one place."""
    place = tl.program_id(0)
    first = (place // places).to(tl.int64) * row_at + (place % places).to(tl.int64) * place_at
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    x = tl.load(logits_ptr + first + word, mask=word < words, other=-float("inf")).to(tl.float32)
    top = tl.max(x, 0)  # on a GPU max ignores NaN, and the sum does not
    out = place.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    tl.store(tops_ptr + out, top)
    tl.store(sums_ptr + out, tl.sum(tl.exp(x - finite(top)), 0))


@triton.jit(
    do_not_specialize=[
        "source_ptr", "target_ptr", "spans_ptr", "places", "row_at", "place_at", "scored", "longest"
    ]
)  # fmt: skip
def _totals(
    logits_ptr, tops_ptr, sums_ptr, source_ptr, target_ptr, spans_ptr, out_ptr,
    words, pieces, places, row_at, place_at, scored, longest, TOKENS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """The log-probability of one option at one point."""
    option = tl.program_id(0)
    r = tl.program_id(1).to(tl.int64)
    piece = tl.arange(0, PIECES)[None, :]
    total = tl.zeros([TOKENS], tl.float32)
    for start in range(0, longest, TOKENS):
        at = start + tl.arange(0, TOKENS)
        n = tl.load(spans_ptr + option.to(tl.int64) * longest + at, mask=at < longest, other=scored)
        there = n < scored
        source = tl.load(source_ptr + n, mask=there, other=0)
        target = tl.load(target_ptr + n, mask=there, other=0)
        known = there & (target >= 0) & (target < words)  # torch raises for others; here they are NaN
        x = tl.load(logits_ptr + r * row_at + source * place_at + target, mask=known, other=float("nan"))
        norm = (r * places + source)[:, None] * pieces + piece
        real = there[:, None] & (piece < pieces)
        tops = tl.load(tops_ptr + norm, mask=real, other=-float("inf"))
        sums = tl.load(sums_ptr + norm, mask=real, other=0.0)
        top = finite(tl.max(tops, 1))
        norm_sum = tl.sum(sums * tl.exp(tops - top[:, None]), 1)
        total += tl.where(there, (x.to(tl.float32) - top) - tl.log(norm_sum), 0.0)
    tl.store(out_ptr + r * tl.num_programs(0) + option, tl.sum(total, 0))


@triton.jit
def mean(totals_ptr, lengths_ptr, slot, choices):
    """The mean log-probability per token of the options in some slots; -inf where there is none."""
    there = slot < choices
    total = tl.load(totals_ptr + slot, mask=there, other=0.0)
    length = tl.load(lengths_ptr + slot, mask=there, other=1).to(tl.float32)
    return tl.where(there, tl.div_rn(total, length), -float("inf"))


@triton.jit(do_not_specialize=["totals_ptr", "lengths_ptr", "slots_ptr", "labels_ptr", "choices", "examples", "most"])
def _losses(
    totals_ptr, lengths_ptr, slots_ptr, labels_ptr, out_ptr, choices, examples, most,
    KIND: tl.constexpr, EXAMPLES: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The sum of the losses at one point."""
    mine = totals_ptr + tl.program_id(0).to(tl.int64) * choices
    acc = tl.zeros([EXAMPLES], tl.float32)
    if KIND == 2:
        for start in range(0, choices, EXAMPLES):
            option = start + tl.arange(0, EXAMPLES)
            acc -= tl.load(mine + option, mask=option < choices, other=0.0)
    else:
        for start in range(0, examples, EXAMPLES):
            e = start + tl.arange(0, EXAMPLES)
            inside = e < examples
            slots = slots_ptr + e.to(tl.int64) * most
            label = tl.load(labels_ptr + e, mask=inside, other=0)
            known = inside & (label >= 0) & (label < most)  # the loss of others is infinite
            right = mean(mine, lengths_ptr, tl.load(slots + label, mask=known, other=choices), choices)
            loss = -right
            if KIND == 0:
                top = tl.full([EXAMPLES], -float("inf"), tl.float32)
                norm = tl.zeros([EXAMPLES], tl.float32)
                for k in range(0, most, OPTIONS):
                    option = k + tl.arange(0, OPTIONS)[None, :]
                    real = inside[:, None] & (option < most)
                    slot = tl.load(slots[:, None] + option, mask=real, other=choices)
                    x = mean(mine, lengths_ptr, slot, choices)
                    above = tl.maximum(top, tl.max(x, 1))
                    base = finite(above)
                    norm = norm * tl.exp(top - base) + tl.sum(tl.exp(x - base[:, None]), 1)
                    top = above
                loss = (finite(top) - right) + tl.log(norm)
            acc += tl.where(inside, loss, 0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(acc, 0))


def totals(logits: Tensor, row: Scored) -> Tensor:
    """See ``reference.py``."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, places, words = logits.shape
    row_at, place_at, _ = logits.stride()
    options, longest = row.spans.shape
    pieces = triton.cdiv(words, WORDS)
    tops, sums = (torch.empty(rows * places, pieces, dtype=torch.float32, device=logits.device) for _ in range(2))
    out = torch.empty(rows, options, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _norms[(rows * places, pieces)](
            logits, tops, sums, words, places, row_at, place_at,
            ALIGNED=row_at % 16 == 0 and place_at % 16 == 0, WORDS=WORDS, num_warps=WORDS_WARPS,
        )  # fmt: skip
        _totals[(options, rows)](
            logits, tops, sums, row.source.contiguous(), row.target.contiguous(), row.spans.contiguous(), out,
            words, pieces, places, row_at, place_at, len(row.source), longest,
            TOKENS=TOKENS, PIECES=triton.next_power_of_2(pieces), num_warps=4,
        )  # fmt: skip
    return out


def losses(totals: Tensor, row: Scored, labels: Tensor, loss: Loss) -> Tensor:
    """See ``reference.py``."""
    rows, options = totals.shape
    examples, most = row.slots.shape
    out = torch.empty(rows, dtype=torch.float32, device=totals.device)
    with torch.cuda.device_of(totals):
        _losses[(rows,)](
            totals.contiguous(), row.lengths.contiguous(), row.slots.contiguous(), labels.contiguous(), out,
            options, examples, most, KIND=KINDS[loss], EXAMPLES=EXAMPLES, OPTIONS=OPTIONS, num_warps=4,
        )  # fmt: skip
    return out
