"""Models that torch wraps for several processes."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within ``DistributedDataParallel``, whose parameters have the names that journals know.

    Closures may call the wrapper: it has no gradients to reduce, and it no longer sends its buffers to the other
    ranks, as it would in the first forward pass.
    """
    if dist.is_available() and isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_forward_param_sync = False
        inner: nn.Module = model.module
        return inner
    return model
