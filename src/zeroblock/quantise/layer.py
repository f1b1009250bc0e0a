"""A linear layer whose matrix is stored as integers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import integer

GROUP = 64
"""The number of integers that share a scale, if it divides the length of a row; otherwise a row has one scale."""

BYTES = torch.float8_e4m3fn
"""The dtype that holds the integers: it has one byte, and torch allows it to be trainable."""


class Codes(nn.Parameter):
    """The integers of a matrix (m, n), as bytes; the class says which integers these are."""

    bits: int
    limit: int
    """The largest integer; the smallest is its negative, or one less if there are zero points."""
    per_byte = 1

    @classmethod
    def packed(cls, integers: Tensor) -> Tensor:
        """(…, n) integers → (…, n / per_byte) bytes."""
        return integer.packed(integers, cls.bits).view(BYTES)

    @classmethod
    def unpacked(cls, codes: Tensor) -> Tensor:
        """(…, n / per_byte) bytes → (…, n) int8."""
        return integer.unpacked(codes, cls.bits)


class Int8(Codes):
    """One integer per byte."""

    bits, limit = 8, 127


class Int4(Codes):
    """Two integers per byte, stored with 8 added; the first one is in the lower half."""

    bits, limit, per_byte = 4, 7, 2


class Scales(nn.Parameter):
    """The scales of a matrix's integers: far below 1/√fan-in, and never zero."""


KINDS: dict[str, type[Codes]] = {"int8": Int8, "int4": Int4}
"""The kinds of integers, by their names on the command line."""


class Given(NamedTuple):
    """The integers of a matrix (m, n), chosen elsewhere: w = s·(q - z).

    Args:
        integers: (m, n) int8.
        scales: (m, groups) s.
        zeros: (m, groups) int8 z; None where all are 0.
    """

    integers: Tensor
    scales: Tensor
    zeros: Tensor | None = None


class QuantisedLinear(nn.Linear):
    """A linear layer whose matrix is stored as integers and scales.

    Its ``weight`` may be replaced by a matrix of floating-point numbers for a while, such as a perturbed copy; then the
    product takes that matrix.

    Args:
        linear: the layer; its matrix is (m, n).
        kind: the class of the integers.
        group: the number of integers that share a scale.
        given: the integers, if they are known; the nearest ones by default.
        device: the device of the integers; by default the matrix's.
    """

    weight: Codes  # type: ignore[assignment]
    zeros: Tensor | None

    def __init__(
        self,
        linear: nn.Linear,
        kind: type[Codes],
        group: int = GROUP,
        given: Given | None = None,
        device: torch.device | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        matrix = linear.weight.detach().to(device)
        if given is None:
            group = group if matrix.shape[1] % group == 0 else matrix.shape[1]
            given = Given(*quantised(matrix, kind, group))
        self.kind, self.group = kind, matrix.shape[1] // given.scales.shape[1]
        self.weight = kind(kind.packed(given.integers.to(matrix.device)), requires_grad=False)
        self.scales = Scales(given.scales.to(matrix), requires_grad=False)
        self.register_buffer("zeros", None if given.zeros is None else given.zeros.to(matrix.device).contiguous())

    def forward(self, input: Tensor) -> Tensor:
        """x W ᵀ + b; (…, n) → (…, m)."""
        weight = self.weight.detach()  # a direction intercepts this call and returns its copy
        if weight.dtype != BYTES:
            return F.linear(input, weight, self.bias)
        return integer.linear(input, self.stored(weight), self.bias)

    def stored(self, codes: Tensor | None = None) -> integer.Integers:
        """The integers as stored, with their scales and zero points."""
        return integer.Integers(self.weight if codes is None else codes, self.kind.bits, self.scales, self.zeros)

    def expanded(self) -> Tensor:
        """The matrix (m, n) that the integers stand for."""
        return integer.expand(self.stored())

    def _apply(self, fn: Any, recurse: bool = True) -> QuantisedLinear:
        """Move to another device or dtype: integers stay integers."""

        def apply(tensor: Tensor) -> Any:
            return fn(tensor.view(torch.uint8)).view(BYTES) if tensor.dtype == BYTES else fn(tensor)

        super()._apply(apply, recurse)
        for name, kind in (("weight", self.kind), ("scales", Scales)):
            param = self._parameters.get(name)
            if param is None or isinstance(param, kind) or (kind is self.kind and param.dtype != BYTES):
                continue
            # a parameter that leaves the meta device is a new, plain one
            self._parameters[name] = kind(param.detach(), requires_grad=param.requires_grad)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save the integers as (m, bytes, 1), a shape that an ordinary layer refuses instead of loading the bytes."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = destination[f"{prefix}weight"].unsqueeze(-1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load integers; refuse numbers that would have to be rounded first.  The last argument collects errors."""
        name = f"{prefix}weight"
        codes = state_dict.get(name)
        if codes is not None and codes.dtype != BYTES:
            state_dict = {key: value for key, value in state_dict.items() if key != name}
            args[-1].append(
                f"{name} holds {codes.dtype} numbers, and this layer stores integers: load them before quantise_"
            )
        elif codes is not None and codes.numel() == self.weight.numel():
            state_dict = {**state_dict, name: codes.reshape(self.weight.shape)}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.kind.bits}, group={self.group}"


def quantised(matrix: Tensor, kind: type[Codes], group: int) -> tuple[Tensor, Tensor]:
    """The integers and scales nearest to a matrix.

    >>> quantised(torch.tensor([[0.0, 2.54, -1.0, 0.5]]), Int8, 4)
    (tensor([[  0, 127, -50,  25]], dtype=torch.int8), tensor([[0.0200]]))

    Args:
        matrix: (m, n).
        kind: the class of the integers.
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


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLinear]:
    """The quantised layers of a model by their paths."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def elements(param: Tensor) -> int:
    """The number of weights that a parameter holds."""
    return param.numel() * (param.per_byte if isinstance(param, Codes) else 1)


def stored_as(model: nn.Module) -> str:
    """How most of a model's weights are stored: ``int8``, ``int4``, or the name of its dtype.

    >>> stored_as(nn.Linear(2, 2))
    'float32'
    """
    layer = next(iter(quantised_layers(model).values()), None)
    if layer is None:
        return str(next(model.parameters()).dtype).removeprefix("torch.")
    return next(name for name, kind in KINDS.items() if kind is layer.kind)


def stored_bytes(model: nn.Module, itemsize: int) -> int:
    """Bytes of a model's weights: integers as they are stored, every other weight with ``itemsize`` bytes.

    >>> stored_bytes(nn.Linear(4, 4), 2)
    40
    """
    zeros = sum(layer.zeros.nbytes for layer in quantised_layers(model).values() if layer.zeros is not None)
    return zeros + sum(p.nbytes if isinstance(p, Codes) else p.numel() * itemsize for p in model.parameters())
