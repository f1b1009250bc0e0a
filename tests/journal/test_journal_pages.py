"""The two pages that specify noise and journal are enough: weights rebuilt from them alone equal zeroblock's."""

from __future__ import annotations

import itertools
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import page_replay as page
import pytest
import torch
import transformers
from journal_fixture import DTYPES, FOLDER, NAMES, Ruled
from journal_toy import build
from torch import nn

import zeroblock as zb
from toy import Tiny, next_token
from zeroblock.block import stacks
from zeroblock.journal import Header, Journal, format, read, replay, spec

pytestmark = pytest.mark.filterwarnings("ignore::zeroblock.ZeroBlockWarning")  # some steps are not finite on purpose
JOURNAL_PAGE = (page.DOCS / "journal.md").read_text(encoding="utf-8")
UNITS = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
NUMPY = {"float32": torch.int32, "bfloat16": torch.int16, "float16": torch.int16}


def singles(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().float().numpy().copy() for name, p in model.named_parameters()}


def is_exact(header: dict[str, Any]) -> bool:
    """Whether the page promises the bits, and not only up to torch's last ones."""
    rule, low = header["method"]["rule"], header["method"]["subspace"]["name"] == "LowRank"
    rule = rule.get("rule", rule)["name"]
    if header["method"]["subspace"]["name"] == "Frames":
        return False
    return rule == "SGD" or (rule == "Adam" and not low) or (rule == "Sign" and header["probes"] == 1)


def check(data: bytes, base: dict[str, np.ndarray], lists: list[str], expected: dict[str, np.ndarray]) -> None:
    """Rebuild the weights from the pages, and compare."""
    header, _ = page.parse(data)
    found = page.weights_of(data, base, lists)
    assert found.keys() == expected.keys()
    moved = sum(int((base[name] != value).sum()) for name, value in found.items())
    assert moved > sum(value.size for value in base.values()) / 4
    for name, value in found.items():
        if is_exact(header):
            assert np.array_equal(value.view(np.uint32), expected[name].view(np.uint32)), name
        else:
            np.testing.assert_allclose(value, expected[name], rtol=2 * UNITS[header["dtype"]], atol=1e-7, err_msg=name)


IN_TURN = [name for i, name in enumerate(NAMES) if i % 2 == i // 2 % 2 or name.endswith("fp16")]
"""Every journal in one dtype, fp32 and bf16 in turn; test_journal_old replays all of them."""


@pytest.mark.parametrize("name", IN_TURN)
def test_an_older_journal_is_replayed_from_the_pages(name: str) -> None:
    path, model = FOLDER / f"{name}.zbj", Ruled(DTYPES[name.rpartition(".")[2]])
    base, contents = singles(model), read(path)
    optimizer = contents.header.rebuild(model)
    replay(optimizer, contents.records)
    optimizer.settle()
    check(path.read_bytes(), base, stacks(model), singles(model))


@pytest.mark.parametrize(
    ("name", "dtype"), zip(zb.METHODS, itertools.cycle([torch.bfloat16, torch.float32, torch.float16]), strict=False)
)
def test_every_method_of_today_is_replayed_from_the_pages(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = Tiny(dtype=dtype)
    base, optimizer, loss = singles(model), build(name, model, weight_decay=0.05, probes=2), next_token(model)
    path = tmp_path / "journal.zbj"
    with Journal.create(path, Header.of(optimizer), fsync=None) as journal:
        for step in range(10):  # a turn ends after the seventh
            optimizer.step((lambda: math.nan) if step == 3 else loss)
            journal.append(optimizer.record)
    check(path.read_bytes(), base, stacks(model), singles(model))


# Blocks


def language_model(kind: str) -> nn.Module:
    small = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    more: dict[str, dict[str, Any]] = {
        "OPT": {**small, "ffn_dim": 8, "word_embed_proj_dim": 8, "max_position_embeddings": 16},
        "Llama": {**small, "intermediate_size": 8, "tie_word_embeddings": False},
        "GPT2": {"vocab_size": 50, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16},
        "T5": {"vocab_size": 50, "d_model": 16, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2},
    }
    config = getattr(transformers, f"{kind}Config")(**more[kind])
    auto = transformers.AutoModel if kind == "T5" else transformers.AutoModelForCausalLM
    model: nn.Module = auto.from_config(config)
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1." not in name and "h.1.ln" not in name)
    return model


@pytest.mark.parametrize("cut", ["whole", "layers", "layers:2", "linears"])
@pytest.mark.parametrize("kind", ["OPT", "Llama", "GPT2", "T5"])
def test_the_blocks_of_the_page_are_those_of_the_code(kind: str, cut: str) -> None:
    model = language_model(kind)
    expected = zb.block.by_name(cut)(model)
    header = {
        "method": {"partition": json.loads(json.dumps(spec.describe_partition(zb.block.by_name(cut), expected)))},
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
    }
    found = page.members(header, {name: tuple(p.shape) for name, p in model.named_parameters()}, stacks(model))
    assert [tuple(block) for block in found] == [block.params for block in expected]


# Test vectors of the pages


def vectors(text: str, number: int) -> list[dict[str, Any]]:
    return json.loads(re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)[number])


NOISE, RUNS = vectors(page.NOISE_PAGE, 1), vectors(JOURNAL_PAGE, 0)


def from_bits(digits: list[str], dtype: str) -> np.ndarray:
    numbers = [int(one, 16) for one in digits]
    if dtype == "float16":
        return np.array(numbers, np.uint16).view(np.float16).astype(np.float32)
    return np.array([n << (16 if dtype == "bfloat16" else 0) for n in numbers], np.uint32).view(np.float32)


def to_bits(values: np.ndarray, dtype: str) -> list[str]:
    if dtype == "float16":
        return [f"{n:04x}" for n in values.astype(np.float16).view(np.uint16).tolist()]
    patterns = np.ascontiguousarray(values, np.float32).view(np.uint32).tolist()
    return [f"{n >> 16:04x}" if dtype == "bfloat16" else f"{n:08x}" for n in patterns]


def test_normals_end_where_the_page_says_and_rounding_bits_follow_them_there() -> None:
    a = np.arange(1 << 16, dtype=np.uint32)
    largest, _ = page._pair(a[:1], np.zeros(1, np.uint32))
    assert largest[0] == pytest.approx(6.6604, abs=5e-5)
    angles = np.random.default_rng(0).integers(0, 2**32, (64, len(a)), dtype=np.uint32)
    for sign, word in ((1, a), (-1, ~a)):
        z = np.stack([page._pair(word, angle)[0] for angle in angles])
        assert np.abs(z).max() <= largest[0]
        tail = np.broadcast_to(word & np.uint32(0xFFFF), z.shape)[sign * z > 4.75] / 65536
        assert tail.mean() - 0.5 == pytest.approx(-0.35 * sign, abs=0.01)
        tail = np.broadcast_to(word & np.uint32(0x1FFF), z.shape)[sign * z > 4.75] / 8192
        assert tail.mean() - 0.5 == pytest.approx(-0.05 * sign, abs=0.01)
        assert np.broadcast_to(a, z.shape)[sign * z > 4.75].max() < 27_100


@pytest.mark.parametrize("vector", NOISE, ids=lambda v: "-".join(filter(None, (v["kind"], v.get("dtype")))))
def test_the_vectors_of_the_noise(vector: dict[str, Any]) -> None:
    match vector["kind"]:
        case "rademacher":
            at = page.Address(vector["seed"], vector["step"], vector["probe"], vector["stream"])
            assert page.noise(at, vector["offset"], len(vector["signs"]), True).tolist() == vector["signs"]
        case "nearest" | "stochastic":
            x = from_bits(vector["single"], "float32")
            words = np.array([int(w, 16) for w in vector["words"]], np.uint32) if "words" in vector else None
            with np.errstate(over="ignore"):
                for dtype in ("bfloat16", "float16"):
                    assert to_bits(page.rounded(x, dtype, words), dtype) == vector[dtype]
                    if words is None:  # and torch agrees
                        kind = getattr(torch, dtype)
                        assert to_bits(torch.from_numpy(x).to(kind).float().numpy(), dtype) == vector[dtype]
        case "bernoulli":
            at, n = page.Address(vector["seed"], vector["step"], 0, 1), len(vector["kept"])
            limit = math.ceil(vector["keep"] * 2**32) - 1
            assert (page.words(at, vector["offset"], n) <= limit).astype(int).tolist() == vector["kept"]
        case "adam":
            dtype, rule = vector["dtype"], {"name": "Adam", "betas": [0.9, 0.999], "eps": 1e-8, "reset": False}
            run = miniature(vector["dtype"], {"seed": vector["seed"], "rule": rule, "shape": [5]}, vector["x"][0])
            run.offsets["w"] = vector["offset"]
            moments = "float32" if dtype == "float32" else "bfloat16"
            for step in range(2):
                run.adam("w", step, vector["lr"], vector["shares"], 1.0)
                assert to_bits(run.weights["w"], dtype) == vector["x"][step + 1]
                for moment in "mv":
                    assert to_bits(run.state["w"][moment], moments) == vector[moment][step]
        case other:
            pytest.fail(f"the page has a vector of kind {other}, which nothing checks")


DEFAULTS: dict[str, Any] = {
    "interval": 2,
    "distribution": "normal",
    "rounding": "stochastic",
    "restore": "copy",
    "fold": 1,
    "subspace": {"name": "Full"},
    "estimator": {"name": "TwoSided", "eps": 0.001, "probes": 1},
    "rule": {"name": "SGD"},
    "partition": {"name": "whole"},
}


def miniature(dtype: str, fields: dict[str, Any], base: list[str]) -> page.Replay:
    """A run of one parameter, as the page describes it."""
    method = {**DEFAULTS, **{name: fields[name] for name in (*DEFAULTS, "clip") if name in fields}}
    header = {
        "method": method,
        "blocks": ["whole"],
        "frozen": [],
        "dtype": dtype,
        "seed": fields["seed"],
        "decays": "matrices",
        "weight_decay": fields.get("weight_decay", 0),
        "probes": method["estimator"]["probes"],
    }
    return page.Replay(header, {"w": from_bits(base, dtype).reshape(fields["shape"])}, [])


def optimizer_of(vector: dict[str, Any]) -> zb.ZeroOrder:
    """The same run in zeroblock."""
    model = nn.Module()
    values = torch.from_numpy(from_bits(vector["base"], vector["dtype"]).reshape(vector["shape"]))
    model.w = nn.Parameter(values.to(getattr(torch, vector["dtype"])))
    method = {**DEFAULTS, **vector}
    return zb.ZeroOrder(
        model,
        0.0,
        partition=zb.whole,
        subspace=spec.build("subspace", method["subspace"]),
        estimator=spec.build("estimator", method["estimator"]),
        rule=spec.build("rule", method["rule"]),
        interval=method["interval"],
        fold=method["fold"],
        seed=vector["seed"],
        weight_decay=vector.get("weight_decay", 0),
        clip=vector.get("clip"),
        distribution=zb.Distribution[method["distribution"].upper()],
        rounding=zb.Rounding[method["rounding"].upper()],
        restore=method["restore"],
    )


def records_of(vector: dict[str, Any]) -> list[zb.Record]:
    return [
        zb.Record(step, 0, tuple(math.nan if c is None else c for c in coeffs), lr, (), 1.0)
        for step, (lr, coeffs) in enumerate(vector["records"])
    ]


@pytest.mark.parametrize("vector", RUNS, ids=lambda v: v["name"])
def test_the_vectors_of_the_journal(vector: dict[str, Any]) -> None:
    run, optimizer, dtype = miniature(vector["dtype"], vector, vector["base"]), optimizer_of(vector), vector["dtype"]
    for record, expected in zip(records_of(vector), vector["weights"], strict=True):
        replay(optimizer, [record])
        run.step(page.Step(record.lr, 0, record.coeffs))
        for found in (run.weights["w"], optimizer.params["w"].detach().float().numpy().reshape(-1)):
            if is_exact(run.header):
                assert to_bits(found, dtype) == expected
            else:
                np.testing.assert_allclose(found, from_bits(expected, dtype), rtol=2 * UNITS[dtype], atol=1e-7)


def test_the_vectors_cover_what_they_should() -> None:
    assert {vector["kind"] for vector in NOISE} == {"rademacher", "nearest", "stochastic", "bernoulli", "adam"}
    rules, spaces = ({vector.get(part, DEFAULTS[part])["name"] for vector in RUNS} for part in ("rule", "subspace"))
    assert rules == {"SGD", "Sign", "Momentum", "Adam", "Normalized"}
    assert spaces == {"Full", "LowRank", "Sparse", "Bernoulli", "Relative"}
    assert {vector["dtype"] for vector in RUNS} == {"float32", "bfloat16", "float16"}


def test_the_page_writes_the_order_as_the_code_does() -> None:
    import hashlib

    model = Ruled()
    listed = json.dumps([[name, *p.shape] for name, p in model.named_parameters()])
    assert '["norm.bias", 4]' in listed
    expected = hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()
    assert read(FOLDER / "mezo.fp32.zbj").header.order == expected


def test_a_reader_of_the_page_sees_a_wrong_record() -> None:
    """The stranger's reader would notice: it is not the code's own checks that make these tests pass."""
    data = bytearray((FOLDER / "mezo.fp32.zbj").read_bytes())
    data[-20] ^= 1
    with pytest.raises(AssertionError):
        page.parse(bytes(data))
    contents = format.parse((FOLDER / "mezo.fp32.zbj").read_bytes())
    other = contents.header.replace(seed=1)
    base = singles(Ruled())
    with warnings.catch_warnings():
        found = page.weights_of(format.dump(other, contents.records), base, ["layers"])
    right = page.weights_of(format.dump(contents.header, contents.records), base, ["layers"])
    assert not np.array_equal(found["embed.weight"], right["embed.weight"])
