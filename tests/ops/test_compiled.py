"""What runs in the interpreter also compiles for a GPU, without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {"_add_noise", "_add_noise_together", "_add", "_adam", "_advance", "_advance_outer", "_fill", "_packed"}
KERNELS |= {"_expand", "_perturb", "_move"}
KERNELS |= {"_rms_norm", "_layer_norm", "_rotate", "_gated", "_project", "_project_gated"}
KERNELS |= {"_norms", "_totals", "_losses", "_weigh"}


@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler for NVIDIA runs on Linux")
def test_every_kernel_compiles(tmp_path: Path) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compiled.py"))],
        env={**plain, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == KERNELS
