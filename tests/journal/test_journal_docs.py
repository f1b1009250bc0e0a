"""The page that specifies the journal: its example is what the code writes, and can be read from the page alone."""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from pathlib import Path

import pytest
import torch

import zeroblock as zb
from toy import Tiny
from zeroblock.journal import Header, Record, fingerprint, format, read

PAGE = (Path(__file__).parents[2] / "docs" / "journal.md").read_text(encoding="utf-8")
EXAMPLE = PAGE.split("## Example")[1].split("\n## ")[0]
PREFIX, ROOT, FIRST, SECOND = (
    bytes.fromhex(line) for line in re.findall(r"^    ((?:[0-9a-f]{2} ?)+)$", EXAMPLE, flags=re.MULTILINE)
)
HEADER = re.findall(r"^    (\{.*\})$", EXAMPLE, flags=re.MULTILINE)[0].encode()


def test_the_code_writes_the_example() -> None:
    records = [
        Record(0, 1, (-0.5,), 1e-5, (0.6995, 0.7005), 0.7),
        Record(1, 0, (1.25,), 1e-5, (0.69125, 0.68875), 0.69),
    ]
    assert format.dump(Header.decode(HEADER), records) == PREFIX + HEADER + ROOT + FIRST + SECOND


def test_the_code_reads_the_example() -> None:
    contents = format.parse(PREFIX + HEADER + ROOT + FIRST + SECOND)
    assert [r.coeffs for r in contents.records] == [(-0.5,), (1.25,)]
    assert contents.records[0].losses == pytest.approx((0.6995, 0.7005), abs=1e-12)
    assert (contents.header.model, contents.header.seed) == ("tiny", 42)


def test_the_page_is_enough_to_read_it() -> None:
    """By the tables alone, without the package."""
    data = PREFIX + HEADER + ROOT + FIRST + SECOND
    magic, version, zero, length = struct.unpack_from("<8sHHI", data)
    assert (magic, version, zero) == (b"\x89ZBJ\r\n\x1a\n", 1, 0)
    (root,) = struct.unpack_from("<I", data, 16 + length)
    assert root == zlib.crc32(data[: 16 + length]) == 0xED3271FC
    assert json.loads(data[16 : 16 + length])["blocks"] == ["embed", "layers.0"]
    for step, expected in enumerate([(0.7, 1e-5, 1, -0.5), (0.69, 1e-5, 0, 1.25)]):
        at = 16 + length + 4 + 28 * step
        *values, crc = struct.unpack_from("<ddIfI", data, at)
        assert tuple(values) == expected
        assert crc == zlib.crc32(data[at : at + 24], zlib.crc32(step.to_bytes(8, "little"), root))


def test_the_fingerprint_is_as_specified() -> None:
    model = torch.nn.Linear(300, 200)
    whole = hashlib.blake2b(digest_size=16)
    for name in ("bias", "weight"):
        param = model.get_parameter(name)
        data = param.detach().numpy().tobytes()
        if len(data) > 65536:
            starts = [(8 * ((len(data) - 4096) // 8) * i // 15) // 8 * 8 for i in range(16)]
            data = b"".join(data[a : a + 4096] for a in starts)
        whole.update(json.dumps([name, "float32", list(param.shape)]).encode())
        whole.update(hashlib.blake2b(data).digest())
    assert fingerprint(model) == whole.hexdigest()


def test_the_code_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    model, base_model = Tiny(), Tiny()
    scope = {"model": model, "base_model": base_model, "zb": zb}
    scope["loss"] = lambda: sum(p.square().sum() for p in model.parameters())
    loop = blocks[1].replace("    ...  #", "    optimizer.step(loss)  #")
    assert loop != blocks[1]
    exec(loop, scope)
    assert len(read("run.zbj").records) == 1
    assert torch.equal(base_model.embed.weight, model.embed.weight)
    Path("run.zbj").rename("tuned.zbj")
    scope["model"] = Tiny()
    exec(blocks[0], scope)
