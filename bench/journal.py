"""The cost of writing a step to a journal, and the time to read a journal and to replay it.

    python bench/journal.py [--only write|read|replay ...] [--device cpu|cuda] [--model opt-125m]
                            [--method mezo_bcd ...] [--dtype float32 ...] [--steps N] [--csv results/journal.csv]

Weights are random and records synthetic: neither changes the work.  Bytes per second are those of the active
weights, read and written once per step, as if every step went through memory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import torch

import zeroblock as zb
from zeroblock.bench.script import append, machine, positive, seconds, writable
from zeroblock.journal import Header, Journal, Record, read, replay
from zeroblock.journal.format import dump
from zeroblock.model import config


def build(name: str, device: str, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config(name), dtype=dtype).eval()


def synthetic(optimizer: zb.ZeroOrder, steps: int) -> list[Record]:
    """Records of steps that the optimizer could have taken."""
    coeffs = np.random.default_rng(0).standard_normal(steps).astype(np.float32)
    turn, records = optimizer.turns.first(), []
    for step in range(steps):
        c = float(coeffs[step])
        records.append(Record(step, turn.block, (c,), 1e-6, (2.0 + 1e-3 * c, 2.0 - 1e-3 * c), 2.0))
        turn = optimizer.turns.after(turn, records[-1])
    return records


def writing(args: argparse.Namespace) -> list[dict[str, object]]:
    """Microseconds of ``Journal.append``, and their share of a step on the CPU (16 rows of 16 tokens)."""
    model = build("opt-125m", "cpu", torch.float32)
    optimizer = zb.mezo_bcd(model, 1e-6)
    header, records = Header.of(optimizer, model="opt-125m"), synthetic(optimizer, 20_000)
    tokens = torch.randint(4, 50_000, (16, 16), generator=torch.Generator().manual_seed(0))
    step = seconds(lambda: optimizer.step(lambda: model(input_ids=tokens, labels=tokens).loss), "cpu", repeats=7)
    rows = []
    for fsync in (1.0, None, 0.0):
        count = 500 if fsync == 0 else len(records)
        with tempfile.TemporaryDirectory() as folder:
            with Journal.create(Path(folder, "journal.zbj"), header, fsync=fsync) as journal:
                begin = time.perf_counter()
                for record in records[:count]:
                    journal.append(record)
                each = (time.perf_counter() - begin) / count
            size = Path(folder, "journal.zbj").stat().st_size
            begin = time.perf_counter()
            read(folder)
            reading = time.perf_counter() - begin
        label = {1.0: "every second", None: "never", 0.0: "every record"}[fsync]
        print(
            f"append, fsync {label:13} {each * 1e6:9.1f} µs per step, {each / step:.4%} of {step * 1e3:.0f} ms; "
            f"{count:,} steps: {size:,} bytes, read in {reading:.2f} s"
        )
        rows.append(
            row(f"append, fsync {label}", "opt-125m", "mezo_bcd", "float32", count, each * count, of_step=each / step)
        )
    return rows


def reading(args: argparse.Namespace) -> list[dict[str, object]]:
    """Seconds to read and check a million steps of one probe, and the peak memory."""
    steps = 1_000_000
    model = torch.nn.Linear(4, 4)
    header = Header.of(zb.mezo(model, 1e-6))
    draws = np.random.default_rng(0).standard_normal(steps).astype(np.float32).tolist()
    records = (Record(step, 0, (c,), 1e-6, (), 2.0) for step, c in enumerate(draws))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "journal.zbj")
        path.write_bytes(dump(header, records))
        taken = seconds(lambda: read(path), "cpu", repeats=5, warm=1)
        tracemalloc.start()
        found = read(path).records
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        begin = time.perf_counter()
        assert sum(1 for _ in found) == steps
        each = time.perf_counter() - begin
        size = path.stat().st_size
    print(
        f"read, {steps:,} steps, {size / 1e6:.0f} MB: {taken:.3f} s, {memory / 1e6:.0f} MB of memory at most; "
        f"every record looked at: {each:.1f} s more"
    )
    return [row("read", "", "mezo", "", steps, taken)]


def replaying(args: argparse.Namespace, method: str, dtype: torch.dtype) -> dict[str, object]:
    """Seconds to replay all steps."""
    options = {"fold": 50} if method.startswith("lozo") else {}  # as a run does
    label = " ".join([method, *(f"{name}={value}" for name, value in options.items())])
    optimizer = zb.METHODS[method](build(args.model, args.device, dtype), 1e-6, **options)
    records = synthetic(optimizer, args.steps)
    warm = zb.METHODS[method](build("opt-125m", args.device, dtype), 1e-6, **options)
    replay(warm, synthetic(warm, 100))  # compiles the kernels
    begin = time.perf_counter()
    replay(optimizer, records)
    if args.device == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - begin
    numel = [sum(optimizer.params[name].numel() for name in block.params) for block in optimizer.blocks]
    moved = sum(numel[record.block] for record in records)
    rate = 2 * moved * dtype.itemsize / taken
    print(
        f"replay, {args.model}, {label}, {name_of(dtype)}: {args.steps:,} steps in {taken:.1f} s, "
        f"{rate / 1e9:.0f} GB/s, {moved / taken / 1e9:.1f} G weights/s"
    )
    return row("replay", args.model, label, name_of(dtype), args.steps, taken, gb_per_s=rate / 1e9)


def row(
    operation: str, model: str, method: str, dtype: str, steps: int, taken: float, of_step: float | None = None,
    gb_per_s: float | None = None,
) -> dict[str, object]:  # fmt: skip
    return {
        "operation": operation,
        "model": model,
        "method": method,
        "dtype": dtype,
        "steps": steps,
        "seconds": round(taken, 4),
        "us_per_step": round(taken / steps * 1e6, 2),
        "of_step": None if of_step is None else round(of_step, 7),
        "gb_per_s": None if gb_per_s is None else round(gb_per_s, 1),
    }


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--model", default="opt-125m")
    parser.add_argument("--method", nargs="+", default=["mezo_bcd"], choices=list(zb.METHODS))
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--steps", type=positive, help="steps to replay; 20,000 on cuda, 100 on the CPU by default")
    parser.add_argument("--only", nargs="+", default=["write", "read", "replay"], choices=["write", "read", "replay"])
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args()
    args.steps = args.steps or (20_000 if args.device == "cuda" else 100)
    if args.csv:
        writable(args.csv)
    print(f"{machine(args.device)}, torch {torch.__version__}")
    rows: list[dict[str, object]] = []
    if args.device == "cpu":
        rows += writing(args) if "write" in args.only else []
        rows += reading(args) if "read" in args.only else []
    if "replay" in args.only:
        rows += [replaying(args, method, getattr(torch, dtype)) for dtype in args.dtype for method in args.method]
    append(args.csv, rows, args.device)


if __name__ == "__main__":
    main()
