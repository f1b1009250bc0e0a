"""Put adapters into models with PEFT, with starting values that do not come from torch's generators."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import family
from ..errors import ZeroBlockError
from ..noise import Key
from ..ops.noise import uniform
from ..ops.shared.reference import words

ADAPTER = 5
"""The stream of the noise that adapters start from; ``docs/noise.md`` lists the others."""
MATRIX, TOKEN = range(2)
"""The probe number of each draw: LoRA's A, and the tokens of a prefix."""
SPLIT = {"q": ("q", "query", "wq", "q_lin"), "k": ("k", "key", "wk", "k_lin"), "v": ("v", "value", "wv", "v_lin")}
FUSED = ("query_key_value", "qkv_proj", "c_attn", "Wqkv", "W_pack")
"""Names of the modules that compute queries, keys or values, and of the modules that compute all three."""
ALL = ("all", "all-linear")


def require() -> Any:
    """Import PEFT, or say how to get it."""
    try:
        import peft
    except ImportError as error:
        raise ZeroBlockError("adapters need PEFT: pip install peft") from error
    return peft


def attach_lora(model: nn.Module, r: int, alpha: float, targets: Sequence[str], seed: int) -> nn.Module:
    """Freeze a model and put LoRA into it; see :class:`~zeroblock.adapter.Lora`."""
    peft = require()
    names = resolve(model, targets)
    matched = [module for path, module in _linears(model) if _ends(path, names)]
    config = peft.LoraConfig(
        task_type=_task_type(model),
        r=r,
        lora_alpha=alpha if alpha % 1 else int(alpha),
        lora_dropout=0.0,
        target_modules=list(names),
        fan_in_fan_out=any(family.product(module) == "transposed" for module in matched),
    )
    adapted = wrap(model, config)
    offset = 0
    for name, param in adapted.named_parameters():
        if ".lora_A." in name:
            _draw_(param, seed, offset)
            offset += param.numel()
    return adapted


def _task_type(model: nn.Module) -> str | None:
    """PEFT's name for a model's task."""
    if family.masked(model):
        return None
    return "CAUSAL_LM" if family.seq2seq(model) is None else "SEQ_2_SEQ_LM"


@torch.no_grad()
def _draw_(param: Tensor, seed: int, offset: int) -> None:
    """A[i] ← (2u - 1)/√n with u = (w + 1/2)/2³², where w is the word at ``offset + i``, for A of (r, n)."""
    if param.is_meta:
        return
    drawn = words(Key(seed, 0, MATRIX, ADAPTER), offset, param.numel())
    values = ((drawn.astype("float64") + 0.5) / 2**31 - 1) / math.sqrt(param.shape[1])
    param.copy_(torch.from_numpy(values).float().view(param.shape))


def resolve(model: nn.Module, targets: Sequence[str]) -> tuple[str, ...]:
    """Find the names that targets have in a model.

    Args:
        model: a model of transformers.
        targets: see :class:`~zeroblock.adapter.Lora`.

    Returns:
        Last parts of modules' paths, each once: ("q_proj", "v_proj") in Llama, ("c_attn",) in GPT-2.
    """
    paths = [path for path, _ in _linears(model)]
    inner = list(dict.fromkeys(path.rpartition(".")[2] for path in paths if any(map(str.isdigit, path.split(".")))))
    found: dict[str, None] = {}
    for target in targets:
        if target in ALL:
            found |= dict.fromkeys(inner)
        elif any(_ends(path, [target]) for path in paths):
            found[target] = None
        else:
            names = [f"{target}_proj", *SPLIT.get(target, ()), *(FUSED if target in SPLIT else ())]
            name = next((name for name in names if name in inner), None)
            if name is None:
                raise ZeroBlockError(
                    f"lora: {type(model).__name__} has no module {target!r}; targets are {', '.join(inner)}, or all"
                )
            found[name] = None
    return tuple(found)


def _ends(path: str, names: Sequence[str]) -> bool:
    return any(f".{path}".endswith(f".{name}") for name in names)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that multiply by a matrix, including quantised ones, with their paths."""
    for path, module in model.named_modules():
        if hasattr(module, "in_features") or family.product(module) == "transposed":
            yield path, module


def attach_prefix(model: nn.Module, tokens: int, seed: int) -> nn.Module:
    """Freeze a model and put a prefix before its layers; see :class:`~zeroblock.adapter.Prefix`."""
    if family.masked(model) or family.seq2seq(model) is not None:
        why = "fills in masks and keeps no keys and values that a prefix could be"
        why = why if family.masked(model) else "is an encoder-decoder, and prefixes are for decoders alone"
        raise ZeroBlockError(f"{type(model).__name__} {why}: use LoRA (--lora r=8,targets=q,v)")
    config = require().PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=tokens)
    start = None if _is_meta(model) else _activations(model, tokens, seed)
    adapted: Any = wrap(model, config)
    weight = adapted.prompt_encoder["default"].embedding.weight
    if start is not None:
        if start.shape != weight.shape:
            raise ZeroBlockError(
                f"prefix: PEFT expects keys and values of shape {tuple(weight.shape)}, {type(model).__name__} has "
                f"{tuple(start.shape)}: use --lora with this model"
            )
        with torch.no_grad():
            weight.copy_(start)
    return by_layer(adapted)


@torch.no_grad()
def _activations(model: Any, tokens: int, seed: int) -> Tensor:
    """Keys and values of random tokens, (tokens, layers · 2 · width), in the order of PEFT."""
    vocabulary = model.config.get_text_config().vocab_size
    drawn = uniform(Key(seed, 0, TOKEN, ADAPTER), tokens)
    ids = torch.tensor([[int(u * vocabulary) for u in drawn]], device=next(model.parameters()).device)
    cache = model.eval()(input_ids=ids, use_cache=True).past_key_values
    parts = [part for layer in getattr(cache, "layers", ()) for part in (layer.keys, layer.values)]
    if not parts or any(part.dim() != 4 or part.shape != parts[0].shape for part in parts):
        raise ZeroBlockError(
            f"prefix: the layers of {type(model).__name__} keep no keys and values of one shape: use --lora"
        )
    return torch.cat([part[0].transpose(0, 1).flatten(1) for part in parts], 1)  # of (1, heads, tokens, d) each


class Layers(nn.Module):
    """The embedding of PEFT's prefix, with one tensor per layer, so that layers are blocks.

    Args:
        weight: (tokens, layers · 2 · width).
        layers: the number of layers.
    """

    def __init__(self, weight: Tensor, layers: int) -> None:
        super().__init__()
        parts = [part.clone() for part in weight.detach().chunk(layers, 1)]
        self.layers = nn.ModuleList(nn.Embedding.from_pretrained(part, freeze=False) for part in parts)
        self.register_load_state_dict_pre_hook(_cut)

    @property
    def weight(self) -> Tensor:
        """The tensor that PEFT saves."""
        return torch.cat([layer.weight for layer in self.layers], 1)  # type: ignore[misc]

    def forward(self, tokens: Tensor) -> Tensor:
        """Ids of any shape → (…, layers · 2 · width)."""
        return torch.cat([layer(tokens) for layer in self.layers], -1)


def _cut(embedding: Layers, state: dict[str, Any], start: str, *_: Any) -> None:
    """Split the tensor that PEFT saves for all layers into one per layer, if a state dict holds it."""
    whole = state.pop(f"{start}weight", None)
    if whole is not None:
        parts = whole.chunk(len(embedding.layers), 1)
        state.update({f"{start}layers.{i}.weight": part for i, part in enumerate(parts)})


def by_layer(adapted: Any) -> nn.Module:
    """Split the prefix of an adapted model by layer; other adapters are split already."""
    config = adapted.peft_config["default"]
    if config.peft_type == "PREFIX_TUNING":
        encoder = adapted.prompt_encoder["default"]
        encoder.embedding = Layers(encoder.embedding.weight, config.num_layers)
    return adapted  # type: ignore[no-any-return]


def wrap(model: nn.Module, config: Any) -> nn.Module:
    """Let PEFT put an adapter into a model, and leave torch's generators as they are."""
    devices = list({param.device for param in model.parameters() if param.is_cuda})
    place = torch.device("meta") if _is_meta(model) else contextlib.nullcontext()
    with torch.random.fork_rng(devices), place:
        adapted: nn.Module = require().get_peft_model(model, config)
    return adapted.eval()


def _is_meta(model: nn.Module) -> bool:
    return any(param.is_meta for param in model.parameters())
