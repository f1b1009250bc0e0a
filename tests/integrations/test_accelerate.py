"""Loops of Accelerate and of Lightning: what works gives the bits of optimizer.step, what cannot work says so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate")
from trainer_toy import Collator, model, rows, same_weights  # noqa: E402

import zeroblock as zb  # noqa: E402


def taken(mine: Any, optimizer: Any, loader: Any, scheduler: Any, packed: bool) -> None:
    """An epoch of steps over two micro-batches each."""
    engine, batches = zb.Engine(mine), list(loader)
    for pair in zip(batches[::2], batches[1::2], strict=True):
        if packed:
            optimizer.step([engine.objective_from(batch) for batch in pair])
        else:
            optimizer.step([functools.partial(loss, mine, batch) for batch in pair])
        scheduler.step()


def loss(mine: Any, batch: dict[str, Tensor]) -> Tensor:
    return mine(**batch).loss


@pytest.mark.parametrize("packed", [True, False])
def test_prepared_objects_give_the_bits_of_the_plain_ones(tmp_path: Path, packed: bool) -> None:
    models = []
    for accelerated in (True, False):
        mine = model()
        zero_order = zb.mezo_bcd(mine, lr=1e-2)
        loader: Any = DataLoader(rows(16), batch_size=4, collate_fn=Collator())  # type: ignore[arg-type]
        scheduler = torch.optim.lr_scheduler.LinearLR(zero_order, 1.0, 0.1, 4)
        objects = (mine, zero_order, loader, scheduler)
        if accelerated:
            accelerator = accelerate.Accelerator(cpu=True)
            objects = accelerator.prepare(*objects)
        taken(*objects, packed)
        if accelerated:
            accelerator.save_state(str(tmp_path))
            taken(*objects, packed)
            accelerator.load_state(str(tmp_path))
        assert zero_order.steps == 2
        taken(*objects, packed)
        models.append(mine)
    assert same_weights(*models)


def test_backward_is_of_no_use_and_said_so() -> None:
    mine, accelerator = model(), accelerate.Accelerator(cpu=True)
    mine, optimizer = accelerator.prepare(mine, zb.mezo_bcd(mine, lr=1e-2))
    accelerator.backward(loss(mine, Collator()(rows(4))))
    with pytest.raises(zb.ZeroBlockError, match=r"accelerator.backward\(\)\) are not used: write optimizer.step"):
        optimizer.step()


class Closure:
    """What Lightning's automatic optimization hands to ``optimizer.step``: it runs ``training_step`` and backward."""

    def __init__(self, training_step: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> None:
        self.training_step, self.optimizer = training_step, optimizer

    @torch.enable_grad()
    def __call__(self) -> Tensor:
        result = self.training_step()
        self.optimizer.zero_grad()
        result.backward()
        return result.detach()


def test_a_closure_that_runs_backward_is_refused_and_moves_nothing() -> None:
    mine, batch = model(), Collator()(rows(4))
    optimizer = zb.mezo_bcd(mine, lr=1e-2)
    step = functools.partial(loss, mine, batch)
    message = r"the closure runs backward.*automatic_optimization = False"
    with pytest.raises(zb.ZeroBlockError, match=message):
        optimizer.step(functools.partial(lambda closure: closure(), Closure(step, optimizer)))
    assert same_weights(mine, model())
    assert optimizer.steps == 0
    with torch.enable_grad():  # gradients of an earlier phase of training, by backpropagation
        step().backward()
    optimizer.step(step)
    with pytest.raises(zb.ZeroBlockError, match=message):
        optimizer.step(lambda: accumulating(step))


@torch.enable_grad()
def accumulating(step: Callable[[], Tensor]) -> Tensor:
    (result := step()).backward()
    return result


def test_a_tensor_is_no_model() -> None:
    for wrong in (nn.Parameter(torch.ones(2)), [{"params": []}], "gpt2"):
        with pytest.raises(zb.ZeroBlockError, match="takes the model itself"):
            zb.ZeroOrder(wrong, lr=1.0)  # type: ignore[arg-type]
