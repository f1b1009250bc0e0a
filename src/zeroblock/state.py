"""A rule's state: its tensors, the memory they lie in, and how many steps they have seen."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .basis import Basis
from .direction import Member
from .errors import ZeroBlockError


class Weighs(Protocol):
    """The part of a rule that handles its numbers per block."""

    def weigh(self, coeffs: Sequence[float], table: list[list[float]], block: int) -> Sequence[float]: ...


class State:
    """The tensors that a rule keeps per tensor of weights.

    A tensor's state holds every named tensor, the number ``t`` of steps it has seen, and the
    ``turn`` whose basis it is expressed in.  A state that is dropped at the end of every turn is
    allocated at the address of the last one, so that captured steps find it there.

    Args:
        values: the states, by tensor of weights.
        names: names of the tensors that the rule keeps.
        carried: names of those tensors that follow the basis from turn to turn.
        reset: whether the tensors are dropped at the end of every turn.
        dtype_of: gives the dtype of the rule's tensors for a tensor of weights.
        basis_of: gives the basis that a tensor had in an earlier turn, by name and turn.
        capacity: gives the number of coordinates of the largest block.
        table: (blocks + 1, numbers per block) shape of the rule's numbers per block, which outlive turns.
        place: gives the device on which a tensor of weights is used.
    """

    def __init__(
        self,
        values: MutableMapping[Tensor, dict[str, Any]],
        names: Sequence[str],
        carried: Sequence[str],
        reset: bool,
        dtype_of: Callable[[Member], torch.dtype],
        basis_of: Callable[[str, int], Basis],
        capacity: Callable[[], int],
        table: tuple[int, int] = (1, 0),
        place: Callable[[Tensor], torch.device] = operator.attrgetter("device"),
    ) -> None:
        self.values, self.names, self.carried, self.reset = values, tuple(names), tuple(carried), reset
        self.dtype_of, self.basis_of, self.capacity, self.place = dtype_of, basis_of, capacity, place
        self.turn = 0
        self.table = torch.zeros(table, dtype=torch.float64)
        """The rule's numbers per block; the last row is for all blocks together."""
        self._arenas: dict[tuple[torch.dtype, torch.device], tuple[Tensor, int]] = {}
        """Memory for states that are dropped at the end of a turn, and how many elements of it are in use."""
        self._ticks: Tensor | None = None
        """(1,) on the device: the steps of this turn that the rule has seen."""
        self._factors: Tensor | None = None
        """(interval + 1, factors) on the device: the rule's factors by the number of steps it has seen."""

    def of(self, member: Member) -> dict[str, Any]:
        """The state of a tensor in its current basis; zeros at its first step."""
        state = self.values[member.param]
        if not state:
            if self.names and not self.reset and not member.basis.carries:
                raise ZeroBlockError(
                    f"a state that is kept has to follow the basis of {member.name!r} from turn to turn, and "
                    f"{type(member.basis).__name__} does not say how: use a rule with reset=True"
                )
            shape, device = (member.basis.size, self.dtype_of(member)), self.place(member.param)
            state.update({name: self._zeros(*shape, device) for name in self.names}, t=0, turn=self.turn)
        if state["turn"] != self.turn:
            for name in self.carried:
                old = self.basis_of(member.name, state["turn"])
                state[name] = member.basis.transport(state[name], old)
        state["turn"] = self.turn
        return state

    def known(self, member: Member) -> dict[str, Any]:
        """The state of a tensor in its current basis; empty before its first step."""
        return self.of(member) if self.values.get(member.param) else {}

    def prepare(self, members: Iterable[Member], factors: Callable[[int], tuple[float, ...]], interval: int) -> None:
        """Allocate everything that outlives a step on the device, before the step runs there.

        Args:
            members: the tensors that will be updated.
            factors: gives the rule's factors by the number of steps of the turn it has seen.
            interval: steps per turn.
        """
        for member in members:
            if self.table.numel() and self.table.device != member.param.device:
                self.table = self.table.to(member.param.device)
            if not self.names:
                return
            self.of(member)
            if self._ticks is None:
                device = member.param.device
                self._ticks = torch.tensor([self._seen], device=device)
                table = [factors(t) for t in range(interval + 1)]
                self._factors = torch.tensor(table, dtype=torch.float64, device=device)

    def tick(self, taken: Tensor) -> Tensor:
        """Count a step on the device, if it is taken, and look up the rule's factors: (factors,) in fp64."""
        assert self._ticks is not None
        assert self._factors is not None
        self._ticks += taken
        return self._factors[self._ticks][0]

    def count(self, turn: int) -> None:
        """Count a step of a turn on the host that the device has taken and counted already."""
        if turn == self.turn:
            for state in self.values.values():
                state["t"] += 1

    def wind(self) -> None:
        """Set the device's count to the host's, after a step on the host or a loaded state."""
        if self._ticks is not None:
            self._ticks.fill_(self._seen)

    @property
    def _seen(self) -> int:
        return next((int(state["t"]) for state in self.values.values() if state), 0)

    def enter(self, turn: int) -> None:
        """Begin a turn: a state that resets is dropped."""
        self.turn = turn
        if self.reset:
            self.forget()

    def forget(self) -> None:
        """Drop every state; the memory of those that reset stays."""
        self.values.clear()
        self._arenas = {place: (arena, 0) for place, (arena, _) in self._arenas.items()}
        if self._ticks is not None:
            self._ticks.zero_()

    def memory(self, members: Iterable[Member]) -> tuple[int, ...]:
        """Addresses of the states of these tensors, which are fixed in a captured step."""
        states = (self.values[member.param] for member in members if member.param in self.values)
        tables = [self.table] if self.table.numel() else []
        kept = (value for state in states for value in state.values() if isinstance(value, Tensor))
        return tuple(tensor.data_ptr() for tensor in (*tables, *kept))

    def weigh(self, rule: Weighs, coeffs: Sequence[float], block: int) -> Sequence[float]:
        """The coefficients that a rule uses in place of the measured ones, by its numbers for the block."""
        if not self.table.numel():
            return coeffs
        table = self.table.tolist()
        weighed = rule.weigh(coeffs, table, block)
        self.table.copy_(torch.tensor(table, dtype=torch.float64))
        return weighed

    def saved(self, names: dict[int, str]) -> dict[str, dict[str, Any]]:
        """A copy of every state by name; ``names`` are the tensors' names by id."""
        states = ((names[id(param)], state) for param, state in self.values.items() if state)
        return {n: {k: v.clone() if isinstance(v, Tensor) else v for k, v in s.items()} for n, s in states}

    def load(self, param: Tensor, saved: dict[str, Any]) -> None:
        """Put back the saved state of a tensor, where captured steps expect it."""
        for key, value in saved.items():
            if isinstance(value, Tensor):
                value = self._zeros(value.numel(), value.dtype, self.place(param)).copy_(value)
            self.values[param][key] = value

    def _zeros(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self.reset:
            return torch.zeros(size, dtype=dtype, device=device)
        if (dtype, device) not in self._arenas:
            elements = len(self.names) * self.capacity()
            self._arenas[dtype, device] = (torch.empty(elements, dtype=dtype, device=device), 0)
        arena, used = self._arenas[dtype, device]
        self._arenas[dtype, device] = (arena, used + size)
        return arena[used : used + size].zero_()
