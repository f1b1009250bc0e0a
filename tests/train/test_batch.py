"""The order of the data, its fingerprint, and demonstrations."""

from __future__ import annotations

import pytest

from zeroblock.errors import ZeroBlockError
from zeroblock.evaluate.demonstration import Demonstrations
from zeroblock.task import TASKS, Encoded, Example
from zeroblock.train.batch import Batches, fingerprint


@pytest.mark.parametrize(("examples", "size"), [(10, 3), (3, 10), (1, 4), (8, 8), (1000, 16)])
def test_every_epoch_is_a_permutation(examples: int, size: int) -> None:
    batches = Batches(examples, size, seed=0)
    steps = -(-3 * examples // size)
    seen = [i for step in range(steps) for i in batches.at(step)]
    epochs = [seen[e * examples : (e + 1) * examples] for e in range(3)]
    assert all(sorted(epoch) == list(range(examples)) for epoch in epochs)
    assert examples < 4 or epochs[0] != epochs[1] != epochs[2]


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    batches = Batches(50, 8, seed=3)
    forward = [batches.at(step) for step in range(20)]
    assert [Batches(50, 8, seed=3).at(step) for step in reversed(range(20))] == forward[::-1]
    assert [Batches(50, 8, seed=4).at(step) for step in range(20)] != forward
    assert batches.at(0) == (40, 43, 11, 5, 32, 47, 14, 26)  # frozen: a resumed run of an older version relies on it


def test_the_fingerprint_sees_every_change() -> None:
    one, two = Encoded((1, 2), ((3,), (4,))), Encoded((1,), ((2, 3), (4,)))
    found = {
        fingerprint(encoded, labels)
        for encoded, labels in [
            ([one], [0]), ([one], [1]), ([two], [0]), ([one, two], [0, 0]), ([two, one], [0, 0]),
        ]
    }  # fmt: skip
    assert len(found) == 5
    assert fingerprint([one, two], [0, 1]) == fingerprint([one, two], [0, 1])


POOL = tuple(Example(f"text {i} It was", (" terrible", " great"), i % 2) for i in range(6))


def test_demonstrations_are_written_as_in_mezo() -> None:
    example = Example("shown It was", (" terrible", " great"), 0)
    shown = Demonstrations(POOL, 3, seed=0)(example, 4)
    *demonstrations, prompt = shown.context.split("\n\n")
    assert prompt == "shown It was"
    words = (" terrible", " great")
    written = {f"text {i} It was{words[i % 2]}" for i in range(6)}
    assert len(set(demonstrations)) == 3
    assert set(demonstrations) <= written
    assert (shown.options, shown.label) == (example.options, example.label)
    assert Demonstrations(POOL, 3, seed=0)(example, 4) == shown
    assert Demonstrations(POOL, 3, seed=1)(example, 4) != shown
    assert Demonstrations(POOL, 3, seed=0)(example, 5) != shown  # every example has its own
    assert Demonstrations(POOL, 0)(example, 4) is example


def test_a_demonstration_is_stripped_of_newlines_and_of_the_right_option() -> None:
    answer = Example("Question: q\nAnswer:", (" blue\n",), 0, ("blue",))
    several = Example("- a\n-", (" x", " y", " z"), (2, 1))
    assert Demonstrations([answer], 1)(answer, 0).context == "Question: q\nAnswer: blue\n\nQuestion: q\nAnswer:"
    assert Demonstrations([several], 1)(answer, 0).context == "- a\n- z\n\nQuestion: q\nAnswer:"


def test_too_many_shots() -> None:
    with pytest.raises(ZeroBlockError, match="7 shots of 6 training examples: lower --shots"):
        Demonstrations(POOL, 7)


def test_a_prompt_of_demonstrations_is_cut_on_the_left() -> None:
    from run_toy import tokenizer

    shown = Demonstrations(POOL, 6)(POOL[0], 0)
    encoder = TASKS["sst2"].encoder(tokenizer(), 40)
    found = encoder.example(shown)
    assert found.cut > 0
    assert len(found.context) + max(map(len, found.options)) == 40
    assert encoder.tokenizer.decode(list(found.context)).endswith("text 0 It was")  # type: ignore[attr-defined]
