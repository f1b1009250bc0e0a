"""Hugging Face's Trainer without a backward pass: the loss falls, and a resumed run ends with the same bits.

python examples/trainer_resume.py
"""

import tempfile

import torch
import transformers

import zeroblock as zb

VOCABULARY, STEPS = 16, 60


def base(folder: str) -> str:
    """A tiny random model in a folder; give the name of your own instead."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).save_pretrained(f"{folder}/base")
    return f"{folder}/base"


def train(folder: str, output: str, checkpoint: str | None = None) -> transformers.Trainer:
    """Sequences that count upwards, in a run with an evaluation and a checkpoint after every third of its steps."""
    rows = [{"input_ids": [(start + i) % VOCABULARY for i in range(8)]} for start in range(VOCABULARY)]
    for row in rows:
        row["labels"] = row["input_ids"]
    args = transformers.TrainingArguments(
        f"{folder}/{output}", max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=2e-2, lr_scheduler_type="cosine", logging_steps=40, eval_strategy="steps", eval_steps=STEPS // 3,
        save_steps=STEPS // 3, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = zb.integrations.ZeroOrderTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(base(folder)),
        args=args, train_dataset=rows, eval_dataset=rows,
        method="mezo_bcd", method_kwargs={"eps": 1e-2, "probes": 2, "clip": 5.0},
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        whole = train(temporary, "whole")
        resumed = train(temporary, "resumed", checkpoint=f"{temporary}/whole/checkpoint-{STEPS // 3 * 2}")
    losses = [entry["eval_loss"] for entry in whole.state.log_history if "eval_loss" in entry]
    print(f"evaluation: {', '.join(f'{loss:.3f}' for loss in losses)}")
    assert losses[-1] < losses[0]
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    print(f"resumed at step {STEPS // 3 * 2}: the same bits at step {STEPS}")
