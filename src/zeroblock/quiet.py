"""Quieter output from transformers."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Silence the advice of transformers on how to load; errors and our own checks remain."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def bars() -> Iterator[None]:
    """Show the progress bars of transformers only on a terminal."""
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield
