"""Settings of the tokenizer in a GGUF file that transformers does not pass on."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

MAX_HEADER = 1 << 28
"""Number of bytes at the beginning of a GGUF file that hold its settings."""


def begins_texts(file: Path) -> bool:
    """Whether a GGUF file says that every text begins with the BOS token; reading the whole header takes seconds."""
    key = b"tokenizer.ggml.add_bos_token"
    boolean = 7  # the type of the value that follows the key
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        entry = struct.pack("<Q", len(key)) + key + struct.pack("<I", boolean)
        place = content.find(entry, 0, MAX_HEADER)
        return place >= 0 and content[place + len(entry)] == 1
