"""A step on the host: measure, wait for the losses, update."""

from __future__ import annotations

import contextlib

import torch

from ..closure import evaluation
from ..direction import visit
from ..errors import ZeroBlockError
from ..exclusive import exclusive
from ..interrupt import Shield
from ..reads import BACKWARD
from ..step import Numbers, Objective, Plan


def run(plan: Plan, objective: Objective, shield: Shield) -> Numbers:
    """Take a step; Ctrl-C may interrupt the measurement, and then nothing has moved.

    Args:
        plan: the step.
        objective: what is measured.
        shield: holds Ctrl-C back during the update.

    Returns:
        The numbers, on the host.
    """
    numbers = measure(plan, objective, shield)
    if bool(numbers.coeffs.isfinite().all()):
        plan.update(numbers.coeffs.tolist(), plan.estimator.curvatures(numbers.losses).tolist())
    return numbers


def measure(plan: Plan, objective: Objective, shield: Shield | None = None) -> Numbers:
    """The numbers of a step that is not taken yet; θ is the same, bit for bit, on return."""
    opened, grads = contextlib.nullcontext() if shield is None else shield.opened(), _grads(plan)
    with exclusive(plan.weights.model), evaluation(plan.weights.model), opened:
        if plan.weights.restore == "subtract":  # one walk, whatever the objective offers: it moves the weights
            losses = Objective.measure(objective, plan.points)
        else:
            losses = objective.measure(plan.points)
    if _grads(plan) > grads:
        raise ZeroBlockError(BACKWARD)
    return plan.shape(plan.gather(losses))


def _grads(plan: Plan) -> int:
    """A number that grows with every gradient that reaches the active block."""
    grads = (member.param.grad for member in plan.members)
    return sum(1 + grad._version for grad in grads if grad is not None)


def retake(plan: Plan) -> Numbers:
    """Take a step that was measured before, from its record.

    A run that measured in place walked the weights to every point and back, after which 16-bit
    weights are elsewhere; so this takes the same walk.
    """
    record = plan.estimator.recall(plan.turn.step)
    assert record is not None
    if plan.weights.restore == "subtract":
        visit(plan.points, lambda: 0.0)
    losses, coeffs = (torch.tensor(values, dtype=torch.float64) for values in (record.losses, record.coeffs))
    if record.finite:
        plan.update(record.coeffs, record.curvatures)
    return Numbers.of(torch.tensor(record.loss, dtype=torch.float64), losses, coeffs)
