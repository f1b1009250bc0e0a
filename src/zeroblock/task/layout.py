"""Layouts: the columns of a row of the user's own data, and the text that the model reads.

``prompt, completion``
    The two texts are joined as they are written: a space between them must be in one of the two.
``messages``
    A chat in OpenAI's format, a list of ``role`` and ``content``.  The tokenizer's chat template
    writes it; without a template it becomes ``User: …`` and ``Assistant: …`` lines.
``conversations``
    A chat in ShareGPT's format, a list of ``from`` and ``value``; read like ``messages``.
``instruction, input, output``
    Alpaca's columns, in the prompt of Stanford's Alpaca; ``input`` may be empty or missing.

The answers of a chat (all of them, or the last) carry loss, and so do the completion and the
output.  Each ends with the model's end-of-sequence token.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ZeroBlockError, ZeroBlockWarning
from .data_row import DataRow
from .example import DataError, Example

Turns = Literal["all", "last"]
Ending = Literal["eos", "newline"]
Messages = list[dict[str, str]]

ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "bing": "assistant", "model": "assistant", "system": "system", "tool": "tool",
}  # fmt: skip
"""The role in chat templates of each speaker in a ShareGPT chat."""
ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n{}### Response:\n"
)
"""The prompt of Stanford's Alpaca; the first and the last placeholder are for the input."""


@dataclass(frozen=True)
class Layout:
    """One way to write an example into columns.

    Args:
        name: the name in messages.
        columns: the columns that identify it.
        render: turns a row into an example.
        answer: returns the text to learn; for a chat, the last answer.
        optional: columns that it reads if they are present.
        chat: whether a row holds several messages.
    """

    name: str
    columns: tuple[str, ...]
    render: Callable[[DataRow, Writer], Example]
    answer: Callable[[DataRow], str]
    optional: tuple[str, ...] = ()
    chat: bool = False


@dataclass(frozen=True)
class Writer:
    """Settings for writing examples.

    Args:
        tokenizer: its chat template formats chats; only chats need it.
        turns: the answers of a chat that carry loss: all, or the last.
        stop: the text that ends completions; None for the end-of-sequence token.
    """

    tokenizer: Any = None
    turns: Turns = "all"
    stop: str | None = None

    def chat(self, messages: Messages) -> Example:
        """Write a chat up to its last answer."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise DataError("the chat has no answer of the assistant")
        scored = answers if self.turns == "all" else answers[-1:]
        for number in scored:
            if not messages[number]["content"].strip():
                raise DataError(f"message {number + 1} is not an answer: it is empty")
        context, option = self._written(messages[: scored[-1] + 1])
        spans = tuple(self._span(messages[: number + 1], context) for number in scored[:-1])
        return Example(context, (option,), 0, (messages[scored[-1]]["content"].strip(),), None, spans=spans)

    def _span(self, messages: Messages, context: str) -> tuple[int, int]:
        """Find the characters of an earlier answer, including its end token, in the context of the last answer."""
        before, answer = self._written(messages)
        answer += "" if self.templated else self._end
        if not context.startswith(before + answer):
            raise DataError(
                f"the chat template writes message {len(messages)} differently once others follow: train on the last "
                "answer alone (--turns last)"
            )
        return len(before), len(before + answer)

    def _written(self, messages: Messages) -> tuple[str, str]:
        return _templated(self.tokenizer, messages) if self.templated else _plain(messages, self._end)

    @functools.cached_property
    def templated(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def _end(self) -> str:
        """The text of the token that ends an earlier answer; empty if earlier answers carry no loss."""
        return str(getattr(self.tokenizer, "eos_token", None) or "") if self.turns == "all" else ""


SEPARATORS = {";": "semicolons", "\t": "tabs"}


def recognize(row: DataRow) -> Layout:
    """Find the layout of a row by its columns."""
    for layout in LAYOUTS:
        if all(column in row.fields for column in layout.columns):
            return layout
    known = "; ".join(f"{', '.join(layout.columns)} ({layout.name})" for layout in LAYOUTS)
    only = next(iter(row.fields)) if len(row.fields) == 1 else ""
    apart = next((sign for sign in SEPARATORS if sign in str(only)), None)
    commas = f"Columns are separated by commas, not by {SEPARATORS[apart]}. " if apart else ""
    raise ZeroBlockError(
        f"{row.where}: no known layout in the columns {', '.join(map(str, row.fields)) or '(none)'}. {commas}"
        f"Layouts: {known}; or name your columns in a TOML file (zeroblock tasks --help)"
    )


def warn_plain(tokenizer: Any) -> None:
    """Warn once that chats are written without a template."""
    who = "no tokenizer is given" if tokenizer is None else "the tokenizer has no chat template"
    warnings.warn(
        f'{who}, so chats are written as plain lines, "User: …" and "Assistant: …"; if the model knows another format, '
        "set tokenizer.chat_template and save the tokenizer with the model",
        ZeroBlockWarning,
        stacklevel=2,
    )


def _completion(row: DataRow, writer: Writer) -> Example:
    return _joined(row.text("prompt"), row.text("completion"), "completion", writer.stop)


def _joined(prompt: str, completion: str, column: str, stop: str | None) -> Example:
    if not completion.strip():
        raise DataError(f"the {column} is empty")
    context = prompt.rstrip(" ")  # its trailing spaces move to the completion, for the tokenizer
    option = prompt[len(context) :] + completion.rstrip(" ")
    if stop is not None:
        option = option.rstrip("\n") + stop
    return Example(context, (option,), 0, (completion.strip(),), calibration=None)


def _alpaca(row: DataRow, writer: Writer) -> Example:
    instruction, given = row.text("instruction"), row.fields.get("input") or ""
    if not instruction.strip():
        raise DataError("the instruction is empty")
    if given:
        given = row.text("input")
    about = ", paired with an input that provides further context" if given.strip() else ""
    written = f"### Input:\n{given.strip()}\n\n" if given.strip() else ""
    return _joined(ALPACA.format(about, instruction.strip(), written), row.text("output"), "output", writer.stop)


def _openai(row: DataRow) -> Messages:
    return _messages(row, "messages", "role", "content")


def _sharegpt(row: DataRow) -> Messages:
    messages = _messages(row, "conversations", "from", "value")
    for number, message in enumerate(messages, start=1):
        if message["role"] not in ROLES:
            raise DataError(f"message {number} is from {message['role']!r}; expected one of: {', '.join(ROLES)}")
    return [message | {"role": ROLES[message["role"]]} for message in messages]


def _messages(row: DataRow, column: str, role: str, content: str) -> Messages:
    """Read a list of messages; ``role`` and ``content`` are the keys of the speaker and the text."""
    messages = row[column]
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(f"column {column!r} holds no list of messages")
    for number, message in enumerate(messages, start=1):
        for key in (role, content):
            if not isinstance(message, Mapping) or not isinstance(message.get(key), str):
                raise DataError(f"message {number} has no text in {key!r}")
    return [{**message, "role": message[role], "content": message[content]} for message in messages]


def _templated(tokenizer: Any, messages: Messages) -> tuple[str, str]:
    try:
        context = str(tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True))
        whole = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is a program by the model's author and may raise anything
        raise DataError(f"the chat template refuses these messages ({error})") from error
    if not whole.startswith(context):
        raise DataError("the chat template writes the conversation differently with its answer than without")
    return context, whole[len(context) :].rstrip("\n")


def _plain(messages: Messages, end: str) -> tuple[str, str]:
    head = "Assistant:"
    *before, last = (f"{message['role'].capitalize()}: {message['content'].strip()}" for message in messages)
    ends = [end if message["role"] == "assistant" else "" for message in messages[:-1]]
    lines = map("".join, zip(before, ends, strict=True))
    return "\n".join([*lines, head]), last[len(head) :]


def _chats(name: str, column: str, read: Callable[[DataRow], Messages]) -> Layout:
    """The layout of chats whose messages ``read`` returns."""

    def answer(row: DataRow) -> str:
        return next((one["content"] for one in reversed(read(row)) if one["role"] == "assistant"), "")

    return Layout(name, (column,), lambda row, writer: writer.chat(read(row)), answer, chat=True)


LAYOUTS = (
    _chats("OpenAI chats", "messages", _openai),
    _chats("ShareGPT chats", "conversations", _sharegpt),
    Layout("completions", ("prompt", "completion"), _completion, lambda row: row.text("completion")),
    Layout("Alpaca", ("instruction", "output"), _alpaca, lambda row: row.text("output"), ("input",)),
)
"""All layouts, in the order in which they are tried."""
COLUMNS = tuple(column for layout in LAYOUTS for column in (*layout.columns, *layout.optional))
"""All columns that a layout knows."""
