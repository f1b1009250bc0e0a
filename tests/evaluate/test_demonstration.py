"""Demonstrations: which are drawn, and how they are written before a prompt."""

from __future__ import annotations

import pytest

from zeroblock.errors import ZeroBlockError
from zeroblock.evaluate.demonstration import Demonstrations
from zeroblock.task import TASKS, Example

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
    said = "--shots 7 needs as many training examples, and there are 6: lower --shots"
    with pytest.raises(ZeroBlockError, match=said):
        Demonstrations(POOL, 7)


def test_a_prompt_of_demonstrations_is_cut_on_the_left() -> None:
    from run_toy import tokenizer

    shown = Demonstrations(POOL, 6)(POOL[0], 0)
    encoder = TASKS["sst2"].encoder(tokenizer(), 40)
    found = encoder.example(shown)
    assert found.cut > 0
    assert len(found.context) + max(map(len, found.options)) == 40
    assert encoder.tokenizer.decode(list(found.context)).endswith("text 0 It was")  # type: ignore[attr-defined]
