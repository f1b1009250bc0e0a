"""Whatever the bytes are: the records that were written, a part of them from the start, or one clear error."""

from __future__ import annotations

import json
import random
import struct
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from journal_toy import key, write

from toy import Tiny, same, snapshot
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import Record, format, replay

SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Record]]:
    path: Path = tmp_path_factory.mktemp("fuzz") / "journal.zbj"
    return (lambda records: (path.read_bytes(), records))(write(path))


def check(data: bytes, truth: list[Record]) -> int:
    """Records that were read: the true ones from the start, and none if the bytes are refused."""
    try:
        found = format.parse(data)
    except ZeroBlockError:
        return 0
    assert [key(r) for r in found.records] == [key(r) for r in truth[: len(found.records)]]
    assert found.torn or len(found.records) <= len(truth)
    return len(found.records)


def test_any_single_flipped_bit_is_seen(whole: tuple[bytes, list[Record]]) -> None:
    data, truth = whole
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        assert check(bytes(changed), truth) < len(truth)


def test_bytes_changed_moved_cut_and_added_at_random(whole: tuple[bytes, list[Record]]) -> None:
    data, truth = whole
    draw = random.Random(1)
    for _ in range(3000):
        changed = bytearray(data)
        for _ in range(draw.randint(1, 4)):
            a, b = sorted(draw.randrange(len(changed) + 1) for _ in range(2))
            piece = bytes(changed[a:b])
            match draw.randrange(6):
                case 0:
                    changed[a:b] = draw.randbytes(b - a)
                case 1:
                    del changed[a:b]
                case 2:
                    changed[a:a] = piece
                case 3:
                    changed[a:b] = bytes(b - a)
                case 4:
                    changed += draw.randbytes(draw.randrange(100))
                case 5 if b > a:
                    changed[a] ^= 1 << draw.randrange(8)
        assert check(bytes(changed), truth) <= len(truth)


@SETTINGS
@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    assert check(data, []) == 0


def framed(text: bytes, records: bytes = b"") -> bytes:
    """A header with a right checksum around any bytes."""
    start = format.PREFIX.pack(format.MAGIC, 1, 0, len(text)) + text
    return start + struct.pack("<I", zlib.crc32(start)) + records


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@SETTINGS
@given(st.binary(max_size=300), st.binary(max_size=100))
def test_any_header_with_a_right_checksum(text: bytes, records: bytes) -> None:
    assert check(framed(text, records), []) == 0


@SETTINGS
@given(data=st.data())
def test_any_value_in_any_field_of_a_header(data: st.DataObject, whole: tuple[bytes, list[Record]]) -> None:
    """A header that somebody made up, checksum and all, is refused, or builds an optimizer; it never runs anything."""
    good = json.loads(format.parse(whole[0]).header.encode())
    field = data.draw(st.sampled_from(sorted(good)))
    if field == "method" and data.draw(st.booleans()):
        part = data.draw(st.sampled_from(sorted(good["method"])))
        changed = {**good, "method": {**good["method"], part: data.draw(JSON)}}
    else:
        changed = {**good, field: data.draw(JSON)}
    model = Tiny()
    before = snapshot(model)
    try:
        header = format.parse(framed(json.dumps(changed).encode())).header
        optimizer = header.rebuild(model)
    except ZeroBlockError:
        return
    assert same(snapshot(model), before)
    assert optimizer.steps == 0


def test_records_that_somebody_made_up_are_refused_by_the_schedule(whole: tuple[bytes, list[Record]]) -> None:
    contents = format.parse(whole[0])
    swapped = [Record(r.step, (r.block + 1) % 5, r.coeffs, r.lr, r.losses, r.loss) for r in contents.records]
    forged = format.parse(format.dump(contents.header, swapped))
    model = Tiny()
    with pytest.raises(ZeroBlockError, match="another method, seed or order"):
        replay(forged.header.rebuild(model), forged.records)
    assert same(snapshot(model), snapshot(Tiny()))
