"""Questions with an answer of one word: RTE, CB, BoolQ, WSC, WiC and MultiRC of SuperGLUE.

Their contexts end in a newline, so their options have no leading space.  A masked language model reads
RTE and CB as LM-BFF writes entailment, ``{premise}? <mask>, {hypothesis}``, and the others with the mask
in place of the option.
"""

from __future__ import annotations

from dataclasses import replace

from .data_row import DataRow
from .example import Example
from .source import Hub
from .split import Sizes
from .task import Task


def _example(context: str, options: tuple[str, ...], row: DataRow) -> Example:
    return Example(context.strip(" "), options, row.label(len(options)))


def _entailment(example: Example, premise: str, hypothesis: str) -> Example:
    claim = hypothesis[:1].lower() + hypothesis[1:]
    return replace(example, gap=(f"{premise.rstrip(' .?!')}?", f", {claim}"))


def _rte(row: DataRow) -> Example:
    premise, hypothesis = row.text("premise"), row.text("hypothesis")
    context = f'{premise}\nDoes this mean that "{hypothesis}" is true? Yes or No?\n'
    return _entailment(_example(context, ("Yes", "No"), row), premise, hypothesis)


def _cb(row: DataRow) -> Example:
    premise, hypothesis = row.text("premise"), row.text("hypothesis")
    context = f'Suppose {premise} Can we infer that "{hypothesis}"? Yes, No, or Maybe?\n'
    return _entailment(_example(context, ("Yes", "No", "Maybe"), row), premise, hypothesis)


def _boolq(row: DataRow) -> Example:
    question = row.text("question").strip(" ").rstrip("?") + "?"
    context = f"{row.text('passage')} {question[:1].upper()}{question[1:]}\n"
    return _example(context, ("No", "Yes"), row)


def _wsc(row: DataRow) -> Example:
    text, noun, pronoun = row.text("text"), row.text("span1_text"), row.text("span2_text")
    question = f'In the previous sentence, does the pronoun "{pronoun.lower()}" refer to {noun}? Yes or No?'
    return _example(f"{text}\n{question}\n", ("No", "Yes"), row)


def _wic(row: DataRow) -> Example:
    word, first, second = row.text("word"), row.text("sentence1"), row.text("sentence2")
    question = f'Does the word "{word}" have the same meaning in these two sentences? Yes, No?'
    return _example(f"{question}\n{first}\n{second}\n", ("No", "Yes"), row)


def _multirc(row: DataRow) -> Example:
    paragraph, question, answer = row.text("paragraph"), row.text("question"), row.text("answer")
    context = f'{paragraph}\nQuestion: {question}\nI found this answer "{answer}". Is that correct? Yes or No?\n'
    return _example(context, ("No", "Yes"), row)


RTE = Task(
    "rte",
    "Does the premise entail the hypothesis?",
    ("premise", "hypothesis", "label"),
    _rte,
    Hub("rte", "super_glue", "rte"),
)
CB = Task(
    "cb",
    "Does the speaker mean that the hypothesis holds, does not, or neither?",
    ("premise", "hypothesis", "label"),
    _cb,
    Hub("cb", "super_glue", "cb"),
    sizes=Sizes(dev=100),
)
BOOLQ = Task(
    "boolq",
    "A yes-or-no question about a passage",
    ("question", "passage", "label"),
    _boolq,
    Hub("boolq", "super_glue", "boolq"),
)
WSC = Task(
    "wsc",
    "Does the pronoun refer to the noun?",
    ("text", "span1_text", "span2_text", "label"),
    _wsc,
    Hub("wsc", "super_glue", "wsc.fixed"),
)
WIC = Task(
    "wic",
    "Does a word mean the same in two sentences?",
    ("word", "sentence1", "sentence2", "label"),
    _wic,
    Hub("wic", "super_glue", "wic"),
)
MULTIRC = Task(
    "multirc",
    "Is this an answer to the question about a paragraph?",
    ("paragraph", "question", "answer", "label"),
    _multirc,
    Hub("multirc", "super_glue", "multirc"),
)
