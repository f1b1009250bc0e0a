"""The optimizer: partition × schedule × subspace × estimator × rule.

c = (L(θ + εPz) - L(θ - εPz)) / 2ε        δ = rule(c·z)        θ ← θ - lr·Pδ
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import block as blocks_of
from . import budget, composition
from .block import Block, Partition
from .closure import Closure, marked_if_profiled, without_gradients
from .composition import Fixed, count, parts_of
from .errors import ZeroBlockError
from .estimator import Estimator, TwoSided
from .exclusive import exclusive
from .interrupt import uninterrupted
from .noise import Distribution, Key, Rounding
from .patience import Patience
from .plan import Plan
from .ranks import Parallel, Ranks, Team
from .record import Record
from .rule import SGD, Rule
from .run import host, stream
from .run.queue import Queue
from .schedule import Schedule, Shuffled
from .shard import refuse_apart
from .state import State
from .step import objective_of
from .subspace import Full, Subspace
from .turn import Turn, Turns
from .watch import Watch
from .weights import Decays, Restore, Weights, is_matrix


class ZeroOrder(torch.optim.Optimizer):
    """Optimizes any objective of any module with evaluations only, one block at a time.

    >>> model = nn.Linear(2, 1)
    >>> optimizer = ZeroOrder(model, lr=0.1, partition=blocks_of.whole)
    >>> loss = optimizer.step(lambda: model(torch.ones(2)).square().sum())

    Args:
        model: the model whose trainable parameters are optimized; fp32, fp64, fp16 or bf16.
        lr: learning rate; ``param_groups`` hold it, so ``torch.optim.lr_scheduler`` works. A schedule may weigh steps;
            records hold the product. Without one, eps and lr are in units of the weights: directions are scaled by the
            size of each tensor (``Relative``), coefficients by their own running size (``Normalized``), and lr is
            chosen such that a run moves the weights by a few percent (``budget``).
        partition: cuts the model into blocks: ``whole``, ``layers``, ``linears``, or a list of blocks.
        schedule: chooses the block that is active in a turn.
        subspace: the part of the block's space that directions are drawn in.
        estimator: the number of directions, the points to measure at, and the coefficients.
        rule: turns the estimate into a step.
        interval: steps per turn: how long a block and its basis are held.
        fold: number of low-rank steps whose sum is held in coordinates, m×r, before it is written to the weights; a
            divisor of interval. The weights are θ after every ``fold`` steps, and after ``settle()``; the steps in
            between need not write them, which would take most of the time, nor round to their grid.
        seed: seed of noise, bases and schedule.
        weight_decay: λ, decoupled, on the active block.
        decays: selects the parameters that λ applies to, by name and tensor; matrices by default.
        clip: clamp coefficients to ±clip in updates and schedules; records keep the measured ones.
        distribution: distribution of the coordinates.
        rounding: rounding of 16-bit weights.
        restore: "copy" never writes θ while measuring; "subtract" is MeZO's way, in place.
        patience: consecutive steps with a non-finite loss before giving up.
        steps: length of the run, over which lr falls linearly to zero by itself; by default lr stays as it is.
        parallel: the work that the ranks of a process group share: "data", "probes", "data,probes", a group, a
            ``DeviceMesh`` or ``Ranks``.  By default an optimizer that is built while several ranks are running joins
            them, and the losses of their closures are averaged.  With None it joins no others.
    """

    model, weights, partition, blocks = Fixed[nn.Module](), Fixed[Weights](), Fixed[Any](), Fixed[tuple[Block, ...]]()
    subspace, rule, interval, fold, seed = Fixed[Subspace](), Fixed[Rule](), Fixed[int](), Fixed[int](), Fixed[int]()
    distribution, rounding, restore = Fixed[Distribution](), Fixed[Rounding](), Fixed[Restore]()
    turn: Turn
    """The next step and its block."""
    steps = property(operator.attrgetter("turn.step"), doc="Steps taken, skipped ones included.")
    block = property(operator.attrgetter("turn.block"), doc="Index of the active block.")
    scores = property(lambda self: list(self.turn.scores), doc="One number per block, from which a schedule learns.")
    skipped = property(operator.attrgetter("skipping.skipped"), doc="Steps whose loss was not finite.")
    patience = property(
        operator.attrgetter("skipping.limit"),
        lambda self, limit: setattr(self.skipping, "limit", count("patience", limit)),
        doc="Consecutive steps with a non-finite loss before giving up.",
    )
    age = property(lambda self: self.steps % self.interval, doc="Steps between the first of this turn and the next.")
    anchoring = property(
        lambda self: 0 if self.age else self.estimator.anchors,
        doc="How many batches the objective of the next step is worth, if an anchor is measured there; otherwise 0.",
    )
    lr = property(
        lambda self: self.param_groups[0]["lr"],
        lambda self, lr: self.param_groups[0].update(lr=lr),
        doc="Learning rate of the next step, as ``param_groups`` hold it.",
    )
    parts = property(parts_of, doc="The composition in words: every value that the weights depend on.")
    turns = property(
        lambda self: Turns(self.schedule, len(self.blocks), self.interval, self.seed, self.clip),
        doc="The order of the blocks, as a function of the step.",
    )
    profile_hook_step = staticmethod(marked_if_profiled)  # torch wraps ``step`` in it

    def __init__(
        self,
        model: nn.Module,
        lr: float | None = None,
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
        decays: Decays = is_matrix,
        clip: float | None = None,
        distribution: Distribution = Distribution.NORMAL,
        rounding: Rounding = Rounding.STOCHASTIC,
        restore: Restore = "copy",
        patience: int = 20,
        steps: int | None = None,
        parallel: Parallel = "auto",
    ) -> None:
        model = composition.check_model(model)
        composition.check_numbers(0.0 if lr is None else lr, weight_decay, clip)
        interval, fold, patience = count("interval", interval), count("fold", fold), count("patience", patience)
        self.schedule: Schedule = schedule or Shuffled()
        subspace, rule = subspace or Full(), rule or SGD()
        self.estimator: Estimator = estimator or (TwoSided() if lr is not None else TwoSided(budget.EPS))
        self.subspace, self.rule = (subspace, rule) if lr is not None else budget.unscaled(subspace, rule, model)
        self.chose_units = self.subspace is not subspace
        """Whether zeroblock chose the units of directions; earlier runs may have others."""
        composition.check(self.subspace, restore, interval, fold, weight_decay)
        composition.check_anchor(self.estimator, restore, fold)
        self.model, self.partition = model, partition
        self.blocks = partition(model) if callable(partition) else blocks_of.explicit(model, partition)
        self.length = None if steps is None else count("steps", steps)
        self._automatic = lr is None
        self.interval, self.fold, self.seed = interval, fold, Key(seed, 0).seed
        if lr is None:
            allowed = budget.Budget.of(self)
            lr = allowed.rate(self.length, "linear") if self.length else allowed.constant
        self._first_lr = self._shown_lr = lr
        self.weight_decay, self.decays = weight_decay, decays
        self.clip = None if clip is None else float(clip)
        self.distribution, self.rounding, self.restore = distribution, rounding, restore
        self.weights = Weights(
            model, self.blocks, self.subspace, interval=interval, fold=fold, seed=self.seed,
            distribution=distribution, rounding=rounding, restore=restore,
        )  # fmt: skip
        ranks = Ranks.of(parallel, probes=self.estimator.probes)
        if ranks is not None:
            refuse_apart(self.weights.params, ranks.apart)
            composition.check_alone(self.weights)
        self.team = None if ranks is None else Team(ranks, self.weights.params)
        """The processes that take every step together; None if this one is alone."""
        composition.check_storage(self.weights, self.rule, self.estimator)
        if self._automatic:
            composition.say_units(self.weights, self.estimator, budget.Budget.of(self))
        self.watch = Watch(self.weights)
        """Notices that the model or the objective no longer fits this optimizer."""
        self.params, self.offsets = self.weights.params, self.weights.offsets
        super().__init__(list(self.params.values()), {"lr": lr, "weight_decay": weight_decay})
        self.skipping = Patience(patience)
        """Counts the steps whose loss was not finite."""
        self.record: Record | None = None
        """The last step whose numbers are known."""
        self.listener: Callable[[Record], None] | None = None
        """Called with the record of every step, in order; on a GPU some steps later, when the weights are ahead."""
        self._queue = Queue(self._tell)
        self._state = State(
            self.state, self.rule.state, self.rule.carried, self.rule.reset, self.rule.dtype, self.weights.basis,
            capacity=lambda: self.weights.largest_size(self.turns.most),
            table=(len(self.blocks) + 1, self.rule.block_numbers), place=self.weights.shelf.place,
        )  # fmt: skip
        self._settled = False
        """Settled between folds, or a fold failed: no further steps."""
        self.enter(self.turns.first())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise after construction: the model determines the parameters."""
        if hasattr(self, "turn"):
            raise ZeroBlockError(
                "ZeroOrder optimizes its model's trainable parameters; unfreeze them before building it, "
                "or cut them into blocks with partition="
            )
        super().add_param_group(param_group)

    def __repr__(self) -> str:
        return f"ZeroOrder({', '.join(f'{k}={v}' for k, v in self.parts.items())})"

    def plan(self) -> Plan:
        """The next step, decided but not taken."""
        self._refuse_settled()
        now = self.param_groups[0]["weight_decay"]
        if now != self.weight_decay:
            raise ZeroBlockError(
                f"weight_decay was {self.weight_decay} and is {now} now, which records would not show: "
                "build another optimizer, and start a new journal"
            )
        taken = self.estimator.recall(self.steps)
        lr = float(self.param_groups[0]["lr"]) * self.turn.weight if taken is None else taken.lr
        return Plan(
            self.turn, lr, self.weights, self.members, self.estimator.at(self.age), self.rule, self._state, self.clip,
            self.weight_decay, self.decays, self.team,
        )  # fmt: skip

    @without_gradients
    def step(  # type: ignore[override]
        self, closure: Closure | Sequence[Closure] | None = None, anchor: Closure | Sequence[Closure] | None = None
    ) -> Tensor:
        """Measure the losses and update the weights.

        Args:
            closure: any objective, evaluated in evaluation mode and without gradient; or several, one per
                micro-batch, whose mean is the objective (weighted by tokens or examples if they know them).
            anchor: the objective of the steps that measure an anchor (``mezo_svrg``), over a large batch; other steps
                do not call it. By default ``closure``.

        Returns:
            The loss: the mean of the two sides, or the loss at θ when one-sided; a scalar, on the GPU
            if the step was submitted, which may not have finished yet.
        """
        wanted = closure if anchor is None or not self.anchoring else anchor
        objective = None if self.estimator.recall(self.steps) else objective_of(wanted, alone=self.team is None)
        if self.length is not None and objective is not None:  # a recorded step has its own
            composition.check_falling(self.lr, self._shown_lr, self.steps, self.length)
            self.lr = self._shown_lr = self._first_lr * max(0.0, 1 - self.steps / self.length)
        if objective is None or not objective.submits:
            self.flush()  # deliver the steps submitted before this one
        turns = self.turns
        if turns.due(self.turn):  # an error kept the last step from entering it
            self.enter(turns.entered(self.turn))
        if any(self.watch.check(block, fresh=not self.steps) for block, _ in self.turn.active):  # on another device
            self.weights.held.clear()
            self.enter(self.turn)
        if self.anchoring:
            self.weights.drop_anchor(self.members)
        plan = self.plan()
        if objective is not None:
            if self.team is not None and not self.team.introduced:
                weights, submits = [part.weight for part in objective.parts], objective.submits and plan.capturable
                passes = {"number of micro-batches": len(weights)} if self.weights.sharded else {}
                facts = composition.facts_of(self) | passes
                self.team.introduce(facts, weights, self.model.parameters(), submits and any(plan.mine))
            objective = self.watch.over(objective, plan)
        with exclusive(self.model), uninterrupted() as shield:
            numbers = submitted = None
            together = self.team is None or self.team.submits
            if objective is not None and objective.submits and plan.capturable and together:
                staged = None if self.turn.others else objective.stage()  # these blocks rarely meet again
                submitted = staged.graphs.run(plan, staged) if staged else None
                numbers = submitted = submitted or stream.run(plan, objective)
            if numbers is None:
                with shield.opened():
                    self.flush()
                numbers = host.retake(plan) if objective is None else host.run(plan, objective, shield)
            if submitted:
                self._queue.put(plan, submitted)
            if plan.lr and not self.weights.shelf.streams:  # our kernels write unseen by torch
                torch.autograd.graph.increment_version([member.param for member in self.members])
            self.turn = turns.counted(self.turn)
            if self.fold > 1 and self.steps % self.fold == 0:
                self._fold()
                self._settled = False  # an error in _fold leaves it true
            try:
                if submitted:
                    self._queue.deliver(0 if turns.learns else self._queue.limit, lambda: self.skipping.exhausted)
                else:
                    self._tell(plan.record(numbers))
            finally:  # whatever a listener raises, the step was taken
                if turns.due(self.turn):
                    self.enter(turns.entered(self.turn))
        if self.team is not None and objective is not None and self.steps % self.team.ranks.every == 0:
            self.team.agree(self.steps)
        self.skipping.complain()
        self.watch.complain()
        return numbers.loss if submitted else torch.tensor(float(numbers.loss))

    def flush(self) -> None:
        """Wait until the records of all steps have been delivered."""
        self._queue.deliver()
        self.skipping.complain()
        self.watch.complain()

    def _tell(self, record: Record) -> None:
        """Process the record of a step whose numbers have arrived."""
        self.record = record
        self.skipping.see(record)
        self.watch.see(record)
        if record.finite:
            self.turn = self.turns.observed(self.turn, record.block, record.coeffs)
        elif self.team is not None:
            self.team.hear(record.step)
        if self.listener is not None:
            self.listener(record)

    def enter(self, turn: Turn) -> None:
        """Prepare for a step; the weights must be those of that step already."""
        each = [
            self.weights.members(block, turn.number) for block, _ in turn.active
        ]  # if it fails, nothing has changed
        self.turn, self.members = turn, tuple(itertools.chain.from_iterable(each))
        self._state.enter(turn.number)

    @without_gradients
    def settle(self) -> None:
        """Bring the weights to θ between two folds; call it last, before they are evaluated or saved."""
        if self.steps % self.fold and not self._settled:
            with uninterrupted():
                self._fold()

    def _fold(self) -> None:
        self._settled = True
        self.weights.fold_(self.members, Key(self.seed, self.steps - 1))

    def _refuse_settled(self) -> None:
        if self._settled:
            raise ZeroBlockError(
                f"the weights were settled at step {self.steps}, between two folds (or an error interrupted a fold), "
                "which no journal records: take steps and states before settle(), or settle after a multiple of "
                f"fold={self.fold} steps; to continue, load an earlier state and its weights"
            )

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Everything besides the weights that is needed to continue, as plain values and tensors."""
        self._refuse_settled()
        if self.turns.due(self.turn):
            raise ZeroBlockError("state_dict() is only valid between two steps: call it outside the listener")
        self.flush()
        held = {m.name: self.weights.held[m.name].clone() for m in self.members if m.basis.behind}
        return {
            "parts": self.parts,
            "seed": self.seed,
            "restore": self.restore,
            "steps": self.steps,
            "block": self.block,
            "weight": self.turn.weight,
            "others": [list(other) for other in self.turn.others],
            "blocks": [(block.name, *block.params) for block in self.blocks],
            "skipped": self.skipping.skipped,
            "run_of_bad": self.skipping.run,
            "scores": self.scores,
            "thresholds": dict(self.weights.initial),
            "first_lr": self._first_lr,
            "length": self.length,
            **({"table": self._state.table.tolist()} if self.rule.block_numbers else {}),
            "held": held if self.steps % self.fold else {},
            **({"anchor": {n: t.clone() for n, t in self.weights.anchor.items()}} if self.estimator.anchors else {}),
            **({"shards": self.weights.layout()} if self.weights.boxes else {}),
            "state": self._state.saved({id(p): n for n, p in self.params.items()}),
            "param_groups": [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # type: ignore[override]
        """Continue where ``state_dict()`` was taken, bit for bit, given the weights of that moment."""
        self.flush()
        composition.check_state(self, state_dict)
        composition.begin_as(self, state_dict["parts"].get("subspace"))
        own = self.lr, self._first_lr
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(saved)
        self._first_lr = state_dict.get("first_lr", self._first_lr)
        if self._automatic and composition.of_other_length(self.length, state_dict):
            self.lr, self._first_lr = own
        self.weight_decay, self._shown_lr = self.param_groups[0]["weight_decay"], self.lr
        self.weights.start_from(state_dict["thresholds"])
        self.skipping.load(state_dict["skipped"], state_dict["run_of_bad"])
        self._settled = False
        if self.team is not None:
            self.team.introduced = False  # the other ranks may have loaded another state
        self._state.forget()
        steps = state_dict["steps"]
        weight, others = state_dict.get("weight", 1.0), tuple(map(tuple, state_dict.get("others", ())))
        turn = Turn(steps, steps // self.interval, state_dict["block"], tuple(state_dict["scores"]), weight, others)
        self.enter(turn)
        if self.rule.block_numbers:
            self._state.table.copy_(torch.tensor(state_dict["table"], dtype=torch.float64))
        self.weights.load(state_dict.get("held", {}), state_dict.get("anchor", {}))
        for name, param in self.params.items():
            self._state.load(param, state_dict["state"].get(name, {}))
        self._state.wind()

    def __getstate__(self) -> dict[str, Any]:
        """Raise: an optimizer cannot be separated from its model."""
        raise ZeroBlockError(
            "an optimizer is not copied or pickled: build one on the other model and load this one's state_dict()"
        )
