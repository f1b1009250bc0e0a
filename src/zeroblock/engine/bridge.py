"""The bridge from tokenised batches, as Hugging Face's collators make them, to packed rows.

A batch holds rows of token ids, a mask of the padding, and labels, −100 where a token carries no loss.  The padding
is left out, every row becomes one text of a packed row, and any of its tokens may be scored: the tokens of one answer,
or of all the assistant's turns in a chat.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..closure import evaluation
from ..errors import ZeroBlockError
from ..exclusive import exclusive
from ..task.encoding import Encoded
from . import trial
from .forward import Forward
from .pack import Padded, Row
from .pair import Pairs

IGNORED = -100
"""The label of a token that carries no loss."""
KEYS = {"input_ids", "labels", "attention_mask"}
DECODER_INPUTS = "decoder_input_ids"
PADDING = 24
"""Tokens of left padding in the trial that shows whether a model counts padding as positions."""


class BridgeError(ZeroBlockError):
    """The engine cannot take this batch; the closure ``lambda: model(**batch).loss`` can."""


@dataclasses.dataclass(frozen=True)
class Text:
    """One row of a batch, without its padding.

    Args:
        tokens: ids, up to the one that predicts the last scored token.
        places: the places in ``tokens`` that predict the scored tokens.
        targets: the id that is scored at each place.
    """

    tokens: tuple[int, ...]
    places: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def example(self) -> Encoded:
        """The same text for the packer, which lays out its tokens; only the last scored token is an option."""
        return Encoded(self.tokens, (self.targets[-1:],))


def texts(batch: Mapping[str, Any]) -> tuple[list[Text], bool]:
    """The rows of a batch that carry loss, and whether any of them is padded on the left.

    Args:
        batch: ``input_ids``, ``labels`` and, where there is padding, ``attention_mask``, all (B, T).
    """
    ids, labels, mask = _columns(batch)
    found, left = [], False
    for number, (row, wanted, real) in enumerate(zip(ids.tolist(), labels.tolist(), mask.tolist(), strict=True)):
        scored = [place for place in range(1, len(row)) if wanted[place] != IGNORED]
        if not scored:
            continue
        if not any(real):
            raise BridgeError(f"row {number} scores padding: set the labels of padding to {IGNORED}")
        first, end = real.index(True), len(real) - real[::-1].index(True)
        if sum(real) != end - first:
            raise BridgeError(f"row {number}: attention_mask hides tokens between others; only padding can be left out")
        if scored[0] <= first:
            raise BridgeError(
                f"row {number} scores its first token, which nothing but padding precedes: set its label to "
                f"{IGNORED}, or pad on the right (tokenizer.padding_side = 'right')"
            )
        if scored[-1] > end:
            raise BridgeError(f"row {number} scores padding: set the labels of padding to {IGNORED}")
        left = left or first > 0
        places = tuple(place - 1 - first for place in scored)
        found.append(Text(tuple(row[first : scored[-1]]), places, tuple(wanted[place] for place in scored)))
    if not found:
        raise BridgeError(f"no token of the batch is scored: every label is {IGNORED}")
    return found, left


def pairs(batch: Mapping[str, Any], model: Any, max_tokens: int | None) -> list[Pairs]:
    """The rows of a batch for an encoder-decoder, whose decoder reads the inputs that the model makes from its labels.

    Args:
        batch: ``input_ids`` and, where there is padding, ``attention_mask``, both (B, S); ``labels`` (B, T).
        model: an encoder-decoder of transformers.
        max_tokens: the most tokens of a row, padding included; a longer batch is split.
    """
    ids, labels, mask = _columns(batch, (DECODER_INPUTS,))
    given = batch.get(DECODER_INPUTS)
    if given is None and not hasattr(model, "prepare_decoder_input_ids_from_labels"):
        raise BridgeError(f"{type(model).__name__} does not shift its labels: add {DECODER_INPUTS} to the batch")
    inputs = model.prepare_decoder_input_ids_from_labels(labels) if given is None else torch.as_tensor(given).cpu()
    if inputs.shape != labels.shape:
        raise BridgeError(f"{DECODER_INPUTS} and labels differ: {tuple(inputs.shape)} and {tuple(labels.shape)}")
    if not bool((labels != IGNORED).any()):
        raise BridgeError(f"no token of the batch is scored: every label is {IGNORED}")
    size = len(ids) if max_tokens is None else max(1, max_tokens // (ids.shape[1] + inputs.shape[1]))
    parts = (slice(first, first + size) for first in range(0, len(ids), size))
    return [_pairs(ids[s], mask[s], inputs[s], labels[s]) for s in parts if bool((labels[s] != IGNORED).any())]


def _pairs(ids: Tensor, mask: Tensor, inputs: Tensor, labels: Tensor) -> Pairs:
    """Some rows of a batch, with all their scored tokens as one option."""
    keep = torch.nonzero(labels.flatten() != IGNORED).flatten()
    every = torch.arange(len(keep))
    count, none = torch.tensor([len(keep)]), torch.tensor([[0]])
    context, target = torch.arange(len(ids)), labels.flatten()[keep]
    return Pairs(ids, mask.long(), inputs, context, keep, every, target, every[None], count, none)


def _columns(batch: Mapping[str, Any], more: Sequence[str] = ()) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels and the mask of real tokens, (B, T) on the host; labels may have another T if ``more`` is given."""
    for key in ("input_ids", "labels"):
        if batch.get(key) is None:
            raise BridgeError(f"the batch has no {key}")
    others = sorted(key for key, value in batch.items() if key not in KEYS.union(more) and value is not None)
    if "position_ids" in others:
        raise BridgeError(
            "the batch has position_ids, so it is packed already, or uses custom positions: collate padded rows "
            "instead (packing=False and padding_free=False in TRL), the engine packs them itself"
        )
    if others:
        raise BridgeError(f"the batch has {', '.join(others)}; the engine takes {', '.join(sorted(KEYS))}")
    ids, labels = (torch.as_tensor(batch[key]).cpu() for key in ("input_ids", "labels"))
    given = batch.get("attention_mask")
    mask = torch.ones_like(ids, dtype=torch.bool) if given is None else torch.as_tensor(given).cpu() != 0
    apart = bool(more) and labels.dim() == 2 and len(labels) == len(ids)
    if ids.dim() != 2 or not (apart or labels.shape == ids.shape) or mask.shape != ids.shape:
        shapes = ", ".join(str(tuple(one.shape)) for one in (ids, labels, mask))
        raise BridgeError(f"input_ids, labels and attention_mask must all be (rows, tokens), got {shapes}")
    if bool(((labels < 0) & (labels != IGNORED)).any()):
        raise BridgeError(f"labels are token ids, or {IGNORED} where there is no loss; got {int(labels.min())}")
    return ids, labels, mask


def rescored(row: Row | Padded, some: Sequence[Text], multiple: int) -> Row | Padded:
    """A row of texts that scores all their places, and not only the last one of each.

    All scored tokens count as one option, so that the shapes of a row depend only on its numbers of tokens, and
    captured steps can be reused.

    Args:
        row: the row that was packed or padded from the texts' examples.
        some: the texts, in their order.
        multiple: the number of scored tokens is rounded up to a multiple of this, with entries that do not count.
    """
    root = int(row.root) if isinstance(row, Row) else 0
    width = row.tokens.shape[-1]
    lengths = [len(text.tokens) - root if isinstance(row, Row) else width for text in some]
    starts = itertools.accumulate(lengths[:-1], initial=0)
    places = [
        place if place < root else start + place
        for start, text in zip(starts, some, strict=True)
        for place in text.places
    ]
    count, rest = len(places), [0] * (-len(places) % multiple)
    fields = {
        "target": torch.tensor([*(target for text in some for target in text.targets), *rest]),
        "spans": torch.tensor([[*range(count), *([count + len(rest)] * len(rest))]]),
        "lengths": torch.tensor([count]),
        "slots": torch.tensor([[0]]),
    }
    if not isinstance(row, Row):
        return dataclasses.replace(row, source=torch.tensor(places + rest), **fields)
    keep = sorted(set(places))  # texts may share places of the root, whose logits are needed once
    index = {place: i for i, place in enumerate(keep)}
    keep += [0] * (-len(keep) % multiple)
    source = [index[place] for place in places] + rest
    return dataclasses.replace(row, keep=torch.tensor(keep), source=torch.tensor(source), **fields)


@torch.no_grad()
def counts_padding(forward: Forward) -> bool:
    """Find out by a trial whether padding on the left moves the positions of the tokens after it, as in GPT-2."""
    words = min((c.vocab_size for c in forward.configs if getattr(c, "vocab_size", None)), default=10)
    tokens = torch.tensor([[words // 4 + 37 * i % (words // 2 + 1) for i in range(8)]], device=forward.device)
    padded = torch.cat([tokens.new_zeros(1, PADDING), tokens], 1)
    mask = torch.cat([tokens.new_zeros(1, PADDING), torch.ones_like(tokens)], 1)
    with exclusive(forward.model), evaluation(forward.model):
        alone, after = (
            forward.model(input_ids=ids, attention_mask=real, use_cache=False).logits[0, -8:].float().log_softmax(-1)
            for ids, real in ((tokens, torch.ones_like(tokens)), (padded, mask))
        )
    return not float((alone - after).abs().max()) <= trial.tolerance(forward)
