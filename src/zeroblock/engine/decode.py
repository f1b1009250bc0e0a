"""The pass of an encoder-decoder over pairs: every context is encoded once, and serves all its strings in the decoder.

The model's own forward runs once.  Between its encoder and its decoder, a hook gives each string the states of its
context; before the head, another hook keeps only the places that are scored.  If the points of a step part in the
encoder, every context has a row per point from there on; if they part in the decoder, the whole encoder runs once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from .anatomy import ForkError
from .fork import Fork
from .pair import Pairs

STATES, MASK, IDS = "encoder_hidden_states", "encoder_attention_mask", "input_ids"
"""Arguments with which transformers' models call their decoders."""


@contextlib.contextmanager
def decoding(
    model: Any, row: Pairs, fork: Fork | None, entrances: Sequence[nn.Module] = ()
) -> Iterator[Callable[[Tensor], Tensor]]:
    """A context in which an encoder-decoder runs on pairs; call the model with :func:`encoder_inputs`.

    Args:
        model: a model of transformers, with a decoder and a head.
        row: the pairs that will run.
        fork: the state of the pass, if it is forked; enter ``forking`` first.
        entrances: active modules before the layers, see ``Anatomy.entrances``.

    Yields:
        A function from the logits that the model returns to those of the kept places, (points or 1, P, words).
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = set(map(id, decoder.modules()))
    kept = False
    if fork is not None:
        fork.parted = any(id(module) not in inside for module in entrances)

    def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args or not all(isinstance(kwargs.get(name), Tensor) for name in (STATES, MASK, IDS)):
            raise ForkError(f"{type(module).__name__} is called in another way than with {STATES} and {MASK}")
        states, context = kwargs[STATES], row.context
        points = len(states) // len(row.tokens)
        many = states.unflatten(0, (points, -1))[:, context.to(states.device)].flatten(0, 1)
        given = {STATES: many, MASK: row.mask[context].repeat(points, 1), IDS: row.inputs.repeat(points, 1)}
        if fork is not None:
            fork.strings, fork.tokens = len(row.inputs), row.inputs.numel()
            if not fork.parted and any(id(module) in inside for module in entrances):
                given = {name: fork.rows(value) for name, value in given.items()}
                fork.parted = True
        return args, {**kwargs, **given}

    def leave(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal kept
        kept = True
        if fork is not None:
            fork.strings, fork.tokens = 1, len(row.keep)
        return (_chosen(args[0], row), *args[1:])

    def finish(logits: Tensor) -> Tensor:
        return logits if kept else _chosen(logits, row)

    with contextlib.ExitStack() as stack:
        stack.callback(decoder.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(head.register_forward_pre_hook(leave).remove)
        yield finish


def encoder_inputs(row: Pairs, fork: Fork | None) -> dict[str, Any]:
    """The arguments of the model's forward; if the points part before the encoder, with all contexts once per point."""
    ids, mask = row.tokens, row.mask
    if fork is not None and fork.parted:
        ids, mask = (x.repeat(len(fork.points), 1) for x in (ids, mask))
    return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": row.inputs, "use_cache": False}


def _chosen(states: Tensor, row: Pairs) -> Tensor:
    """(points·D, T, n) → (points, P, n): the kept places of all strings."""
    points = len(states) // len(row.inputs)
    places: Tensor = states.unflatten(0, (points, -1)).flatten(1, 2)
    return places[:, row.keep.to(states.device)]
