"""Steps on tokenised batches: packed rows through ``engine.objective_from`` and the closure ``model(**batch).loss``.

    python bench/bridge.py [--model opt-125m] [--method mezo_bcd ...] [--batch 16] [--steps 3]
                           [--threads 2] [--csv results/bridge.csv]

The batches are chats as TRL collates them: padded on the right to their longest row, with lengths that vary like
instructions, and with a loss on the answer.  Both ways take the same batches in turn, in one run, and the row has the
ratio of their medians.  Weights are random, which does not change the work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import zeroblock as zb
from zeroblock.bench.script import append, machine, positive, writable
from zeroblock.model import config

LONGEST = 160
"""Tokens of the longest row; the median is near 50, as in collections of short instructions."""


def build(name: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(name), dtype=torch.float32).eval()


def batches(rows: int, count: int, words: int) -> list[dict[str, torch.Tensor]]:
    """Padded batches of chats: a prompt of two thirds, an answer of one third."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        lengths = (50 * torch.empty(rows).log_normal_(0.0, 0.6, generator=generator)).clamp(8, LONGEST).long()
        places = torch.arange(int(lengths.max()))
        mask = places < lengths[:, None]
        ids = torch.randint(4, words, mask.shape, generator=generator).masked_fill(~mask, 1)
        scored = mask & (places >= lengths[:, None] * 2 // 3)
        made.append({"input_ids": ids, "attention_mask": mask.long(), "labels": ids.masked_fill(~scored, -100)})
    return made


def compare(args: argparse.Namespace, method: str) -> dict[str, object]:
    """Median seconds of a step both ways, and the difference of their losses."""
    model = build(args.model)
    data = batches(args.batch, args.steps + 1, int(model.config.vocab_size))
    engine, optimizer = zb.Engine(model), zb.METHODS[method](model, 0.0)  # lr 0: both measure the same weights
    taken: dict[str, list[float]] = {"packed": [], "plain": []}
    difference = 0.0
    for step, batch in enumerate(data):
        losses = {}
        state = optimizer.state_dict()
        for way in taken:
            optimizer.load_state_dict(state)  # the same block both times
            begin = time.perf_counter()
            objective = engine.objective_from(batch) if way == "packed" else lambda batch=batch: model(**batch).loss
            losses[way] = float(optimizer.step(objective))
            if step:  # the first is the warm-up
                taken[way].append(time.perf_counter() - begin)
        difference = max(difference, abs(losses["packed"] - losses["plain"]))
    packed, plain = (statistics.median(taken[way]) for way in ("packed", "plain"))
    padded = sum(batch["input_ids"].numel() for batch in data) / sum(int(b["attention_mask"].sum()) for b in data)
    print(
        f"{args.model}, {method}, {args.batch} rows: packed {packed:.3f} s, plain {plain:.3f} s per step, "
        f"×{plain / packed:.2f}; losses differ by {difference:.1e}; {padded:.2f} padded per real token"
    )
    return {
        "model": args.model, "method": method, "batch": args.batch, "threads": args.threads,
        "packed_s": round(packed, 4), "plain_s": round(plain, 4), "ratio": round(plain / packed, 3),
        "difference": difference, "padded_per_real_token": round(padded, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--method", nargs="+", default=["mezo_bcd"], choices=list(zb.METHODS))
    parser.add_argument("--batch", type=positive, default=16)
    parser.add_argument("--steps", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=2)
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args()
    if args.csv:
        writable(args.csv)
    torch.set_num_threads(args.threads)
    print(f"{machine('cpu')}, torch {torch.__version__}, {args.threads} threads")
    append(args.csv, [compare(args, method) for method in args.method], "cpu")


if __name__ == "__main__":
    main()
