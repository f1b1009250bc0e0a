"""A model whose matrices are stored as integers, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import ZeroBlockError, unknown
from .layer import GROUP, KINDS, Given, QuantisedLinear, quantised_layers

Moves = Literal["integers", "scales"]


def quantise_(
    model: nn.Module,
    kind: str,
    moves: Moves = "integers",
    group: int = GROUP,
    *,
    given: Mapping[nn.Module, Given] | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """Store the matrices of a model's layers as integers; embeddings, norms, the head and tied matrices do not change.

    In a model with a PEFT adapter, only frozen matrices become integers, and only the adapter moves.  Matrices that
    transformers keeps in fp32, such as T5's ``wo``, stay as they are, too.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    >>> quantise_(model, "int8")["layers"][0]
    QuantisedLinear(in_features=4, out_features=4, bias=True, bits=8, group=4)

    Args:
        model: the model, in its final dtype.
        kind: "int8" or "int4".
        moves: "integers" leaves everything trainable that was; "scales" freezes all but the scales.
        group: the number of integers that share a scale.
        given: known integers of some linear layers; only those layers are then stored as integers. By default all
            layers are, as the nearest integers.
        device: the device on which integers are made and kept, one matrix at a time; other weights stay where they are.

    Returns:
        The same model.
    """
    if kind not in KINDS:
        raise unknown("kind of weights", kind, KINDS)
    if moves not in ("integers", "scales"):
        raise unknown("choice of what moves", moves, ("integers", "scales"))
    trainable = {id(param) for param in model.parameters() if param.requires_grad}
    adapted = any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules())
    kept = (getattr(module, "_keep_in_fp32_modules", None) or () for module in model.modules())
    precise = {path.rpartition(".")[2] for paths in kept for path in paths}
    stored = 0
    for parent, name, linear in list(_matrices(model, KINDS[kind].per_byte)):
        moved = id(linear.weight) in trainable
        if (adapted and moved) or (given is not None and linear not in given) or (given is None and name in precise):
            continue
        replacement = QuantisedLinear(linear, KINDS[kind], group, (given or {}).get(linear), device)
        replacement.weight.requires_grad_(moved and moves == "integers")
        replacement.train(linear.training)
        setattr(parent, name, replacement)
        stored += 1
    if not stored:
        raise ZeroBlockError(f"{type(model).__name__} has no linear layers that can be stored as {kind}")
    if moves == "scales" and not adapted:
        for param in model.parameters():
            param.requires_grad_(False)
        for module in quantised_layers(model).values():
            module.scales.requires_grad_(True)
    return model


def store_(
    model: nn.Module,
    how: str | None,
    *,
    given: Mapping[nn.Module, Given] | None = None,
    device: torch.device | None = None,
) -> nn.Module:
    """Store a model's matrices as the command line says: ``int8``, ``int4``, ``int8:scales`` or ``int4:scales``.

    Args:
        model: see :func:`quantise_`.
        how: the integers, and ``:scales`` if their scales move instead of them; None leaves the model as it is.
        given, device: see :func:`quantise_`.
    """
    if how is None:
        return model
    check(how)
    kind, _, moves = how.partition(":")
    return quantise_(model, kind, "scales" if moves else "integers", given=given, device=device)


def check(how: str) -> None:
    """Refuse a text that is not a way to store weights."""
    choices = [*KINDS, *(f"{kind}:scales" for kind in KINDS)]
    if how not in choices:
        raise unknown("way to store weights:", how, choices)


def recorded(extra: Mapping[str, Any]) -> str | None:
    """How the weights of a journaled run were stored, from its header's ``extra``."""
    how = extra.get("weights")
    if how is not None:
        check(str(how))
    return how


def values(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict for export: quantised matrices are expanded to numbers, on the host."""
    state = dict(model.state_dict())
    for path, layer in quantised_layers(model).items():
        state[f"{path}.weight"] = layer.expanded().cpu()
        del state[f"{path}.scales"]
        state.pop(f"{path}.zeros", None)
    return state


def expand_(model: nn.Module) -> nn.Module:
    """Replace every quantised layer by an ordinary one with the same values, for example to export a model."""
    for path, module in quantised_layers(model).items():
        parent = model.get_submodule(path.rpartition(".")[0])
        matrix = module.expanded()
        linear = nn.Linear(module.in_features, module.out_features, False, matrix.device, matrix.dtype)
        linear.weight.data, linear.bias = matrix, module.bias
        linear.train(module.training)
        setattr(parent, path.rpartition(".")[2], linear)
    return model


def _matrices(model: nn.Module, per_byte: int) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The linear layers inside stacks of layers, each with parent and name; layers that share a matrix are left out."""
    places = (
        param for _, module in model.named_modules(remove_duplicate=False) for param in module._parameters.values()
    )
    uses = Counter(map(id, places))
    for stack in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for parent in stack.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear and child.in_features % per_byte == 0 and uses[id(child.weight)] == 1:
                    yield parent, name, child
