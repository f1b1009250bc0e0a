"""A tiny model, token rows of many lengths, and trainers on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import zeroblock as zb

Batch = dict[str, Tensor]
WORDS = 24


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rows(count: int = 22) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        ids = torch.randint(3, WORDS, (4 + 5 * i % 7,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100, -100, *ids[2:]]})
    return made


class Collator:
    """Pads on the right, and keeps every batch it made."""

    def __init__(self) -> None:
        self.made: list[Batch] = []

    def __call__(self, some: list[dict[str, list[int]]]) -> Batch:
        width = max(len(row["input_ids"]) for row in some)

        def column(name: str, filler: int) -> Tensor:
            return torch.tensor([row[name] + [filler] * (width - len(row[name])) for row in some])

        batch = {"input_ids": column("input_ids", 0), "labels": column("labels", -100)}
        batch["attention_mask"] = (batch["input_ids"] != 0).long()
        self.made.append({name: value.clone() for name, value in batch.items()})
        return batch


def arguments(folder: Path, **options: Any) -> Any:
    """Three epochs of three steps: 22 rows in micro-batches of 4, two per step."""
    defaults = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 3,
        "learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "use_cpu": True,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **{**defaults, **options})


def trainer(folder: Path, **options: Any) -> Any:
    """A ZeroOrderTrainer; options of TrainingArguments are given as ``args={...}``."""
    args = arguments(folder, **options.pop("args", {}))
    defaults = {"model": model(), "train_dataset": rows(), "data_collator": Collator()}
    return zb.integrations.ZeroOrderTrainer(args=args, **{**defaults, **options})


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)
