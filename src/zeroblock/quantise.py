"""Weights of 8 or 4 bits: integers on a grid, with one scale per group of them.

    w = s·q        q an integer in [-127, 127] or [-7, 7], s one number per group of a row

A step may move the integers, rounded to the grid at random so that its mean is kept, or the
scales (QZO), or an adapter beside them.  The forward pass expands one matrix at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .errors import ZeroBlockError, unknown

GROUP = 64
"""Integers that share a scale, in a row whose length this divides; else one scale serves a row."""

Moves = Literal["integers", "scales"]
BYTES = torch.float8_e4m3fn
"""The dtype in which integers lie: of one byte, and one that torch allows to be trainable."""


class Codes(nn.Parameter):
    """The integers of a matrix (m, n), as bytes; which numbers they are, their class says."""

    bits: int
    limit: int
    """The largest integer; the smallest is its negative."""
    per_byte = 1

    @classmethod
    def packed(cls, integers: Tensor) -> Tensor:
        """(…, n) integers → (…, n / per_byte) bytes."""
        return integers.to(torch.int8).contiguous().view(BYTES)

    @classmethod
    def unpacked(cls, codes: Tensor) -> Tensor:
        """(…, n / per_byte) bytes → (…, n) int8."""
        return codes.detach().view(torch.int8)


class Int8(Codes):
    """One integer per byte."""

    bits, limit = 8, 127


class Int4(Codes):
    """Two integers per byte, each 8 more than it stands for; the first one in the lower half."""

    bits, limit, per_byte = 4, 7, 2

    @classmethod
    def packed(cls, integers: Tensor) -> Tensor:
        shifted = (integers + 8).to(torch.uint8)
        return (shifted[..., 0::2] | shifted[..., 1::2] << 4).contiguous().view(BYTES)

    @classmethod
    def unpacked(cls, codes: Tensor) -> Tensor:
        both = codes.detach().view(torch.uint8)
        return torch.stack([both & 15, both >> 4], dim=-1).flatten(-2).to(torch.int8) - 8


KINDS: dict[str, type[Codes]] = {"int8": Int8, "int4": Int4}
"""By their names on the command line."""


class QuantisedLinear(nn.Linear):
    """A linear layer whose matrix is stored as integers and scales.

    Its ``weight`` may be shown as a matrix of floating-point numbers for a while, as a perturbed copy is; then the
    product takes that matrix.

    Args:
        linear: the layer; its matrix is (m, n).
        kind: of the integers.
        group: integers that share a scale.
    """

    weight: Codes  # type: ignore[assignment]

    def __init__(self, linear: nn.Linear, kind: type[Codes], group: int = GROUP) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        matrix = linear.weight.detach()
        self.kind = kind
        self.group = group if matrix.shape[1] % group == 0 else matrix.shape[1]
        integers, scales = quantised(matrix, kind, self.group)
        self.weight = kind(kind.packed(integers), requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:
        """x W ᵀ + b; (…, n) → (…, m)."""
        weight = self.weight.detach()  # a function that a direction sees, and answers with its copy
        return F.linear(input, self.expanded(weight) if weight.dtype == BYTES else weight, self.bias)

    def expanded(self, codes: Tensor | None = None) -> Tensor:
        """(m, n) the matrix that the integers stand for."""
        return expanded(self.weight if codes is None else codes, self.kind, self.scales)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantisedLinear:
        """Move to another device or dtype: integers stay integers."""

        def apply(tensor: Tensor) -> Any:
            return fn(tensor.view(torch.uint8)).view(BYTES) if tensor.dtype == BYTES else fn(tensor)

        super()._apply(apply, recurse)
        return self

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.kind.bits}, group={self.group}"


def expanded(codes: Tensor, kind: type[Codes], scales: Tensor) -> Tensor:
    """(m, n / per_byte) bytes and (m, groups) scales → (m, n) the matrix that they stand for, in the scales' dtype."""
    groups = kind.unpacked(codes).unflatten(1, (scales.shape[1], -1))
    return torch.mul(groups, scales.detach()[..., None]).flatten(1)


def quantised(matrix: Tensor, kind: type[Codes], group: int) -> tuple[Tensor, Tensor]:
    """The integers and scales nearest to a matrix.

    >>> quantised(torch.tensor([[0.0, 2.54, -1.0, 0.5]]), Int8, 4)
    (tensor([[  0, 127, -50,  25]], dtype=torch.int8), tensor([[0.0200]]))

    Args:
        matrix: (m, n).
        kind: of the integers.
        group: a divisor of n.

    Returns:
        (m, n) int8 and (m, n / group) scales in the matrix's dtype.
    """
    if matrix.is_meta:
        return torch.empty_like(matrix, dtype=torch.int8), matrix.new_empty(matrix.shape[0], matrix.shape[1] // group)
    groups = matrix.float().unflatten(1, (-1, group))
    scales = (groups.abs().amax(-1) / kind.limit).to(matrix.dtype)
    used = scales[scales > 0]
    scales[scales == 0] = used.mean() if used.numel() else 1.0  # zeros may move, too
    integers = (groups / scales.float()[..., None]).round().clamp(-kind.limit, kind.limit)
    return integers.flatten(1).to(torch.int8), scales


def quantise_(model: nn.Module, kind: str, moves: Moves = "integers", group: int = GROUP) -> nn.Module:
    """Store the matrices of a model's layers as integers; embeddings, norms and the head stay as they are.

    In a model with an adapter of PEFT only frozen matrices are stored so, and only the adapter moves.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    >>> quantise_(model, "int8")["layers"][0]
    QuantisedLinear(in_features=4, out_features=4, bias=True, bits=8, group=4)

    Args:
        model: on its device, in its dtype.
        kind: "int8" or "int4".
        moves: "integers" leaves everything trainable that was; "scales" freezes all but the scales.
        group: integers that share a scale.

    Returns:
        The same model.
    """
    if kind not in KINDS:
        raise unknown("kind of weights", kind, KINDS)
    if moves not in ("integers", "scales"):
        raise unknown("choice of what moves", moves, ("integers", "scales"))
    trainable = {id(param) for param in model.parameters() if param.requires_grad}
    adapted = any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules())
    stored = 0
    for parent, name, linear in list(_matrices(model, KINDS[kind].per_byte)):
        moved = id(linear.weight) in trainable
        if adapted and moved:
            continue
        replacement = QuantisedLinear(linear, KINDS[kind], group)
        replacement.weight.requires_grad_(moved and moves == "integers")
        replacement.train(linear.training)
        setattr(parent, name, replacement)
        stored += 1
    if not stored:
        raise ZeroBlockError(f"{type(model).__name__} has no linear layers to store as {kind}")
    if moves == "scales" and not adapted:
        for param in model.parameters():
            param.requires_grad_(False)
        for module in quantised_layers(model).values():
            module.scales.requires_grad_(True)
    return model


def store_(model: nn.Module, how: str | None) -> nn.Module:
    """Store a model's matrices as the command line says: ``int8``, ``int4``, ``int8:scales`` or ``int4:scales``.

    Args:
        model: see :func:`quantise_`.
        how: the integers, and ``:scales`` where their scales move in their place; None leaves the model as it is.
    """
    if how is None:
        return model
    check(how)
    kind, _, moves = how.partition(":")
    return quantise_(model, kind, "scales" if moves else "integers")


def check(how: str) -> None:
    """Refuse words that do not say how to store weights."""
    choices = [*KINDS, *(f"{kind}:scales" for kind in KINDS)]
    if how not in choices:
        raise unknown("way to store weights:", how, choices)


def recorded(extra: Mapping[str, Any]) -> str | None:
    """How the weights of a journaled run were stored, from what its header says besides."""
    how = extra.get("weights")
    if how is not None:
        check(str(how))
    return how


def values(model: nn.Module) -> dict[str, Tensor]:
    """A model's state with every matrix as the numbers that its integers stand for, on the host, to be exported."""
    state = dict(model.state_dict())
    for path, layer in quantised_layers(model).items():
        state[f"{path}.weight"] = layer.expanded().cpu()
        del state[f"{path}.scales"]
    return state


def expand_(model: nn.Module) -> nn.Module:
    """Replace every quantised layer by an ordinary one with the same values; the way to export a model."""
    for path, module in quantised_layers(model).items():
        parent = model.get_submodule(path.rpartition(".")[0])
        matrix = module.expanded()
        linear = nn.Linear(module.in_features, module.out_features, False, matrix.device, matrix.dtype)
        linear.weight.data, linear.bias = matrix, module.bias
        linear.train(module.training)
        setattr(parent, path.rpartition(".")[2], linear)
    return model


def elements(param: Tensor) -> int:
    """How many weights a parameter stands for."""
    return param.numel() * (param.per_byte if isinstance(param, Codes) else 1)


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLinear]:
    """The quantised layers of a model by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def _matrices(model: nn.Module, per_byte: int) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Linear layers inside stacks of layers: their parent, name and themselves."""
    for stack in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for parent in stack.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear and child.in_features % per_byte == 0:
                    yield parent, name, child
