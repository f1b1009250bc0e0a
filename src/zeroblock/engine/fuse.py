"""Parts of a layer that one kernel computes: norms, rotary positions, gates, and products that share their input.

A small model spends most of a step launching kernels of a microsecond each.  During a pass without
gradients the model's own modules get forwards that do the same in one kernel.  Nothing is taken on
trust: each new forward is compared with the one that it replaces on random numbers, and dropped
where the two differ.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..interrupt import uninterrupted
from ..ops.gate import Act
from ..ops.norm import Scaling
from ..ops.shared.dispatch import backend, is_triton, tf32_allowed
from .fork import restore

ROTARY = "apply_rotary_pos_emb"
"""The function in transformers' model files that rotates queries and keys."""
GATED = ("gate_proj", "up_proj", "down_proj")
"""The products of a gated layer."""
SIBLINGS = ("q_proj", "k_proj", "v_proj")
"""Products that share their input."""
SPLIT = "_split_heads"
"""The method by which Falcon's attention separates queries, keys and values."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference from the original forward, relative to its largest number; TF32 has the precision of fp16."""

Forward = Callable[..., Any]


@dataclass
class Fusions:
    """The forwards of one model that can be replaced.

    Args:
        forwards: modules, each with its new forward.
        splits: attention modules, each with its new ``SPLIT``.
        rotations: model files, each with its own rotary function and the new one.
        children: modules, each with the children that it had when the fusions were found.
    """

    forwards: list[tuple[nn.Module, Forward]] = field(default_factory=list)
    splits: list[tuple[nn.Module, Forward]] = field(default_factory=list)
    rotations: list[tuple[ModuleType, Forward, Forward]] = field(default_factory=list)
    children: list[tuple[nn.Module, dict[str, nn.Module | None]]] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context in which the model runs with the new forwards.

        It has no effect if gradients are on, under autocast, or if a module has since been replaced or wrapped: PEFT,
        for example, puts an adapter in place of a product, and the new forwards would bypass it.
        """
        if torch.is_grad_enabled() or _autocast() or not self._current:
            yield
            return
        with uninterrupted() as shield:
            try:
                for module, forward in self.forwards:
                    vars(module)["forward"] = forward
                for module, split in self.splits:
                    vars(module)[SPLIT] = split
                for file, _, rotate in self.rotations:
                    setattr(file, ROTARY, rotate)
                with shield.opened():
                    yield
            finally:
                for file, own, _ in self.rotations:
                    setattr(file, ROTARY, own)
                for module, _ in self.splits:
                    vars(module).pop(SPLIT, None)
                for module, _ in self.forwards:
                    restore(module, None)  # none had a forward of its own

    @property
    def _current(self) -> bool:
        """Whether modules still have the same children, and no forward of their own or hook that may change results."""
        return all(
            module._modules == held and all(_plain(one) for one in (module, *held.values()) if one is not None)
            for module, held in self.children
        )


@torch.no_grad()
def find(
    model: nn.Module,
    device: str,
    showing: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Fusions:
    """Find the forwards of a model's modules that can be replaced, by trying each.

    Args:
        model: a model of any family.
        device: the type of device whose kernels are used: ``cuda``, or another for plain torch.
        showing: makes a context in which a module's weights are on their device, for weights that rest elsewhere.
    """
    ops = _Ops(device)
    fusions, tried = Fusions(), dict[Hashable, Any]()
    for module in model.modules():
        with showing(module):
            _find(module, ops, tried, fusions)
    return fusions


def _find(module: nn.Module, ops: _Ops, tried: dict[Hashable, Any], fusions: Fusions) -> None:
    """Add the forwards that can be replaced in one module."""
    if not _plain(module):
        return
    known = len(fusions.forwards)
    split = _split(module, tried)
    if split is not None:
        fusions.splits.append((module, split))
    for kind in (_norm, _layer_norm, _gate):
        made = kind(module, ops, tried)
        if made is not None:
            fusions.forwards.append((module, made))
    fusions.forwards += _siblings(module, ops)
    fusions.forwards += _relu(module)
    if len(fusions.forwards) > known or split is not None:
        fusions.children.append((module, dict(module._modules)))
    file = sys.modules.get(type(module).__module__)
    if file is not None and hasattr(file, ROTARY) and file not in tried:
        tried[file] = _rotation(file, module, ops)
        fusions.rotations += tried[file]


class _Ops:
    """The versions of the operations for a type of device."""

    def __init__(self, device: str) -> None:
        self.norm, self.rotary, self.gate, self.project = (
            backend(name, device if device == "cuda" else "reference") for name in ("norm", "rotary", "gate", "project")
        )
        self.tf32 = tf32_allowed()

    def joins(self, linear: nn.Linear) -> bool:
        """Whether products like this one may be computed together; exact fp32 products are left to cuBLAS."""
        return linear.weight.dtype != torch.float32 or self.tf32 or not is_triton(self.project)


def _autocast() -> bool:
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")


def _norm(module: nn.Module, ops: _Ops, tried: dict[Hashable, Any]) -> Forward | None:
    """The forward of a root-mean-square norm; None for other modules."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if set(module._parameters) != {"weight"} or weight.dim() != 1 or weight.dtype not in TOLERANCE:
        return None
    key = (type(module), weight.shape, weight.dtype, weight.device, eps)
    if key not in tried:
        x, own = _random(2, 3, len(weight), like=weight), weight.data
        try:
            weight.data = _random(len(weight), like=weight, seed=1)
            fits = {s: _difference(module.forward(x), ops.norm.rms_norm(x, weight, eps, s)) for s in Scaling}
        finally:
            weight.data = own
        best = min(Scaling, key=lambda scaling: fits[scaling])
        tried[key] = best if fits[best] <= TOLERANCE[weight.dtype] else None
    scaling = tried[key]
    if scaling is None:
        return None

    def forward(hidden_states: Tensor) -> Tensor:
        if hidden_states.dtype != module.weight.dtype:  # leave type promotion to torch, as the model does
            return type(module).forward(module, hidden_states)  # type: ignore[no-any-return]
        result: Tensor = ops.norm.rms_norm(hidden_states, module.weight, eps, scaling)
        return result

    return forward


def _layer_norm(module: nn.Module, ops: _Ops, tried: dict[Hashable, Any]) -> Forward | None:
    """The forward of torch's own norm over one dimension; None for other modules."""
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1:
        return None
    weight, bias = module.weight, module.bias
    if weight is None or bias is None or weight.dtype not in TOLERANCE:
        return None
    key = (type(module), weight.shape, weight.dtype, weight.device, module.eps)
    if key not in tried:
        x = _random(2, 3, len(weight), like=weight)
        got = ops.norm.layer_norm(x, weight, bias, module.eps)
        tried[key] = _difference(module.forward(x), got) <= TOLERANCE[weight.dtype]

    def forward(input: Tensor) -> Tensor:  # as torch names it
        if input.dtype != module.weight.dtype:
            return nn.LayerNorm.forward(module, input)
        result: Tensor = ops.norm.layer_norm(input, module.weight, module.bias, module.eps)
        return result

    return forward if tried[key] else None


def _gate(module: nn.Module, ops: _Ops, tried: dict[Hashable, Any]) -> Forward | None:
    """The forward of a gated layer; None for other modules."""
    if set(module._modules) - {"act_fn"} != set(GATED) or module._parameters or not hasattr(module, "act_fn"):
        return None
    gate, up, down = (getattr(module, name) for name in GATED)
    if not all(type(one) is nn.Linear for one in (gate, up, down)) or gate.weight.shape != up.weight.shape:
        return None
    if gate.bias is not None or up.bias is not None or gate.weight.dtype not in TOLERANCE:
        return None
    joins = ops.joins(gate)

    def make(act: Act) -> Forward:
        def forward(x: Tensor) -> Tensor:
            if joins and _plain(gate) and _plain(up):
                return down(ops.project.project_gated(x, gate.weight, up.weight, act))  # type: ignore[no-any-return]
            return down(ops.gate.gated(gate(x), up(x), act))  # type: ignore[no-any-return]

        return forward

    key = (
        type(module),
        type(module.act_fn),
        gate.weight.shape,
        down.weight.shape,
        gate.weight.dtype,
        down.bias is None,
    )
    if key not in tried:
        x = _random(1, 3, gate.weight.shape[1], like=gate.weight)
        expected = module.forward(x)
        t, u = (_random(1, 3, gate.weight.shape[0], like=gate.weight, seed=seed) for seed in (1, 2))
        product = cast(nn.Module, module.act_fn)(t) * u  # for itself, because a matrix of zeros after it would hide it
        fits = {
            act: max(_difference(expected, make(act)(x)), _difference(product, ops.gate.gated(t, u, act)))
            for act in Act
        }
        best = min(Act, key=lambda act: fits[act])
        tried[key] = best if fits[best] <= TOLERANCE[gate.weight.dtype] * (100 if ops.tf32 else 1) else None
    return None if tried[key] is None else make(tried[key])


def _plain(module: nn.Module) -> bool:
    """Whether a call of a module runs only its class's forward: a fork may replace it, and hooks may add to it."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" not in vars(module) and all(getattr(hook, "transparent", False) for hook in hooks)


def _siblings(module: nn.Module, ops: _Ops) -> list[tuple[nn.Module, Forward]]:
    """The forwards of products that share their input: the first one to be called computes all of them."""
    linears = [getattr(module, name, None) for name in SIBLINGS]
    if not all(type(linear) is nn.Linear for linear in linears):
        return []
    found: list[nn.Linear] = linears  # type: ignore[assignment]
    first = found[0]
    alike = all(
        one.in_features == first.in_features
        and one.weight.dtype == first.weight.dtype
        and (one.bias is None) == (first.bias is None)
        for one in found
    )
    if not alike or first.weight.dtype not in TOLERANCE or not ops.joins(first):
        return []
    shared = _Shared(found, ops.project.project)
    return [(linear, functools.partial(shared.product, i)) for i, linear in enumerate(found)]


class _Shared:
    """Products of one input, computed together when the first is called; a forked pass may replace some of them."""

    def __init__(self, linears: list[nn.Linear], project: Callable[..., list[Tensor]]) -> None:
        self.linears, self.project = linears, project
        self.x: Tensor | None = None
        self.waiting: dict[int, Tensor] = {}

    def product(self, i: int, x: Tensor) -> Tensor:
        """x Wᵢᵀ + bᵢ."""
        if x is self.x and i in self.waiting:
            out = self.waiting.pop(i)
        elif all(isinstance(vars(one).get("forward"), functools.partial) for one in self.linears):
            outs = self.project(x, [one.weight for one in self.linears], [one.bias for one in self.linears])
            self.x, self.waiting = x, dict(enumerate(outs))
            out = self.waiting.pop(i)
        else:
            return F.linear(x, self.linears[i].weight, self.linears[i].bias)
        if not self.waiting:
            self.x = None
        return out


def _relu(module: nn.Module) -> list[tuple[nn.Module, Forward]]:
    """The forwards of a product and of the ReLU after it: cuBLAS applies the ReLU before it writes the product."""
    product, act = getattr(module, "fc1", None), getattr(module, "activation_fn", None)
    if type(product) is not nn.Linear or type(act) is not nn.ReLU or product.bias is None:
        return []
    if not product.weight.is_cuda or product.weight.dtype not in TOLERANCE:
        return []
    done: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        out = torch._addmm_activation(product.bias, x.flatten(0, -2), product.weight.t())  # max(0, x Wᵀ + b)
        done[:] = [out.view(*x.shape[:-1], -1)]
        return done[0]

    def skip(x: Tensor) -> Tensor:
        applied = bool(done) and x is done.pop()
        return x if applied else F.relu(x)

    return [(product, forward), (act, skip)]


def _split(module: nn.Module, tried: dict[Hashable, Any]) -> Forward | None:
    """Falcon's split of queries, keys and values, by slices; None for other modules.

    Falcon's own indexes keys and values with Python lists, which are copied from the host: no graph can capture that.
    """
    own, grouped = getattr(module, SPLIT, None), getattr(module, "new_decoder_architecture", False)
    weight = next(module.parameters(), None)
    if own is None or SPLIT in vars(module) or weight is None or not (grouped or getattr(module, "multi_query", False)):
        return None
    heads, keys, size = (getattr(module, name, None) for name in ("num_heads", "num_kv_heads", "head_dim"))
    if not (heads and keys and size and weight.dtype in TOLERANCE):  # Falcon's first code had other names
        return None

    def split(fused_qkv: Tensor) -> tuple[Tensor, ...]:
        fused = fused_qkv.view(*fused_qkv.shape[:2], keys if grouped else 1, -1, size)
        query, key, value = fused.split([fused.shape[3] - 2, 1, 1], 3)
        if grouped:
            key, value = key.expand_as(query), value.expand_as(query)
        return query.flatten(2, 3), key.flatten(2, 3), value.flatten(2, 3)

    at = (type(module), heads, keys, size, grouped)
    if at not in tried:
        wide = keys * (heads // keys + 2) if grouped else heads + 2
        fused = _random(2, 3, wide * size, like=weight)
        tried[at] = all(torch.equal(a, b) for a, b in zip(own(fused), split(fused), strict=True))
    return split if tried[at] else None


def _rotation(file: ModuleType, module: nn.Module, ops: _Ops) -> list[tuple[ModuleType, Forward, Forward]]:
    """The new rotary function of a file, if the file's own rotates the halves of whole heads."""
    own: Forward = getattr(file, ROTARY)
    like = next(module.parameters(), None)
    if like is None or like.dtype not in TOLERANCE:
        return []
    query, key = (_random(2, heads, 5, 8, like=like, seed=heads) for heads in (4, 2))
    cos, sin = (_random(1, 5, 8, like=like, seed=seed) for seed in (1, 2))
    try:
        pairs = zip(own(query, key, cos, sin), ops.rotary.rotate(query, key, cos, sin), strict=True)
        fits = all(_difference(expected, got) <= TOLERANCE[like.dtype] for expected, got in pairs)
    except (TypeError, ValueError, RuntimeError):
        return []

    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any) -> Any:
        known = not (others or named) and not torch.is_grad_enabled() and q.device == like.device
        if known and q.dim() == 4 and q.dtype == k.dtype == cos.dtype and q.shape[-1] == cos.shape[-1]:
            return ops.rotary.rotate(q, k, cos, sin)
        return own(q, k, cos, sin, *others, **named)

    return [(file, own, rotate)] if fits else []


def _random(*shape: int, like: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(like.device, like.dtype)


def _difference(expected: Any, got: Tensor) -> float:
    """The largest difference, relative to the largest number; infinite where the two cannot be compared."""
    if not isinstance(expected, Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    scale = float(expected.float().abs().max()) or 1.0
    return float((expected.float() - got.float()).abs().max()) / scale
