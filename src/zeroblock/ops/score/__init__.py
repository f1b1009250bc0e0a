"""From logits to losses: sums of log-probabilities by option, and the losses of the examples that have these options.

Plain torch launches about thirty kernels of 1 to 5 µs each for this, eight of them for a logsumexp; here there are
three.  ``reference`` is plain torch, serves the CPU, and is what gradients flow through.  ``triton`` reads logits as
they are, without a copy in fp32.
"""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from ..shared.dispatch import backend

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of the logits that the kernels take."""


class Loss(enum.Enum):
    """The losses that are added up over a row."""

    OPTIONS = "options"
    """For each example the cross-entropy over its options, each by its mean log-probability per token."""
    ANSWER = "answer"
    """For each example the negative mean log-probability per token of its answer."""
    TOKENS = "tokens"
    """The negative log-probabilities of all scored tokens."""


class Scored(Protocol):
    """The N scored tokens of O options of E examples, and the places that predict them; all are int64."""

    @property
    def source(self) -> Tensor:
        """(N,) the place that predicts each token."""
        ...

    @property
    def target(self) -> Tensor:
        """(N,) its id."""
        ...

    @property
    def spans(self) -> Tensor:
        """(O, longest) the tokens of each option; N stands for none."""
        ...

    @property
    def lengths(self) -> Tensor:
        """(O,) number of tokens of each option."""
        ...

    @property
    def slots(self) -> Tensor:
        """(E, most options) the options of each example; O stands for none."""
        ...


def totals(logits: Tensor, row: Scored) -> Tensor:
    """Sums of log-probabilities by option, in an order that depends on shapes alone.

    Args:
        logits: (R, P, V) at the places that predict.
        row: the scored tokens, on the same device.

    Returns:
        (R, O) in fp32.
    """
    result: Tensor = _version(logits, row).totals(logits, row)
    return result


def losses(totals: Tensor, row: Scored, labels: Tensor, loss: Loss) -> Tensor:
    """The sum of a row's losses.

    Args:
        totals: (R, O) see :func:`totals`.
        row: as in :func:`totals`.
        labels: (E,) int64, the index of each example's right option; not read by ``TOKENS``.
        loss: the losses that are added up.

    Returns:
        (R,) in fp32.
    """
    result: Tensor = _version(totals, row).losses(totals, row, labels, loss)
    return result


def _version(x: Tensor, row: Scored) -> ModuleType:
    """The kernels, if no gradient has to flow through them and their inputs are on one device; else the reference."""
    kernels = x.is_cuda and x.dtype in DTYPES and type(x) is Tensor and x.device == row.source.device
    plain = not kernels or (torch.is_grad_enabled() and x.requires_grad)
    return backend("score", "reference" if plain else "cuda")
