"""Checkpoints that others have quantised: GPTQ, AWQ, and bitsandbytes with 8 bits.

The integers are taken as they are, from safetensors files and without the libraries that wrote them:

    w = s·(q - z)        s and z one number each per group of a row

Transformers loads everything else, as from a checkpoint that was never quantised.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ZeroBlockError
from ..ops.integer import Integers, expand, packed
from .layer import Given

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column, of eight, in each place of a word, starting from its lowest bits."""

Tensors = dict[str, Tensor]


def load(
    name: str, source: str, config: Any, auto: Any, how: str, *, trust_remote_code: bool = False, **options: Any
) -> tuple[nn.Module, dict[str, Any], dict[nn.Module, Given]]:
    """Load a model whose checkpoint is quantised.

    Args:
        name: the model's name, for messages.
        source: its folder, or its id on the hub.
        config: the configuration of transformers, with a ``quantization_config``.
        auto: the class of transformers that finds the model's class.
        how: the integers to load, see :func:`store_`.
        trust_remote_code: run the code that comes with the model.
        options: passed on to transformers, ``dtype`` among them.

    Returns:
        The model with its integers expanded to numbers, the report of transformers, and the integers by layer.
    """
    settings = config.quantization_config
    settings = dict(settings if isinstance(settings, Mapping) else settings.to_dict())
    method = str(settings.get("quant_method", "")).rpartition(".")[2].lower()
    bits, unpack = _layout(name, method, settings)
    wanted = how.partition(":")[0]
    if wanted != f"int{bits}":
        raise ZeroBlockError(f"{name} holds integers of {bits} bits, not {wanted}: give --weights int{bits}")
    folder = _folder(source)
    state, given = _parted(name, _read(name, folder), bits, unpack, options["dtype"])
    config = copy.deepcopy(config)
    del config.quantization_config
    with torch.device("meta"):
        kind: Any = type(auto.from_config(config, trust_remote_code=trust_remote_code))
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        options["generation_config"] = GenerationConfig.from_pretrained(folder)
    model, report = kind.from_pretrained(None, config=config, state_dict=state, output_loading_info=True, **options)
    model.config.name_or_path = source
    return model, report, {_linear(name, model, path): one for path, one in given.items()}


def _layout(name: str, method: str, settings: Mapping[str, Any]) -> tuple[int, Callable[[Tensors], Given]]:
    """The bits of an integer, and the function that unpacks a layer; refuse all but integers in groups of a row."""
    bits = int(settings.get("bits") or settings.get("w_bit") or 8)
    if method == "gptq":
        layout = _named(settings, "checkpoint_format", "format") or "gptq"
        first = 0 if layout == "gptq_v2" else 1  # the first layout stores zero points minus one
        reason = "" if bits in (4, 8) else f"they have {bits} bits"
        if layout not in ("gptq", "gptq_v2"):
            reason = f"they are in the layout {layout}"
        if (words := _named(settings, "pack_dtype")) not in ("", "int32"):
            reason = f"they are packed into words of {words}"
        return _admitted(name, method, reason, bits, lambda layer: gptq(layer, bits, first))
    if method == "awq":
        version = _named(settings, "version", "checkpoint_format", "format") or "gemm"
        reason = "" if (bits, version) == (4, "gemm") else f"they have {bits} bits in the layout {version}"
        return _admitted(name, method, reason, bits, awq)
    if method == "bitsandbytes":
        reason = "" if settings.get("load_in_8bit") else "their 4-bit codes are indices into a table, not integers"
        return _admitted(name, method, reason, 8, rows)
    return _admitted(name, method, "their layout is not known", 8, rows)


def _named(settings: Mapping[str, Any], *fields: str) -> str:
    """The value of the first of some fields that is set, in lower case; for an enumeration, its name alone."""
    found = next((str(settings[field]) for field in fields if settings.get(field)), "")
    return found.rpartition(".")[2].lower()


def _admitted(
    name: str, method: str, reason: str, bits: int, unpack: Callable[[Tensors], Given]
) -> tuple[int, Callable[[Tensors], Given]]:
    if reason:
        raise ZeroBlockError(
            f"{name} was quantised by {method or 'an unknown method'}, whose weights --weights does not support "
            f"({reason}): leave out --weights, install its library, and add --lora r=8,targets=q,v"
        )
    return bits, unpack


def gptq(layer: Tensors, bits: int, first: int) -> Given:
    """The integers of a layer of GPTQ, packed along its inputs.

    Args:
        layer: ``qweight`` (n·bits/32, m) and ``qzeros`` (groups, m·bits/32) int32, ``scales`` (groups, m), and possibly
            ``g_idx`` (n,), the group of every input.
        bits: 4 or 8.
        first: the number to add to zero points.
    """
    q = _fields(layer["qweight"].T.contiguous(), bits)
    z = (_fields(layer["qzeros"], bits) + first) % (1 << bits)
    groups = z.shape[0]
    if q.shape[1] % groups:
        raise ValueError(f"its {q.shape[1]} columns are not in {groups} groups of one size")
    index = layer.get("g_idx")
    if index is not None and not torch.equal(index.long(), torch.arange(q.shape[1]) // (q.shape[1] // groups)):
        raise ValueError(
            "its columns were reordered by their activations (desc_act), so its groups are not contiguous in a row"
        )
    middle = 1 << bits - 1
    return Given((q - middle).to(torch.int8), layer["scales"].T, (z.T - middle).to(torch.int8))


def awq(layer: Tensors) -> Given:
    """The 4-bit integers of a layer of AWQ, packed along its outputs in ``AWQ_ORDER``.

    Args:
        layer: ``qweight`` (n, m/8) and ``qzeros`` (groups, m/8) int32, ``scales`` (groups, m).
    """

    def ordered(words: Tensor) -> Tensor:
        places = _fields(words, 4).unflatten(1, (-1, 8))
        return torch.empty_like(places).index_copy_(2, torch.tensor(AWQ_ORDER), places).flatten(1)

    q, z = ordered(layer["qweight"]), ordered(layer["qzeros"])
    return Given((q.T - 8).to(torch.int8), layer["scales"].T, (z.T - 8).to(torch.int8))


def rows(layer: Tensors) -> Given:
    """The 8-bit integers of a layer of bitsandbytes: ``weight`` (m, n) int8, and ``SCB`` (m,), 127 times the scales."""
    if int(layer.get("weight_format", torch.tensor(0))) != 0:
        raise ValueError("its weights are tiled for one kind of GPU")
    return Given(layer["weight"], (layer["SCB"].float() / 127)[:, None])


def _fields(words: Tensor, bits: int) -> Tensor:
    """(r, c) words of 32 bits → (r, c·32/bits) the integers in them, starting from the lowest bits, in int16."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & (1 << bits) - 1).flatten(1).to(torch.int16)


def _parted(
    name: str, tensors: Tensors, bits: int, unpack: Callable[[Tensors], Given], dtype: torch.dtype
) -> tuple[Tensors, dict[str, Given]]:
    """The state dict with the integer matrices expanded, and the integers by the paths of their layers."""
    paths = {key.rpartition(".")[0] for key in tensors if key.endswith((".qweight", ".SCB"))}
    given: dict[str, Given] = {}
    for path in sorted(paths):
        fields = ("qweight", "qzeros", "scales", "g_idx", "weight", "SCB", "weight_format")
        layer = {field: tensors.pop(f"{path}.{field}") for field in fields if f"{path}.{field}" in tensors}
        try:
            one = unpack(layer)
            m, n = one.integers.shape
            if one.scales.shape[0] != m or n % one.scales.shape[1]:
                raise ValueError(f"its scales are {tuple(one.scales.shape)} for a matrix of {(m, n)}")
            if one.zeros is not None and one.zeros.shape != one.scales.shape:
                raise ValueError(f"its zero points are {tuple(one.zeros.shape)}, its scales {tuple(one.scales.shape)}")
            one = _movable(one, dtype)
        except (KeyError, RuntimeError, ValueError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
            raise ZeroBlockError(f"{name}: the integers of {path} cannot be read: {reason}") from error
        tensors[f"{path}.weight"] = expand(Integers(packed(one.integers, bits), bits, one.scales, one.zeros))
        given[path] = one
    if not given:
        raise ZeroBlockError(f"{name}: no integers are in its safetensors files: leave out --weights")
    return tensors, given


def _movable(one: Given, dtype: torch.dtype) -> Given:
    """The same weights with scales in a dtype; groups of zeros, whose scale is 0 there, get one to move by."""
    scales, zeros = one.scales.to(dtype).contiguous(), None if one.zeros is None else one.zeros.contiguous()
    if not scales.isfinite().all():
        raise ValueError(f"some of its scales are not finite in {str(dtype).removeprefix('torch.')}")
    empty = scales == 0
    if not empty.any():
        return Given(one.integers, scales, zeros)
    none = torch.zeros_like(scales, dtype=torch.int8) if zeros is None else zeros
    groups = one.integers.unflatten(1, (scales.shape[1], -1))
    integers = torch.where(empty[..., None], none[..., None], groups).flatten(1)
    used = scales[~empty].abs()
    return Given(integers, scales.masked_fill(empty, used.mean().item() if used.numel() else 1.0), zeros)


def _linear(name: str, model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise ZeroBlockError(
            f"{name}: {type(model).__name__} has no layer {path!r}, which the checkpoint has"
        ) from error


def _folder(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))


def _read(name: str, folder: Path) -> Tensors:
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if index.is_file():  # the folder may hold other safetensors files, too
        files = [folder / file for file in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    else:
        whole = folder / "model.safetensors"
        files = [whole] if whole.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ZeroBlockError(f"no *.safetensors in {str(folder)!r}: weights are never read from a pickle")
    tensors: Tensors = {}
    for file in files:
        if not file.is_file():
            raise ZeroBlockError(f"{name}: the checkpoint lacks {file.name}: get the whole checkpoint again")
        tensors |= load_file(file)
    return tensors
