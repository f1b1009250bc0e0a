"""The setting of a run: model, task and data, loaded and encoded."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from .. import model as models
from .. import task as tasks
from ..engine import Engine
from ..errors import ZeroBlockError
from ..evaluate.demonstration import Demonstrations
from ..evaluate.evaluator import Evaluator, Exam
from ..optimizer import Closure
from ..task.own import is_path
from . import cache
from .batch import digest, fingerprint
from .config import BACKPROPAGATION, Config


@dataclass(frozen=True)
class Setting:
    """All that a run works on.

    Args:
        config: resolved.
        model: on its device, in evaluation mode.
        engine: of the model.
        task: what it learns.
        evaluator: of the task.
        train: the training examples, encoded for the objective, with the index of the right option.
        exam: the training examples as they are evaluated, where a metric is the objective; else None.
        exams: what it is evaluated on, by split.
        notes: what the user should know of the data, a line each.
    """

    config: Config
    model: nn.Module
    engine: Engine
    task: tasks.Task
    evaluator: Evaluator
    train: tuple[tuple[tasks.Encoded, int], ...]
    exam: Exam | None
    exams: dict[str, Exam]
    notes: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A digest of the training data as the model reads them."""
        return fingerprint(*zip(*self.train, strict=True)) if self.train else ""

    @property
    def examined(self) -> str:
        """A digest of what a metric is measured on: dev, test, and the training data where it is the objective."""
        exams = [*self.exams.values(), *([self.exam] if self.exam else [])]
        shown = [(one.context, one.options) for exam in exams for one in (*exam.scored, *exam.prompts, *exam.bare)]
        asked = [(example.right, example.answers) for exam in exams for example in exam.examples]
        return digest([*shown, *asked, (self.task.metric.name, self.task.max_new_tokens)])

    def closures(self, batch: Sequence[int]) -> list[Closure]:
        """The objective on a step's examples, a closure for each micro-batch.

        Args:
            batch: indices of training examples.
        """
        size = self.config.batch_size
        return [self._closure(batch[start : start + size]) for start in range(0, len(batch), size)]

    def _closure(self, batch: Sequence[int]) -> Closure:
        if self.exam is not None:
            return functools.partial(self._missed, self.exam.take(batch))
        encoded, labels = zip(*(self.train[i] for i in batch), strict=True)
        return self.engine.objective(encoded, labels, over=self.task.objective)

    def _missed(self, exam: Exam) -> float:
        """1 less the metric; not a number where the scores are none."""
        found = self.evaluator(exam, loss=False)
        return math.nan if math.isnan(found.loss) and not self.task.metric.generates else 1 - found.value


def resolve(config: Config) -> Config:
    """The configuration with what it left open decided, and with paths that hold from any folder."""
    device = models.place(config.device)
    # Adam's steps are far below the grid of 16-bit weights, and nothing here rounds them stochastically
    dtype = "fp32" if config.dtype == "auto" and config.method == BACKPROPAGATION else config.dtype
    names = {kind: name for name, kind in models.DTYPES.items()}
    return config.replace(
        dtype=names[models.precision(dtype, device)],
        eval_every=config.every,
        model=_absolute(config.model) if _is_place(config.model) else config.model,
        task=_absolute(config.task) if config.task not in tasks.TASKS and is_path(config.task) else config.task,
        data=_absolute(config.data) if config.data is not None else None,
    )


def prepare(
    config: Config, *, splits: Sequence[str] = ("dev", "test"), tell: Callable[[str], None] = lambda text: None
) -> Setting:
    """Load and encode; what is wrong with the rows is found before the model is loaded.

    Args:
        config: resolved.
        splits: those to evaluate on.
        tell: hears what is being done, a line each.
    """
    tokenizer = cache.tokenizer(config)
    task = tasks.get(config.task, tokenizer)
    if config.objective not in ("loss", task.metric.name):
        raise ZeroBlockError(
            f"{task.name} is measured by {task.metric.name}: use objective {task.metric.name} (or loss), not "
            f"{config.objective}"
        )
    sizes = {name: value for name in ("train", "dev", "test") if (value := getattr(config, name)) is not None}
    tell(f"reading {task.name}")
    found = task.load(config.data, seed=config.data_seed, sizes=dataclasses.replace(task.sizes, **sizes))
    for name in splits:
        if not getattr(found, name):
            raise ZeroBlockError(f"{task.name} has no {name} examples: give more rows")
    tell(f"loading {config.model} ({config.dtype}, {models.place(config.device)})")
    model: Any = cache.model(config)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or config.max_length
    encoder = task.encoder(tokenizer, min(config.max_length, longest))
    graphs = {"auto": None, "on": True, "off": False}[config.graphs]
    engine = Engine(model, fork=config.engine == "forked", max_tokens=config.max_tokens, graphs=graphs)
    demonstrations = Demonstrations(found.train, config.shots, config.data_seed)
    evaluator = Evaluator(engine, tokenizer, task, encoder, demonstrations, config.calibrate)

    notes = [found.note] if found.note else []
    train: tuple[tuple[tasks.Encoded, int], ...] = ()
    pairs: list[tuple[tasks.Example, tasks.Encoded]] = []
    exam = None
    if config.trains:
        pairs = _trained_on(config, task, encoder, found.train)
        if config.train_tokens is not None:
            notes.append(
                f"{len(pairs)} of {len(found.train)} training examples have at most {config.train_tokens} tokens"
            )
        options = task.objective == "options"
        train = tuple((one, example.right[0] if options else 0) for example, one in pairs)
        if config.objective != "loss":
            exam = evaluator.exam([example for example, _ in pairs])
    exams = {name: evaluator.exam(getattr(found, name)[: config.eval_limit]) for name in splits}
    cuts = {"train": [example for example, one in pairs if one.cut]} | {name: one.cut for name, one in exams.items()}
    if any(cuts.values()):
        told = ", ".join(f"{len(cut)} {name}" for name, cut in cuts.items() if cut)
        first = next(example.where for cut in cuts.values() for example in cut)
        notes.append(
            f"contexts cut on the left to {encoder.max_length} tokens: {told}{first and f', the first being {first}'}"
        )
    if task.metric.generates:
        long = sum(len(one.options[0]) > task.max_new_tokens for exam in exams.values() for one in exam.scored)
        if long:
            notes.append(
                f"answers longer than the {task.max_new_tokens} tokens that are generated: {long} of dev and test "
                "(max_new_tokens in the task's TOML)"
            )
    return Setting(config, model, engine, task, evaluator, train, exam, exams, tuple(notes))


def _trained_on(
    config: Config, task: tasks.Task, encoder: tasks.Encoder, examples: Sequence[tasks.Example]
) -> list[tuple[tasks.Example, tasks.Encoded]]:
    """The examples to train on, as the objective reads them."""
    encode = encoder.example if task.objective == "options" else encoder.target
    pairs = [(example, encode(example)) for example in examples]
    if config.train_tokens is not None:
        pairs = [(e, one) for e, one in pairs if max(len(ids) for ids, _ in one.rows) <= config.train_tokens]
    if not pairs:
        raise ZeroBlockError(f"{task.name} leaves no training example: give more rows, or raise --train-tokens")
    return pairs


def _is_place(model: str) -> bool:
    """Whether a model's name means a file or folder: names of ours do not, whatever lies beside."""
    return model not in models.NAMES and Path(model).expanduser().exists()


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())
