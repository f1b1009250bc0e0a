"""Closures: the value of one, and the mode of its model while it runs."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, optimizer

from .errors import ZeroBlockError, ZeroBlockWarning
from .interrupt import uninterrupted

P = ParamSpec("P")
R = TypeVar("R")
Closure = Callable[[], Any]
"""Returns a number: a float, a numpy scalar or a tensor (averaged in fp32), from one micro-batch."""


def without_gradients(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function run under ``torch.no_grad()``, which Ctrl-C cannot leave switched on.

    >>> without_gradients(torch.is_grad_enabled)(), torch.is_grad_enabled()
    (False, True)
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with uninterrupted() as shield, torch.no_grad(), shield.opened():
            return function(*args, **kwargs)

    return call


def marked_if_profiled(func: Callable[P, R]) -> Callable[P, R]:
    """Wrap an optimizer's step in torch's profiler mark and hooks, if a profiler runs or there are hooks.

    The mark alone takes 25 microseconds on the host.
    """
    marked = Optimizer.profile_hook_step(func)

    @functools.wraps(marked)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        self = cast(Optimizer, args[0])
        hooks = (
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks,
            optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks,
        )  # fmt: skip
        plain = not any(hooks) and not torch._C._autograd._profiler_enabled()
        return (func if plain else marked)(*args, **kwargs)

    return call


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """A context that puts a model in evaluation mode, and restores the mode of every module on exit."""
    training = [module for module in model.modules() if module.training]
    with uninterrupted() as shield:
        try:
            for module in training:
                module.training = False
            with shield.opened():
                yield
        finally:
            for module in training:
                module.training = True


def value_of(closure: Closure) -> float:
    """The value of a closure at the weights that the model currently shows."""
    torch.clear_autocast_cache()  # it keeps 16-bit copies of the weights, which would hide the perturbation
    value = _number(closure())
    torch.clear_autocast_cache()
    return value


def _number(value: Any) -> float:
    if isinstance(value, Tensor):
        if value.dim() > 2:  # of examples and tokens, at most
            warnings.warn(
                f"the closure returned a tensor of shape {tuple(value.shape)}, and the step takes its mean for the "
                "loss: return one number, such as the loss of a model's output",
                ZeroBlockWarning,
                stacklevel=2,
            )
        wide = value.detach() if value.dtype == torch.float64 else value.detach().float()
        return float(wide.mean())
    if value is None:
        raise ZeroBlockError("the closure returned None; return the loss from it")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ZeroBlockError(
            f"the closure must return a number, got {type(value).__name__}; from a model's output return its loss"
        ) from error
