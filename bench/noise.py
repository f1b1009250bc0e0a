"""Throughput of the noise kernels against torch.normal + add and against a plain copy.

    python bench/noise.py [--device cpu|cuda] [--numel N] [--csv results/noise.csv]

Bytes are those of the weights, read and written once; a ratio compares rows of one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch

from record import append, machine, positive, seconds, writable
from zeroblock import ops
from zeroblock.noise import Distribution, Draw, Key, Rounding

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--numel", type=positive, help="elements; 10**9 on cuda, 2**24 on the CPU by default")
    parser.add_argument("--csv", help="append the rows to this file")
    args = parser.parse_args()
    if args.csv:
        writable(args.csv)
    n = args.numel or (10**9 if args.device == "cuda" else 1 << 24)
    rows = []
    print(f"{machine(args.device)}, torch {torch.__version__}, {n:,} elements")
    print(f"{'operation':34} {'dtype':9} {'ms':>9} {'GB/s':>8} {'M elem/s':>9} {'× copy':>7} {'× torch':>8}")
    for dtype in DTYPES:
        x = torch.randn(n, device=args.device).mul_(0.02).to(dtype)
        y = torch.empty_like(x)
        steps = iter(range(10**6))

        def baseline(x: torch.Tensor = x) -> object:
            return x.add_(torch.normal(0.0, 1.0, x.shape, device=x.device, dtype=x.dtype), alpha=1e-6)

        def add(
            x: torch.Tensor = x,
            steps: Iterator[int] = steps,
            distribution: Distribution = Distribution.NORMAL,
            rounding: Rounding = Rounding.STOCHASTIC,
        ) -> object:
            return ops.add_noise_(x, Draw(Key(0, next(steps)), distribution=distribution), 1e-6, rounding=rounding)

        def pair(x: torch.Tensor = x, steps: Iterator[int] = steps) -> object:
            return ops.perturb_pair(x, Draw(Key(0, next(steps))), 1e-3)

        operations: dict[str, tuple[Callable[[], object], int]] = {
            "copy": (lambda x=x, y=y: y.copy_(x), 2),
            "torch.normal + add_": (baseline, 2),
            "add_noise_": (add, 2),
            "add_noise_, nearest": (lambda add=add: add(rounding=Rounding.NEAREST), 2),
            "add_noise_, Rademacher": (lambda add=add: add(distribution=Distribution.RADEMACHER), 2),
            "perturb_pair": (pair, 3),
        }
        times = {name: seconds(run, args.device) for name, (run, _) in operations.items()}
        for name, (_, passes) in operations.items():
            bandwidth = passes * n * x.element_size() / times[name]
            row = {
                "operation": name,
                "dtype": str(dtype).removeprefix("torch."),
                "numel": n,
                "ms": round(times[name] * 1e3, 3),
                "gb_per_s": round(bandwidth / 1e9, 1),
                "elements_per_s": round(n / times[name]),
                "of_copy_bandwidth": round(bandwidth / (2 * n * x.element_size() / times["copy"]), 3),
                "speedup_over_torch": round(times["torch.normal + add_"] / times[name], 2),
            }
            rows.append(row)
            print(
                f"{name:34} {row['dtype']:9} {row['ms']:9.3f} {row['gb_per_s']:8.1f} {n / times[name] / 1e6:9.0f} "
                f"{row['of_copy_bandwidth']:7.2f} {row['speedup_over_torch']:8.2f}"
            )
        del x, y
    append(args.csv, rows, args.device)


if __name__ == "__main__":
    main()
