"""Imported by the process that forks ranks: loads compiled kernels once, before there are any ranks."""

from __future__ import annotations

import sys

import rank_case
import torch

import zeroblock as zb

if "pytest" not in sys.modules:
    torch.set_num_threads(1)
    for name in ("mezo_adam", "lozo_m"):
        rank_case.alone(name, torch.bfloat16, 1, steps=1)
    zb.Engine(rank_case.decoders().decoder("llama"))
    assert zb.integrations.ZeroOrderTrainer
