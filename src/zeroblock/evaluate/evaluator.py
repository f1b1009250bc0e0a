"""Evaluation: the metric and the loss of a set of examples.

A model chooses the option with the highest mean log-probability; with SFC calibration, the one with
the highest sum minus the sum without the context.  Tasks that generate do so greedily.  Free text
that is too long for F1 to mean anything is measured by its loss alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal, Protocol, TypeVar

from ..engine import Engine, Score
from ..errors import ZeroBlockError
from ..task import Encoded, Encoder, Example, Task, exact_match
from .demonstration import Demonstrations
from .generate import generate_part

CHUNK_EXAMPLES = 64
"""Examples that the engine scores at a time."""

T = TypeVar("T")


class Ranks(Protocol):
    """Processes that hold the same model and share an evaluation."""

    @property
    def rank(self) -> int:
        """The number of this process."""
        ...

    @property
    def size(self) -> int:
        """The number of processes."""
        ...

    def each(self, work: Callable[[], T]) -> list[T]:
        """Call a function on every rank; every rank gets all results, in the order of ranks."""
        ...


class Alone:
    """A single process."""

    rank, size = 0, 1

    def each(self, work: Callable[[], T]) -> list[T]:
        return [work()]


@dataclass(frozen=True)
class Exam:
    """Examples, encoded for evaluation.

    Args:
        examples: the examples, in order.
        scored: each example with all options, or with the answer alone if the task generates.
        prompts: the contexts to generate from, if the task generates.
        bare: the options after the calibration context, if they are calibrated.
    """

    examples: tuple[Example, ...]
    scored: tuple[Encoded, ...]
    prompts: tuple[Encoded, ...] = ()
    bare: tuple[Encoded, ...] = ()

    def take(self, indices: Sequence[int]) -> Exam:
        """Select some of the examples."""
        parts = (self.examples, self.scored, self.prompts, self.bare)
        return Exam(*(tuple(part[i] for i in indices) if part else () for part in parts))  # type: ignore[arg-type]

    @property
    def cut(self) -> tuple[Example, ...]:
        """The examples whose context was cut, for scoring or for generating."""
        lengths = [max(one.cut, prompt.cut if prompt else 0) for one, prompt in zip_longest(self.scored, self.prompts)]
        return tuple(example for example, cut in zip(self.examples, lengths, strict=True) if cut)


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation.

    Args:
        metric: the name of the metric.
        value: its mean over the examples.
        loss: the training loss on them; NaN if it was not computed.
        n: the number of examples.
        seconds: the time it took.
        exact_match: the mean exact match if the task generates; else None.
    """

    metric: str
    value: float
    loss: float
    n: int
    seconds: float
    exact_match: float | None = None


@dataclass(frozen=True)
class Evaluator:
    """Measures a model on one task.

    Args:
        engine: the model's engine.
        tokenizer: the model's tokenizer.
        task: the task to measure.
        encoder: encodes the task's examples.
        demonstrations: written before the prompts.
        calibrate: choose options by SFC.
        loss_over: average the loss of answers over all their tokens, or first within each example.
    """

    engine: Engine
    tokenizer: Any
    task: Task
    encoder: Encoder
    demonstrations: Demonstrations
    calibrate: bool = False
    loss_over: Literal["tokens", "examples"] = "tokens"

    def __post_init__(self) -> None:
        if self.calibrate and self.task.kind == "generation":
            raise ZeroBlockError(f"calibration is for tasks with options, and {self.task.name} generates")

    def exam(self, examples: Sequence[Example]) -> Exam:
        """Encode examples; do this once for all evaluations on them."""
        shown = [self.demonstrations(example, number) for number, example in enumerate(examples)]
        if self.task.metric.generates:
            prompts = tuple(self.encoder.prompt(example, self.task.max_new_tokens) for example in shown)
            return Exam(tuple(examples), tuple(map(self.encoder.target, shown)), prompts)
        bare = tuple(map(self._bare, examples)) if self.calibrate else ()
        return Exam(tuple(examples), tuple(map(self.encoder.example, shown)), bare=bare)

    def __call__(
        self,
        exam: Exam,
        *,
        loss: bool = True,
        check: Callable[[int], None] = lambda done: None,
        ranks: Ranks | None = None,
    ) -> Evaluation:
        """Evaluate the model.

        Several ranks divide the batches of a single process among them, so the results are the same to the bit.

        Args:
            exam: the examples.
            loss: whether a task that generates computes its loss too, which takes a separate pass.
            check: called often, with the number of examples done; it may raise to stop.
            ranks: the processes that share the work; all of them call this, and get the full result.
        """
        start, ranks = time.perf_counter(), ranks or Alone()
        values = self._generated(exam, check, ranks) if self.task.metric.generates else None
        losses = self._losses(exam, check, ranks) if loss or values is None else []
        if values is None:
            values = [(value, None) for _, value, _ in losses]
        exact = [match for _, match in values if match is not None]
        mean_loss = _mean([(loss, weight) for loss, _, weight in losses])
        metric = self.task.metric
        return Evaluation(
            metric.name,
            metric.score(mean_loss) if metric.of_loss else math.fsum(value for value, _ in values) / len(values),
            mean_loss,
            len(values),
            time.perf_counter() - start,
            math.fsum(exact) / len(exact) if exact else None,
        )

    def _generated(self, exam: Exam, check: Callable[[int], None], ranks: Ranks) -> list[tuple[float, float | None]]:
        """Compute the metric and the exact match of every generated text."""
        task = self.task
        opening = () if self.engine.seq2seq is None else (self.engine.start, *self.encoder.opening)

        def mine() -> dict[int, str]:
            return generate_part(
                self.engine.model, self.tokenizer, [prompt.context for prompt in exam.prompts], stop=task.stop,
                max_new_tokens=task.max_new_tokens, check=lambda: check(0), part=(ranks.rank, ranks.size),
                opening=opening,
            )  # fmt: skip

        texts = {i: text for some in ranks.each(mine) for i, text in some.items()}
        return [
            (task.metric.score(texts[i], example), exact_match(texts[i], example))
            for i, example in enumerate(exam.examples)
        ]

    def _losses(self, exam: Exam, check: Callable[[int], None], ranks: Ranks) -> list[tuple[float, float, int]]:
        """Compute the loss of every example, the metric of the chosen option, and the weight of the loss."""
        starts = range(0, len(exam.examples), CHUNK_EXAMPLES)

        def mine() -> dict[int, list[tuple[float, float, int]]]:
            return {start: self._chunk(exam, start, check) for start in starts[ranks.rank :: ranks.size]}

        chunks = {start: results for some in ranks.each(mine) for start, results in some.items()}
        return [result for start in starts for result in chunks[start]]

    def _chunk(self, exam: Exam, start: int, check: Callable[[int], None]) -> list[tuple[float, float, int]]:
        """The part of :meth:`_losses` for the examples that the engine scores together."""
        check(start)
        some = exam.take(range(start, min(start + CHUNK_EXAMPLES, len(exam.examples))))
        scores = self.engine.scores(some.scored)
        bare = self.engine.scores(some.bare) if some.bare else [None] * len(scores)
        results = []
        for example, mine, alone in zip(some.examples, scores, bare, strict=True):
            if self.task.metric.generates or self.task.metric.of_loss:
                results.append((-mine[0].mean, 0.0, self._weight(mine[0])))
            else:
                known = not any(math.isnan(score.mean) for score in mine)  # a model that diverged prefers nothing
                value = self.task.metric.score(choose(mine, alone), example) if known else 0.0
                loss = loss_of(self.task, mine, example) if known else math.nan
                results.append((loss, value, self._weight(mine[example.right[0]])))
        return results

    def _weight(self, answer: Score) -> int:
        """The weight of an example in the mean loss: the number of its scored tokens, or one."""
        return answer.tokens if self.task.over == "answer" and self.loss_over == "tokens" else 1

    def _bare(self, example: Example) -> Encoded:
        encoded = self.encoder.calibration(example)
        if encoded is None:
            raise ZeroBlockError(f"{self.task.name} has no calibration context: leave out --calibrate")
        return encoded


def _mean(weighted: Sequence[tuple[float, int]]) -> float:
    """The weighted mean of losses; NaN if there are none."""
    if not weighted:
        return math.nan
    return math.fsum(loss * weight for loss, weight in weighted) / sum(weight for _, weight in weighted)


def choose(scores: Sequence[Score], bare: Sequence[Score] | None = None) -> int:
    """Choose the option that a model prefers; ties go to the first.

    Args:
        scores: the scores of the options after their context.
        bare: the same after the calibration context (SFC).
    """
    values = (
        [s.mean for s in scores] if bare is None else [s.total - b.total for s, b in zip(scores, bare, strict=True)]
    )
    return max(range(len(values)), key=values.__getitem__)


def loss_of(task: Task, scores: Sequence[Score], example: Example) -> float:
    """Cross-entropy over the options of one example, or the mean negative log-probability of its answer."""
    means = [score.mean for score in scores]
    right = means[example.right[0]]
    if task.over == "answer":
        return -right
    top = max(means)
    return top + math.log(math.fsum(math.exp(mean - top) for mean in means)) - right
