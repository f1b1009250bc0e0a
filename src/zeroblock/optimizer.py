"""The optimizer: partition × schedule × subspace × estimator × rule.

c = (L(θ + εPz) - L(θ - εPz)) / 2ε        δ = rule(c·z)        θ ← θ - lr·Pδ
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn

from . import block as blocks_of
from .block import Block, Partition
from .direction import Direction, JustInTime, Member, Point, Subtracted, Swapped, uninterrupted, visit
from .errors import ZeroBlockError, ZeroBlockWarning
from .estimator import Estimator, Finite, Measure, TwoSided, clipped
from .noise import VERSION, Distribution, Key, Rounding
from .ops import DTYPES
from .record import Record
from .rule import SGD, Adam, Rule
from .schedule import Schedule, Shuffled
from .subspace import Alphas, Basis, Elementwise, Factored, Full, LowRank, Sparse, Subspace

PENDING = 64
"""Submitted steps that may be under way before the host waits for the oldest."""
LAG = 1000.0
"""Milliseconds of work that they may amount to, two steps at least: a stop, or a kill, is not far behind."""


class _Pending(NamedTuple):
    """A step that was submitted: what is known of it, where its numbers will be, and when."""

    step: int
    block: int
    lr: float
    probes: int
    host: Tensor
    event: torch.cuda.Event


Closure = Callable[[], Any]
"""Returns a number: a float, a numpy scalar or a tensor (averaged in fp32), from one micro-batch."""


def is_matrix(name: str, param: Tensor) -> bool:
    """What weight decay applies to by default: not to biases and norms."""
    return param.dim() >= 2


class ZeroOrder(torch.optim.Optimizer):
    """Optimizes any objective of any module with evaluations only, one block at a time.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = ZeroOrder(model, lr=0.1, partition=blocks_of.whole)
    >>> loss = optimizer.step(lambda: model(torch.ones(2)).square().sum())

    Args:
        model: its trainable parameters are optimized; fp32, fp64, fp16 or bf16.
        lr: learning rate; ``param_groups`` hold it, so ``torch.optim.lr_scheduler`` works.
        partition: cuts the model into blocks: ``whole``, ``layers``, ``linears``, or a list of blocks.
        schedule: which block is active in a turn.
        subspace: where in the block directions are drawn.
        estimator: how many directions, how far, how measured.
        rule: from the estimate to the step.
        interval: steps a turn: how long a block and its basis are held.
        fold: low-rank steps whose sum is held in coordinates, m×r, before it reaches the weights: a
            divisor of interval. The weights are θ after every ``fold`` steps, and after ``settle()``; the steps in
            between need not write them, which takes most of their time, nor round to their grid.
        seed: of noise, bases and schedule.
        weight_decay: λ, decoupled, on the active block.
        decays: which parameters λ applies to, by name and tensor; matrices by default.
        clip: steps and schedule take coefficients beyond ±clip for ±clip; records keep what was measured.
        distribution: of the coordinates.
        rounding: of 16-bit weights.
        restore: "copy" never writes θ while measuring; "subtract" is MeZO's way, in place.
        patience: consecutive steps with a non-finite loss before giving up.
    """

    clock: Tensor | None = None
    """Given to the keys of directions, bases and updates while a step is captured; see :class:`~.noise.Key`."""

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        partition: Partition | Sequence[Block | Iterable[str]] = blocks_of.layers,
        schedule: Schedule | None = None,
        subspace: Subspace | None = None,
        estimator: Estimator | None = None,
        rule: Rule | None = None,
        interval: int = 1,
        fold: int = 1,
        seed: int = 0,
        weight_decay: float = 0.0,
        decays: Callable[[str, Tensor], bool] = is_matrix,
        clip: float | None = None,
        distribution: Distribution = Distribution.NORMAL,
        rounding: Rounding = Rounding.STOCHASTIC,
        restore: Literal["copy", "subtract"] = "copy",
        patience: int = 20,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not (value >= 0 and math.isfinite(value)):
                raise ZeroBlockError(f"{name} must be finite and not negative, got {value}")
        if clip is not None and not (clip > 0 and math.isfinite(clip)):
            raise ZeroBlockError(f"clip must be finite and positive, or None, got {clip}")
        interval, fold, patience = _count("interval", interval), _count("fold", fold), _count("patience", patience)
        if restore not in ("copy", "subtract"):
            raise ZeroBlockError(f"restore must be 'copy' or 'subtract', got {restore!r}")
        if restore == "subtract" and (isinstance(subspace, Sparse) or getattr(subspace, "as_published", False)):
            raise ZeroBlockError(
                f"{subspace} cannot be restored by subtraction, which would not take back the step it made: "
                "leave restore='subtract' (or as_published) out"
            )
        if fold > 1:
            _check_fold(fold, interval, subspace, restore, weight_decay)
        self.model = model
        self.blocks = partition(model) if callable(partition) else blocks_of.explicit(model, partition)
        self.partition = partition
        self.schedule: Schedule = schedule or Shuffled()
        self.subspace: Subspace = subspace or Full()
        self.estimator: Estimator = estimator or TwoSided()
        self.rule: Rule = rule or SGD()
        self.interval, self.fold = interval, fold
        self.seed, self.decays = Key(seed, 0).seed, decays
        self.clip = None if clip is None else float(clip)
        self.distribution, self.rounding = distribution, rounding
        self.restore, self.patience = restore, patience
        self.weight_decay = weight_decay

        self.offsets: dict[str, int] = {}
        total = 0
        for name, param in model.named_parameters():  # frozen ones too: freezing moves nobody's noise
            self.offsets[name] = total
            total += param.numel()
        self.params = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for name, param in self.params.items():
            if param.is_meta:
                raise ZeroBlockError(f"{name!r} is on the meta device; load the weights first")
            if param.dtype not in DTYPES:
                raise ZeroBlockError(
                    f"{name!r} is {param.dtype}; zeroblock moves fp32, fp64, fp16 and bf16 weights: "
                    "freeze the others with requires_grad_(False)"
                )
        super().__init__(list(self.params.values()), {"lr": lr, "weight_decay": weight_decay})

        self.thresholds = {n: self.subspace.threshold(p) for n, p in self.params.items()}
        self.steps = 0
        """Steps taken, skipped ones counted in."""
        self.skipped = 0
        """Steps whose loss was not finite."""
        self.scores = [0.0] * len(self.blocks)
        self.record: Record | None = None
        """The last step whose numbers are known."""
        self.listener: Callable[[Record], None] | None = None
        """Called with the record of every step, in order; on a GPU later than the step, when the weights are ahead."""
        self._complained = False
        self._run_of_bad = 0
        self._held: dict[str, Tensor] = {}
        """Of the tensors that fall behind θ: what they lack, in coordinates."""
        self._settled = False
        """Whether the weights are θ where steps would not take them to be, or half way there."""
        self._rooms: dict[tuple[torch.dtype, torch.device], tuple[Tensor, int]] = {}
        """Memory for states that are dropped at the end of a turn, and how much of it is taken."""
        self._pending: deque[_Pending] = deque()
        self._ended: torch.cuda.Event | None = None
        self._pace = LAG
        """Milliseconds from the end of one submitted step to the next, the last time."""
        self._enter_turn()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: the model says what is optimized."""
        if hasattr(self, "steps"):
            raise ZeroBlockError(
                "ZeroOrder optimizes its model's trainable parameters; unfreeze them before building it, "
                "or cut them into blocks with partition="
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"ZeroOrder({', '.join(f'{k}={v}' for k, v in self.parts.items())})"

    @property
    def parts(self) -> dict[str, str]:
        """The composition, for people and for checks: every value that the weights depend on."""
        cut = self.partition
        if isinstance(cut, functools.partial):
            options = ", ".join(f"{k}={v}" for k, v in cut.keywords.items())
            name = f"{cut.func.__name__}({options})"
        else:
            name = getattr(cut, "__name__", "explicit")
        return {
            "partition": name,
            "schedule": _told(self.schedule),
            "subspace": _told(self.subspace),
            "estimator": _told(self.estimator),
            "rule": _told(self.rule),
            "interval": repr(self.interval),
            **({} if self.fold == 1 else {"fold": repr(self.fold)}),
            **({} if self.clip is None else {"clip": repr(self.clip)}),
            "distribution": self.distribution.name.lower(),
            "rounding": self.rounding.name.lower(),
            "noise": f"version {VERSION}",
        }

    @torch.no_grad()
    def step(self, closure: Closure | Sequence[Closure] | None = None) -> Tensor:  # type: ignore[override]
        """Measure and move.

        Args:
            closure: any objective, evaluated in evaluation mode and without gradient; or several,
                one a micro-batch, whose mean is the objective.

        Returns:
            The loss: the mean of the two sides, or that at θ when one-sided; a scalar, on the GPU
            where the step was submitted and may not have ended yet.
        """
        now = self.param_groups[0]["weight_decay"]
        if now != self.weight_decay:
            raise ZeroBlockError(
                f"weight_decay was {self.weight_decay} and is {now} now, which records would not tell: "
                "build another optimizer, whose steps begin a journal of their own"
            )
        self._refuse_settled()
        submitted = self._submit(closure)
        if submitted is not None:
            return submitted
        self.flush()  # steps submitted before this one come first
        directions = [self.direction(probe) for probe in range(self.estimator.probes)]
        with evaluation(self.model):
            estimate = self.estimator(self._measure(closure), directions)
        lr = float(self.param_groups[0]["lr"])
        record = Record(self.steps, self.block, estimate.coeffs, lr, estimate.losses, estimate.loss)
        with uninterrupted():
            if estimate.finite:
                self._move(estimate.coeffs, lr)
                self._wind_clock()
            self._counted()
            try:
                self._deliver(record, estimate.finite)
            finally:  # whatever a listener raises, the step was taken
                if self.steps % self.interval == 0:
                    self._enter_turn()
        if not estimate.finite:
            self._complain(record.step, self._run_of_bad)
        return torch.tensor(estimate.loss)

    def _submit(self, closure: Closure | Sequence[Closure] | None) -> Tensor | None:
        """A whole step on the device without waiting for it, where objective and method allow."""
        submit = getattr(closure, "submit", None)
        if submit is None or not self.capturable:
            return None
        with uninterrupted():
            if self.rule.state:  # memory that outlives the step, and so is not taken while it is captured
                for member in self.members:
                    self._state(*member)
                _ = self._device_clock
            numbers: Tensor | None = submit(self)
            if numbers is None:
                return None
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            host.copy_(numbers, non_blocking=True)
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(numbers.device))
            lr, probes = float(self.param_groups[0]["lr"]), self.estimator.probes
            self._pending.append(_Pending(self.steps, self.block, lr, probes, host, event))
            self._counted()
            most = max(2, min(PENDING, int(LAG / self._pace)))
            try:
                self._collect(0 if getattr(self.schedule, "learns", True) else most)
            finally:
                if self.steps % self.interval == 0:
                    self._enter_turn()
        return numbers[0]

    def _counted(self) -> None:
        """A step was taken; the last one before a fold brings the weights to θ."""
        self.steps += 1
        if self.steps % self.fold == 0:
            self._fold()
            self._settled = False  # which an error within leaves as it is

    def _fold(self) -> None:
        self._settled = True
        for member in self.members:
            if member.holds:
                assert isinstance(member.basis, Factored)
                member.basis.fold_(member.param, Key(self.seed, self.steps - 1), self.rounding)

    @torch.no_grad()
    def settle(self) -> None:
        """Bring the weights to θ between two folds: the last thing to do, before they are evaluated or saved."""
        if self.steps % self.fold and not self._settled:
            with uninterrupted():
                self._fold()

    def _refuse_settled(self) -> None:
        if self._settled:
            raise ZeroBlockError(
                f"the weights were settled at step {self.steps}, between two folds (or an error came within one), "
                "which no journal tells: take steps and states before settle(), or settle after a multiple of "
                f"fold={self.fold} steps; to go on, load an earlier state and its weights"
            )

    @property
    def capturable(self) -> bool:
        """Whether a step needs no number on the host: then it is submitted, and can be captured as a graph."""
        return (
            (isinstance(self.rule, SGD) or (isinstance(self.rule, Adam) and self.rule.reset and self._elementwise))
            and isinstance(self.estimator, Finite)
            and self.restore == "copy"
            and not self.param_groups[0]["weight_decay"]
            and not getattr(self.subspace, "as_published", False)
            and all(p.dtype != torch.float64 for p in self.params.values())
            and len({p.device for p in self.params.values()}) == 1
        )

    @property
    def _elementwise(self) -> bool:
        return all(isinstance(member.basis, Elementwise) for member in self.members)

    def flush(self) -> None:
        """Wait until the numbers of every step have been delivered."""
        self._collect(0)

    def _collect(self, most: int) -> None:
        """Deliver the steps that have ended, in order; wait until at most ``most`` have not."""
        bad, run = None, 0
        while self._pending:
            first = self._pending[0]
            if not (len(self._pending) > most or first.event.query() or run >= self.patience):
                break
            first.event.synchronize()  # where Ctrl-C may come in flush(): the step has not been taken out yet
            with uninterrupted():
                self._pending.popleft()
                if self._ended is not None:
                    self._pace = max(1e-3, self._ended.elapsed_time(first.event))
                self._ended = first.event
                loss, *rest = first.host.tolist()
                losses, coeffs = tuple(rest[: -first.probes]), tuple(rest[-first.probes :])
                finite = all(map(math.isfinite, coeffs))
                if finite and first.step // self.interval == self._turn:
                    for state in self.state.values():
                        state["t"] += 1
                self._deliver(Record(first.step, first.block, coeffs, first.lr, losses, loss), finite)
                if self._run_of_bad > run:
                    bad, run = first.step, self._run_of_bad
        if bad is not None:
            self._complain(bad, run)

    def _deliver(self, record: Record, finite: bool) -> None:
        """A step's numbers are known."""
        self.record = record
        if finite:
            self._run_of_bad = 0
            self.schedule.observe(self.scores, record.block, clipped(record.coeffs, self.clip))
        else:
            self.skipped += 1
            self._run_of_bad += 1
        if self.listener is not None:
            self.listener(record)

    def _measure(self, closure: Closure | Sequence[Closure] | None) -> Measure:
        """The mean over the closures at each point, measured forked where they can be."""
        closures = [closure] if callable(closure) else list(closure) if isinstance(closure, (list, tuple)) else []

        def measure(points: Sequence[Point]) -> list[float]:
            if not closures or not all(map(callable, closures)):
                raise ZeroBlockError(
                    "step() needs a closure, a function of no arguments that returns the loss, or a list of them; got "
                    f"{type(closure).__name__}"
                )
            if self.restore == "subtract":  # one walk, whatever the number of closures: it moves the weights
                return visit(points, lambda: sum(map(value_of, closures)) / len(closures))
            losses = []
            for one in closures:
                at = getattr(one, "at", None)
                losses.append(at(points) if at else visit(points, functools.partial(value_of, one)))
            return [sum(column) / len(losses) for column in zip(*losses, strict=True)]

        return measure

    def _enter_turn(self) -> None:
        """Choose the block of the turn that starts with the next step; a rule that resets forgets."""
        self._turn = self.steps // self.interval
        self.block = self.schedule.pick(self._turn, len(self.blocks), self.seed, self.scores)
        if self.rule.reset:
            self._forget()
        self._place()

    def _forget(self) -> None:
        self.state.clear()
        self._rooms = {where: (room, 0) for where, (room, _) in self._rooms.items()}
        if "_device_clock" in vars(self):
            self._device_clock[0].zero_()

    def _place(self) -> None:
        self.members = self.members_of(self.block)

    def members_of(self, block: int) -> list[Member]:
        """The tensors of a block with the bases that they have, or would have, in this turn."""
        key = Key(self.seed, self._turn * self.interval, clock=self.clock)
        return [Member(n, self.params[n], self._basis(n, key)) for n in self.blocks[block].params]

    def places(self) -> tuple[object, ...]:
        """Where the active tensors and their states lie, and their thresholds: what is fixed in a captured step."""
        states = (self.state[member.param] for member in self.members if member.param in self.state)
        moments = (value.data_ptr() for state in states for value in state.values() if isinstance(value, Tensor))
        tensors = ((member.param.data_ptr(), self.thresholds[member.name]) for member in self.members)
        held = (self._held[member.name].data_ptr() for member in self.members if member.holds)
        return (*tensors, *moments, *held)

    def _basis(self, name: str, key: Key) -> Basis:
        param = self.params[name]
        basis = self.subspace.basis(param, key, self.offsets[name], self.thresholds[name], self.distribution)
        if self.fold == 1 or not isinstance(basis, Factored):
            return basis
        if name not in self._held:
            self._held[name] = torch.zeros((basis.shape[0], basis.rank), dtype=torch.float32, device=param.device)
        return dataclasses.replace(basis, held=self._held[name])

    def direction(self, probe: int) -> Direction:
        """The line along which a probe of the next step measures."""
        key = Key(self.seed, self.steps, probe, clock=self.clock)
        paired = not self.rule.state  # moments take room enough
        if self.restore == "subtract":
            return Subtracted(key, self.members, self.rounding, paired)
        if len(self.blocks) > 1 or self._opaque:
            return Swapped(key, self.members, self.rounding, paired)
        return JustInTime(key, self.members, self.rounding, paired, self._budget)

    @functools.cached_property
    def _budget(self) -> int:
        """Bytes of the largest layer, or of the largest tensor where there are no layers."""
        try:
            cut = blocks_of.layers(self.model)
        except ZeroBlockError:
            return max(p.nbytes for p in self.params.values())
        return max(sum(self.params[n].nbytes for n in b.params) for b in cut)

    @functools.cached_property
    def _opaque(self) -> bool:
        """Whether the model reads weights where no torch function shows it: compiled or scripted."""
        if not compiled(self.model) and not any(isinstance(m, torch.jit.ScriptModule) for m in self.model.modules()):
            return False
        warnings.warn(
            "a compiled or scripted model is evaluated on a perturbed copy of the whole block; "
            "for less memory give the plain model, a partition into layers, or restore='subtract'",
            ZeroBlockWarning,
            stacklevel=5,
        )
        return True

    def _move(self, coeffs: Sequence[float], lr: float) -> None:
        key = Key(self.seed, self.steps)
        share = [c / len(coeffs) for c in clipped(coeffs, self.clip)]
        if isinstance(self.rule, SGD):
            self.descend([-lr * s for s in share], lr)
            return
        for name, param, basis in self.members:
            state = self._state(name, param, basis)
            state["t"] += 1
            decay = self._decay(name, param, lr)
            if self._fused(param, basis):
                assert isinstance(self.rule, Adam)
                assert isinstance(basis, Elementwise)
                scalars = (1.0, -lr, *self.rule.corrections(state["t"]), *share)
                basis.adam_(param, state, key, scalars, self.rule, decay, self.rounding)
                continue
            for span in basis.spans():
                g = basis.coords(param, key, span).mul_(share[0])
                for probe in range(1, len(share)):
                    g.add_(basis.coords(param, key.to(probe=probe), span), alpha=share[probe])
                delta = self.rule.delta(g, {s: state[s][span] for s in self.rule.state}, state["t"])
                basis.lift_(param, delta, span, -lr, key, decay, self.rounding)

    def move(self, coeffs: Tensor, lr: Tensor, live: Tensor) -> None:
        """Take the step of coefficients that stay on the device; one that is not finite, or not live, moves nothing.

        Args:
            coeffs: (probes,) fp32.
            lr: (1,) fp64.
            live: (1,) nought in a trial run.
        """
        taken = coeffs.isfinite().all() & (live != 0)
        coeffs = coeffs if self.clip is None else coeffs.double().clamp(-self.clip, self.clip)
        share = torch.where(taken, coeffs.double() / len(coeffs), 0.0)
        if isinstance(self.rule, SGD):
            self.descend((-lr * share).float(), 0.0)
            return
        assert isinstance(self.rule, Adam)
        ticks, corrections = self._device_clock
        ticks += taken
        scalars = torch.cat([taken.double(), -lr, corrections[ticks][0], share]).float()
        for name, param, basis in self.members:
            assert isinstance(basis, Elementwise)
            state, key = self._state(name, param, basis), Key(self.seed, self.steps, clock=self.clock)
            basis.adam_(param, state, key, scalars, self.rule, 1.0, self.rounding)

    @functools.cached_property
    def _device_clock(self) -> tuple[Tensor, Tensor]:
        """On the device: steps taken in this turn, (1,), and Adam's corrections after so many, (interval + 1, 2)."""
        assert isinstance(self.rule, Adam)
        device = self.members[0].param.device
        table = [(1.0, 1.0), *(self.rule.corrections(t) for t in range(1, self.interval + 1))]
        return torch.tensor([self._taken], device=device), torch.tensor(table, dtype=torch.float64, device=device)

    @property
    def _taken(self) -> int:
        """Steps of this turn that the rule has seen."""
        return next((int(state["t"]) for state in self.state.values() if state), 0)

    def _wind_clock(self) -> None:
        """After steps or a state from elsewhere; captured steps hold on to the clock itself."""
        if "_device_clock" in vars(self):
            self._device_clock[0].fill_(self._taken)

    def descend(self, alphas: Alphas, lr: float) -> None:
        """θ ← (1 - lr·λ)·θ + P Σₖ alphas[k]·z_k on the active block, in one pass."""
        key = Key(self.seed, self.steps, clock=self.clock)
        for name, param, basis in self.members:
            basis.add_(param, key, alphas, self._decay(name, param, lr), self.rounding)

    def _decay(self, name: str, param: Tensor, lr: float) -> float:
        weight_decay = self.param_groups[0]["weight_decay"]
        return 1 - lr * weight_decay if weight_decay and self.decays(name, param) else 1.0

    def _fused(self, param: Tensor, basis: Basis) -> bool:
        """Whether Adam's step on a tensor is one kernel."""
        return isinstance(self.rule, Adam) and isinstance(basis, Elementwise) and param.dtype != torch.float64

    def _state(self, name: str, param: Tensor, basis: Basis) -> dict[str, Any]:
        """The rule's state of a tensor, in the current basis."""
        state: dict[str, Any] = self.state[param]
        if not state:
            # Adam's moments of 16-bit weights are bf16, rounded stochastically: 4 bytes a weight instead of 8
            half = self._fused(param, basis) and param.dtype.itemsize == 2
            dtype = torch.bfloat16 if half else torch.float32
            zeros = {s: self._room(basis.size, dtype, param.device) for s in self.rule.state}
            state.update(zeros, t=0, turn=self._turn)
        if state["turn"] != self._turn and "m" in state:
            old = self._basis(name, Key(self.seed, state["turn"] * self.interval))
            state["m"] = basis.transport(state["m"], old)
        state["turn"] = self._turn
        return state

    def _room(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros for a state; one that is dropped at the end of a turn lies where the last one lay, as graphs need."""
        if not self.rule.reset:
            return torch.zeros(size, dtype=dtype, device=device)
        if (dtype, device) not in self._rooms:
            most = max(sum(self.params[n].numel() for n in block.params) for block in self.blocks)
            self._rooms[dtype, device] = (torch.empty(len(self.rule.state) * most, dtype=dtype, device=device), 0)
        room, used = self._rooms[dtype, device]
        self._rooms[dtype, device] = (room, used + size)
        return room[used : used + size].zero_()

    def _complain(self, step: int, run: int) -> None:
        """Of steps without a finite loss, so many in a row: warn at the first, give up after many."""
        advice = "lower lr (try a tenth), set clip, lower eps if the weights are small, or use bf16 or fp32, not fp16"
        if run >= self.patience:
            raise ZeroBlockError(
                f"the loss was not finite for {run} steps in a row, the last being step {step}: {advice}"
            )
        if not self._complained:
            self._complained = True
            warnings.warn(
                f"the loss of step {step} is not finite; the step is skipped and counted in "
                f"optimizer.skipped. If it goes on: {advice}",
                ZeroBlockWarning,
                stacklevel=4,
            )

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Everything that continuing needs besides the weights: plain values and tensors."""
        self._refuse_settled()
        if self._turn != self.steps // self.interval:
            raise ZeroBlockError("a state is of the time between two steps: take it outside of the listener")
        self.flush()
        names = {id(p): n for n, p in self.params.items()}
        return {
            "parts": self.parts,
            "seed": self.seed,
            "restore": self.restore,
            "steps": self.steps,
            "block": self.block,
            "blocks": [(block.name, *block.params) for block in self.blocks],
            "skipped": self.skipped,
            "run_of_bad": self._run_of_bad,
            "scores": list(self.scores),
            "thresholds": dict(self.thresholds),
            "held": {m.name: self._held[m.name].clone() for m in self.members if m.holds and self.steps % self.fold},
            "state": {names[id(p)]: {k: _own(v) for k, v in s.items()} for p, s in self.state.items() if s},
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Continue where ``state_dict()`` was taken, bit for bit, given the weights of that moment."""
        self.flush()
        if "parts" not in state_dict:
            raise ZeroBlockError("this state is not one of ZeroOrder.state_dict()")
        for what, mine, theirs in [
            ("seed", self.seed, state_dict["seed"]),
            ("number of blocks", len(self.blocks), len(state_dict["scores"])),
            ("restore", self.restore, state_dict.get("restore", self.restore)),
            *both_parts(self.parts, state_dict["parts"]),
        ]:
            if mine != theirs:
                raise ZeroBlockError(f"the state was saved with {what} {theirs}, this optimizer has {mine}")
        for block, saved in zip(self.blocks, state_dict.get("blocks", ()), strict=False):
            if (block.name, *block.params) != tuple(saved):
                raise ZeroBlockError(f"the state's block {saved[0]!r} is not this optimizer's: it has other parameters")
        unknown_names = set(state_dict["state"]) - set(self.params)
        if unknown_names:
            raise ZeroBlockError(f"the state has parameters this model lacks, one being {min(unknown_names)!r}")
        self.steps, self.block = state_dict["steps"], state_dict["block"]
        self._turn = self.steps // self.interval
        self.skipped, self._run_of_bad = state_dict["skipped"], state_dict["run_of_bad"]
        self._complained = self.skipped > 0
        self.scores, self.thresholds = list(state_dict["scores"]), dict(state_dict["thresholds"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        self.weight_decay = self.param_groups[0]["weight_decay"]
        self._settled = False
        self._forget()
        self._place()
        for name, held in self._held.items():  # where they are: captured steps know the place
            saved = state_dict.get("held", {}).get(name)
            held.zero_() if saved is None else held.copy_(saved)
        for name, param in self.params.items():
            for key, value in state_dict["state"].get(name, {}).items():
                if isinstance(value, Tensor):
                    self.state[param][key] = self._room(value.numel(), value.dtype, param.device).copy_(value)
                else:
                    self.state[param][key] = value
        self._wind_clock()

    def __getstate__(self) -> dict[str, Any]:
        """Refused: half of an optimizer is its model."""
        raise ZeroBlockError(
            "an optimizer is not copied or pickled: build one on the other model and load this one's state_dict()"
        )


def _count(name: str, value: SupportsIndex) -> int:
    """A number of steps, of whatever kind of integer."""
    try:
        count = operator.index(value)
    except TypeError:
        count = 0
    if count < 1:
        raise ZeroBlockError(f"{name} must be a whole number and at least 1, got {value!r}")
    return count


def _check_fold(fold: int, interval: int, subspace: Subspace | None, restore: str, weight_decay: float) -> None:
    """Refuse to hold steps where they cannot be held, with the reason."""
    if not isinstance(subspace, LowRank):
        raise ZeroBlockError(
            f"fold is for low-rank steps (lozo, lozo_m, LowRank), whose sum is small: with {subspace or Full()} leave "
            "it out"
        )
    if interval % fold:
        divisor = next(d for d in range(min(fold, interval), 0, -1) if interval % d == 0)
        raise ZeroBlockError(
            f"fold {fold} does not divide the interval of {interval} steps, in which the basis stays the same: give "
            f"fold {divisor}, or interval {-(-interval // fold) * fold}"
        )
    if restore == "subtract":
        raise ZeroBlockError("restore='subtract' moves the weights, which are not θ between folds: leave fold out")
    if weight_decay:
        raise ZeroBlockError("weight_decay writes every weight at every step: leave fold out, or weight_decay")


def _told(part: object) -> str:
    """A part in words that are the same in every process."""
    return type(part).__qualname__ if type(part).__repr__ is object.__repr__ else repr(part)


def both_parts(mine: dict[str, str], theirs: dict[str, str]) -> list[tuple[str, str | None, str | None]]:
    """Every part that either of two compositions has, in both."""
    return [(part, mine.get(part), theirs.get(part)) for part in {**mine, **theirs}]


def compiled(model: nn.Module) -> bool:
    """Whether ``torch.compile`` has a part of a model in hand."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in model.modules()
    )


def _own(value: Any) -> Any:
    """A value that nothing else writes."""
    return value.clone() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, every module's own mode again outside."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def value_of(closure: Closure) -> float:
    """What an objective is at the weights as they are shown now."""
    torch.clear_autocast_cache()  # it keeps 16-bit copies of the weights, which would hide the perturbation
    value = _number(closure())
    torch.clear_autocast_cache()
    return value


def _number(value: Any) -> float:
    if isinstance(value, Tensor):
        wide = value.detach() if value.dtype == torch.float64 else value.detach().float()
        return float(wide.mean())
    if value is None:
        raise ZeroBlockError("the closure returned None; return the loss from it")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ZeroBlockError(
            f"the closure must return a number, got {type(value).__name__}; from a model's output return its loss"
        ) from error
