"""The workload of a run: model, task and data, loaded and encoded."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .. import family
from .. import model as models
from .. import task as tasks
from ..adapter import virtual_tokens
from ..closure import Closure
from ..engine import Engine
from ..errors import ZeroBlockError
from ..evaluate.demonstration import Demonstrations
from ..evaluate.evaluator import Evaluator, Exam
from ..step import Objective
from ..task.own import is_hub, is_path, located
from . import cache
from .batch import digest, fingerprint
from .config import BACKPROPAGATION, Config, only_options
from .offloaded import decided, shelved


@dataclass(frozen=True)
class Workload:
    """Everything that a run works on.

    Args:
        config: the resolved configuration.
        model: the model, on its device and in evaluation mode.
        engine: the model's engine.
        task: the task to learn.
        evaluator: the task's evaluator.
        train: the training examples as the objective reads them, each with the index of its right option.
        train_exam: the training examples as they are evaluated, if a metric is the objective; else None.
        exams: the evaluated examples, by split.
        notes: lines about the data for the user.
    """

    config: Config
    model: nn.Module
    engine: Engine
    task: tasks.Task
    evaluator: Evaluator
    train: tuple[tuple[tasks.Encoded, int], ...]
    train_exam: Exam | None
    exams: dict[str, Exam]
    notes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A digest of the training data as the model reads them."""
        return fingerprint(*zip(*self.train, strict=True)) if self.train else ""

    @property
    def exam_digest(self) -> str:
        """A digest of the evaluated data: dev, test, and the training data if a metric is the objective."""
        exams = [*self.exams.values(), *([self.train_exam] if self.train_exam else [])]
        shown = [
            (one.context, one.options, *([] if one.scored is None else [one.scored]))
            for exam in exams
            for one in (*exam.scored, *exam.prompts, *exam.bare)
        ]
        asked = [(example.right, example.answers) for exam in exams for example in exam.examples]
        return digest([*shown, *asked, (self.task.metric.name, self.task.max_new_tokens)])

    def objectives(
        self, batch: Sequence[int], share: Callable[[int], slice] = lambda parts: slice(None)
    ) -> list[Closure]:
        """The objectives of a step, one per micro-batch.

        Args:
            batch: indices of training examples.
            share: returns the slice of micro-batches that this process measures, from their number; by default all.
        """
        parts = self.cut(batch)
        return [self._objective(part) for part in parts[share(len(parts))]]

    def cut(self, batch: Sequence[int]) -> list[Sequence[int]]:
        """Cut a step's examples into micro-batches: every batch into its shares, which differ by one example at most.

        Args:
            batch: indices of training examples.
        """
        size, shares = self.config.batch_size, self.config.shares or 1
        ends = [size * share // shares for share in range(shares + 1)]
        return [batch[at + a : at + b] for at in range(0, len(batch), size) for a, b in itertools.pairwise(ends)]

    def _objective(self, batch: Sequence[int]) -> Closure:
        if self.train_exam is not None:
            return Missed(self.evaluator, self.train_exam.take(batch))
        encoded, labels = zip(*(self.train[i] for i in batch), strict=True)
        reduction = self.config.loss_over or "tokens"
        return self.engine.objective(encoded, labels, over=self.task.over, reduction=reduction)


@dataclass(frozen=True)
class Missed(Objective):
    """One minus the metric of some examples; NaN if the scores are NaN.

    Args:
        evaluator: measures the examples.
        exam: the examples.
    """

    evaluator: Evaluator
    exam: Exam

    def __call__(self) -> float:
        result = self.evaluator(self.exam, loss=False)
        unknown = math.isnan(result.loss) and not self.evaluator.task.metric.generates
        return math.nan if unknown else 1 - result.value

    @property
    def weight(self) -> tuple[str, float]:
        return "examples", float(len(self.exam.examples))


def resolve(config: Config) -> Config:
    """Set the values that a configuration leaves open, and make its paths absolute."""
    device = models.find_device(config.device)
    # Adam's steps are far smaller than the spacing of 16-bit weights, and ft does not round stochastically
    dtype = "fp32" if config.dtype == "auto" and config.method == BACKPROPAGATION else config.dtype
    names = {kind: name for name, kind in models.DTYPES.items()}
    config = config.replace(
        dtype=names[models.precision(dtype, device)],
        eval_every=config.every,
        loss_over=config.loss_over or (None if only_options(config.task) else "tokens"),
        model=_absolute(config.model) if _is_local(config.model) else config.model,
        turns=config.turns or ("all" if tasks.is_rows(config.task) else None),
        ending=config.ending or ("eos" if tasks.is_rows(config.task) else None),
        task=located(config.task) if _is_own(config.task) else config.task,
        data=_absolute(config.data) if config.data is not None else None,
    )
    return decided(config)


def prepare(
    config: Config,
    *,
    splits: Sequence[str] = ("dev", "test"),
    tell: Callable[[str], None] = lambda text: None,
    folder: Path = Path(),
) -> Workload:
    """Load and encode the data and the model; bad rows are reported before the model is loaded.

    Args:
        config: the resolved configuration.
        splits: the splits to evaluate on.
        tell: called with a line about each stage.
        folder: the run's folder, for a file of weights.
    """
    tokenizer = cache.tokenizer(config)
    choices = {name: value for name in ("turns", "ending", "metric") if (value := getattr(config, name)) is not None}
    if config.objective in ("f1", "exact_match") and tasks.is_rows(config.task):
        choices.setdefault("metric", config.objective)
    task = tasks.get(config.task, tokenizer, **choices)
    if config.objective not in ("loss", task.metric.name):
        instead = "loss" if task.metric.of_loss else f"{task.metric.name} (or loss)"
        raise ZeroBlockError(
            f"{task.name} is measured by {task.metric.name}: use objective {instead}, not {config.objective}"
        )
    sizes = {name: value for name in ("train", "dev", "test") if (value := getattr(config, name)) is not None}
    tell(f"reading {task.name}")
    rows = task.load(config.data, seed=config.data_seed, sizes=dataclasses.replace(task.sizes, **sizes))
    for name in splits:
        if not getattr(rows, name):
            raise ZeroBlockError(
                f"{task.name} has no {name} examples: give more rows; without a validation part a fifth of them is "
                "held out for test, and a fifth of the rest for dev, so at least six are needed"
            )
    tell(f"loading {config.model} ({config.dtype}, {models.find_device(config.device)})")
    model: Any = cache.model(config)
    limit = shelved(config, model, folder, tell)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or config.max_length
    longest -= virtual_tokens(model) + family.first_position(model)
    masked, seq2seq = family.masked(model), family.seq2seq(model) is not None
    encoder = task.encoder(tokenizer, min(config.max_length, longest), masked=masked, seq2seq=seq2seq)
    engine = engine_of(config.replace(max_tokens=limit or config.max_tokens), model)
    demonstrations = Demonstrations(rows.train, config.shots, config.data_seed)
    over = config.loss_over or "tokens"
    evaluator = Evaluator(engine, tokenizer, task, encoder, demonstrations, config.calibrate, over)

    notes = [rows.note] if rows.note else []
    if config.loss_over is not None and only_options(config.task):
        notes.append(f"loss_over has no effect: {task.name} trains on a cross-entropy over its options")
    if choices and not tasks.is_rows(config.task):
        notes.append(f"{', '.join(choices)} have no effect: they apply only to your own data in a known layout")
    if task.metric.of_loss:
        notes.append(
            f"the answers of {task.name} are too long for F1 to mean anything: its held-out loss decides (likelihood "
            "is exp(-loss), the probability per token)"
        )
    pairs: list[tuple[tasks.Encoded, int]] = []
    examples: list[tasks.Example] = []
    if config.trains:
        examples, pairs = _training_examples(config, task, encoder, rows.train)
        if config.train_tokens is not None:
            notes.append(
                f"{len(pairs)} of {len(rows.train)} training examples have at most {config.train_tokens} tokens"
            )
    train_exam = evaluator.exam(examples) if config.trains and config.objective != "loss" else None
    exams = {name: evaluator.exam(getattr(rows, name)[: config.eval_limit]) for name in splits}
    cut = {"train": [example for example, (one, _) in zip(examples, pairs, strict=True) if one.cut]}
    notes += _notes(task, encoder, exams, cut | {name: list(exam.cut) for name, exam in exams.items()})
    return Workload(config, model, engine, task, evaluator, tuple(pairs), train_exam, exams, tuple(notes))


def engine_of(config: Config, model: nn.Module) -> Engine:
    """The engine that a configuration describes."""
    graphs = {"auto": None, "on": True, "off": False}[config.graphs]
    return Engine(model, fork=config.engine == "forked", max_tokens=config.max_tokens, graphs=graphs)


def _notes(
    task: tasks.Task, encoder: tasks.Encoder, exams: dict[str, Exam], cut: dict[str, list[tasks.Example]]
) -> list[str]:
    """Notes for the user about examples that did not fit."""
    notes = []
    if any(cut.values()):
        counts = ", ".join(f"{len(examples)} {name}" for name, examples in cut.items() if examples)
        first = next(example.where for examples in cut.values() for example in examples)
        where = f", the first being {first}" if first else ""
        notes.append(f"contexts cut on the left to {encoder.max_length} tokens: {counts}{where}")
    if task.metric.generates:
        long = sum(len(one.options[0]) > task.max_new_tokens for exam in exams.values() for one in exam.scored)
        if long:
            notes.append(
                f"answers longer than the {task.max_new_tokens} tokens that are generated: {long} of dev and test "
                "(max_new_tokens in the task's TOML)"
            )
    return notes


def _training_examples(
    config: Config, task: tasks.Task, encoder: tasks.Encoder, examples: Sequence[tasks.Example]
) -> tuple[list[tasks.Example], list[tuple[tasks.Encoded, int]]]:
    """The examples to train on, as they are and as the objective reads them."""
    pairs = [(example, task.training_pair(encoder, example)) for example in examples]
    if config.train_tokens is not None:
        pairs = [(e, pair) for e, pair in pairs if max(len(ids) for ids, _ in pair[0].rows) <= config.train_tokens]
    if not pairs:
        raise ZeroBlockError(f"{task.name} has no training example left: give more rows, or raise --train-tokens")
    return [example for example, _ in pairs], [pair for _, pair in pairs]


def _is_own(task: str) -> bool:
    """Whether a task's name means the user's own data; a built-in name does not, even if a file has that name."""
    return task not in tasks.TASKS and (is_path(task) or is_hub(task))


def _is_local(model: str) -> bool:
    """Whether a model's name means a file or folder; a built-in name does not, even if a file has that name."""
    return model not in models.NAMES and Path(model).expanduser().exists()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())
