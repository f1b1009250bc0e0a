"""Journals that zeroblock 0.1.0 wrote, kept in ``fixtures/`` so that every later version is tested to read them.

    PYTHONPATH=OLD/src:tests/journal python tests/journal/journal_fixture.py

with OLD a checkout of the version that shall be kept writes them anew.  The base weights come from a rule and not from
torch's generator, so that they are the same with every version of torch.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zeroblock as zb
from zeroblock.journal import Header, Journal, export

FOLDER = Path(__file__).with_name("fixtures")
HASHES = FOLDER / "weights.json"
STEPS, BAD_STEP = 13, 6
TURNS = ("lozo", "lozo_m", "mezo_bcd_adam", "subzero", "zo_muon")
"""Methods whose turns last longer than a journal here."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Ruled(nn.Module):
    """Matrices, vectors, a scalar-like vector and a tensor of three dimensions, in two layers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.LayerNorm(4), "up": nn.Linear(4, 3), "mix": nn.Conv1d(3, 2, 2)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(4)
        for place, param in enumerate(self.parameters()):
            k = torch.arange(param.numel(), dtype=torch.int64)
            values = ((7919 * k + 104_729 * place) % 2003 - 1001).double() / 4096
            param.data = values.view(param.shape).to(dtype)

    def loss(self) -> float:
        """A smooth function of every weight, in double precision, with no library routine that may change."""
        total = 0.0
        for place, param in enumerate(self.parameters()):
            for k, value in enumerate(param.detach().double().reshape(-1).tolist()):
                total += (value - math.sin(k + 3.0 * place)) ** 2 / 2
        return total


def halves(model: nn.Module) -> list[zb.Block]:
    """Blocks of one's own, which a header lists by name."""
    names = [name for name, _ in model.named_parameters()]
    return [zb.Block("even", tuple(names[::2])), zb.Block("odd", tuple(names[1::2]))]


def method(name: str) -> Any:
    """A method with turns short enough to change, at a rate that moves 16-bit weights."""
    options: dict[str, Any] = {"interval": 4} if name in TURNS else {}
    if name == "hizoo":
        options = {"alpha": 1e-3}
    return functools.partial(zb.METHODS[name], lr=1e-2, **options)


METHODS: dict[str, Any] = {name: method(name) for name in zb.METHODS}
VARIANTS: dict[str, Any] = {
    "in_place": functools.partial(zb.mezo, lr=1e-2, as_published=True),
    "in_place_low_rank": functools.partial(zb.lozo, lr=1e-2, interval=4, restore="subtract", probes=2),
    "in_place_one_sided": lambda model: zb.ZeroOrder(
        model, 1e-2, estimator=zb.OneSided(1e-3, 2), restore="subtract", partition=zb.whole
    ),
    "stale_factor": functools.partial(zb.lozo, lr=1e-2, interval=4, as_published=True, probes=2),
    "folded": functools.partial(zb.lozo, lr=1e-2, interval=8, fold=4),
    "folded_momentum": functools.partial(zb.lozo_m, lr=1e-2, interval=4, fold=2),
    "three_probes_decay_clip": functools.partial(zb.mezo_bcd, lr=1e-2, probes=3, weight_decay=0.1, clip=2.0),
    "one_sided_pairs": lambda model: zb.ZeroOrder(
        model, 1e-2, estimator=zb.OneSided(1e-3, 2), partition=functools.partial(zb.layers, k=2)
    ),
    "linears_sign": functools.partial(zb.zo_sign, lr=1e-2, partition=zb.linears),
    "own_blocks_bernoulli": lambda model: zb.ZeroOrder(
        model,
        1e-2,
        partition=halves(model),
        subspace=zb.Bernoulli(0.5),
        distribution=zb.Distribution.RADEMACHER,
        rounding=zb.Rounding.NEAREST,
        schedule=zb.FlipFlop(),
        interval=3,
        seed=2**64 - 1,
    ),
    "adam_probes_decay_masked": lambda model: zb.ZeroOrder(
        model,
        1e-2,
        subspace=zb.Bernoulli(0.75),
        estimator=zb.TwoSided(1e-3, 2),
        rule=zb.Adam((0.8, 0.99), reset=False),
        weight_decay=0.1,
        interval=2,
    ),
    "adam_low_rank": lambda model: zb.ZeroOrder(
        model, 1e-2, partition=zb.whole, subspace=zb.LowRank(3), rule=zb.Adam(reset=False), interval=4
    ),
    "momentum_sparse": lambda model: zb.ZeroOrder(
        model, 1e-2, subspace=zb.Sparse(0.5), rule=zb.Momentum(0.5, reset=True), interval=2, weight_decay=0.1
    ),
    "frozen_adaptive": lambda model: zb.mezo_bcd_adaptive(
        frozen(model), 1e-2, schedule=zb.Adaptive(warmup=3, temperature=0.5)
    ),
}
BUILDERS = {**METHODS, **VARIANTS}
NAMES = [f"{name}.{kind}" for name in BUILDERS for kind in ("fp32", "bf16")] + ["mezo_bcd.fp16", "mezo_adam.fp16"]


def frozen(model: nn.Module) -> nn.Module:
    model.get_submodule("layers.1").requires_grad_(False)
    return model


def run(name: str, path: Path) -> nn.Module:
    """Write the journal of a run; the model with its last weights."""
    kind, _, short = name.partition(".")
    model = Ruled(DTYPES[short])
    optimizer = BUILDERS[kind](model)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.25, total_iters=STEPS)
    with Journal.create(path, Header.of(optimizer, model="ruled", task="fixture", method=kind), fsync=None) as journal:
        for step in range(STEPS):
            optimizer.step((lambda: math.nan) if step == BAD_STEP else model.loss)
            journal.append(optimizer.record)
            rate.step()
    optimizer.settle()
    return model


def digest(model: nn.Module) -> str:
    """BLAKE2b of every parameter's bits, in order."""
    found = hashlib.blake2b(digest_size=16)
    for param in model.parameters():
        found.update(_bytes(param))
    return found.hexdigest()


def _bytes(param: Tensor) -> bytes:
    return param.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def main() -> None:
    warnings.simplefilter("ignore")
    FOLDER.mkdir(exist_ok=True)
    hashes = {}
    for name in NAMES:
        path = FOLDER / f"{name}.zbj"
        path.unlink(missing_ok=True)
        hashes[name] = digest(run(name, path))
    (FOLDER / "export.zbj").unlink(missing_ok=True)
    export(FOLDER / "mezo_bcd.bf16.zbj", FOLDER / "export.zbj", step=9)
    model = Ruled(torch.bfloat16)
    zb.load(model, FOLDER / "export.zbj")
    hashes["export"] = digest(model)
    whole = (FOLDER / "mezo_bcd.fp32.zbj").read_bytes()
    (FOLDER / "torn.zbj").write_bytes(whole[:-9])  # the last record lacks nine bytes
    HASHES.write_text(json.dumps(hashes, indent=1) + "\n")


if __name__ == "__main__":
    main()
