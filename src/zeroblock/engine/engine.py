"""From encoded examples to rows, losses and scores."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import family
from ..closure import evaluation
from ..errors import Renamed, ZeroBlockError, ZeroBlockWarning
from ..exclusive import exclusive
from ..ranks.wrapper import unwrapped
from ..run.graph import Graphs
from ..task.encoding import Encoded
from . import bridge, trial
from .forward import Forward
from .fuse import find
from .held import Prefix
from .objective import BatchObjective, Over, Reduction
from .pack import Padded, Row, join, lay, pad, root, split
from .pair import Pairs
from .pair import split as split_pairs

GPU_MAX_TOKENS = 4096
"""Default limit on the tokens of a row on a GPU, and of a row of pairs on any device."""

SMALL_WORK = 1e11
"""Tokens × weights below which a row's length hardly affects its time: about 700 tokens at 135M."""
LARGE_WORK = 1e12
"""Tokens × weights from which on a row's time is that of its products: about 80 tokens at 13B."""


class Score(NamedTuple):
    """Log-probability of an option: the sum over its tokens, and their number."""

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Log-probability per token."""
        return self.total / self.tokens


class Engine(Forward):
    """Scores examples with a causal language model, a masked one or an encoder-decoder of transformers.

    A batch becomes one row of tokens in which options share their context; the points of a
    zeroth-order step run in one forked pass.  Both are exact.  A trial finds the models that
    cannot be packed (their attention ignores the mask, or their layers carry state from token to
    token); the engine evaluates these on padded rows, one point after another.

    An encoder-decoder runs on padded rows: its encoder reads every context once, its decoder reads the options.
    The points of a step run in one forked pass here, too.

    Only one thread at a time can measure a model; a second thread gets an error.

    Args:
        model: the model; the engine only reads its weights.
        fork: False measures one point after another.
        max_tokens: the most tokens in a row; longer batches are split, with the same losses.  By default there is no
            limit on the CPU, and a limit of 4,096 on a GPU; for encoder-decoders the limit is 4,096 on both, padding
            included; after ``shelve`` with a ``memory`` it is the number of tokens that fit into that memory.
        graphs: whether to capture steps as CUDA graphs; by default where it pays.
        hold: whether consecutive steps on the same objective and block reuse the hidden states before the block; the
            losses are the same to the bit. Captured steps never do. Do not edit weights through ``.data`` in between.
    """

    why = Renamed("reason")

    def __init__(
        self,
        model: nn.Module,
        *,
        fork: bool = True,
        max_tokens: int | None = None,
        graphs: bool | None = None,
        hold: bool = False,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ZeroBlockError(f"max_tokens must be at least 1, got {max_tokens}")
        model = unwrapped(model)
        super().__init__(model)
        on_gpu = self.device.type == "cuda"
        if graphs and not on_gpu:
            raise ZeroBlockError(f"graphs are captured on a CUDA device, the model is on {self.device}; leave them out")
        if graphs and (self.spread or len(self.devices) > 1):
            raise ZeroBlockError(
                "graphs capture steps on whole weights on one device, and this model's are sharded, or on several "
                "devices; leave them out"
            )
        if (graphs or hold) and self.shelf.streams:
            raise ZeroBlockError(
                f"{'graphs' if graphs else 'hold'} cannot be combined with streamed weights, which are never at one "
                "address: leave it out (a launch takes almost no time compared with the copy of a layer)"
            )
        paired = self.seq2seq is not None
        if paired and (graphs or hold):
            raise ZeroBlockError(
                f"{type(self.seq2seq).__name__} is an encoder-decoder, whose steps are not captured and whose "
                f"layers are not held: leave out {'graphs' if graphs else 'hold'}"
            )
        if paired and self.spread:
            raise ZeroBlockError(
                f"{type(self.seq2seq).__name__} is an encoder-decoder, whose padded rows each process splits "
                "differently, but processes that share its weights must run the same passes: use --shard none"
            )
        self.max_tokens = max_tokens or self.shelf.tokens or (GPU_MAX_TOKENS if on_gpu or paired else None)
        if on_gpu and not self.spread and not paired:  # the kernels are made for one row of tokens
            self.fusions = find(model, "cuda", self.shelf.showing)
        self.shares = paired and trial.shares(self)
        self.packed = not paired and trial.packs(self, self._multiples(0))
        self.forked = fork and (self.packed or self.shares)
        captures = on_gpu and not self.spread and len(self.devices) == 1 and not paired
        self.coarse = self.forked and (captures if graphs is None else graphs)
        self.graphs = Graphs() if self.coarse and not self.shelf.streams else None
        if self.graphs is not None:
            self.cuts = trial.cuts(self, self._multiples(0))
            self.graphs.reason = "" if graphs else family.uncaptured(model)
            if self.graphs.reason:
                warnings.warn(
                    f"steps of {type(model).__name__} are not captured as CUDA graphs and run one kernel at a time: "
                    f"{self.graphs.reason}",
                    ZeroBlockWarning,
                    stacklevel=2,
                )
        if hold and self.forked:
            cuts = self.cuts or trial.cuts(self, self._multiples(0))
            self.prefix = None if cuts is None else Prefix(model, self.anatomy, cuts)
        if self.reason:
            warnings.warn(
                f"{type(model).__name__} is evaluated on padded rows, one point after another: {self.reason}",
                ZeroBlockWarning,
                stacklevel=2,
            )

    def objective(
        self,
        batch: Sequence[Encoded],
        labels: Sequence[int],
        over: Over = "options",
        reduction: Reduction = "tokens",
    ) -> BatchObjective:
        """The mean loss of a batch, to be called or to be handed to ``ZeroOrder.step``.

        Args:
            batch: examples with their options.
            labels: index of each example's right option.
            over: ``"options"``: cross-entropy over an example's options, where the logit of each is the mean
                log-probability of its tokens.  ``"answer"``: the negative log-probability of the right option.
            reduction: how ``"answer"`` averages.  ``"tokens"``: the mean over the scored tokens of all examples, as in
                MeZO's code and Hugging Face's.  ``"examples"``: the mean over the examples of each one's mean over
                tokens.
        """
        if not batch:
            raise ZeroBlockError("an objective needs at least one example")
        for name, value, known in (
            ("over", over, ("options", "answer")),
            ("reduction", reduction, ("tokens", "examples")),
        ):
            if value not in known:
                raise ZeroBlockError(f"{name} must be {known[0]!r} or {known[1]!r}, got {value!r}")
        if over == "answer":
            batch = [one.only(k) for one, k in zip(batch, labels, strict=True)]
            labels = [0] * len(batch)
        return BatchObjective(self, self._rows(batch, labels), over, reduction, len(batch))

    def objective_from(self, batch: Mapping[str, Any]) -> BatchObjective:
        """The mean loss over the scored tokens of a tokenised batch, as a Hugging Face model computes it.

        >>> objective = engine.objective_from(batch)               # doctest: +SKIP
        >>> optimizer.step(objective)                               # doctest: +SKIP

        Several objectives in one step are weighted by their numbers of scored tokens.

        Args:
            batch: ``input_ids``, ``labels`` (-100 where a token carries no loss) and, where there is padding,
                ``attention_mask``, all (rows, tokens); padded on the left or on the right.  An
                encoder-decoder's labels have their own length, and its batch may contain ``decoder_input_ids``.
        """
        if self.masked:
            raise bridge.BridgeError(
                f"{type(self.model).__name__} predicts a token at its own place, not at the one before it: use "
                "engine.objective, or the closure lambda: model(**batch).loss"
            )
        if self.seq2seq is not None:
            pairs = bridge.pairs(batch, self.seq2seq, self.max_tokens)
            none = torch.zeros(1, dtype=torch.long)
            return BatchObjective(self, [(row, none) for row in pairs], "answer", "tokens", len(batch["labels"]))
        texts, left = bridge.texts(batch)
        if left and self._counts_padding:
            raise bridge.BridgeError(
                f"{type(self.model).__name__} counts padding on the left as positions: pad on the right "
                "(tokenizer.padding_side = 'right')"
            )
        rows: list[tuple[Row | Padded | Pairs, Tensor]] = []
        for row, chosen in self._rows([text.example for text in texts], range(len(texts))):
            assert not isinstance(row, Pairs)
            some = [texts[i] for i in chosen.tolist()]
            multiple = self._multiples(row.tokens.numel())[1]
            if multiple > 1:  # captured rows have few numbers of scored tokens, a sixteenth apart
                multiple = max(multiple, 1 << max(0, sum(len(text.places) for text in some).bit_length() - 5))
            rows.append((bridge.rescored(row, some, multiple), torch.zeros(1, dtype=torch.long)))
        return BatchObjective(self, rows, "answer", "tokens", len(texts))

    @functools.cached_property
    def _counts_padding(self) -> bool:
        return bridge.counts_padding(self)

    @torch.no_grad()
    def scores(self, batch: Sequence[Encoded]) -> list[tuple[Score, ...]]:
        """Log-probabilities of every option of every example, at the weights as they are."""
        scores: list[tuple[Score, ...]] = []
        with exclusive(self.model), evaluation(self.model):
            for row, _ in self._rows(batch, [0] * len(batch)):
                totals, lengths = self.totals(row.to(self.device))[0].tolist(), row.lengths.tolist()
                for slots in row.slots.tolist():
                    scores.append(tuple(Score(totals[o], lengths[o]) for o in slots if o < len(lengths)))
        return scores

    def _rows(self, batch: Sequence[Encoded], labels: Sequence[int]) -> list[tuple[Row | Padded | Pairs, Tensor]]:
        """Rows of the batch with the labels of their examples, on the host."""
        if not all(one.context for one in batch):
            raise ZeroBlockError("an example has no context to predict its options from: begin it with a BOS token")
        if any((one.mask is None) == self.masked for one in batch):
            reads = "fills in masks, and an example has none" if self.masked else "continues a text, and one has a mask"
            raise ZeroBlockError(
                f"{type(self.model).__name__} {reads}: encode with task.encoder(tokenizer, masked={self.masked})"
            )
        paired = self.seq2seq is not None
        if any(one.seq2seq != paired for one in batch):
            reads = (
                "is an encoder-decoder, and an example is not encoded for one"
                if paired
                else "continues the context, and an example is encoded for an encoder-decoder"
            )
            raise ZeroBlockError(
                f"{type(self.model).__name__} {reads}: encode with task.encoder(tokenizer, seq2seq={paired})"
            )
        rows: list[tuple[Row | Padded | Pairs, Tensor]] = []
        if paired:
            for some in split_pairs(batch, self.max_tokens):
                rows.append((self.pairs([batch[i] for i in some]), torch.tensor([labels[i] for i in some])))
            return rows
        strands = list(map(lay, batch))
        alone = {i for i, one in enumerate(batch) if _length(one) > self.alone_from}
        fits = [self.packed and (self.max_length == math.inf or _length(one) <= self.max_length) for one in batch]
        shared = root(batch) if all(fits) else 0  # padded rows share nothing
        costs = [strand.cost - shared for strand in strands]
        for some in split(costs, self.max_tokens and self.max_tokens - shared, alone):
            if all(fits[i] for i in some):
                tokens = shared + sum(costs[i] for i in some)
                row: Row | Padded = join([strands[i] for i in some], shared, *self._multiples(tokens))
            else:
                row = pad([batch[i] for i in some])
            rows.append((row, torch.tensor([labels[i] for i in some])))
        return rows

    def _multiples(self, tokens: int) -> tuple[int, int]:
        """The multiples that a row's lengths are rounded up to; captured rows have few lengths, a sixteenth apart.

        Rows of streamed weights are not captured, but are rounded the same way, so that losses are the same to the bit.
        Where launches take most of the time, extra tokens cost almost nothing: then lengths are 128 apart.  Where
        products take all of it, lengths are 24 apart: OPT-13B's products on sst2 take 2 % longer with 32; 16
        would save 1 % more, and take a quarter of a gigabyte for graphs.
        """
        if not (self.coarse and self.forked and Graphs.pays(tokens, self.numel)):
            return (16 if self.device.type == "cuda" else 1), 1  # tensor cores want multiples of 8
        work = tokens * self.numel
        coarse = 128 if work < SMALL_WORK else 32 if work < LARGE_WORK else 24
        return max(coarse, 1 << max(0, tokens.bit_length() - 5)), 16


def _length(one: Encoded) -> int:
    return len(one.context) + max(map(len, one.options))
