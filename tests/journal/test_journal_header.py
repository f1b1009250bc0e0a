"""The header: it rebuilds an optimizer from plain data, and refuses whatever would not repeat the run."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import zeroblock as zb
from toy import Tiny
from zeroblock.errors import ZeroBlockError
from zeroblock.journal import Header, fingerprint, spec
from zeroblock.journal.identity import order

SMALL = {"vocab_size": 3000, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SMALL, "intermediate_size": 48}
OPT = {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32}


def language_model(kind: str, tied: bool = True) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(OPT if kind == "OPT" else LLAMA), tie_word_embeddings=tied)
    return transformers.AutoModelForCausalLM.from_config(config)


# Parts as data

PARTS = [
    ("schedule", zb.Adaptive(decay=0.3, warmup=7, signed=True, first=zb.Ascending())),
    ("schedule", zb.Adaptive()),
    ("schedule", zb.FlipFlop()),
    ("schedule", zb.Uniform()),
    ("subspace", zb.LowRank(4, as_published=True)),
    ("subspace", zb.Sparse(1)),
    ("subspace", zb.Bernoulli(0.1)),
    ("estimator", zb.OneSided(2e-3, 5)),
    ("rule", zb.Adam((0.8, 0.99), eps=1e-9, reset=False)),
    ("rule", zb.Momentum(0.5, reset=True)),
    ("rule", zb.SGD()),
]


@pytest.mark.parametrize(("kind", "part"), PARTS, ids=lambda value: str(value))
def test_a_part_survives_json(kind: str, part: object) -> None:
    text = json.dumps(spec.describe(kind, part))
    again = spec.build(kind, json.loads(text))
    assert again == part
    assert repr(again) == repr(part)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("rule", {"name": "Adan", "betas": [0.9, 0.99]}, "unknown rule 'Adan'; did you mean 'Adam'"),
        ("rule", {"name": "Momentum", "beta": 0.9}, "Momentum has the fields beta, reset"),
        ("rule", {"name": "Momentum", "beta": "0.9", "reset": False}, "beta cannot be '0.9'"),
        ("rule", {"name": "Momentum", "beta": True, "reset": False}, "beta cannot be True"),
        ("rule", {"name": "Momentum", "beta": 7, "reset": False}, r"beta must be in \[0, 1\)"),
        ("rule", {"name": "Adam", "betas": [0.9], "eps": 1e-8, "reset": True}, "betas cannot be"),
        ("rule", {"name": "SGD", "__class__": "os.system"}, "SGD has the fields none"),
        ("rule", {"name": "__import__"}, "unknown rule"),
        ("rule", ["SGD"], "does not describe its rule"),
        ("rule", None, "build the optimizer in Python"),
        ("subspace", {"name": "LowRank", "rank": 2.5, "as_published": False}, "rank cannot be 2.5"),
        ("schedule", {"name": "Shuffled", "n": 3}, "Shuffled has the fields none"),
    ],
)
def test_what_is_not_a_part_is_refused(kind: str, data: Any, message: str) -> None:
    with pytest.raises(ZeroBlockError, match=message):
        spec.build(kind, data)


def test_schedules_nest_a_little_and_not_without_end() -> None:
    data = spec.describe("schedule", zb.Adaptive(first=zb.Adaptive()))
    assert spec.build("schedule", data) == zb.Adaptive(first=zb.Adaptive())
    for _ in range(10):
        data = {**data, "first": data}
    with pytest.raises(ZeroBlockError, match="nested too deeply"):
        spec.build("schedule", data)


@pytest.mark.parametrize(
    "partition", [zb.whole, zb.layers, zb.linears, functools.partial(zb.layers, k=2)], ids=["w", "l", "n", "k"]
)
def test_partitions_go_by_name(partition: Any) -> None:
    data = json.loads(json.dumps(spec.describe_partition(partition, ())))
    assert spec.build_partition(data)(Tiny()) == partition(Tiny())
    assert "blocks" not in data


@pytest.mark.parametrize(
    "data",
    [
        {"name": "layers", "k": "2"},
        {"name": "layers", "k": True},
        {"name": "whole", "k": 2},
        {"name": "explicit", "blocks": [["a", "b"]]},
        {"name": "explicit", "blocks": [["a", ["b"], 3]]},
        {"name": "os.system"},
        "layers",
        None,
    ],
)
def test_what_is_not_a_partition_is_refused(data: Any) -> None:
    with pytest.raises(ZeroBlockError, match="partition is not one that zeroblock knows"):
        spec.build_partition(data)


class Alternate(zb.Shuffled):
    """A schedule of somebody else's."""

    def pick(self, turn: int, n: int, seed: int, scores: list[float]) -> int:
        return turn % 2


def test_a_part_of_ones_own_is_journalled_but_not_rebuilt() -> None:
    header = Header.of(zb.mezo_bcd(Tiny(), 1e-2, schedule=Alternate()))
    header = Header.decode(header.encode())
    header.check(zb.mezo_bcd(Tiny(), 1e-2, schedule=Alternate()))
    with pytest.raises(ZeroBlockError, match="does not describe its schedule"):
        header.rebuild(Tiny())


# The header


def test_the_header_survives_the_file_and_is_the_same_bytes_each_time() -> None:
    optimizer = zb.lozo_m(Tiny(), 1e-2, seed=2**64 - 1, weight_decay=0.1)
    header = Header.of(optimizer, model="tiny ü", task="t", data="abc", method="lozo_m", nested={"a": [1, None]})
    assert Header.decode(header.encode()) == header
    assert header.encode() == Header.decode(header.encode()).encode()
    assert header.extra == {"method": "lozo_m", "nested": {"a": [1, None]}}
    assert header.versions["noise"] == "1"


def test_values_that_json_cannot_hold_are_refused() -> None:
    optimizer = zb.mezo(Tiny(), 1e-2)
    for value in (float("nan"), object(), 1 + 2j):
        with pytest.raises(ZeroBlockError, match="plain, finite values only"):
            Header.of(optimizer, odd=value).encode()


GOOD = Header.of(zb.mezo(Tiny(), 1e-2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 3),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", True),
        ("probes", 0),
        ("probes", 10**9),
        ("blocks", "whole"),
        ("blocks", [1]),
        ("steps", -1),
        ("steps", 1.5),
        ("weight_decay", "0"),
        ("weight_decay", 10**400),
        ("parts", {"a": 1}),
        ("method", {}),
        ("method", {**GOOD.method, "interval": "1"}),
        ("method", {**GOOD.method, "rounding": "up"}),
        ("method", {**GOOD.method, "restore": "magic"}),
        ("method", {**GOOD.method, "clip": "3"}),
        ("method", {**GOOD.method, "clip": 10**400}),
        ("decays", 4),
    ],
)
def test_a_field_of_the_wrong_type_is_refused(field: str, value: Any) -> None:
    found = {**json.loads(GOOD.encode()), field: value}
    with pytest.raises(ZeroBlockError, match=f"the header's .*{field}"):
        Header.decode(json.dumps(found).encode())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not an object"),
        (b"{}", "lacks the field"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"),
        (GOOD.encode().replace(b'"seed"', b'"sead"'), "'sead'|'seed'"),
    ],
)
def test_what_is_not_a_header_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ZeroBlockError, match=message):
        Header.decode(data)


def moved(model: nn.Module) -> nn.Module:
    """The same model a thousandth further on, in one tensor."""
    with torch.no_grad():
        model.layers[2]["down"].bias += 1e-3
    return model


class Reordered(Tiny):
    """The same parameters, registered in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = self._modules.pop("norm")
        self.layers = self._modules.pop("layers")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: zb.mezo_bcd(Tiny(), 1e-2, seed=1), "written with seed 0, this optimizer has 1"),
        (lambda: zb.mezo_bcd(Tiny(), 1e-2, eps=1e-2), "written with estimator TwoSided.*0.001"),
        (lambda: zb.mezo_bcd(Tiny(), 1e-2, weight_decay=0.5), "written with weight decay 0.0, this optimizer has 0.5"),
        (lambda: zb.mezo_bcd(Tiny(), 1e-2, clip=3), "written with clip None, this optimizer has 3.0"),
        (lambda: zb.mezo(Tiny(), 1e-2), "written with number of blocks 5, this optimizer has 1"),
        (
            lambda: zb.mezo_bcd(Tiny(), 1e-2, partition=[zb.Block(b.name, b.params) for b in zb.layers(Tiny())]),
            "written with partition layers, this optimizer has explicit",
        ),
        (lambda: zb.mezo_bcd(Tiny(), 1e-2, decays=lambda name, param: False), "decayed parameters matrices"),
        (lambda: zb.mezo_bcd(Tiny(), 1e-2, restore="subtract"), "written with restore copy"),
        (lambda: zb.mezo_bcd(Tiny(), 1e-2, rounding=zb.Rounding.NEAREST), "rounding stochastic"),
        (lambda: zb.mezo_bcd(Tiny(depth=4), 1e-2), "written with number of blocks 5, this optimizer has 6"),
        (lambda: zb.mezo_bcd(Tiny(width=8), 1e-2), "names, shapes or order differ"),
        (lambda: zb.mezo_bcd(Reordered(), 1e-2), "written with block|names, shapes or order differ"),
        (lambda: zb.mezo_bcd(moved(Tiny()), 1e-2), "starts from other base weights"),
        (lambda: zb.mezo_bcd(Tiny(dtype=torch.bfloat16), 1e-2), "they are bfloat16 where the run had float32"),
    ],
)
def test_what_would_not_repeat_the_run_is_refused(other: Any, message: str) -> None:
    header = Header.of(zb.mezo_bcd(Tiny(), 3e-2))  # the rate is in the records
    header.check(zb.mezo_bcd(Tiny(), 1e-2))
    with pytest.raises(ZeroBlockError, match=message):
        header.check(other())


def test_force_is_for_base_and_version_alone() -> None:
    header = Header.of(zb.mezo_bcd(Tiny(), 1e-2))
    header.check(zb.mezo_bcd(moved(Tiny()), 1e-2), force=True)
    header.rebuild(moved(Tiny()), force=True)
    with pytest.raises(ZeroBlockError, match="names, shapes or order"):
        header.rebuild(Tiny(width=8), force=True)
    with pytest.raises(ZeroBlockError, match="seed"):
        header.check(zb.mezo_bcd(Tiny(), 1e-2, seed=1), force=True)
    newer = header.replace(versions={**header.versions, "zeroblock": "9.2.0"})
    with pytest.raises(ZeroBlockError, match=r"written by zeroblock 9\.2\.0, this is .*--force"):
        newer.rebuild(Tiny())
    newer.rebuild(Tiny(), force=True)
    other = header.replace(versions={**header.versions, "noise": "2"})
    for force in (False, True):
        with pytest.raises(ZeroBlockError, match="noise version 2, this is 1"):
            other.rebuild(Tiny(), force=force)


def test_another_patch_is_the_same_version_and_another_torch_matters_to_some() -> None:
    header = Header.of(zb.mezo_bcd(Tiny(), 1e-2))
    minor = zb.__version__.rpartition(".")[0]
    header.replace(versions={**header.versions, "zeroblock": f"{minor}.99", "torch": "2.0"}).rebuild(Tiny())
    adam = Header.of(zb.mezo_adam(Tiny(), 1e-2))
    with pytest.warns(zb.ZeroBlockWarning, match=r"written with torch 2\.0"):
        adam.replace(versions={**adam.versions, "torch": "2.0"}).rebuild(Tiny())


def test_the_check_comes_before_the_replay() -> None:
    header = Header.of(zb.mezo(Tiny(), 1e-2))
    optimizer = zb.mezo(Tiny(), 1e-2)
    optimizer.step(lambda: 1.0)
    with pytest.raises(ZeroBlockError, match="before its replay"):
        header.check(optimizer)


# Fingerprints


def test_every_tensor_counts_and_so_do_name_shape_and_dtype() -> None:
    base = fingerprint(Tiny())
    assert base == fingerprint(Tiny())
    assert len(base) == 32
    for name, _ in Tiny().named_parameters():
        model = Tiny()
        with torch.no_grad():
            model.get_parameter(name).view(-1)[-1] += 1
        assert fingerprint(model) != base, name
    model = Tiny()
    model.neck = model._modules.pop("norm")
    assert fingerprint(model) != base
    assert fingerprint(Tiny(dtype=torch.bfloat16)) != base
    assert order(Reordered()) != order(Tiny())
    assert fingerprint(Reordered()) == base


def test_a_large_tensor_is_sampled_evenly() -> None:
    model = nn.Linear(1000, 1000, bias=False)
    torch.nn.init.zeros_(model.weight)
    base, seen = fingerprint(model), 0
    for i in range(0, 1_000_000, 10_007):
        with torch.no_grad():
            model.weight.view(-1)[i] = 1
        seen += fingerprint(model) != base
        with torch.no_grad():
            model.weight.view(-1)[i] = 0
    assert 0 < seen < 20
    with torch.no_grad():  # what training leaves changes enough of them
        model.weight += 1e-8 * (torch.rand(model.weight.shape, generator=torch.Generator().manual_seed(0)) < 0.01)
    assert fingerprint(model) != base


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "tied"), [("OPT", True), ("Llama", True), ("Llama", False)])
def test_a_folder_has_the_fingerprint_of_its_model(kind: str, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = language_model(kind, tied).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert fingerprint(tmp_path) == fingerprint(model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert fingerprint(again) == fingerprint(model)


def test_a_folder_without_weights_or_with_broken_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ZeroBlockError, match=r"no \*\.safetensors"):
        fingerprint(tmp_path)
    file = tmp_path / "model.safetensors"
    for data in (
        b"",
        b"abc",
        (1 << 60).to_bytes(8, "little"),
        (2).to_bytes(8, "little") + b"[]",
        (63).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 999]}}',
        (63).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [-99, 0]}}',
    ):
        file.write_bytes(data)
        with pytest.raises(ZeroBlockError, match="not a safetensors file"):
            fingerprint(tmp_path)


def test_headers_are_plain_data() -> None:
    """Nothing in a header is anything but a value of JSON."""
    for name in zb.METHODS:
        header = Header.of(zb.METHODS[name](Tiny(), 1e-2))
        assert json.loads(json.dumps(dataclasses.asdict(header))) == json.loads(header.encode())
