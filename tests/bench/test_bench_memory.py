"""The table of memory: every method of the library, and what each really keeps from step to step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from toy import distance
from zeroblock.bench.claim import CLAIMS
from zeroblock.bench.memory import table
from zeroblock.cli import app
from zeroblock.cli.plan import ABOUT, CHOSEN
from zeroblock.method import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "methods.md"


def tiny(dtype: torch.dtype) -> nn.Module:
    layers = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
    return nn.ModuleDict({"embed": nn.Embedding(50, 12), "layers": layers}).to(dtype)


def test_every_method_has_a_row() -> None:
    assert [need.method for need in table(tiny(torch.float32), 4)] == list(METHODS)
    assert set(CLAIMS) <= set(METHODS)
    assert set(ABOUT | CHOSEN) == {*METHODS, "ft"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", METHODS)
def test_a_method_keeps_what_the_table_says(name: str, dtype: torch.dtype) -> None:
    """Its state, the sum of steps that are not folded yet, its anchor and its frames, after two steps."""
    model = tiny(dtype)
    need = next(need for need in table(model, dtype.itemsize) if need.method == name)
    folded = {"fold": 2, "interval": 2} if METHODS[name](model, lr=0.0).subspace.folds else {}
    optimizer = METHODS[name](model, lr=1e-6, **folded)
    loss = distance(model)
    kept = 0
    for _ in range(2):
        optimizer.step(loss, **({"anchor": loss} if name == "mezo_svrg" else {}))
        state = [value for values in optimizer.state.values() for value in values.values()]
        frames = [getattr(member.basis, side, None) for member in optimizer.members for side in ("left", "right")]
        beside = [*optimizer.weights.held.values(), *optimizer.weights.anchor.values(), *frames]
        now = sum(tensor.nbytes for tensor in (*state, *beside) if isinstance(tensor, torch.Tensor))
        kept = max(kept, now)
    if name == "mezo_bcd_adam":  # its memory is that of the largest block, whichever is active
        kept = 2 * dtype.itemsize * max(sum(p.numel() for p in block.parameters()) for block in model.values())
    if name == "zo_muon":  # its second frame is never made
        kept -= sum(m.basis.right.nbytes for m in optimizer.members if hasattr(m.basis, "right"))
    assert need.kept_here == kept


def test_the_page_has_the_table() -> None:
    """The section of docs/methods.md is what `zeroblock bench memory --model opt-13b --markdown` prints."""
    shown = CliRunner().invoke(app, ["bench", "memory", "--model", "opt-13b", "--markdown"])
    assert shown.exit_code == 0, shown.output
    section = PAGE.read_text(encoding="utf-8").partition("<!-- memory of every method -->\n")[2]
    assert section.partition("\n<!-- end of memory -->")[0].strip() == shown.stdout.strip()
