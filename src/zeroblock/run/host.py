"""A step on the host: measure, wait for the losses, update."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..closure import evaluation, value_of
from ..direction import visit
from ..errors import ZeroBlockError
from ..exclusive import exclusive
from ..interrupt import Shield
from ..number import Numbers
from ..plan import Plan
from ..reads import BACKWARD
from ..step import Objective


def run(plan: Plan, objective: Objective, shield: Shield) -> Numbers:
    """Take a step; Ctrl-C may interrupt the measurement, and then nothing has moved.

    Args:
        plan: the step.
        objective: the objective to measure.
        shield: holds Ctrl-C back during the update.

    Returns:
        The numbers, on the host.
    """
    with _lifted(plan):
        numbers = measure(plan, objective, shield)
        if bool(numbers.coeffs.isfinite().all()):
            plan.update(numbers.coeffs.tolist(), plan.estimator.curvatures(numbers.losses).tolist())
    return numbers


@contextlib.contextmanager
def _lifted(plan: Plan) -> Iterator[None]:
    """A context in which the active block is on the device that measures and moves it, if it fits there."""
    shelf = plan.weights.shelf
    with shelf.lifted(plan.members):
        if plan.weights.restore == "subtract":  # measuring moves the weights, too
            for _ in shelf.visits(plan.members):
                pass
        yield


def measure(plan: Plan, objective: Objective, shield: Shield | None = None) -> Numbers:
    """The numbers of a step that is not taken yet; unless restore="subtract", θ is the same on return, bit for bit."""
    opened, grads = contextlib.nullcontext() if shield is None else shield.opened(), _grads(plan)
    with contextlib.nullcontext() if plan.team is None else plan.team.telling(plan.points, plan.turn.step):
        with exclusive(plan.weights.model), evaluation(plan.weights.model), opened:
            losses = _losses(plan, objective) if plan.team is None else _shared_losses(plan, objective)
        if _grads(plan) > grads:
            raise ZeroBlockError(BACKWARD)
    return plan.shape(plan.gather(losses, [part.weight for part in objective.parts]))


def _losses(plan: Plan, objective: Objective) -> Tensor:
    """(points,) the losses of a step that one process takes alone."""
    if plan.weights.restore == "subtract":  # one walk, whatever the objective offers: a walk moves weights
        return Objective.measure(objective, plan.points)
    return objective.measure(plan.points)


def _shared_losses(plan: Plan, objective: Objective) -> Tensor:
    """(micro-batches, points) the losses of each of this rank's micro-batches at each point that it measures."""
    assert plan.team is not None
    parts, mine = objective.parts, [i for group in plan.team.mine(plan.points) for i in group]
    plan.team.admit(len(parts), plan.turn.step)
    if plan.weights.restore == "subtract":  # every rank takes the whole walk, which moves 16-bit weights
        wanted = iter([i in mine for i in range(len(plan.points))])
        walked = visit(plan.points, lambda: [value_of(part) for part in parts] if next(wanted) else None)
        table = [values for values in walked if values is not None]
        return torch.tensor(table, dtype=torch.float64).reshape(len(mine), len(parts)).T
    losses = [torch.cat([part.measure(group).double().cpu() for group in plan.mine]) for part in parts if mine]
    return torch.stack(losses) if losses else torch.empty(len(parts), len(mine), dtype=torch.float64)


def _grads(plan: Plan) -> int:
    """A number that grows with every gradient that reaches the active block."""
    grads = (member.param.grad for member in plan.members)
    return sum(1 + grad._version for grad in grads if grad is not None)


def retake(plan: Plan) -> Numbers:
    """Take a step that was measured before, from its record.

    A run that measured in place walked the weights to every point and back, which leaves 16-bit
    weights at other values; so this takes the same walk.
    """
    record = plan.estimator.recall(plan.turn.step)
    assert record is not None
    losses, coeffs = (torch.tensor(values, dtype=torch.float64) for values in (record.losses, record.coeffs))
    with _lifted(plan):
        if plan.weights.restore == "subtract":
            visit(plan.points, lambda: 0.0)
        if record.finite:
            plan.update(record.coeffs, record.curvatures)
    return Numbers.of(torch.tensor(record.loss, dtype=torch.float64), losses, coeffs)
