"""The table that the benchmarks of the elementwise operations share."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from .script import append, machine, positive, seconds, writable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Operations = dict[str, tuple[Callable[[], object], float]]
"""Operations by name, each with the bytes per element that it reads and writes."""


def arguments(doc: str | None) -> argparse.Namespace:
    """Parse the options of a benchmark; its help is the file's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--numel", type=positive, help="elements; 10**9 on cuda, 2**24 on the CPU by default")
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args()
    if args.csv:
        writable(args.csv)
    args.numel = args.numel or (10**9 if args.device == "cuda" else 1 << 24)
    return args


def name_of(dtype: torch.dtype) -> str:
    """A dtype without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def table(args: argparse.Namespace, operations: Callable[[Tensor], Operations], baseline: str) -> None:
    """Time every operation in every dtype, print a line for each and append the rows to the CSV.

    Args:
        args: the options that :func:`arguments` has parsed.
        operations: makes the operations on given weights.
        baseline: the name of the operation in plain torch.
    """
    n, rows = args.numel, []
    print(f"{machine(args.device)}, torch {torch.__version__}, {n:,} elements")
    print(f"{'operation':34} {'dtype':9} {'ms':>9} {'GB/s':>8} {'M elem/s':>9} {'× copy':>7} {'× torch':>8}")
    for dtype in DTYPES:
        x = torch.randn(n, device=args.device).mul_(0.02).to(dtype)
        y = torch.empty_like(x)
        named: Operations = {"copy": (functools.partial(y.copy_, x), 2 * x.element_size()), **operations(x)}
        times = {name: seconds(run, args.device) for name, (run, _) in named.items()}
        copied = 2 * n * x.element_size() / times["copy"]
        for name, (_, size) in named.items():
            bandwidth = size * n / times[name]
            row = {
                "operation": name,
                "dtype": name_of(dtype),
                "numel": n,
                "ms": round(times[name] * 1e3, 3),
                "gb_per_s": round(bandwidth / 1e9, 1),
                "elements_per_s": round(n / times[name]),
                "of_copy_bandwidth": round(bandwidth / copied, 3),
                "speedup_over_torch": round(times[baseline] / times[name], 2),
            }
            rows.append(row)
            print(
                f"{name:34} {row['dtype']:9} {row['ms']:9.3f} {row['gb_per_s']:8.1f} {n / times[name] / 1e6:9.0f} "
                f"{row['of_copy_bandwidth']:7.2f} {row['speedup_over_torch']:8.2f}"
            )
        del x, y, named
    append(args.csv, rows, args.device)
