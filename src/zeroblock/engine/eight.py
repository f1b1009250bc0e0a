"""Products of 8-bit numbers in the layers after the active block (``gemm="fp8"``).

The rows of all points have parted there.  The first point is rounded as it is, every other one as its difference from
the first, and a matrix is rounded anew in every pass, since weights move (see ``ops/eight``).  The embedding, the
layers before the block, the active layer and the head stay in 16 bits, and so do passes without points.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ZeroBlockError, ZeroBlockWarning, unknown
from ..interrupt import uninterrupted
from ..ops.eight import Rounded
from ..ops.shared.dispatch import backend
from ..quantise import quantised_layers
from .anatomy import Anatomy
from .fork import Fork, restore
from .fuse import Fusions

MIN_FP8_TOKENS = 1024
"""The fewest tokens per point with which 8-bit products pay: a shorter row saves less than rounding matrices costs."""
MIN_FP8_WIDTH = 1024
"""The smallest side of a matrix with which 8-bit products pay."""
MULTIPLE = 16
"""Torch's row-wise product requires sides that are multiples of this."""
CAPABILITY = (8, 9)
"""The lowest compute capability of a CUDA device that multiplies 8-bit floats."""
MAX_ERROR = 0.02
"""Largest error of the trial that passes, relative to the reference; both are rounded to bf16."""
MAX_DIFFERENCE_ERROR = 0.2
"""The same for the difference of two points, where the last bit of a sum may be rounded the other way."""
GEMMS = ("fp8",)

Forward = Callable[..., Any]


class Eight:
    """The products of a model's layers, which run in 8 bits during a forked pass.

    Args:
        layers: the layers of the model.
        ops: the version of the operations for the model's device.
    """

    def __init__(self, layers: Sequence[nn.Module], ops: ModuleType) -> None:
        self.layers, self.ops = layers, ops
        self.linears = {id(layer): _wide(layer) for layer in layers}
        """The products of each layer that are wide enough, by the layer's id."""
        self.products = 0
        """Number of 8-bit products so far."""
        self._said = False

    def pays(self, tokens: int) -> bool:
        """Whether rows are long enough."""
        return tokens >= MIN_FP8_TOKENS

    @contextlib.contextmanager
    def running(self, fork: Fork, fusions: Fusions) -> Iterator[None]:
        """Context manager in which the layers after the active block have 8-bit products.

        Args:
            fork: the forked pass, which is entered before.
            fusions: the fused forwards, which are entered before.
        """
        active = {id(module) for module, _ in fork.anatomy.stages(fork.points[0].direction.members)}
        if not self._said and all(id(layer) in active for layer in self.layers if self.linears[id(layer)]):
            self._said = True
            warnings.warn(
                "gemm='fp8' rounds nothing in steps that perturb every layer: leave it out, or take a method of "
                "blocks (mezo_bcd, fzoo_bcd)",
                ZeroBlockWarning,
                stacklevel=8,
            )
        replaced: list[tuple[nn.Module, Forward | None]] = []
        with uninterrupted() as shield:
            try:
                for layer in self.layers:
                    if id(layer) not in active and self.linears[id(layer)]:
                        replaced.append((layer, vars(layer).get("forward")))
                        vars(layer)["forward"] = self._layer(layer, fork, fusions)
                with shield.opened():
                    yield
            finally:
                for layer, before in reversed(replaced):
                    restore(layer, before)

    def _layer(self, layer: nn.Module, fork: Fork, fusions: Fusions) -> Forward:
        """The forward of a layer, which checks in every call whether the layer comes after the block.

        Only then do its products get new forwards: a fused forward notices that one of its products has another
        forward, and calls the modules instead, so the fusions before the block remain in use.
        """
        inner = layer.forward
        linears = [linear for linear in self.linears[id(layer)] if fusions.untouched(linear)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not fork.parted:
                return inner(*args, **kwargs)
            inputs = _Inputs(self.ops, fork.tokens)
            before = [vars(linear).get("forward") for linear in linears]
            with uninterrupted() as shield:
                try:
                    for linear in linears:
                        vars(linear)["forward"] = self._linear(linear, fork, inputs)
                    with shield.opened():
                        return inner(*args, **kwargs)
                finally:
                    for linear, own in zip(linears, before, strict=True):
                        restore(linear, own)

        return forward

    def _linear(self, linear: nn.Linear, fork: Fork, inputs: _Inputs) -> Forward:
        """The forward of one product."""
        inner, rows = linear.forward, len(fork.points) * fork.tokens

        def forward(input: Tensor) -> Tensor:  # as torch names it
            whole = input.dim() == 2 or input.shape[0] == len(fork.points)  # OPT lays the rows end to end
            known = input.dtype == linear.weight.dtype and not torch.is_grad_enabled()
            if not (known and whole and input.numel() == rows * linear.in_features):  # an expert sees only some rows
                return inner(input)  # type: ignore[no-any-return]
            self.products += 1
            y: Tensor = self.ops.product(inputs.rounded(input), self.ops.rounded(linear.weight.detach()))
            self.ops.join_(y, fork.tokens, linear.bias)
            return y.view(*input.shape[:-1], -1)

        return forward


class _Inputs:
    """The last input of a layer's products, rounded once for all products that share it.

    Tensors of inference mode do not count their changes, so they are rounded every time.
    """

    def __init__(self, ops: ModuleType, tokens: int) -> None:
        self.ops, self.tokens = ops, tokens
        self.last: tuple[Tensor, int, Rounded] | None = None

    def rounded(self, x: Tensor) -> Rounded:
        counted = not x.is_inference()
        if counted and self.last is not None and self.last[0] is x and self.last[1] == x._version:
            return self.last[2]
        self.last = None  # free its memory before the next one is made
        made: Rounded = self.ops.rounded(x.reshape(-1, x.shape[-1]), self.tokens)
        if counted:
            self.last = x, x._version, made
        return made


def _wide(layer: nn.Module) -> list[nn.Linear]:
    """The plain linear modules of a layer that are wide enough; packed weights are tensors of a class of their own."""
    linears = [m for m in layer.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    plain = [one for one in linears if type(one.weight) in (nn.Parameter, Tensor)]
    return [one for one in plain if all(map(_pays, (one.in_features, one.out_features)))]


def _pays(size: int) -> bool:
    return size >= MIN_FP8_WIDTH and size % MULTIPLE == 0


def check(gemm: str | None) -> None:
    """Refuse an unknown value of ``gemm``."""
    if gemm is not None and gemm not in GEMMS:
        raise unknown("gemm", gemm, GEMMS)


def find(
    model: nn.Module, anatomy: Anatomy, device: torch.device, *, streams: bool, spread: bool, scattered: bool
) -> Eight:
    """The 8-bit products of a model; refuses a model or a device that cannot have them.

    Args:
        model: a model of any family.
        anatomy: the anatomy of the model.
        device: the device that the model runs on.
        streams: whether its weights rest elsewhere than on the device.
        spread: whether its weights are sharded.
        scattered: whether it lies on several devices.
    """
    refusals = {
        "needs weights that stay on the device: leave out --offload and --memory (zeroblock.shelve)": streams,
        "needs whole weights: leave out --shard and tensor parallelism": spread,
        "needs a model on one device: load it without a device_map": scattered,
        "needs weights in bf16, and these are stored as integers: leave out --weights": bool(quantised_layers(model)),
    }
    for reason, refused in refusals.items():
        if refused:
            raise ZeroBlockError(f"gemm='fp8' {reason}")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CAPABILITY:
        raise ZeroBlockError(
            f"gemm='fp8' needs a CUDA device of capability 8.9 or newer (Ada, Hopper), and the model is on {device}: "
            "leave it out; a run that began with it continues only on such a device, and replays on any"
        )
    eight = Eight(anatomy.layers, backend("eight", "cuda"))
    linears = [linear for some in eight.linears.values() for linear in some]
    if not linears:
        raise ZeroBlockError(
            f"gemm='fp8' takes nn.Linear modules with plain weights, both sides at least {MIN_FP8_WIDTH:,} and "
            f"multiples of {MULTIPLE}, and the layers of {type(model).__name__} have none: leave it out"
        )
    other = next((linear.weight.dtype for linear in linears if linear.weight.dtype != torch.bfloat16), None)
    if other is not None:
        raise ZeroBlockError(
            f"gemm='fp8' needs weights in bf16, which torch's product of scaled rows writes, and these are {other}: "
            "load the model with --dtype bf16"
        )
    _try(eight.ops, device)
    return eight


@torch.no_grad()
def _try(ops: ModuleType, device: torch.device) -> None:
    """Refuse a device on which the 8-bit products do not run, or differ from the reference."""
    tokens, reference = 80, backend("eight", "reference")
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    first = drawn(tokens, 256)
    x = torch.cat([first, first + 0.1 * drawn(tokens, 256), first]).to(device, torch.bfloat16)
    weight, bias = (drawn(*shape).to(device, torch.bfloat16) for shape in ((128, 256), (128,)))
    x[1] = math.nan  # a model that has diverged must not look as if it had not

    def points(some: ModuleType) -> Tensor:
        y = some.join_(some.product(some.rounded(x, tokens), some.rounded(weight)), tokens, bias)
        return y.view(3, tokens, -1).float()  # type: ignore[no-any-return]

    try:
        (a, b, c), (expected, moved, _) = points(ops).cpu(), points(reference).cpu()
    except Exception as reason:  # of torch or of Triton's compiler
        told = " ".join(str(reason).split())[:200]
        raise ZeroBlockError(f"gemm='fp8' does not run on {device} with this torch ({told}): leave it out") from reason
    lost, sound = a[1].isnan().all(), torch.arange(tokens) != 1
    pairs = ((a, expected), (b - a, moved - expected), (c, a))
    errors = [float((got - own)[sound].norm() / own[sound].norm()) for got, own in pairs]
    if not (lost and errors[0] <= MAX_ERROR and errors[1] <= MAX_DIFFERENCE_ERROR and errors[2] == 0):
        told = ", ".join(f"{error:.2g}" for error in errors)
        raise ZeroBlockError(f"gemm='fp8' computes wrong products on {device} (by {told}): leave it out")
