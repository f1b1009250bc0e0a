"""An extension of griffe: docstrings as Markdown. Examples become code, and roles of Sphinx plain names."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!>>>|\s*$).*\n?)*)+", re.MULTILINE)
"""Lines from a prompt up to an empty line."""
ROLE = re.compile(r":(?:func|data|class|meth|mod):`~?([^`]+)`")


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = EXAMPLE.sub(lambda match: f"```pycon\n{match[0].rstrip()}\n```\n", obj.docstring.value)
            obj.docstring.value = ROLE.sub(r"`\1`", text)
