"""Greedy generation, in batches padded on the left; for encoder-decoders on the right."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

MAX_ROWS, MAX_CELLS = 64, 16_384
"""The most prompts in a batch, and the most tokens, including padding."""


def generate(model: nn.Module, tokenizer: Any, prompts: Sequence[tuple[int, ...]], **options: Any) -> list[str]:
    """Generate the texts that follow the prompts, in their order; see :func:`generate_part` for the options."""
    texts = generate_part(model, tokenizer, prompts, **options)
    return [texts[i] for i in range(len(prompts))]


@torch.no_grad()
def generate_part(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[tuple[int, ...]],
    *,
    stop: str | None,
    max_new_tokens: int,
    rows: int = MAX_ROWS,
    check: Callable[[], None] = lambda: None,
    part: tuple[int, int] = (0, 1),
    opening: tuple[int, ...] = (),
) -> dict[int, str]:
    """Generate the texts that follow the prompts, greedily; they are stripped.

    Args:
        model: a causal language model of transformers, or an encoder-decoder.
        tokenizer: the model's tokenizer.
        prompts: token ids.
        stop: the text to stop at, left out of the result; the end-of-sequence token stops in any case.
        max_new_tokens: the most tokens that are generated.
        rows: the most prompts per batch.
        check: called before every batch.
        part: (k, n) generates every n-th batch, from the k-th on; the batches are the same whatever n is.
        opening: ids that the decoder of an encoder-decoder begins with; empty for other models.

    Returns:
        The texts, by the index of their prompt.
    """
    from transformers import GenerationConfig

    holder: Any = getattr(model, "get_base_model", lambda: model)()  # inside a PEFT adapter
    own: Any = holder.generation_config
    ends = _ends(tokenizer, stop) | _ids(own.eos_token_id)  # the turns of a chat may have another end token
    padding = next(iter(ends), 0) if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(ends) or None, pad_token_id=padding,
        decoder_start_token_id=opening[0] if opening else None,
    )  # fmt: skip
    device = next(model.parameters()).device
    texts: dict[int, str] = {}
    holder.generation_config = GenerationConfig()  # the model's own settings (penalties, beams) must not be filled in
    try:
        for batch in itertools.islice(_batches(prompts, rows), part[0], None, part[1]):
            check()
            width = max(len(prompts[i]) for i in batch)
            ids = torch.full((len(batch), width), padding)
            seen = torch.zeros_like(ids)
            for row, i in enumerate(batch):
                place = slice(len(prompts[i])) if opening else slice(width - len(prompts[i]), None)
                ids[row, place] = torch.tensor(prompts[i])
                seen[row, place] = 1
            begun = _begun(opening, len(batch), device) if opening else {}
            tokens = model.generate(  # type: ignore[operator]
                input_ids=ids.to(device), attention_mask=seen.to(device), generation_config=greedy, **begun
            )
            for i, new in zip(batch, tokens[:, len(opening) or width :].tolist(), strict=True):
                texts[i] = _text(tokenizer, new, ends, stop)
    finally:
        holder.generation_config = own
    return texts


def _begun(opening: tuple[int, ...], rows: int, device: torch.device) -> dict[str, Any]:
    """A decoder's first tokens, and a cache that grows with its layers; transformers' grows with the encoder's."""
    from transformers import DynamicCache, EncoderDecoderCache

    ids = torch.tensor([opening] * rows).to(device)
    return {"decoder_input_ids": ids, "past_key_values": EncoderDecoderCache(DynamicCache(), DynamicCache())}


def _ids(given: int | list[int] | None) -> set[int]:
    return set() if given is None else {given} if isinstance(given, int) else set(given)


def _text(tokenizer: Any, tokens: list[int], ends: frozenset[int], stop: str | None) -> str:
    """Decode up to and including the first token that ends the text; cut at the stop, and strip."""
    end = next((n for n, token in enumerate(tokens, start=1) if token in ends), len(tokens))
    text = str(tokenizer.decode(tokens[:end], skip_special_tokens=True))
    return (text if stop is None else text.partition(stop)[0]).strip()


def _batches(prompts: Sequence[tuple[int, ...]], rows: int) -> Iterator[list[int]]:
    """Group prompts of similar length, the longest first, so that running out of memory shows at once."""
    batch: list[int] = []
    for i in sorted(range(len(prompts)), key=lambda i: -len(prompts[i])):
        if batch and (len(batch) == rows or (len(batch) + 1) * len(prompts[batch[0]]) > MAX_CELLS):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@functools.lru_cache(maxsize=4)
def _ends(tokenizer: Any, stop: str | None) -> frozenset[int]:
    """The tokens that end a text: end of sequence, and every token whose text contains the stop."""
    ends = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    if stop is not None:
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        ends |= {i for i, text in enumerate(texts) if stop in text}
    return frozenset(ends)
