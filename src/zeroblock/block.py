"""Partitions: how the weights of a model are cut into blocks.

A partition lists exact parameter names, never substrings.  Every trainable
parameter is in exactly one block, tied weights are counted once, frozen weights
belong to no block, and blocks are ordered from input to output.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from .errors import ZeroBlockError, unknown
from .family import is_output_side
from .quantise import Codes


@dataclasses.dataclass(frozen=True)
class Block:
    """Parameters that are perturbed and moved together.

    Args:
        name: the name shown to people, usually the path of a module.
        params: exact names, as in ``model.named_parameters()``.
    """

    name: str
    params: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.params:
            raise ZeroBlockError(f"block {self.name!r} has no parameters")


Partition = Callable[[nn.Module], tuple[Block, ...]]

EIGHT_BITS = {torch.float8_e4m3fn, torch.float8_e5m2}
"""Floating-point formats that hold quantised weights."""


def whole(model: nn.Module) -> tuple[Block, ...]:
    """One block with every trainable parameter: MeZO is block descent with N = 1."""
    return (Block("whole", tuple(_trainable(model))),)


def layers(model: nn.Module, k: int = 1) -> tuple[Block, ...]:
    """One block for every ``k`` consecutive layers, and one for each module outside them.

    Layers are the items of the model's outermost ``nn.ModuleList``.  On OPT-1.3B
    this gives embed_tokens (with the tied head), embed_positions, 24 layers and
    final_layer_norm: N = 27.

    Args:
        model: any module with a ``ModuleList`` of layers: decoder, encoder, both, or wrapped by PEFT.
        k: layers per block; the last block has fewer if k does not divide the number of layers.
    """
    if k < 1:
        raise ZeroBlockError(f"layers(k={k}): a block holds at least one layer")
    before, stacks, after = _anatomy(model)
    blocks = [Block(name, params) for name, params in before]
    for stack in stacks:
        for start in range(0, len(stack), k):
            group = stack[start : start + k]
            name = group[0][0] if len(group) == 1 else f"{group[0][0]}-{group[-1][0].rpartition('.')[2]}"
            blocks.append(Block(name, tuple(itertools.chain.from_iterable(params for _, params in group))))
    return tuple(blocks + [Block(name, params) for name, params in after])


def linears(model: nn.Module) -> tuple[Block, ...]:
    """One block for every module with a matrix inside a layer, and one for each module outside the layers.

    A layer's vectors (norms) join the matrix before them, or the layer's first matrix.
    """
    before, stacks, after = _anatomy(model)
    trainable = dict(model.named_parameters())
    blocks = [Block(name, params) for name, params in before]
    for layer, params in itertools.chain.from_iterable(stacks):
        groups: list[tuple[str, list[str]]] = []
        pending: list[str] = []
        for owner, names in _by_owner(params):
            if any(trainable[n].dim() >= 2 for n in names):
                groups.append((owner, pending + names))
                pending = []
            elif groups:
                groups[-1][1].extend(names)
            else:
                pending = pending + names
        blocks += [Block(owner, tuple(names)) for owner, names in groups or [(layer, pending)]]
    return tuple(blocks + [Block(name, params) for name, params in after])


def explicit(model: nn.Module, blocks: Sequence[Block | Iterable[str]]) -> tuple[Block, ...]:
    """The user's own blocks, checked: known names, each trainable parameter exactly once.

    Args:
        model: the model that the blocks partition.
        blocks: ``Block``s, or lists of parameter names.
    """
    cut = tuple(b if isinstance(b, Block) else Block(f"block {i}", tuple(b)) for i, b in enumerate(blocks))
    trainable = _trainable(model)
    owner: dict[str, str] = {}
    for block in cut:
        for name in block.params:
            if name in owner:
                raise ZeroBlockError(f"parameter {name!r} is in two blocks: {owner[name]!r} and {block.name!r}")
            if name not in trainable:
                if name in dict(model.named_parameters(remove_duplicate=False)):
                    raise ZeroBlockError(
                        f"block {block.name!r}: {name!r} is frozen, or tied to a parameter of another name; "
                        "list each trainable parameter once, by its name in model.named_parameters()"
                    )
                raise unknown(f"parameter in block {block.name!r}:", name, trainable)
            owner[name] = block.name
    left = [name for name in trainable if name not in owner]
    if left:
        raise ZeroBlockError(
            f"{len(left)} trainable parameters are in no block, the first {left[0]!r}; "
            "add a block for them, or freeze them with requires_grad_(False)"
        )
    return cut


PARTITIONS: dict[str, Partition] = {"whole": whole, "layers": layers, "linears": linears}


def by_name(text: str) -> Partition:
    """A partition from the command line: whole, layers, layers:K or linears."""
    name, colon, k = text.partition(":")
    if name not in PARTITIONS:
        raise unknown("partition", name, [*PARTITIONS, "layers:2"])
    if not colon:
        return PARTITIONS[name]
    if name != "layers":
        raise ZeroBlockError(f"partition {text!r}: only layers takes a number, as in layers:2")
    if not k.isdigit() or int(k) < 1:
        raise ZeroBlockError(f"partition {text!r}: the number counts layers per block, from 1 on, as in layers:2")
    return functools.partial(layers, k=int(k))


def stacks(model: nn.Module) -> list[str]:
    """Paths of the lists of layers; a list inside a layer (such as its experts) belongs to that layer."""
    paths: list[str] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(_dotted(stack)) for stack in paths)
        if isinstance(module, nn.ModuleList) and len(module) and not inside:
            paths.append(path)
    return paths


Named = tuple[str, tuple[str, ...]]


ADAPTER = "train an adapter on top (--lora, or peft.get_peft_model(model, LoraConfig(...)))"


def _trainable(model: nn.Module) -> list[str]:
    names = []
    for name, param in model.named_parameters():
        if param.requires_grad:
            refuse_packed(name, param)
            names.append(name)
    if not names:
        fix = f"its weights are packed: {ADAPTER}" if packed(model) else "unfreeze some with requires_grad_(True)"
        raise ZeroBlockError(f"the model has no trainable parameter; {fix}")
    return names


def refuse_packed(name: str, param: Tensor) -> None:
    """Raise if a trainable weight is stored in a quantised form."""
    if is_packed(param):
        raise ZeroBlockError(
            f"{name!r} is packed as {type(param).__name__} and cannot move: freeze it with requires_grad_(False) and "
            f"{ADAPTER}"
        )


def is_packed(tensor: Tensor) -> bool:
    """Whether a weight is stored in a quantised form that no small step can move; our own integers can be moved."""
    kind = type(tensor)
    if issubclass(kind, Codes):
        return False
    wrapped = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not hasattr(tensor, "device_mesh")
    if wrapped or kind.__module__.partition(".")[0] == "bitsandbytes":
        return True
    return not (tensor.is_complex() or tensor.is_floating_point()) or tensor.dtype in EIGHT_BITS


def packed(model: nn.Module) -> list[str]:
    """Names of the weights that are stored in a quantised form, as parameters or as GPTQ's and AWQ's buffers."""
    buffers = (name for name, _ in model.named_buffers() if name.rpartition(".")[2] == "qweight")
    return [name for name, param in model.named_parameters() if is_packed(param)] + list(buffers)


def _dotted(path: str) -> str:
    return f"{path}." if path else ""


def _by_owner(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Names grouped by the module that holds them, in order."""
    groups = itertools.groupby(names, key=lambda name: name.rpartition(".")[0] or name)
    return [(owner, list(group)) for owner, group in groups]


def _anatomy(model: nn.Module) -> tuple[list[Named], list[list[Named]], list[Named]]:
    """Modules before the layers, stacks of layers, and modules after them, if they have trainable parameters."""
    paths = stacks(model)
    names = _trainable(model)
    layer_of = re.compile("|".join(rf"^{re.escape(_dotted(stack))}\d+(?=\.)" for stack in paths) or r"(?!)")
    if not paths:
        raise ZeroBlockError(
            f"{type(model).__name__} has no nn.ModuleList of layers; use partition=whole, "
            "or give the blocks as lists of parameter names"
        )
    everything = [name for name, _ in model.named_parameters()]
    where = {name: i for i, name in enumerate(everything)}
    inner = [name for name in everything if layer_of.match(name)]
    first = where[inner[0]] if inner else len(everything)
    sides: tuple[list[Named], list[Named]] = ([], [])
    for owner, group in _by_owner([name for name in names if not layer_of.match(name)]):
        after = where[group[0]] > first or is_output_side(owner)
        sides[after].append((owner, tuple(group)))
    cut: list[list[Named]] = []
    for stack in paths:
        members: dict[str, list[str]] = {}
        for name in names:
            match = layer_of.match(name)
            if match and match.group().rpartition(".")[0] == stack:
                members.setdefault(match.group(), []).append(name)
        cut.append([(layer, tuple(group)) for layer, group in members.items()])
    return sides[0], cut, sides[1]
