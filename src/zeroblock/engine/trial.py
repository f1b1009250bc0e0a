"""The trial of a model: whether packed examples score as they do alone."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import family
from ..closure import evaluation
from ..errors import ZeroBlockError
from ..exclusive import BusyError, exclusive
from ..ops.shared.dispatch import tf32_allowed
from ..task.encoding import Encoded
from ..weights import compiled
from .cut import CutError, Cuts, find
from .forward import Forward
from .objective import one_line
from .pack import Padded, pack, pad
from .pair import Pairs

PRECISE, ROUGH = 1e-3, 0.3
"""The largest differences per token that pass, with fp32 and with 16-bit products; bf16 on SmolLM2 differs by 0.07."""


@torch.no_grad()
def packs(forward: Forward, multiples: tuple[int, int]) -> bool:
    """Compare a packed row with single strings; if they differ, ``forward.reason`` says why.

    Args:
        forward: the forward pass of the model; the trial sets its ``max_length``, too.
        multiples: the multiples that the lengths of the trial's row are rounded up to.
    """
    virtual = family.virtual_tokens(forward.model)
    if virtual not in ("", "PREFIX_TUNING"):
        raise ZeroBlockError(
            f"an adapter of type {virtual} adds virtual tokens to the text, so scores would belong to the wrong "
            "tokens: use LoRA or prefix tuning"
        )
    if any(getattr(config, "is_encoder_decoder", False) for config in forward.configs):
        raise ZeroBlockError(
            f"{type(forward.model).__name__} is an encoder-decoder that does not read and write text (but speech "
            "or images, or it has no head), so the engine cannot build its batches: step on a closure in Python, "
            "optimizer.step(lambda: model(**batch).loss)"
        )
    examples = _specimens(forward)
    with exclusive(forward.model), evaluation(forward.model):
        alone = _alone(forward, [pad([one]) for one in examples])
        if virtual:
            forward.reason = (
                "a prefix is passed to every example as past_key_values, which a packed row does not support"
            )
            return False
        if compiled(forward.model):
            forward.reason = "it is compiled; give the plain model, whose steps are captured as graphs on a GPU"
            return False
        if not forward.told and any(map(family.counts_places, forward.configs)):
            forward.reason = "its own attention has a window or a bias that counts positions in the row"
            return False
        try:
            row, windows = pack(examples, *multiples).to(forward.device), set[int]()
            together = forward.totals(row, windows=windows)[0]
        except Exception as error:  # models of any family may raise anything on a packed row
            forward.reason = f"it cannot run a packed row ({one_line(error)})"
            return False
    named = itertools.chain.from_iterable(map(family.windows, forward.configs))
    if forward.masked:
        windows |= {size - 1 for size in windows}  # ModernBERT counts the keys on either side, without the query's own
    forward.alone_from = min(map(family.scaled_from, forward.configs), default=math.inf)
    kept = (size for size in named if size not in windows)
    forward.max_length = min((*kept, forward.alone_from), default=math.inf)
    difference = float(((alone - together) / row.lengths).abs().max())  # per token
    if not difference <= tolerance(forward):
        forward.reason = (
            f"packed examples do not score as they do alone (by {difference:.2g} per token): its layers carry "
            "something from token to token, or count positions in the row"
        )
        return False
    return True


@torch.no_grad()
def shares(forward: Forward) -> bool:
    """Compare options that share their contexts in an encoder-decoder with single ones; see :func:`packs`.

    Args:
        forward: the forward pass of the model.
    """
    if family.virtual_tokens(forward.model):
        raise ZeroBlockError(
            f"{type(forward.seq2seq).__name__} is an encoder-decoder, which runs without virtual tokens: use LoRA"
        )
    examples = _specimens(forward)
    strings = [one.only(k) for one in examples for k in range(len(one.options))]
    with exclusive(forward.model), evaluation(forward.model):
        alone = _alone(forward, [forward.pairs([one]) for one in strings])
        if compiled(forward.model):
            forward.reason = "it is compiled; give the plain model"
            return False
        row = forward.pairs(examples).to(forward.device)
        difference = float(((alone - forward.totals(row)[0]) / row.lengths).abs().max())  # per token
        if not difference <= tolerance(forward):
            raise ZeroBlockError(
                f"{type(forward.seq2seq).__name__} scores padded texts differently from single ones (by "
                f"{difference:.2g} per token): step on a closure in Python, optimizer.step(lambda: model(**batch).loss)"
            )
        try:
            forward.shares = True
            difference = float(((alone - forward.totals(row)[0]) / row.lengths).abs().max())
        except Exception as error:  # models of any family may raise anything
            forward.reason = f"its decoder cannot be given the states of several contexts ({one_line(error)})"
            return False
        finally:
            forward.shares = False
    if not difference <= tolerance(forward):
        forward.reason = f"options that share a context do not score as they do alone (by {difference:.2g} per token)"
        return False
    return True


def _alone(forward: Forward, rows: Sequence[Padded | Pairs]) -> Tensor:
    """The scores of single examples, in the model's own forward."""
    try:
        return torch.cat([forward.totals(row.to(forward.device))[0] for row in rows])
    except (torch.OutOfMemoryError, BusyError):
        raise
    except Exception as error:  # models of any family may raise anything
        raise ZeroBlockError(
            f"{type(forward.model).__name__} does not run on a short text ({one_line(error)})"
        ) from error


@torch.no_grad()
def cuts(forward: Forward, multiples: tuple[int, int]) -> Cuts | None:
    """The cuts of a model that can be packed; None if it cannot be cut, so that its pass is captured whole."""
    row = pack(_specimens(forward), *multiples).to(forward.device)
    with exclusive(forward.model), evaluation(forward.model):
        try:
            return find(forward.model, functools.partial(forward.totals, row))
        except CutError:
            return None


def tolerance(forward: Forward) -> float:
    """The largest difference per token that passes: for products in fp32, or in 16 bits or TF32."""
    if forward.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(forward.device.type):
        return ROUGH
    return ROUGH if tf32_allowed() and forward.device.type == "cuda" else PRECISE


def _specimens(forward: Forward) -> list[Encoded]:
    """Examples that score differently in a row than alone, unless the model attends only where the row says.

    They share a root, and the options of the last one lie far from their context, so that a wrong distance is a large
    one.
    """
    words = min((c.vocab_size for c in forward.configs if getattr(c, "vocab_size", None)), default=10)
    ids = (words // 4 + 37 * i % (words // 2 + 1) for i in itertools.count())  # usually no special tokens

    def some(count: int) -> tuple[int, ...]:
        return tuple(itertools.islice(ids, count))

    stem = some(1)
    if forward.masked:
        alike = some(7)
        return [
            Encoded(alike, (some(1), some(1)), mask=5),
            Encoded(some(2), (some(1),), mask=0),
            Encoded(some(24), (some(1), some(1)), mask=3),  # the words after the mask count too
            Encoded(alike, (some(1), some(1)), mask=2),
        ]
    root = some(2)  # all contexts begin with it
    return [
        Encoded(root + some(3), (stem + some(1), stem + some(2))),
        Encoded(root, (some(1), some(1))),
        Encoded(root + some(1), (some(4),)),
        Encoded(root + some(1), (some(24), some(24), some(5))),
    ]
