"""The card of a fine-tune on the hub: ``README.md`` with the front matter that the hub reads."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from .. import family
from ..adapter import base_of, is_folder
from ..errors import ZeroBlockError, shown
from ..evaluate.evaluator import Evaluation
from ..evaluate.measurement import SPLITS, Measurement, read_measurements
from ..hub import is_id
from ..journal.share import public_name
from ..task import TASKS
from ..task.metric import is_loss, worded
from ..train.config import EXECUTION, Config, recorded
from .summary import selection

GENERATION, FILLING, ANSWERING = "text-generation", "fill-mask", "text2text-generation"
"""The pipelines of transformers for causal and for masked language models, and the hub's name for encoder-decoders."""
AUTO = {
    GENERATION: "AutoModelForCausalLM",
    FILLING: "AutoModelForMaskedLM",
    ANSWERING: "AutoModelForSeq2SeqLM",
}
"""The classes of transformers that load them."""
What = Literal["model", "journal"]
"""The content of a repository: a folder for ``from_pretrained``, or an exported journal."""
HUB_NAMES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""The hub ids of models that have a short name in zeroblock."""
PLACEHOLDER = "USER/NAME"
"""The repository in the card of a folder that has none yet."""
MAX_VALUE = 300
"""Maximum characters of a setting that are shown."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts about a run that its card states.

    Args:
        config: the run's settings.
        step: the step of the weights in the repository.
        by: how that step was selected; empty if it was not selected by dev.
        measurements: the evaluations of the run.
        adapted: the base of the adapter that the repository holds; empty if it holds whole weights or a journal.
        pipeline: the pipeline of transformers for the model.
    """

    config: Config
    step: int
    by: str
    measurements: tuple[Measurement, ...]
    adapted: str = ""
    pipeline: str = GENERATION

    @classmethod
    def read(cls, run: Path, step: int, weights: Path | None = None) -> Facts | None:
        """Read the facts from a run's folder; None if it has no readable configuration.

        Args:
            run: the run's folder.
            step: the step of the weights in the repository.
            weights: the folder of these weights, if the repository holds them.
        """
        try:
            config = recorded(run / "config.toml", trust_remote_code=True)  # no model is loaded here
        except ZeroBlockError:
            return None
        try:
            measurements = tuple(one for _, one in read_measurements(run / "metrics.jsonl"))
        except (OSError, ValueError):
            measurements = ()
        chosen = selection(run)
        adapted = base_of(str(weights)) if weights is not None and is_folder(str(weights)) else ""
        pipeline = GENERATION if weights is None else pipeline_of(weights)
        by = chosen.by if chosen and chosen.step == step else ""
        return cls(config, step, by, measurements, adapted, pipeline)

    def at(self, step: int) -> dict[str, Measurement]:
        """The evaluations after a step, by split."""
        return {one.split: one for one in self.measurements if one.step == step}

    @property
    def base(self) -> str:
        """The base's name on the hub or in zeroblock, or the last part of its path."""
        return shown(public_name(self.adapted or self.config.model), MAX_VALUE)

    @property
    def task(self) -> str:
        """The name of the task or of its file."""
        return shown(Path(self.config.task).name, MAX_VALUE)


def pipeline_of(folder: Path) -> str:
    """The pipeline of transformers for a folder's model; for an adapter, that of its base if the base is a folder."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return pipeline_of(Path(base_of(str(folder)))) if is_folder(str(folder)) else GENERATION
    if config.get("is_encoder_decoder"):
        return ANSWERING
    return FILLING if any(family.MASKED.search(str(name)) for name in config.get("architectures") or ()) else GENERATION


def hub_card(facts: Facts, what: What, repo: str = PLACEHOLDER) -> str:
    """Write the card of a repository.

    Args:
        facts: the facts about the run.
        what: the content of the repository.
        repo: ``user/name``.
    """
    config = facts.config
    steps = f"the weights after {facts.step:,} of {config.steps:,} steps"
    chosen = f"{steps}, selected by {facts.by}" if facts.by else steps
    lines = [
        f"# {facts.base} fine-tuned on {facts.task}",
        "",
        f"Fine-tuned with `{config.method}` by zeroblock: {chosen}. The license is that of the base, {facts.base}.",
        "",
        "## Results",
        "",
        *_results(facts),
        "",
        "## Training",
        "",
        "```",
        command(config),
        "```",
        "",
        *_settings(facts),
        "",
        "## How to use it",
        "",
        *_use(facts, what, repo),
    ]
    return _front_matter(facts, what, repo) + "\n".join(lines) + "\n"


def _front_matter(facts: Facts, what: What, repo: str) -> str:
    """The YAML that the hub reads, between its two lines of dashes."""
    from huggingface_hub import EvalResult, ModelCardData

    test = facts.at(facts.step).get("test")
    dataset = _dataset(facts.config)
    results = []
    if test is not None:
        results.append(
            EvalResult(
                task_type=facts.pipeline,
                dataset_type=dataset or facts.task,
                dataset_name=facts.task,
                dataset_split="test",
                metric_type=test.evaluation.metric,
                metric_value=round(test.evaluation.value, 4),
            )
        )
    data = ModelCardData(
        base_model=hub_name(facts.base),
        base_model_relation="adapter" if facts.adapted else None,
        library_name="zeroblock" if what == "journal" else "peft" if facts.adapted else "transformers",
        pipeline_tag=facts.pipeline,
        tags=["zeroblock", *([] if facts.config.method == "ft" else ["zeroth-order"]), facts.config.method],
        datasets=[dataset] if dataset else None,
        metrics=[test.evaluation.metric] if test is not None else None,
        model_name=repo,
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---\n\n"


def hub_name(base: str) -> str | None:
    """The hub id of a base, if it has one.

    Args:
        base: the name of the base, without folders of this machine.

    >>> hub_name("smollm2"), hub_name("facebook/opt-125m"), hub_name("mine")
    ('HuggingFaceTB/SmolLM2-135M-Instruct', 'facebook/opt-125m', None)
    """
    name = HUB_NAMES.get(base, base)
    return name if is_id(name) else None


def _dataset(config: Config) -> str:
    """The hub's dataset of a task; empty if the rows came from elsewhere."""
    source: Any = TASKS[config.task].source if config.task in TASKS else None
    return str(getattr(source, "path", ""))


def _results(facts: Facts) -> list[str]:
    now, before = facts.at(facts.step), facts.at(0)
    if not now:
        return [f"The run was not evaluated after step {facts.step:,}."]
    first = worded(next(iter(now.values())).evaluation.metric, 1.0).partition(" ")[0]
    counts = [f"{split} (n = {now[split].evaluation.n:,})" if split in now else split for split in SPLITS]
    lines = [f"| {shown(first)} | {counts[0]} | {counts[1]} |", "|---|---|---|"]
    if before and facts.step:
        lines.append(_row("before training", before))
    return [*lines, _row(f"**step {facts.step:,}**", now)]


def _row(label: str, found: dict[str, Measurement]) -> str:
    results = [found[split].evaluation if split in found else None for split in SPLITS]
    values = [_numbers(one) if one else "–" for one in results]
    return f"| {label} | {values[0]} | {values[1]} |"


def _numbers(one: Evaluation) -> str:
    """The metric and the loss; only the loss if the metric is a function of it."""
    return f"{one.loss:.4f}" if is_loss(one.metric) else f"{100 * one.value:.1f} %, loss {one.loss:.4f}"


def _settings(facts: Facts) -> list[str]:
    config = facts.config
    rate = "automatic, in units of the weights" if config.lr is None else f"{config.lr:g}"
    lr = rate + (f", {config.lr_schedule}" if config.lr_schedule != "constant" else "")
    return [
        f"- method: {config.method}",
        f"- steps: {config.steps:,}, each on {config.batch_size * config.accumulate} examples",
        f"- learning rate: {lr}",
        f"- seed: {config.seed}",
        f"- dtype: {config.dtype}",
    ]


def command(config: Config) -> str:
    """The command of a run, without folders of this machine and without settings that are at their defaults.

    >>> command(Config(model="/home/ann/tuned", task="sst2", lr=3e-4, eval_start=False))
    'zeroblock train --model tuned --task sst2 --lr 0.0003 --no-eval-start'
    """
    words = ["zeroblock", "train"]
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if value in (None, item.default) or item.name in (*EXECUTION, "trust_remote_code"):
            continue
        flag = item.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
            continue
        if item.name == "model":
            value = public_name(value)
        elif item.name == "task":
            value = Path(value).name
        text = f"{value:g}" if isinstance(value, float) else str(value)
        words += [f"--{flag}", shown(text, MAX_VALUE)]
    return " ".join(shlex.quote(word) for word in words)


def _use(facts: Facts, what: What, repo: str) -> list[str]:
    """How to use what the repository holds."""
    if what == "journal":
        return _use_journal(repo, facts)
    return _use_adapter(repo, facts) if facts.adapted else _use_model(repo, facts.pipeline)


def _use_adapter(repo: str, facts: Facts) -> list[str]:
    base = hub_name(facts.base) or facts.base
    name = json.dumps(repo, ensure_ascii=False)
    lines = [
        "This repository holds an adapter. It belongs to its base and is loaded with it:",
        "",
        "```python",
        "from peft import PeftModel",
        f"from transformers import {AUTO[facts.pipeline]}, AutoTokenizer",
        "",
        f"base = {AUTO[facts.pipeline]}.from_pretrained({json.dumps(base, ensure_ascii=False)})",
        f"model = PeftModel.from_pretrained(base, {name})",
        f"tokenizer = AutoTokenizer.from_pretrained({name})",
        "```",
    ]
    if facts.config.lora is None or facts.pipeline != GENERATION:
        return lines
    served = f"vllm serve {shlex.quote(base)} --enable-lora --lora-modules tuned={shlex.quote(repo)}"
    return [*lines, "", "With vLLM:", "", "```", served, "```"]


def _use_model(repo: str, pipeline: str) -> list[str]:
    name = json.dumps(repo, ensure_ascii=False)
    auto = AUTO[pipeline]
    if pipeline == ANSWERING:
        return [
            "```python",
            f"from transformers import {auto}, AutoTokenizer",
            "",
            f"model = {auto}.from_pretrained({name})",
            f"tokenizer = AutoTokenizer.from_pretrained({name})",
            'written = model.generate(**tokenizer("The film was", return_tensors="pt"), max_new_tokens=20)[0]',
            "print(tokenizer.decode(written, skip_special_tokens=True))",
            "```",
        ]
    call = 'print(pipe("The film was", max_new_tokens=20)[0]["generated_text"])'
    if pipeline == FILLING:
        call = 'print(pipe(f"The film was {pipe.tokenizer.mask_token}.")[0]["token_str"])'
    lines = [
        "```python",
        f"from transformers import {auto}, AutoTokenizer, pipeline",
        "",
        f'pipe = pipeline("{pipeline}", model={name})',
        call,
        "",
        f"model = {auto}.from_pretrained({name})  # or without the pipeline",
        f"tokenizer = AutoTokenizer.from_pretrained({name})",
        "```",
    ]
    if pipeline == FILLING:
        return lines
    return [
        *lines,
        "",
        "With vLLM:",
        "",
        "```",
        f"vllm serve {shlex.quote(repo)}",
        "```",
    ]


def _use_journal(repo: str, facts: Facts) -> list[str]:
    name = json.dumps(repo, ensure_ascii=False)
    into = f"zb.load(model, {name})  # or into a model that you have loaded; zb.unload(model) takes it out again"
    return [
        "This repository holds `journal.zbj`: every step in a few bytes. The base weights and these steps give the "
        "fine-tuned weights, bit for bit.",
        "",
        "```python",
        "import zeroblock as zb",
        "",
        f"model = zb.load({name})  # loads {facts.base}, then takes the steps",
        *([] if facts.config.adapter else [into]),  # a new adapter would start from other weights
        "```",
        "",
        "As a folder for `from_pretrained`:",
        "",
        "```",
        f"zeroblock apply {shlex.quote(repo)} --out FOLDER",
        "```",
    ]


def public_card(text: str, tags: Sequence[str], base: str) -> str:
    """Put front matter before the card of an exported file, whose run is not available.

    Args:
        text: the card in the file.
        tags: the repository's tags.
        base: the name of the base in the file.
    """
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=hub_name(base),
        library_name="zeroblock",
        pipeline_tag=GENERATION,
        tags=["zeroblock", "zeroth-order", *tags],
    )
    return f"---\n{data.to_yaml()}\n---\n\n{text}"
