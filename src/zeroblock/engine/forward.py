"""The forward pass over a row: at the weights as they are, or forked at several points of a step."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import family
from ..direction import Point
from ..errors import ZeroBlockError, ZeroBlockWarning
from ..exclusive import exclusive
from ..offload.shelf import shelf_of
from ..ops import score
from ..run.graph import Graphs
from ..shard import is_spread
from ..step import Call, Tape
from ..task.encoding import Encoded
from .anatomy import Anatomy, ForkError
from .attention import attending, configs
from .cut import Cuts, cutting, first, given, named
from .decode import decoding, encoder_inputs
from .fork import forking
from .fuse import Fusions
from .held import Prefix
from .pack import Padded, Row
from .pair import Pairs, pair


class Forward:
    """A model's own forward pass, run on packed rows.

    Args:
        model: the model, whose weights are only read.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shelf = shelf_of(model)
        """The shelf on which the weights rest while they are not in use."""
        self.device, self.dtype = next(
            (self.shelf.place(p), p.dtype) for p in model.parameters() if p.is_floating_point()
        )
        self.numel = sum(p.numel() for p in model.parameters())
        self.devices = set(map(self.shelf.place, model.parameters()))
        """The devices of the model; if there are several, its layers move their inputs themselves."""
        self.spread = any(map(is_spread, model.parameters()))
        """Whether processes gather the weights together, so that all run equally many passes, whatever their rows."""
        self.anatomy = Anatomy(model)
        self.configs = configs(model)
        self.masked = family.masked(model)
        """Whether the model is a masked language model, whose examples have a mask."""
        self.seq2seq: Any = family.seq2seq(model)
        """The encoder-decoder: the model, or the model inside its adapter; None for every other model."""
        self.shares = False
        """Whether the options of an encoder-decoder's example share one pass of the encoder."""
        self.first_position = family.first_position(model)
        """The position id of a text's first token."""
        self.base = _base(model)
        """The model without its head, if the head cannot be told which tokens to predict from; else None."""
        self.reason = ""
        """The reason why the model is not packed or not forked; empty if it is both."""
        self.packed = False
        """Whether examples share a row."""
        self.forked = False
        """Whether the points of a step run in one pass."""
        self.max_length: float = math.inf
        """The longest example, in tokens, that a packed row scores correctly: some windows exist only in the mask."""
        self.alone_from: float = math.inf
        """Examples with more tokens than this share no row: the model turns all positions of a row by the longest."""
        self.graphs: Graphs | None = None
        """The captured steps, if steps are submitted to a GPU."""
        self.coarse = False
        """Whether rows are rounded up to few lengths, so that captured steps can be reused."""
        self.cuts: Cuts | None = None
        """The cuts of a pass that is captured in pieces; None if it cannot be cut."""
        self.prefix: Prefix | None = None
        """Holds the hidden states before the active block from step to step; None without ``hold``."""
        self.fusions = Fusions()
        """The forwards of modules that are each replaced by one kernel."""
        self._watched: set[tuple[tuple[int, type], ...]] = set()
        """Blocks for which a watched pass has read the weights only where a point's copies are shown."""

    @functools.cached_property
    def start(self) -> int:
        """The token that the decoder of an encoder-decoder begins with."""
        token = family.decoder_start(self.seq2seq)
        if token is None:
            raise ZeroBlockError(
                f"{type(self.seq2seq).__name__} does not say which token its decoder begins with: set "
                "model.config.decoder_start_token_id (decoder_start_token_id in config.json)"
            )
        return token

    def pairs(self, batch: Sequence[Encoded]) -> Pairs:
        """A batch as the encoder and the decoder of an encoder-decoder read it."""
        padding = getattr(self.seq2seq.config, "pad_token_id", None)
        return pair(batch, self.start, padding or 0)

    @functools.cached_property
    def told(self) -> bool:
        """Whether the model looks up its attention in transformers' registry; otherwise it gets a mask."""
        return any(getattr(module, "_supports_attention_backend", False) for module in self.model.modules())

    def unfork(self, reason: str) -> None:
        """Measure one point after another from now on, and warn with the reason."""
        self.forked, self.graphs, self.reason = False, None, reason
        warnings.warn(
            f"{type(self.model).__name__} is measured one point after another: {reason}", ZeroBlockWarning, stacklevel=7
        )

    def totals(
        self,
        row: Row | Padded | Pairs,
        points: Sequence[Point] = (),
        windows: set[int] | None = None,
        tape: Tape | None = None,
    ) -> Tensor:
        """Log-probabilities of a row's options.

        Args:
            row: the options of some examples, on the device.
            points: the points to evaluate at; by default the weights as they are.
            windows: a set that collects the lengths of the attention windows that layers ask for.
            tape: follows the pass, which skips its layers; the model must have ``cuts``.

        Returns:
            (points or 1, options) in fp32.
        """
        with exclusive(self.model):
            if isinstance(row, Padded):
                if points:
                    raise ForkError(f"an example is longer than the model's window of {self.max_length:,} tokens")
                logits = self.model(input_ids=row.tokens, attention_mask=row.mask, use_cache=False).logits
                return score.totals(logits.flatten(0, 1)[None].to(row.tokens.device), row)
            if isinstance(row, Pairs):
                logits = self._paired(row, points)
                return score.totals(self._complete(logits, points).to(row.tokens.device), row)
            block = _block(points)
            mask = None if self.told else _additive(row, self.dtype)
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.fusions.running())  # first: a fork wraps the forwards that it finds
                fork = None
                if points:  # no watch on a pass in pieces: the trial of ``cuts`` has seen who reads its layers
                    watch = tape is None and block not in self._watched
                    fork = stack.enter_context(forking(self.anatomy, points, len(row.tokens), watch))
                    if self.prefix is not None and tape is None:
                        stack.enter_context(self.prefix.passing(row, points[0].direction.members))
                if tape is not None:
                    assert self.cuts is not None
                    stack.enter_context(cutting(self.cuts, tape, fork))
                if self.told:
                    stack.enter_context(attending(self.configs, row, windows))
                keep = row.keep if len(self.devices) == 1 else row.keep.cpu()  # as an index for any device
                kept = {"logits_to_keep": keep} if self.base is None else {}
                if self.base is not None:
                    stack.callback(self.base.register_forward_hook(functools.partial(_keep, keep)).remove)
                positions = row.positions + self.first_position if self.first_position else row.positions
                logits = self.model(
                    input_ids=row.tokens[None], position_ids=positions[None], attention_mask=mask,
                    use_cache=False, **kept,
                ).logits  # fmt: skip
            if tape is None:
                self._watched.add(block)
        return score.totals(self._complete(logits, points).to(row.tokens.device), row)

    def _paired(self, row: Pairs, points: Sequence[Point]) -> Tensor:
        """The logits of an encoder-decoder at the kept places: (points or 1, P, words)."""
        if not self.shares:  # in the model's own way, with a copy of the context for every string
            own = {"input_ids": row.tokens[row.context], "attention_mask": row.mask[row.context]}
            logits: Tensor = self.model(**own, decoder_input_ids=row.inputs, use_cache=False).logits
            return logits.flatten(0, 1)[None, row.keep]
        block, entrances = _block(points), []
        with contextlib.ExitStack() as stack:
            fork = None
            if points:
                watch, contexts = block not in self._watched, len(row.tokens)
                fork = stack.enter_context(forking(self.anatomy, points, row.tokens.numel(), watch, contexts))
                entrances = self.anatomy.entrances(points[0].direction.members)
            finish = stack.enter_context(decoding(self.seq2seq, row, fork, entrances))
            logits = finish(self.model(**encoder_inputs(row, fork)).logits)
        self._watched.add(block)
        return logits

    def _complete(self, logits: Tensor, points: Sequence[Point]) -> Tensor:
        """Logits with a row for every point, also if the model does not read the active block."""
        if not points or len(logits) == len(points):
            return logits
        if len(logits) != 1:
            raise ForkError(f"it returns {len(logits)} rows for {len(points)} points")
        warnings.warn(
            f"{type(self.model).__name__} reads no weight of the block of "
            f"{points[0].direction.members[0].name!r}, whose turns change nothing: freeze what it does not use with "
            "requires_grad_(False) before building the optimizer",
            ZeroBlockWarning,
            stacklevel=6,
        )
        return logits.expand(len(points), -1, -1)

    @contextlib.contextmanager
    def layers(self, row: Row) -> Iterator[None]:
        """A context in which layers can run one by one on a row."""
        with exclusive(self.model), self.fusions.running(), contextlib.ExitStack() as stack:
            if self.told:
                stack.enter_context(attending(self.configs, row))
            yield

    def layer(self, i: int, hidden: Tensor, call: Call, points: Sequence[Point], parted: bool) -> Tensor:
        """Run one layer; see :class:`step.Staging`."""
        assert self.cuts is not None
        layer = self.cuts.layers[i]
        if not points:
            return first(layer(*given(call.args, hidden), **named(call.kwargs, hidden)))
        with forking(self.anatomy, points, hidden.shape[1]) as fork:
            fork.parted = parted
            return first(layer(*given(call.args, hidden), **named(call.kwargs, hidden)))


def _block(points: Sequence[Point]) -> tuple[tuple[int, type], ...]:
    """A key of the block that the points perturb."""
    return tuple((id(m.param), type(m.basis)) for m in points[0].direction.members) if points else ()


def _base(model: nn.Module) -> nn.Module | None:
    """The model without its head, for a model of transformers that takes no ``logits_to_keep``; None for others."""
    from transformers import PreTrainedModel

    whole = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    if whole is None or "logits_to_keep" in inspect.signature(whole.forward).parameters:
        return None
    base = getattr(whole, whole.base_model_prefix, None)
    return base if isinstance(base, nn.Module) else None


def _keep(places: Tensor, base: nn.Module, args: Any, out: Any) -> Any:
    """The output of a base model, with the hidden states of only some places."""
    out.last_hidden_state = out.last_hidden_state[:, places]
    return out


def _additive(row: Row, dtype: torch.dtype) -> Tensor:
    """The mask as numbers to be added to scores: (1, 1, S, S)."""
    seen = row.sees()
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill(~seen, torch.finfo(dtype).min)[None, None]
