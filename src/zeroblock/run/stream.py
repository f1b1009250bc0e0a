"""A step on the device, kernel by kernel: the host waits for none of them and can pack the next batch."""

from __future__ import annotations

import contextlib

import torch

from ..closure import evaluation
from ..exclusive import exclusive
from ..number import Numbers
from ..plan import Plan
from ..step import Objective


def run(plan: Plan, objective: Objective) -> Numbers | None:
    """Submit a step.

    Args:
        plan: a capturable step.
        objective: the objective to measure.

    Returns:
        The numbers, on the device; None, with nothing moved, if the objective needs the host.
    """
    telling = contextlib.nullcontext() if plan.team is None else plan.team.telling(plan.points, plan.turn.step)
    with telling, exclusive(plan.weights.model), evaluation(plan.weights.model):
        losses = objective.submit(plan.measured)
    if losses is None:
        return None
    plan.prepare()
    rate = torch.tensor([plan.lr, 1.0, plan.amount(objective.weight)], dtype=torch.float64, device="cpu")
    lr, live, amount = (rate.pin_memory() if losses.is_cuda else rate).to(losses.device, non_blocking=True).split(1)
    numbers = plan.shape(plan.gather_on_device(losses, amount))
    plan.update_on_device(numbers.coeffs, lr, live)  # last: a failure before it has moved nothing
    return numbers
