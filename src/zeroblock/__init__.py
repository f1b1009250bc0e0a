"""Fine-tune language models with forward passes only, one block at a time.

>>> import torch, zeroblock as zb
>>> model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])})
>>> optimizer = zb.mezo_bcd(model, lr=1e-3)
>>> loss = optimizer.step(lambda: sum(layer(torch.ones(4)).square().sum() for layer in model["layers"]))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from . import integrations
    from .block import Block, layers, linears, whole
    from .engine import Engine
    from .errors import ZeroBlockError, ZeroBlockWarning
    from .estimator import Anchored, Curvature, Greedy, OneSided, Replay, Standardized, TwoSided
    from .journal import load, unload
    from .method import (
        METHODS,
        adalezo,
        adamezo,
        conmezo,
        eggroll,
        fzoo,
        fzoo_bcd,
        hizoo,
        lezo,
        lozo,
        lozo_m,
        mezo,
        mezo_adam,
        mezo_bcd,
        mezo_bcd_adam,
        mezo_bcd_adaptive,
        mezo_greedy,
        mezo_svrg,
        sparse_mezo,
        subzero,
        zo_momentum,
        zo_muon,
        zo_sign,
    )
    from .noise import Distribution, Draw, Key, RandomMask, Rounding, SmallMask
    from .offload import shelve, unshelve
    from .ops import add_noise_, normal, perturb, perturb_pair
    from .optimizer import ZeroOrder
    from .ranks import Ranks
    from .record import Record
    from .rerun import replay
    from .rule import SGD, Adam, AnchorSGD, Cone, Hessian, Momentum, Muon, Normalized, RecallAdam, Sign
    from .schedule import (
        Adaptive,
        Ascending,
        Bandit,
        Descending,
        Economical,
        FlipFlop,
        Proportional,
        Shuffled,
        Subset,
        Uniform,
    )
    from .subspace import Bernoulli, Frames, Full, LowRank, Outer, Relative, Sparse

_MODULES = {
    "block": "Block layers linears whole",
    "engine": "Engine",
    "errors": "ZeroBlockError ZeroBlockWarning",
    "estimator": "Anchored Curvature Greedy OneSided Replay Standardized TwoSided",
    "journal": "load unload",
    "method": "METHODS adalezo adamezo conmezo eggroll fzoo fzoo_bcd hizoo lezo lozo lozo_m mezo mezo_adam mezo_bcd "
    "mezo_bcd_adam mezo_bcd_adaptive mezo_greedy mezo_svrg sparse_mezo subzero zo_momentum zo_muon zo_sign",
    "offload": "shelve unshelve",
    "noise": "Distribution Draw Key RandomMask Rounding SmallMask",
    "ops": "add_noise_ normal perturb perturb_pair",
    "optimizer": "ZeroOrder",
    "ranks": "Ranks",
    "record": "Record",
    "rerun": "replay",
    "rule": "SGD Adam AnchorSGD Cone Hessian Momentum Muon Normalized RecallAdam Sign",
    "schedule": "Adaptive Ascending Bandit Descending Economical FlipFlop Proportional Shuffled Subset Uniform",
    "subspace": "Bernoulli Frames Full LowRank Outer Relative Sparse",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted([*_HOME, "integrations"])


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line can answer without torch."""
    if name == "Estimate":  # its name until 0.1
        from .errors import warn_renamed
        from .number import Numbers

        warn_renamed("zeroblock.Estimate", "zeroblock.step.Numbers")
        return Numbers
    if name == "integrations":
        return importlib.import_module(".integrations", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'zeroblock' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
