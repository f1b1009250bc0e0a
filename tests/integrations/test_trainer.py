"""Hugging Face's Trainer with zeroth-order steps: the bits of optimizer.step, and the rest as users know it."""

from __future__ import annotations

import functools
import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")
import transformers
from trainer_toy import WORDS, Batch, Collator, arguments, model, rows, same_weights, trainer

import zeroblock as zb
from zeroblock import budget
from zeroblock.adapter import Lora
from zeroblock.budget import Budget
from zeroblock.journal import read
from zeroblock.quantise import store_

STEPS = 9


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An uninterrupted run with checkpoints within an epoch and at its end, the oldest of them removed."""
    args = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 6, "eval_strategy": "epoch"}
    run = trainer(tmp_path_factory.mktemp("whole"), args=args, eval_dataset=rows(5), method_kwargs={"eps": 1e-2})
    run.output = run.train()
    return run


def by_hand(batches: list[Batch], per_step: list[int], plain: bool) -> nn.Module:
    """The same batches in a loop of one's own."""
    mine = model()
    optimizer, engine = zb.mezo_bcd(mine, lr=1e-2, eps=1e-2, seed=42), zb.Engine(mine)
    scheduler = transformers.get_scheduler("linear", optimizer, 0, len(per_step))
    given = iter(batches)
    for count in per_step:
        parts = list(itertools.islice(given, count))
        if plain:
            scored = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
            optimizer.step(functools.partial(summed, mine, parts, scored))
        else:
            optimizer.step([engine.objective_from(part) for part in parts])
        scheduler.step()
    return mine


def summed(mine: Any, parts: list[Batch], scored: int) -> float:
    return sum(float(mine(**part, num_items_in_batch=scored).loss) for part in parts)


@pytest.mark.parametrize("plain", [False, True])
def test_the_weights_are_those_of_the_same_batches_by_optimizer_step(whole: Any, tmp_path: Path, plain: bool) -> None:
    run = whole
    if plain:
        run = trainer(tmp_path, packed=False, method_kwargs={"eps": 1e-2})
        run.train()
    batches = [batch for batch in run.data_collator.made if len(batch["input_ids"]) != 5]  # of evaluations
    assert len(batches) == 18
    assert same_weights(run.model, by_hand(batches, [2] * STEPS, plain))
    assert not same_weights(run.model, model())


@pytest.mark.parametrize("change", [{}, {"learning_rate": None}, {"eps": 2e-2}, {"dtype": torch.float32}])
def test_an_eps_that_bf16_does_not_resolve_is_warned_about(tmp_path: Path, change: dict[str, Any]) -> None:
    """The toy's weights have a size of 0.3: an eps of 1e-3 is a third of a percent of it, 2e-2 seven."""
    given = {"learning_rate": 1e-3, "eps": 1e-3, "dtype": torch.bfloat16, **change}
    options = {} if given["learning_rate"] is None else {"eps": given["eps"]}
    args = {"learning_rate": given["learning_rate"]}
    run = trainer(tmp_path, model=model().to(given["dtype"]), args=args, method_kwargs=options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.create_optimizer()
    told = [str(one.message) for one in caught if "too small a distance for losses in bf16" in str(one.message)]
    assert len(told) == (not change)
    assert all(
        "give learning_rate=None, or method_kwargs={'eps': 0.01}, or load the model in fp32" in one for one in told
    )


def test_the_log_has_the_loss_the_coefficient_and_the_block(whole: Any) -> None:
    records, history = whole.ledger.records, whole.state.log_history
    steps = [entry for entry in history if "loss" in entry]
    assert [entry["loss"] for entry in steps] == [record.loss for record in records]
    assert [entry["coefficient"] for entry in steps] == [abs(record.coeffs[0]) for record in records]
    assert [entry["block"] for entry in steps] == [record.block for record in records]
    assert [record.lr for record in records] == pytest.approx([1e-2 * (9 - step) / 9 for step in range(STEPS)])
    assert not any("grad_norm" in entry for entry in history)
    assert sum("eval_loss" in entry for entry in history) == 3
    mean = sum(record.loss for record in records) / STEPS
    assert whole.output.training_loss == whole.output.metrics["train_loss"] == pytest.approx(mean)
    assert all(param.grad is None for param in whole.model.parameters())


@pytest.mark.parametrize("step", [4, 6])  # within an epoch, and at the end of one
def test_a_resumed_run_ends_with_the_same_bits(whole: Any, tmp_path: Path, step: int) -> None:
    checkpoint = Path(whole.args.output_dir, f"checkpoint-{step}")
    resumed = trainer(tmp_path, eval_dataset=rows(5), args={"eval_strategy": "epoch"}, method_kwargs={"eps": 1e-2})
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert same_weights(resumed.model, whole.model)
    assert resumed.ledger.records[step:] == whole.ledger.records[step:]
    assert not checkpoint.with_name("checkpoint-3").exists()  # save_total_limit
    contents = read(checkpoint)
    replayed = contents.header.rebuild(model())
    zb.replay(replayed, contents.records)
    saved = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert same_weights(replayed.model, saved)


def test_checkpoints_without_weights_resume_by_replaying_their_journal(whole: Any, tmp_path: Path) -> None:
    options = {"save_weights": False, "method_kwargs": {"eps": 1e-2}}
    args = {"save_strategy": "steps", "save_steps": 4, "max_steps": 4, "lr_scheduler_type": "constant"}
    first = trainer(tmp_path, args=args, **options)
    first.train()
    checkpoint = tmp_path / "checkpoint-4"
    assert not list(checkpoint.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 30_000
    second = trainer(tmp_path, args={**args, "max_steps": 6}, **options)
    second.train(resume_from_checkpoint=True)
    third = trainer(tmp_path / "whole", args={**args, "max_steps": 6}, **options)
    third.train()
    assert same_weights(second.model, third.model)
    with torch.no_grad():
        (other := model()).lm_head.weight.add_(1.0)
    with pytest.raises(zb.ZeroBlockError, match="the journal starts from other base weights"):
        trainer(tmp_path, args={**args, "max_steps": 6}, model=other, **options).train(resume_from_checkpoint=True)
    (checkpoint / "journal.zbj").unlink()
    with pytest.raises(zb.ZeroBlockError, match="holds neither weights nor a journal"):
        trainer(tmp_path, args=args, **options).train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(zb.ZeroBlockError, match="save_weights=False leaves the weights out"):
        trainer(tmp_path, args={"save_only_model": True}, **options)


@pytest.mark.filterwarnings("ignore:without a learning rate:zeroblock.ZeroBlockWarning")  # of a floor
@pytest.mark.parametrize("save_weights", [True, False])
def test_checkpoints_of_an_adapter_that_began_with_the_floor_go_on_with_it(
    save_weights: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until 2026-11-18 the size of LoRA's B did not follow from the matrix."""
    pytest.importorskip("peft")
    args = {"save_strategy": "steps", "save_steps": 4, "learning_rate": None, "lr_scheduler_type": "constant"}

    def run(folder: str) -> Any:
        options = {"model": Lora(2).attach(model()), "save_weights": save_weights}
        return trainer(tmp_path / folder, args={**args, "max_steps": 6}, **options)

    with monkeypatch.context() as before:
        before.setattr(budget, "PRODUCT", None)
        whole = run("whole")
        whole.train()
    second, fresh = run("second"), run("fresh")
    second.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert same_weights(second.model, whole.model)
    assert second.zero_order.parts == whole.zero_order.parts
    fresh.train()
    assert not same_weights(fresh.model, whole.model)


def test_a_second_call_of_train_and_an_optimizer_that_is_built_already(tmp_path: Path) -> None:
    mine = model()
    heard: list[Any] = []
    optimizer = zb.mezo(mine, lr=1e-2)
    optimizer.listener = heard.append
    run = trainer(tmp_path, model=mine, optimizers=(optimizer, None), args={"max_steps": 2})
    run.train()
    assert run.zero_order is optimizer
    output = run.train()
    assert optimizer.steps == len(heard) == 4
    assert output.training_loss == pytest.approx(sum(record.loss for record in heard[2:]) / 2)
    with pytest.raises(zb.ZeroBlockError, match="built on another LlamaForCausalLM"):
        trainer(tmp_path, method=optimizer).train()
    with pytest.raises(zb.ZeroBlockError, match="SGD needs gradients"):
        trainer(tmp_path, optimizers=(torch.optim.SGD(mine.parameters(), lr=1.0), None))
    with pytest.raises(zb.ZeroBlockError, match="did you mean 'mezo_bcd'"):
        trainer(tmp_path, method="mezo_bdc").train()
    with pytest.raises(zb.ZeroBlockError, match="fold keeps steps outside the weights"):
        trainer(tmp_path, method="lozo", method_kwargs={"fold": 50}).train()


class Doubled(zb.integrations.ZeroOrderTrainer):
    """A loss of one's own, which knows nothing of gradient accumulation."""

    loss_is_scaled_for_ga = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = 2 * super().compute_loss(model, inputs)
        return (loss, {}) if return_outputs else loss


def test_a_loss_of_ones_own_is_what_is_measured(tmp_path: Path) -> None:
    args, collator = arguments(tmp_path, max_steps=1), Collator()
    run = Doubled(model=model(), args=args, train_dataset=rows(), data_collator=collator, method_kwargs={"eps": 1e-6})
    with pytest.warns(zb.ZeroBlockWarning, match=r"Doubled.compute_loss defines a different loss .*packed=True"):
        run.train()
    with torch.no_grad():
        expected = sum(2 * float(model()(**batch).loss) for batch in collator.made[:2]) / 2
    assert run.ledger.records[0].loss == pytest.approx(expected, abs=1e-4)
    trusted = Doubled(model=model(), args=args, train_dataset=rows(), data_collator=collator, packed=True)
    trusted.loss_is_scaled_for_ga = True
    with pytest.warns(zb.ZeroBlockWarning, match=r"by compute_loss and .* on packed rows"):
        trusted.train()
    smooth = trainer(tmp_path, args={"label_smoothing_factor": 0.1, "max_steps": 1})
    with pytest.warns(zb.ZeroBlockWarning, match="label_smoothing_factor defines a different loss"):
        smooth.train()


def test_a_classifier_is_measured_by_compute_loss(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_labels=2, pad_token_id=0,
    )  # fmt: skip
    data = [{"input_ids": [3 + i % 5, 4, 5], "labels": i % 2} for i in range(8)]
    classifier = transformers.LlamaForSequenceClassification(config)
    run = trainer(
        tmp_path, model=classifier, train_dataset=data, args={"max_steps": 2}, data_collator=None, method="mezo"
    )
    with pytest.warns(zb.ZeroBlockWarning, match="is not that of a causal language model"):
        run.train()
    assert run.zero_order.steps == 2


def test_micro_batches_without_a_scored_token_count_for_nothing(tmp_path: Path) -> None:
    data = rows(8)
    for row in data[:4]:
        row["labels"] = [-100] * len(row["input_ids"])
    args = {"max_steps": 1, "train_sampling_strategy": "sequential"}
    run = trainer(tmp_path, train_dataset=data, args=args, method_kwargs={"eps": 1e-6})
    run.train()
    with torch.no_grad():
        expected = float(model()(**Collator()(data[4:])).loss)
    assert run.ledger.records[0].loss == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"fp16": True}, r"fp16=True scales gradients.*dtype=torch.bfloat16"),
        ({"torch_compile": True}, "torch_compile=True hides the weights"),
    ],
)
def test_flags_that_cannot_work_are_refused_with_the_fix(tmp_path: Path, args: dict[str, Any], message: str) -> None:
    given = arguments(tmp_path)
    for name, value in args.items():  # TrainingArguments itself refuses some of them on a machine without a GPU
        setattr(given, name, value)
    with pytest.raises(zb.ZeroBlockError, match=message):
        zb.integrations.ZeroOrderTrainer(model=model(), args=given, train_dataset=rows())


def test_several_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path)
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", property(lambda self: 2))  # this machine has one
    with pytest.raises(zb.ZeroBlockError, match="CUDA_VISIBLE_DEVICES=0"):
        zb.integrations.ZeroOrderTrainer.__init__(run, model=run.model, args=run.args)


def test_several_processes_need_an_optimizer_that_joins_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", property(lambda self: 2))
    with pytest.raises(zb.ZeroBlockError, match="drift apart"):
        run.create_optimizer()


def test_flags_without_effect_are_named_and_bf16_of_fp32_weights_is_warned_of(tmp_path: Path) -> None:
    idle = {"max_grad_norm": 0.5, "neftune_noise_alpha": 5.0, "optim": "sgd", "gradient_checkpointing": True}
    with pytest.warns(zb.ZeroBlockWarning, match="no effect: max_grad_norm .*; neftune_noise_alpha .*; optim"):
        run = trainer(tmp_path, args=idle)
    assert not run.args.gradient_checkpointing
    with pytest.warns(zb.ZeroBlockWarning, match=r"bf16=True rounds .* bf16=False"):
        run = trainer(tmp_path, args={"bf16": True, "max_steps": 1})
    run.train()
    assert run.zero_order.steps == 1


def test_the_trainers_own_learning_rate_is_warned_of_where_it_is_used(tmp_path: Path) -> None:
    usual = {"learning_rate": transformers.TrainingArguments(str(tmp_path)).learning_rate}
    with pytest.warns(
        zb.ZeroBlockWarning, match=r"learning_rate is 5e-05, the Trainer's default, .* learning_rate=None"
    ):
        trainer(tmp_path, args=usual).create_optimizer()
    trainer(tmp_path, args={"learning_rate": None}).create_optimizer()
    trainer(tmp_path, args=usual, method_kwargs={"lr": 1e-3}).create_optimizer()


def test_a_quantised_base_with_float_adapters_is_taken_and_one_without_is_refused(tmp_path: Path) -> None:
    """The Trainer refuses what has no backward pass; here the flags of such a model stand on a float one."""
    peft = pytest.importorskip("peft")

    class Quantizer:
        is_trainable = is_qat_trainable = False

    base = model()
    base.is_quantized, base.hf_quantizer = True, Quantizer()
    for param in base.parameters():
        param.requires_grad_(False)
    with pytest.raises(zb.ZeroBlockError, match="nothing in the quantised model is trainable"):
        trainer(tmp_path, model=base)
    adapted = peft.get_peft_model(
        base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    with pytest.raises(ValueError, match=r"do not support training|purely quantized"):
        transformers.Trainer(model=base, args=arguments(tmp_path))
    frozen = base.model.embed_tokens.weight.clone()
    run = trainer(tmp_path, model=adapted, args={"max_steps": 2})
    run.train()
    assert base.is_quantized
    assert torch.equal(frozen, base.model.embed_tokens.weight)
    assert run.zero_order.steps == 2


@pytest.mark.parametrize("how", ["int8", "int4:scales"])
def test_integers_continue_from_checkpoints_and_are_saved_as_the_numbers_they_stand_for(
    tmp_path: Path, how: str
) -> None:
    def made(folder: str) -> Any:
        args = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": None}
        return trainer(tmp_path / folder, model=store_(model(), how), args=args)

    one, other = made("one"), made("other")
    one.train()
    one.save_model(str(tmp_path / "saved"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    ids = torch.arange(3, 20)[None]
    assert torch.equal(saved(ids).logits, one.model(ids).logits)
    with pytest.raises(RuntimeError, match="mismatch"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "one" / "checkpoint-4")
    other.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-2"))
    assert all(
        torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True)
    )


def test_without_a_learning_rate_steps_find_their_own(tmp_path: Path) -> None:
    by_argument = trainer(tmp_path / "one", args={"learning_rate": None, "max_steps": 3})
    by_option = trainer(tmp_path / "other", method_kwargs={"lr": None}, args={"max_steps": 3})
    by_argument.train()
    by_option.train()
    assert by_argument.zero_order.subspace.relative
    assert same_weights(by_argument.model, by_option.model)


@pytest.mark.parametrize(
    ("scheduler", "falls"), [("linear", "linear"), ("cosine", "cosine"), ("polynomial", "constant")]
)
def test_without_a_learning_rate_the_length_of_the_run_decides_the_steps(
    tmp_path: Path, scheduler: str, falls: str
) -> None:
    args = {"learning_rate": None, "max_steps": 6, "lr_scheduler_type": scheduler}
    args |= {"save_strategy": "steps", "save_steps": 3}
    run, again = trainer(tmp_path / "one", args=args), trainer(tmp_path / "two", args=args)
    rates: list[float] = []
    run.create_optimizer()
    run.zero_order.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.lr))
    run.train()
    budget = Budget.of(run.zero_order)
    assert rates[0] == budget.rate(6, falls) > budget.constant
    assert rates == sorted(rates, reverse=True)
    assert sum(lr * lr for lr in rates[1:]) <= budget.displacement**2 * budget.blocks
    again.train(resume_from_checkpoint=str(tmp_path / "one" / "checkpoint-3"))
    assert same_weights(run.model, again.model)


def test_routes_that_cannot_work_name_the_one_that_does(tmp_path: Path) -> None:
    route = "zb.integrations.ZeroOrderTrainer"
    plain = functools.partial(transformers.Trainer, args=arguments(tmp_path), train_dataset=rows())
    mine = model()
    run = plain(model=mine, optimizers=(zb.mezo_bcd(mine, lr=1e-3), None), data_collator=Collator())
    with pytest.raises(zb.ZeroBlockError, match=f"step.. needs a closure.*{route}"):
        run.train()
    run = plain(model=model(), optimizer_cls_and_kwargs=(zb.ZeroOrder, {"lr": 1e-3}), data_collator=Collator())
    with pytest.raises(zb.ZeroBlockError, match=f"takes the model itself and not its parameters, got list.*{route}"):
        run.train()
    with pytest.raises(zb.ZeroBlockError, match=f"got generator.*{route}"):
        zb.mezo_bcd(mine.parameters())
    with pytest.raises(zb.ZeroBlockError, match="leave it out, and give method="):
        trainer(tmp_path, optimizer_cls_and_kwargs=(zb.ZeroOrder, {"lr": 1e-3}))


def test_the_state_of_the_trainer_is_plain_json(whole: Any) -> None:
    state = json.loads(Path(whole.args.output_dir, "checkpoint-9", "trainer_state.json").read_text())
    assert state["log_history"][0]["block"] == whole.ledger.records[0].block
