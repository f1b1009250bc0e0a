"""The modules of a model that hold its parameters, and the stages that run once per point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from ..block import stacks
from ..direction import Member
from ..errors import ZeroBlockError
from ..family import is_output_side
from ..shard import is_spread


class ForkError(ZeroBlockError):
    """The model reads its weights, or returns its rows, in a way that cannot be forked."""


class Anatomy:
    """The places where a model reads its parameters: a layer, or modules outside the layers."""

    def __init__(self, model: nn.Module) -> None:
        self.owners: dict[str, list[nn.Module]] = {}
        self.layer: dict[str, nn.Module] = {}
        self._places: dict[str, tuple[nn.Module, str]] = {}
        """For each parameter, a module that holds it, and its name in that module."""
        names = {id(p): n for n, p in model.named_parameters()}
        for module in model.modules():
            for key, param in module._parameters.items():
                if param is not None:
                    self.owners.setdefault(names[id(param)], []).append(module)
                    self._places.setdefault(names[id(param)], (module, key))
        self.shared: set[str] = set()
        """Parameters that are read in several layers, or in a layer and outside it."""
        self.layers: list[nn.Module] = []
        self._paths = {id(module): path for path, module in model.named_modules()}
        for stack in stacks(model):
            for layer in model.get_submodule(stack).children():
                self.layers.append(layer)
                inside = set(layer.modules())
                for name in {names[id(param)] for param in layer.parameters()}:
                    if name in self.layer or not inside.issuperset(self.owners[name]):
                        self.shared.add(name)
                    self.layer[name] = layer

    def stages(self, members: Sequence[Member]) -> list[tuple[nn.Module, list[Member]]]:
        """The modules that run once per point, each with the tensors that are perturbed in it.

        These are the layers and the modules outside the layers that hold an active tensor; a tied head and embedding
        are two of the latter.
        """
        by_module: dict[int, tuple[nn.Module, list[Member]]] = {}
        for member in members:
            if member.name in self.shared:
                raise ForkError(f"{member.name!r} is read in several places of the stack of layers")
            if member.name not in self.owners:
                raise ForkError(f"{member.name!r} has another name here: build engine and optimizer on the same model")
            layer = self.layer.get(member.name)
            for module in [layer] if layer is not None else self._readers(member.name):
                by_module.setdefault(id(module), (module, []))[1].append(member)
        return list(by_module.values())

    def entrances(self, members: Sequence[Member]) -> list[nn.Module]:
        """The modules outside the layers that hold an active tensor, except those known to run after the layers."""
        layers = set(map(id, self.layers))
        found = (module for module, _ in self.stages(members) if id(module) not in layers)
        return [module for module in found if not is_output_side(self._paths[id(module)])]

    def held(self, member: Member) -> Tensor:
        """The tensor that the model now holds in a parameter's place: the parameter, or what FSDP2 has gathered."""
        if not is_spread(member.param):
            return member.param
        module, key = self._places[member.name]
        return cast(Tensor, module._parameters[key])

    def gathered(self, member: Member) -> Member:
        """A member with the values that a module reads while it runs: whole, where FSDP2 has gathered its shards."""
        param = self.held(member)
        if param is member.param and not is_spread(param):
            return member
        basis = member.basis.uncut
        if basis is None:
            raise ForkError(f"{member.name!r} is sharded, and each process holds only some rows of its folded steps")
        if is_spread(param):
            raise ForkError(f"{member.name!r} is sharded, and not gathered whole for the layer that reads it")
        if param.dtype != member.param.dtype:
            raise ForkError(f"{member.name!r} is {member.param.dtype}, and gathered as {param.dtype}")
        values = param.data.clone() if param.device.type == "cpu" else param.data  # FSDP2 cannot free what numpy saw
        return member._replace(param=values, basis=basis)

    def _readers(self, name: str) -> list[nn.Module]:
        """The modules outside the layers that read a parameter; ``_Watch`` makes sure that no other does.

        RoBERTa's head and the linear layer in it hold one bias, which only the linear layer reads.
        """
        leaves = [module for module in self.owners[name] if not any(True for _ in module.children())]
        if not leaves:
            raise ForkError(f"{name!r} belongs to a module that contains other modules")
        return leaves
