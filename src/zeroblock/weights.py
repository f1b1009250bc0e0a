"""The weights of a run: the tensors that move, the addresses of their noise, and their bases in a turn."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Literal

import torch
from torch import Tensor, nn

from . import block as blocks_of
from .adapter.pair import Pair, pairs
from .basis import Basis, Elsewhere, Grid, Initial, Site
from .block import Block
from .direction import Direction, JustInTime, Member, Subtracted, Swapped, Written
from .errors import ZeroBlockError, ZeroBlockWarning
from .noise import Distribution, Key, Rounding
from .offload.shelf import shelf_of
from .ops import DTYPES
from .quantise import Codes, QuantisedLinear, Scales, elements, quantised_layers
from .shard import Box, Gathering, box_of, is_spread, whole
from .size import root_mean_square, typical_size
from .subspace import Subspace

Restore = Literal["copy", "subtract"]


class Weights:
    """The trainable tensors of a model, cut into blocks.

    Args:
        model: the model whose trainable parameters move.
        blocks: the parameters that move together.
        subspace: the subspace that directions are drawn in.
        interval: steps per turn.
        fold: steps whose sum is held in coordinates before it is written to the tensors.
        seed: seed of the bases.
        distribution: distribution of the coordinates.
        rounding: rounding of 16-bit weights.
        restore: "copy" measures on copies, "subtract" moves the weights themselves and moves them back.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Block],
        subspace: Subspace,
        *,
        interval: int = 1,
        fold: int = 1,
        seed: int = 0,
        distribution: Distribution = Distribution.NORMAL,
        rounding: Rounding = Rounding.STOCHASTIC,
        restore: Restore = "copy",
    ) -> None:
        self.model, self.blocks, self.subspace = model, tuple(blocks), subspace
        self.interval, self.fold, self.seed = interval, fold, seed
        self.distribution, self.rounding, self.restore = distribution, rounding, restore
        self.shelf = shelf_of(model)
        """Holds the weights while they are not used."""
        self._gathering = Gathering(model)
        self.offsets: dict[str, int] = {}
        total = 0
        for name, param in model.named_parameters():  # frozen ones too: freezing a tensor must not move others' noise
            self.offsets[name] = total
            total += elements(param)
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        layers = {f"{path}.weight": layer for path, layer in quantised_layers(model).items()}
        self.quantised = {name: layer for name, layer in layers.items() if name in self.params}
        """The layers whose integers move, by the names of their integers."""
        if self.quantised and restore == "subtract":
            raise ZeroBlockError("integers cannot be moved back by subtraction: use restore='copy'")
        for name, param in self.params.items():
            _check(name, param, model)
        _say_packed(model, self.params)
        self.sharded = any(map(is_spread, self.params.values()))
        """Whether any trainable tensor is spread over several processes."""
        boxes = {name: box_of(name, param) for name, param in self.params.items()}
        self.boxes: dict[str, Box] = {name: box for name, box in boxes.items() if box is not None}
        """The places of this process's shards in their tensors, by name."""
        self.sizes, self.initial = self.read()
        """Sizes that follow from other tensors, and the numbers that the subspace needs, both from before training."""
        self._members: dict[int, tuple[Member, ...]] = {}
        """The members of blocks whose bases never change."""
        self._placed: torch.device | None = None
        self._uniform = False
        self.held: dict[str, Tensor] = {}
        """Coordinates of the steps that have not reached their tensors yet, by name."""
        self.anchor: dict[str, Tensor] = {}
        """A copy of the active block from the beginning of its turn, by name, if the estimator measures there."""

    def read(self) -> tuple[dict[str, float], dict[str, Initial]]:
        """Read the numbers that the subspace needs from the weights before training.

        Returns:
            The sizes that follow from other tensors, and the numbers of every tensor, by name.
        """
        if not self.subspace.reads:
            return {}, dict.fromkeys(self.params)
        sizes = {} if self.subspace.product is None else self._sizes()
        given = {name: {"size": size} for name, size in sizes.items()}
        return sizes, {n: self.subspace.initial(self.values(n), **given.get(n, {})) for n in self.params}

    def _sizes(self) -> dict[str, float]:
        """The sizes of adapters' factors that follow from the matrices next to them; all processes gather shards."""
        names = {id(param): name for name, param in self.params.items()}
        sizes: dict[str, float] = {}
        for pair in pairs(self.model):
            matrix = self._beside(pair) if id(pair.still) in names else None
            if matrix is None:
                continue
            drawn = root_mean_square(whole(self.shelf.value(pair.drawn)))
            size = pair.size(root_mean_square(matrix), drawn)
            if size is not None:
                sizes.setdefault(names[id(pair.still)], size)
        return sizes

    def _beside(self, pair: Pair) -> Tensor | None:
        """The matrix next to a pair; None if its numbers are elsewhere or cannot be read."""
        layer, weight = pair.layer, getattr(pair.layer, "weight", None)
        if not isinstance(weight, Tensor) or weight.is_meta:
            return None
        if isinstance(layer, QuantisedLinear):
            with self.shelf.showing(layer):
                return None if is_spread(layer.weight) else layer.expanded()
        if weight.dtype not in DTYPES or (hasattr(weight, "__tensor_flatten__") and not is_spread(weight)):
            return None  # packed by another library
        if getattr(layer, "_hf_device_mesh", None) is not None and not is_spread(weight):
            return None  # a part of the matrix, different in every process
        return whole(self.shelf.value(weight))

    def start_from(self, initial: Mapping[str, Initial]) -> None:
        """Take the numbers that were read from the weights when the run began, and drop bases made from others."""
        self.initial = dict(initial)
        self._members.clear()

    def begin_in(self, subspace: Subspace) -> None:
        """Draw directions in another subspace from the first step on."""
        self.subspace = subspace
        self.sizes, initial = self.read()
        self.start_from(initial)

    @property
    def capturable(self) -> bool:
        """Whether all tensors lie whole on one device, and kernels there know their dtypes."""
        first = next(iter(self.params.values()))
        if self._placed != first.device:  # a model may move before its first step
            params = self.params.values()
            alike = all(p.dtype != torch.float64 for p in params) and len({p.device for p in params}) == 1
            self._uniform = alike and not self.sharded
            self._placed = first.device
        return self._uniform

    def values(self, name: str) -> Tensor:
        """The numbers of a tensor; if it is quantised, those that its integers stand for."""
        layer, param = self.quantised.get(name), self.params[name]
        if layer is None:
            value = self.shelf.value(param)
            return Scales(value.detach(), requires_grad=False) if isinstance(param, Scales) else value
        with self.shelf.showing(layer):
            return layer.expanded()

    @property
    def spacing(self) -> float:
        """Root mean square of the steps between integers relative to that of the weights, for the coarsest layer that
        moves; 0 if no integers move."""
        return max((self._spacing(layer) for layer in self.quantised.values()), default=0.0)

    def _spacing(self, layer: QuantisedLinear) -> float:
        with self.shelf.showing(layer):
            return typical_size(layer.scales, small=True) / typical_size(layer.expanded(), small=True)

    def basis(self, name: str, turn: int) -> Basis:
        """The basis of a tensor in a turn."""
        param = self.params[name]
        site = Site(self.offsets[name], self.distribution, self.rounding, self.initial[name])
        layer = self.quantised.get(name)
        place = self.shelf.place(param)
        shown = param if layer is None else torch.empty(layer.out_features, layer.in_features, device="meta")
        if layer is None and param.device != place:  # same shape and dtype, on the device that will use it
            shown = torch.empty((), dtype=param.dtype, device=place).expand(param.shape)
        basis = self.subspace.basis(shown, Key(self.seed, turn * self.interval), site)
        if layer is not None:
            return Grid.over(basis, layer)
        if name in self.boxes:
            basis = basis.cut(self.boxes[name])
        if self.fold == 1:
            return basis
        if name not in self.held:
            empty = basis.empty(place)
            if empty is None:
                return basis
            self.held[name] = empty
        return basis.holding(self.held[name])

    def members(self, block: int, turn: int) -> tuple[Member, ...]:
        """The tensors of a block with the bases that they have, or would have, in a turn."""
        known = self._members.get(block)
        if known is not None:
            return known
        names = self.blocks[block].params
        members = tuple(Member(name, self.params[name], self.basis(name, turn)) for name in names)
        if self.subspace.fixed:
            self._members[block] = members
        return members

    def load(self, held: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> None:
        """Take the held steps and the anchor of a saved state, by the names of their tensors."""
        for name, mine in self.held.items():  # in place: captured steps know the address
            mine.copy_(held[name]) if name in held else mine.zero_()
        self.anchor = {name: copy.to(self.shelf.place(self.params[name]), copy=True) for name, copy in anchor.items()}

    def drop_anchor(self, members: Sequence[Member]) -> None:
        """Keep a copy of a block as it is now, and drop the last copy.

        It is written into the last copy's memory if the shapes are the same, because finished steps may keep that
        memory alive until Python collects its garbage.
        """
        places = [self.shelf.place(param) for _, param, _ in members]
        wanted = [(param.shape, param.dtype, place) for (_, param, _), place in zip(members, places, strict=True)]
        room = list(self.anchor.values())
        if [(copy.shape, copy.dtype, copy.device) for copy in room] != wanted:
            room = []
        self.anchor.clear()  # before the next is made
        for i, (name, param, _) in enumerate(members):
            if room:
                self.anchor[name] = room[i].copy_(param.detach())
            else:
                self.anchor[name] = param.detach().to(places[i], copy=True, memory_format=torch.contiguous_format)

    def anchored(self, members: Sequence[Member]) -> tuple[Member, ...]:
        """The tensors of the active block with directions from the anchor."""
        return tuple(member._replace(basis=Elsewhere(member.basis, self.anchor[member.name])) for member in members)

    def grouped(
        self, members: Sequence[Member], active: Sequence[tuple[int, float]]
    ) -> list[tuple[float, Sequence[Member]]]:
        """The members of active blocks by the factor on their learning rate: one group, unless the factors differ.

        Args:
            members: the members of all active blocks, block after block.
            active: the blocks, each with its factor.
        """
        if all(factor == 1 for _, factor in active):
            return [(1.0, members)]
        rest = iter(members)
        return [(factor, list(itertools.islice(rest, len(self.blocks[b].params)))) for b, factor in active]

    def direction(self, key: Key, members: Sequence[Member], paired: bool, several: bool = False) -> Direction:
        """The line θ + s·Pz in the form that suits the model; ``several`` says that members are of several blocks."""
        lifts = self.shelf.lifts(members)
        if self.restore == "subtract":
            if not lifts:
                raise ZeroBlockError(
                    "restore='subtract' moves a whole block at once, and this one is streamed: use restore='copy', a "
                    "partition into layers, or give more --memory"
                )
            return Subtracted(key, members, paired, self.release)
        if self.sharded:
            return Written(key, members, paired, self.release)
        if (len(self.blocks) > 1 and not several and lifts) or self.opaque:
            return Swapped(key, members, paired)
        return JustInTime(key, members, paired, self.largest_layer)

    def release(self) -> None:
        """Drop the copies of sharded weights that forward passes have gathered, which would not see the next move."""
        self._gathering.release()

    def whole(self, name: str) -> Tensor:
        """A tensor as one process would hold it; if it is sharded, every process must call this."""
        return whole(self.params[name])

    def layout(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        """The shards of this process as plain numbers, start and size; empty if tensors are whole."""
        return {name: (box.start, box.size) for name, box in self.boxes.items()}

    def fold_(self, members: Sequence[Member], key: Key) -> None:
        """Write the held steps to their tensors; ``key`` addresses the rounding bits."""
        self.release()
        for part in self.shelf.visits([member for member in members if member.basis.behind], folds=True):
            for member in part:
                member.basis.fold_(member.local, key)

    def largest_size(self, blocks: int = 1) -> int:
        """Number of coordinates of the ``blocks`` largest blocks together."""
        sizes = (sum(member.basis.size for member in self.members(b, 0)) for b in range(len(self.blocks)))
        return sum(sorted(sizes, reverse=True)[:blocks])

    def numel(self, block: int) -> int:
        """Number of weights of a block."""
        return sum(elements(self.params[name]) for name in self.blocks[block].params)

    @functools.cached_property
    def largest_layer(self) -> int:
        """Bytes of the largest layer, or of the largest tensor if there are no layers."""
        try:
            cut = blocks_of.layers(self.model)
        except ZeroBlockError:
            return max(p.nbytes for p in self.params.values())
        return max(sum(self.params[n].nbytes for n in b.params) for b in cut)

    @functools.cached_property
    def opaque(self) -> bool:
        """Whether the model reads weights without a torch function that shows it: compiled or scripted."""
        if not hidden(self.model):
            return False
        warnings.warn(
            "a compiled or scripted model is evaluated on a perturbed copy of the whole block; "
            "for less memory give the plain model, a partition into layers, or restore='subtract'",
            ZeroBlockWarning,
            stacklevel=6,
        )
        return True


def _check(name: str, param: Tensor, model: nn.Module) -> None:
    if param.is_meta and any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ZeroBlockError(
            f"{name!r} is offloaded by Accelerate, on the meta device between calls, where no step can move it: call "
            "zeroblock.shelve(model), which takes its place, or load the model whole, without device_map='auto' and "
            "cpu_offload, or freeze everything that is offloaded"
        )
    if param.is_meta:
        raise ZeroBlockError(f"{name!r} is on the meta device; load the weights first")
    blocks_of.refuse_packed(name, param)
    if isinstance(param, Codes):
        return
    if param.dtype not in DTYPES or (hasattr(param, "__tensor_flatten__") and not is_spread(param)):
        kind = param.dtype if param.dtype not in DTYPES else type(param).__name__
        raise ZeroBlockError(
            f"{name!r} is {kind}; zeroblock moves whole fp32, fp64, fp16 and bf16 weights: freeze the others with "
            "requires_grad_(False)"
        )


def _say_packed(model: nn.Module, params: Sized) -> None:
    """Warn which weights a quantised model trains, unless the user chose them by adding an adapter."""
    packed = blocks_of.packed(model)
    if packed and not adapted(model):
        warnings.warn(
            f"{len(packed)} packed weights, the first {packed[0]!r}, cannot move; blocks hold the other {len(params)} "
            f"parameters only. To train the packed ones, {blocks_of.ADAPTER}",
            ZeroBlockWarning,
            stacklevel=5,
        )


def adapted(model: nn.Module) -> bool:
    """Whether PEFT has put an adapter into a model."""
    return any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules())


def compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` has taken over any part of a model."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )


def hidden(model: nn.Module) -> bool:
    """Whether any part of a model reads its weights without torch functions that show it: compiled, scripted, or
    sharded, so that it reads what was gathered."""
    scripted = any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())
    return compiled(model) or scripted or any(map(is_spread, model.parameters()))


Decays = Callable[[str, Tensor], bool]


def is_matrix(name: str, param: Tensor) -> bool:
    """The tensors that weight decay applies to by default: matrices, not biases and norms."""
    return param.dim() >= 2
