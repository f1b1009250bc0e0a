"""Miniature rows of every task, invented for these tests, and the examples they must read as."""

from __future__ import annotations

from typing import Any

from zeroblock.task import Example

# name: [(row, example), …]
GOLDEN: dict[str, list[tuple[dict[str, Any], Example]]] = {
    "sst2": [
        (
            {"sentence": "a soup of stale jokes . ", "label": 0, "idx": 4},
            Example("a soup of stale jokes . It was", (" terrible", " great"), 0, calibration="It was"),
        ),
        (
            {"sentence": " warm and witty", "label": 1},
            Example("warm and witty It was", (" terrible", " great"), 1, calibration="It was"),
        ),
    ],
    "reviews": [
        (
            {"sentence": "Two hours I want back.", "label": 0},
            Example("Two hours I want back. It was", (" terrible", " great"), 0, calibration="It was"),
        ),
    ],
    "rte": [
        (
            {"premise": "Ana fed the goats.", "hypothesis": "The goats were fed.", "label": 0},
            Example(
                'Ana fed the goats.\nDoes this mean that "The goats were fed." is true? Yes or No?\n',
                ("Yes", "No"),
                0,
                gap=("Ana fed the goats?", ", the goats were fed."),
            ),
        ),
    ],
    "cb": [
        (
            {"premise": "B: I doubt the bus runs.", "hypothesis": "the bus runs", "label": 2},
            Example(
                'Suppose B: I doubt the bus runs. Can we infer that "the bus runs"? Yes, No, or Maybe?\n',
                ("Yes", "No", "Maybe"),
                2,
                gap=("B: I doubt the bus runs?", ", the bus runs"),
            ),
        ),
    ],
    "boolq": [
        (
            {"question": "is rye a grass", "passage": "Rye -- Rye is a grass grown for grain.", "label": 1},
            Example("Rye -- Rye is a grass grown for grain. Is rye a grass?\n", ("No", "Yes"), 1),
        ),
        (
            {"question": "can owls swim??", "passage": "Owls fly.", "label": 0},
            Example("Owls fly. Can owls swim?\n", ("No", "Yes"), 0),
        ),
        (
            {"question": "can owls swim? ", "passage": "Owls fly.", "label": False},
            Example("Owls fly. Can owls swim?\n", ("No", "Yes"), 0),
        ),
    ],
    "wsc": [
        (
            {
                "text": "Tom paid Ned after He fixed the gate.",
                "span1_index": 2,
                "span2_index": 4,
                "span1_text": "Ned",
                "span2_text": "He",
                "label": 1,
            },
            Example(
                "Tom paid Ned after He fixed the gate.\n"
                'In the previous sentence, does the pronoun "he" refer to Ned? Yes or No?\n',
                ("No", "Yes"),
                1,
            ),
        ),
    ],
    "wic": [
        (
            {"word": "bank", "sentence1": "A bank of sand.", "sentence2": "The bank lent it.", "label": 0},
            Example(
                'Does the word "bank" have the same meaning in these two sentences? Yes, No?\n'
                "A bank of sand.\nThe bank lent it.\n",
                ("No", "Yes"),
                0,
            ),
        ),
    ],
    "multirc": [
        (
            # the paragraph's own space before the newline stays: only the ends of the context are stripped
            {"paragraph": " Ida has a red kite. ", "question": "What is red?", "answer": "A kite", "label": 1},
            Example(
                'Ida has a red kite. \nQuestion: What is red?\nI found this answer "A kite". '
                "Is that correct? Yes or No?\n",
                ("No", "Yes"),
                1,
            ),
        ),
    ],
    "copa": [
        (
            {
                "premise": "It rained all night.",
                "choice1": "The street was wet.",
                "choice2": "I slept well.",
                "question": "effect",
                "label": 0,
            },
            Example("It rained all night so", (" the street was wet.", " I slept well."), 0, calibration="so"),
        ),
        (
            {
                "premise": "The dog barked. ",
                "choice1": "It's the mailman. ",
                "choice2": "A car passed.",
                "question": "cause",
                "label": 1,
            },
            Example("The dog barked because", (" it's the mailman.", " a car passed."), 1, calibration="because"),
        ),
    ],
    "record": [
        (
            {
                "passage": "Oslo beat Bergen.\n@highlight\nOslo scores twice\n@highlight\nBergen sad",
                "query": "The fans of @placeholder sang all night.",
                "entities": ["Bergen", "Oslo", "Oslo FC"],
                "answers": ["Oslo FC", "Oslo"],
                "idx": {"passage": 0, "query": 0},
            },
            Example(
                "Oslo beat Bergen.\n- Oslo scores twice\n- Bergen sad\n-",
                (
                    " The fans of Bergen sang all night.",
                    " The fans of Oslo sang all night.",
                    " The fans of Oslo FC sang all night.",
                ),
                (2, 1),
                calibration="-",
            ),
        ),
    ],
    "squad": [
        (
            {
                "id": "1",
                "title": "Old_Mill",
                "context": "The mill was built in 1702 by Jan.",
                "question": " Who built the mill? ",
                "answers": {"text": ["Jan", "by Jan"], "answer_start": [30, 27]},
            },
            Example(
                "Title: Old_Mill\nContext: The mill was built in 1702 by Jan.\nQuestion: Who built the mill?\nAnswer:",
                (" Jan\n",),
                0,
                ("Jan", "by Jan"),
                None,
            ),
        ),
    ],
    "drop": [
        (
            {
                "section_id": "s",
                "query_id": "q",
                "passage": "The Reds kicked 3 goals and the Blues 2.",
                "question": "How many goals were kicked?",
                "answers_spans": {"spans": ["5", "five"], "types": ["number", "span"]},
            },
            Example(
                "Passage: The Reds kicked 3 goals and the Blues 2.\nQuestion: How many goals were kicked?\nAnswer:",
                (" 5\n",),
                0,
                ("5", "five"),
                None,
            ),
        ),
    ],
}

CASES = [(name, row, example) for name, pairs in GOLDEN.items() for row, example in pairs]
FIRST = [(name, *pairs[0]) for name, pairs in GOLDEN.items()]
