"""Short runs with journals, on models in miniature."""

from __future__ import annotations

import json
import struct
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroblock as zb
from toy import Tiny, next_token
from zeroblock.cli import main
from zeroblock.journal import Header, Journal, Record

Row = tuple[float, float, int, float]
"""Loss, rate, block, coefficient."""
GOOD: Row = (1.0, 1e-2, 0, 1.0)

RATES = {"mezo_adam": 3e-3, "mezo_bcd_adam": 3e-3, "zo_sign": 3e-3}


def build(name: str, model: nn.Module, **options: Any) -> zb.ZeroOrder:
    """A method at a rate that moves Tiny, 16-bit weights too; intervals short enough to change turns."""
    if name in ("lozo", "lozo_m", "mezo_bcd_adam", "subzero", "zo_muon"):
        options.setdefault("interval", 7)
    if name == "hizoo":
        options.setdefault("alpha", 1e-3)
    return zb.METHODS[name](model, lr=RATES.get(name, 1e-2), **options)


def write(path: Path, steps: int = 12, name: str = "mezo_bcd", dtype: torch.dtype = torch.float32) -> list[Record]:
    """A journal of a run of Tiny; its records as the run had them."""
    model = Tiny(dtype=dtype)
    optimizer, loss, records = build(name, model), next_token(model), []
    with Journal.create(path, Header.of(optimizer, model="tiny", task="successor", method=name)) as journal:
        for _ in range(steps):
            optimizer.step(loss)
            records.append(optimizer.record)
            journal.append(optimizer.record)
    return records


def forge(path: Path, header: Header, rows: list[Row], **fields: Any) -> Path:
    """A journal of one probe, byte by byte, so that nothing is in the way of nonsense."""
    text = json.dumps({**json.loads(header.encode()), **fields}).encode()
    data = struct.pack("<8sHHI", b"\x89ZBJ\r\n\x1a\n", 1, 0, len(text)) + text
    root = zlib.crc32(data)
    data += struct.pack("<I", root)
    for step, row in enumerate(rows):
        body = struct.pack("<ddIf", *row)
        data += body + struct.pack("<I", zlib.crc32(body, zlib.crc32(step.to_bytes(8, "little"), root)))
    path.write_bytes(data)
    return path


def key(record: Record) -> tuple[Any, ...]:
    """What a journal keeps exactly."""
    return record.step, record.block, record.coeffs, record.lr, record.loss


def save_model(folder: Path, seed: int = 0) -> Path:
    """A folder with a random Llama of two layers and a tokenizer of bytes, as ``save_pretrained`` writes them."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    symbols = ["</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="</s>", eos_token="</s>")
    words.save_pretrained(folder)
    return folder


def save_reviews(folder: Path) -> Path:
    """Sentences in the layout of SST-2 whose label a word gives away."""
    (folder / "sst2").mkdir(parents=True)
    for part, count in (("train", 40), ("validation", 8)):
        rows = [{"sentence": f"{i} {('dull', 'warm')[i % 2]}", "label": i % 2} for i in range(count)]
        (folder / "sst2" / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def tokens_loss(model: nn.Module) -> Any:
    tokens = torch.arange(2, 34).view(2, 16)
    return lambda: model(input_ids=tokens, labels=tokens).loss


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """Exit status and output of the real command line."""
    monkeypatch.setattr(sys, "argv", ["zeroblock", *map(str, words)])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # which the command line sets for good
    capsys.readouterr()  # of loading a model to forge from
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out + said.err
