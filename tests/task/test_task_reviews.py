"""The embedded default: parsing, balance, split and cache; the archive itself where pip can get it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections import Counter

import pytest

from zeroblock.errors import ZeroBlockError
from zeroblock.task import TASKS
from zeroblock.task.reviews import ARCHIVE, INNER, TABLE, cache, divide, parse


def table(count):
    """Invented sentences: a third bad, a third in between, a bit more than a third good."""
    rated = [(f"Scene {i} drags.", -1.5) for i in range(count)]
    rated += [(f"Scene {i} exists.", 0.9) for i in range(count)]
    rated += [(f"Scene {i} sings.", 1.0) for i in range(count + 7)]
    return "".join(f"{n}\t{rating}\t{sentence}\r\n" for n, (sentence, rating) in enumerate(rated, start=1))


def archived(name, content):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return file.getvalue()


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A cache with an archive of invented sentences, in the layout of the real one, and no pip."""
    monkeypatch.setenv("ZEROBLOCK_CACHE", str(tmp_path))
    whole = archived(INNER, archived(TABLE, table(200).encode()))
    (tmp_path / ARCHIVE).write_bytes(whole)
    monkeypatch.setattr("zeroblock.task.reviews.SHA256", hashlib.sha256(whole).hexdigest())
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("pip was called"))
    return tmp_path


def test_parse():
    lines = ["1\t-0.6\tTepid: but fine \r\n", "2\t2.25\tA joy.\r\n", "3\t1.0\tA joy.\r\n"]
    assert parse(lines) == [("Tepid: but fine", -0.6), ("A joy.", 2.25)]


def test_divide_balances_and_drops_the_lukewarm():
    train, held = divide(parse(table(200).splitlines()), held_out=60)
    assert Counter(row["label"] for row in held) == {0: 30, 1: 30}
    assert Counter(row["label"] for row in train) == {0: 170, 1: 170}
    sentences = [row["sentence"] for row in train + held]
    assert len(set(sentences)) == len(sentences)
    assert not any("exists" in sentence for sentence in sentences)
    assert all(("sings" in row["sentence"]) == (row["label"] == 1) for row in train + held)


def test_divide_is_seeded():
    rated = parse(table(50).splitlines())
    assert divide(rated, seed=1) == divide(rated, seed=1)
    assert divide(rated, seed=1) != divide(rated, seed=2)


def test_reviews_from_the_archive(offline):
    splits = TASKS["reviews"].load(seed=3)
    assert tuple(map(len, (splits.train, splits.dev, splits.test))) == (256, 64, 80)
    assert splits.test[0].context.endswith(". It was")
    first = json.loads((offline / "reviews-1.0" / "train.jsonl").read_text().splitlines()[0])
    assert set(first) == {"sentence", "label"}
    (offline / ARCHIVE).unlink()  # the second time nothing is fetched or unpacked
    assert TASKS["reviews"].load(seed=3) == splits


def test_reviews_from_a_folder(tmp_path):
    for part in ("train", "validation"):
        (tmp_path / f"{part}.jsonl").write_text('{"sentence": "It sings.", "label": 1}\n')
    assert TASKS["reviews"].load(tmp_path).test[0].context == "It sings. It was"


def test_a_wrong_archive_is_refused(offline):
    (offline / ARCHIVE).write_bytes(b"something else")
    with pytest.raises(ZeroBlockError, match="not the vaderSentiment"):
        TASKS["reviews"].load()


def test_pip_that_fails_says_what_to_do(tmp_path, monkeypatch):
    import subprocess

    monkeypatch.setenv("ZEROBLOCK_CACHE", str(tmp_path / "new"))
    done = subprocess.CompletedProcess([], 1, "", "WARNING: x\nERROR: no such thing\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: done)
    with pytest.raises(ZeroBlockError, match=r"ERROR: no such thing\); put vaderSentiment-3.3.2.tar.gz into"):
        TASKS["reviews"].load()


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("ZEROBLOCK_CACHE", raising=False)
    assert cache() == tmp_path / "xdg" / "zeroblock"
    monkeypatch.setenv("ZEROBLOCK_CACHE", str(tmp_path / "own"))
    assert cache() == tmp_path / "own"
    monkeypatch.delenv("ZEROBLOCK_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache() == tmp_path / ".cache" / "zeroblock"


def test_the_real_sentences():
    """On the real archive, where an earlier run has cached it: enough sentences for the demonstration, balanced."""
    if not (cache() / ARCHIVE).is_file():
        pytest.skip("the reviews have not been fetched")
    splits = TASKS["reviews"].load(seed=0)
    assert tuple(map(len, (splits.train, splits.dev, splits.test))) == (7648, 500, 1000)
    assert Counter(example.label for example in splits.test) == {0: 500, 1: 500}
    texts = [example.context for part in (splits.train, splits.dev, splits.test) for example in part]
    assert len(set(texts)) == len(texts)
