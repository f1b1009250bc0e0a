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
    """Store the matrices of a model's layers as integers; embeddings, norms, the head and tied ones stay as they are.

    In a model with an adapter of PEFT only frozen matrices are stored so, and only the adapter moves.  Matrices that
    transformers keeps precise, such as T5's ``wo``, stay as they are, too.

    >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])})
    >>> quantise_(model, "int8")["layers"][0]
    QuantisedLinear(in_features=4, out_features=4, bias=True, bits=8, group=4)

    Args:
        model: in its dtype.
        kind: "int8" or "int4".
        moves: "integers" leaves everything trainable that was; "scales" freezes all but the scales.
        group: integers that share a scale.
        given: the integers of some linear layers, and then only those layers are stored so; by default all are, as the
            nearest integers.
        device: where the integers are put, and made, one matrix after another; other weights stay where they are.

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
        raise ZeroBlockError(f"{type(model).__name__} has no linear layers of their own to store as {kind}")
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
        how: the integers, and ``:scales`` where their scales move in their place; None leaves the model as it is.
        given, device: see :func:`quantise_`.
    """
    if how is None:
        return model
    check(how)
    kind, _, moves = how.partition(":")
    return quantise_(model, kind, "scales" if moves else "integers", given=given, device=device)


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
        state.pop(f"{path}.zeros", None)
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


def _matrices(model: nn.Module, per_byte: int) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Linear layers inside stacks of layers: their parent, name and themselves; those that share a matrix stay tied."""
    places = (
        param for _, module in model.named_modules(remove_duplicate=False) for param in module._parameters.values()
    )
    uses = Counter(map(id, places))
    for stack in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
        for parent in stack.modules():
            for name, child in parent.named_children():
                if type(child) is nn.Linear and child.in_features % per_byte == 0 and uses[id(child.weight)] == 1:
                    yield parent, name, child
