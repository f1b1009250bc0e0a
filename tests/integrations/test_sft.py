"""TRL's SFTTrainer with zeroth-order steps: chats, completions, adapters, and batches that cannot be packed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
from trainer_toy import Collator, model, rows, same_weights  # noqa: E402

import zeroblock as zb  # noqa: E402


class ZOSFTTrainer(zb.integrations.ZeroOrderMixin, trl.SFTTrainer):  # type: ignore[misc]
    pass


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(24)}, "0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2")


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")


def sft(folder: Path, tokenizer: Any, *, args: dict[str, Any] | None = None, **options: Any) -> Any:
    defaults = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "save_strategy": "no", "logging_steps": 1, "report_to": [],
        "disable_tqdm": True, "use_cpu": True, "bf16": False, "max_length": 16,
    }  # fmt: skip
    config = trl.SFTConfig(str(folder), **{**defaults, **(args or {})})
    data = datasets.Dataset.from_list(rows(16))
    given = {"model": model(), "train_dataset": data, "processing_class": tokenizer, **options}
    return ZOSFTTrainer(args=config, **given)


def test_the_weights_are_those_of_the_same_batches_by_optimizer_step(tmp_path: Path, tokenizer: Any) -> None:
    run = sft(tmp_path, tokenizer, data_collator=(collator := Collator()))
    run.train()
    mine = model()
    optimizer, engine = zb.mezo_bcd(mine, lr=1e-2, seed=42), zb.Engine(mine)
    for step in range(3):
        optimizer.step([engine.objective_from(batch) for batch in collator.made[2 * step : 2 * step + 2]])
    assert same_weights(run.model, mine)
    assert not same_weights(run.model, model())
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert [entry["loss"] for entry in logged] == [record.loss for record in run.ledger.records]
    tokens = sum(int(batch["attention_mask"].sum()) for batch in collator.made[:6])
    assert logged[-1]["num_tokens"] == tokens
    assert not run.args.gradient_checkpointing  # which SFTConfig turns on


def test_the_plain_loss_is_trls_and_its_metrics_count_for_training(tmp_path: Path, tokenizer: Any) -> None:
    packed, plain = (sft(tmp_path, tokenizer, packed=packed, data_collator=Collator()) for packed in (None, False))
    for run in (packed, plain):
        run.train()
    for mine, theirs in zip(packed.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)
    logged = [entry for entry in plain.state.log_history if "loss" in entry]
    assert all("mean_token_accuracy" in entry for entry in logged)
    assert not plain._metrics["eval"]


def test_batches_that_trl_has_packed_are_measured_as_they_are(tmp_path: Path, tokenizer: Any) -> None:
    run = sft(
        tmp_path,
        tokenizer,
        args={"padding_free": True, "max_length": None, "max_steps": 1, "gradient_accumulation_steps": 1},
    )
    with pytest.warns(zb.ZeroBlockWarning, match=r"position_ids.*padding_free=False"):
        run.train()
    assert run.zero_order.steps == 1


def test_adapters_are_trained_saved_and_resumed(tmp_path: Path, tokenizer: Any) -> None:
    peft = pytest.importorskip("peft")

    def run(folder: str, **options: Any) -> Any:
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
        args = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "gradient_checkpointing": True}
        return sft(tmp_path / folder, tokenizer, args=args, peft_config=lora, data_collator=Collator())

    whole, resumed = run("whole"), run("resumed")
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    assert same_weights(whole.model, resumed.model)
    assert (tmp_path / "whole" / "checkpoint-2" / "adapter_model.safetensors").exists()
    assert all("lora" in name for name in whole.zero_order.params)
