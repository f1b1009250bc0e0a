"""Losses and metrics against the slow and obvious: a batch of one, unpadded, in fp64, no cache."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from run_toy import save_model, tokenizer
from zeroblock import model as models
from zeroblock.engine import Engine
from zeroblock.errors import ZeroBlockError
from zeroblock.evaluate.demonstration import Demonstrations
from zeroblock.evaluate.evaluator import Evaluator, choose
from zeroblock.evaluate.generate import generate
from zeroblock.task import TASKS, Encoded, Example

EXAMPLES = {
    "sst2": [
        Example("dull and slow It was", (" terrible", " great"), 0, calibration="It was"),
        Example("fun It was", (" terrible", " great"), 1, calibration="It was"),
        Example("a good x It was", (" terrible", " great"), 1, calibration="It was"),
    ],
    "cb": [
        Example("Suppose a. Can we infer that b?\n", ("Yes", "No", "Maybe"), 2),
        Example("Suppose bad c. Can we infer?\n", ("Yes", "No", "Maybe"), 0),
    ],
    "copa": [
        Example("It rained so", (" the street was wet.", " we sang."), 0, calibration="so"),
        Example("He fell because", (" ice.", " it was warm and fine outside."), 1, calibration="because"),
    ],
    "record": [
        Example("- a\n-", (" Ana won.", " Bo won.", " the club won."), (1, 2), calibration="-"),
        Example("- it is so\n-", (" Ana won.", " Bo won."), 0, calibration="-"),
    ],
}


@pytest.fixture(scope="module", params=["Llama", "OPT"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Weights large enough that a model of no training is sure of itself."""
    folder = save_model(tmp_path_factory.mktemp("bold"), request.param, seed=3, spread=0.5)
    return models.load(str(folder), dtype="fp32", device="cpu")


def evaluator(model: Any, name: str, demonstrations: Demonstrations | None = None, **options: Any) -> Evaluator:
    words, task = tokenizer(), TASKS[name]
    return Evaluator(
        Engine(model), words, task, task.encoder(words, 256), demonstrations or Demonstrations(()), **options
    )


def slow_scores(model: Any, encoded: Encoded) -> list[tuple[float, int]]:
    """Sum of log-probabilities and number of tokens of every option, one row at a time."""
    found = []
    for option in encoded.options:
        ids = torch.tensor([[*encoded.context, *option]])
        with torch.no_grad():
            logs = model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
        start = len(encoded.context)
        found.append((sum(float(logs[start + k - 1, token]) for k, token in enumerate(option)), len(option)))
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_choices_and_losses(model: Any, name: str) -> None:
    measure, examples = evaluator(model, name), EXAMPLES[name]
    found = measure(measure.exam(examples))
    right, loss, tokens = 0, 0.0, []
    for example in examples:
        scores = slow_scores(model, measure.encoder.example(example))
        means = [total / count for total, count in scores]
        right += means.index(max(means)) in example.right
        if name in ("copa", "record"):
            loss += -means[example.right[0]]
            tokens.append(scores[example.right[0]])
        else:
            loss += math.log(sum(map(math.exp, means))) - means[example.right[0]]
    assert found.value == right / len(examples)
    by_example = dataclasses.replace(measure, loss_over="examples")(measure.exam(examples))
    assert by_example.loss == pytest.approx(loss / len(examples), abs=2e-5)
    if tokens:
        loss = -sum(total for total, _ in tokens) / sum(count for _, count in tokens) * len(examples)
    assert found.loss == pytest.approx(loss / len(examples), abs=2e-5)
    assert (found.n, found.metric, found.exact_match) == (len(examples), "accuracy", None)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_training_objective_is_the_evaluated_loss(model: Any, name: str) -> None:
    measure, examples = evaluator(model, name), EXAMPLES[name]
    task = TASKS[name]
    encoded, labels = zip(*(task.training_pair(measure.encoder, example) for example in examples), strict=True)
    objective = measure.engine.objective(encoded, labels, over=task.over)
    with torch.no_grad():
        assert float(objective()) == pytest.approx(measure(measure.exam(examples)).loss, abs=2e-5)


def test_calibration(model: Any) -> None:
    examples = EXAMPLES["sst2"] + EXAMPLES["copa"] + EXAMPLES["record"]
    measure = evaluator(model, "sst2", calibrate=True)
    right = plain = 0
    for example in examples:
        bare = measure.encoder(example.calibration or "", example.options)
        full, alone = slow_scores(model, measure.encoder.example(example)), slow_scores(model, bare)
        gains = [a - b for (a, _), (b, _) in zip(full, alone, strict=True)]
        right += gains.index(max(gains)) in example.right
        means = [total / count for total, count in full]
        plain += means.index(max(means)) != gains.index(max(gains))
    assert plain  # it makes a difference here
    assert measure(measure.exam(examples)).value == right / len(examples)
    with pytest.raises(ZeroBlockError, match="squad generates"):
        evaluator(model, "squad", calibrate=True)
    with pytest.raises(ZeroBlockError, match="no calibration context"):
        measure.exam([Example("a", (" b", " c"), 0, calibration=None)])


def test_demonstrations_change_the_prompt(model: Any) -> None:
    pool = EXAMPLES["sst2"]
    measure = evaluator(model, "sst2", Demonstrations(pool, 2, seed=1))
    found = measure(measure.exam(pool))
    loss = 0.0
    for number, example in enumerate(pool):
        shown = measure.encoder.example(Demonstrations(pool, 2, seed=1)(example, number))
        means = [total / count for total, count in slow_scores(model, shown)]
        loss += math.log(sum(map(math.exp, means))) - means[example.right[0]]
    assert found.loss == pytest.approx(loss / len(pool), abs=2e-5)
    plain = evaluator(model, "sst2")
    assert plain(plain.exam(pool)).loss != pytest.approx(found.loss, abs=1e-3)


def slow_greedy(model: Any, words: Any, prompt: tuple[int, ...], stop: str | None, most: int) -> str:
    """Token by token without a cache; the text up to the stop."""
    tokens: list[int] = []
    for _ in range(most):
        with torch.no_grad():
            best = int(model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, -1].argmax())
        if best == words.eos_token_id:
            break
        tokens.append(best)
        text = words.decode(tokens)
        if stop is not None and stop in text:
            break
    text = words.decode(tokens)
    return (text.split(stop)[0] if stop is not None else text).strip()


PROMPTS = ["a", "dull and", "warm good x", "Q: what?\nA:", "x x x x x x x x", "fun\nfun\n", "slow 12 34", "so so"]


@pytest.mark.parametrize("stop", ["\n", "x", None])
def test_generation_in_batches_is_generation_one_by_one(model: Any, stop: str | None) -> None:
    words = tokenizer()
    prompts = [tuple(words.encode(text)) for text in PROMPTS]
    # a stop that the model does say: some end at once, some go on
    if stop == "x":
        said = "".join(slow_greedy(model, words, prompt, None, 12) for prompt in prompts)
        stop = max(set(said), key=said.count)
    slow = [slow_greedy(model, words, prompt, stop, 12) for prompt in prompts]
    assert len(set(slow)) > 2
    for rows in (1, 3, 64):
        assert generate(model, words, prompts, stop=stop, max_new_tokens=12, rows=rows) == slow


def test_a_models_own_habits_of_generation_are_set_aside(model: Any) -> None:
    words = tokenizer()
    prompts = [tuple(words.encode(text)) for text in PROMPTS]
    plain = generate(model, words, prompts, stop=None, max_new_tokens=8)
    own = model.generation_config
    model.generation_config = type(own)(do_sample=True, temperature=9.0, repetition_penalty=5.0, no_repeat_ngram_size=1)
    try:
        assert generate(model, words, prompts, stop=None, max_new_tokens=8) == plain
        assert model.generation_config.temperature == 9.0
    finally:
        model.generation_config = own


def test_a_turn_ends_where_the_model_says(model: Any) -> None:
    """Chat models end their turns by a token that need not be the tokenizer's end of sequence."""
    words = tokenizer()
    prompt = tuple(words.encode(PROMPTS[0]))
    ids = [int(i) for i in model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6)[0, len(prompt) :]]
    own = model.generation_config
    model.generation_config = type(own)(eos_token_id=[words.eos_token_id, ids[2]])
    try:
        (text,) = generate(model, words, [prompt], stop=None, max_new_tokens=6)
    finally:
        model.generation_config = own
    assert text == words.decode(ids[: ids.index(ids[2]) + 1], skip_special_tokens=True).strip()


def test_f1_and_exact_match(model: Any) -> None:
    """Gold answers made of what the model says: right, half right, and wrong."""
    measure = evaluator(model, "squad")
    contexts = [f"Question: {text}\nAnswer:" for text in PROMPTS[:4]]
    bare = [Example(context, (" a\n",), 0, ("a",)) for context in contexts]
    said = [
        slow_greedy(model, measure.tokenizer, measure.encoder.prompt(example, 50).context, "\n", 50) for example in bare
    ]
    answers = [(said[0],), ("nothing", said[1]), ("completely different",), (f"{said[3]} surplus",)]
    examples = [Example(c, (" a\n",), 0, gold) for c, gold in zip(contexts, answers, strict=True)]
    found = measure(measure.exam(examples))
    metric = TASKS["squad"].metric
    assert found.value == pytest.approx(sum(metric.score(s, e) for s, e in zip(said, examples, strict=True)) / 4)
    assert found.value > 0.5
    assert found.exact_match == 0.5
    losses = [-total / count for e in examples for total, count in slow_scores(model, measure.encoder.target(e))]
    assert found.loss == pytest.approx(sum(losses) / 4, abs=2e-5)
    assert math.isnan(measure(measure.exam(examples), loss=False).loss)


def test_a_prompt_leaves_room_for_its_answer(model: Any) -> None:
    measure = evaluator(model, "squad")
    examples = [Example("x" * (256 - 10) + "\nA:", (" a\n",), 0, ("a",)), Example("x\nA:", (" a\n",), 0, ("a",))]
    exam = measure.exam(examples)
    assert len(exam.prompts[0].context) == 256 - 50
    assert exam.scored[0].cut == 0
    assert exam.cut == (examples[0],)  # though it fits where its answer is scored


def test_the_first_of_equal_options_is_chosen() -> None:
    from zeroblock.engine import Score

    assert choose([Score(-4.0, 2), Score(-2.0, 1)]) == 0
    assert choose([Score(-4.0, 1), Score(-6.0, 2)]) == 1  # by the mean, not by the sum
    assert choose([Score(-4.0, 1), Score(-6.0, 2)], [Score(0.0, 1), Score(-5.0, 2)]) == 1


def test_an_evaluation_can_be_stopped(model: Any) -> None:
    measure = evaluator(model, "sst2")
    done: list[int] = []

    def check(count: int) -> None:
        done.append(count)
        if count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(measure.exam(EXAMPLES["sst2"] * 50), check=check)
    assert done == [0, 64]


@pytest.mark.parametrize("name", ["sst2", "copa"])
def test_on_real_rows(model: Any, name: str) -> None:
    data = Path(__file__).parents[3] / "shared" / "data"
    if not data.is_dir():
        pytest.skip("no local copies of the tasks beside the project")
    measure = evaluator(model, name)
    examples = TASKS[name].load(data).test[:8]
    exam = measure.exam(examples)
    scores = [[total / count for total, count in slow_scores(model, one)] for one in exam.scored]
    right = [means.index(max(means)) in e.right for means, e in zip(scores, examples, strict=True)]
    assert measure(exam).value == sum(right) / len(right)
