"""Devices and dtypes by name."""

from __future__ import annotations

import torch

from .errors import ZeroBlockError, unknown

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""The names of dtypes on the command line."""


def find_device(name: torch.device | str = "auto") -> torch.device:
    """Find a device by its name; ``auto`` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ZeroBlockError(f"unknown device {str(name)!r}; choose auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ZeroBlockError(f"zeroblock does not run on the device {str(name)!r}; choose auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ZeroBlockError(f"the device is {str(name)!r}, but torch sees no GPU: use cpu or auto")
    return device


def precision(dtype: torch.dtype | str, device: torch.device) -> torch.dtype:
    """Find a dtype by its name; ``auto`` is fp32 on the CPU, and bf16 (or fp16, if it has no bf16) on a GPU."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        if device.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, ["auto", *DTYPES])
    return DTYPES[dtype]
