"""Nothing goes wrong in silence: a model, an objective and an optimizer that no longer fit together say so."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroblock as zb
from toy import Tiny, next_token, same, snapshot
from zeroblock import ZeroBlockError, ZeroBlockWarning
from zeroblock.direction import Mode
from zeroblock.watch import ZERO_STEPS

TOKENS = torch.arange(7)
Build = Callable[..., zb.ZeroOrder]
Objective = Callable[[nn.Module], Callable[[], Any]]


def take(optimizer: zb.ZeroOrder, closure: Callable[[], Any], steps: int) -> None:
    for _ in range(steps):
        optimizer.step(closure)


def loss_of(logits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, TOKENS.roll(-1))


def other_model(model: nn.Module) -> Callable[[], Any]:
    return next_token(copy.deepcopy(model))


def detached_copy(model: nn.Module) -> Callable[[], Any]:
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    return lambda: loss_of(torch.func.functional_call(model, weights, (TOKENS,)))


def computed_once(model: nn.Module) -> Callable[[], Any]:
    loss = next_token(model)().detach()
    return lambda: loss


def cached(model: nn.Module) -> Callable[[], Any]:
    """Reads the weights in the first step only."""
    losses: list[Tensor] = []

    def closure() -> Tensor:
        if len(losses) < 2:
            losses.append(next_token(model)())
        return losses[-1] * 1.0

    return closure


# An objective that no step can change


@pytest.mark.parametrize(("objective", "steps"), [(other_model, 1), (detached_copy, 1), (computed_once, ZERO_STEPS)])
@pytest.mark.parametrize(
    "build",
    [
        zb.mezo,
        zb.mezo_bcd,
        zb.lozo,
        lambda model, lr: zb.mezo_bcd(model, lr, restore="subtract"),
        lambda model, lr: zb.mezo_bcd(model, lr, partition=zb.linears),
    ],
    ids=["mezo", "mezo_bcd", "lozo", "subtract", "linears"],
)
def test_an_objective_that_reads_no_weights_is_an_error(build: Build, objective: Objective, steps: int) -> None:
    model = Tiny()
    optimizer, closure, before = build(model, 1e-2), objective(model), snapshot(model)
    with pytest.raises(ZeroBlockError, match=r"read none of the model's weights .* very model .* loss anew"):
        take(optimizer, closure, steps)
    torch.testing.assert_close(snapshot(model), before)


def test_every_kind_of_block_method_notices_a_loss_that_was_cached() -> None:
    model = Tiny()
    for optimizer, closure in ((zb.mezo_bcd(model, 0.0), cached(model)), (zb.mezo(model, 0.0), cached(model))):
        optimizer.step(closure)
        with pytest.raises(ZeroBlockError, match="read none"):
            optimizer.step(closure)


def test_an_objective_in_steps_may_stand_still() -> None:
    """Accuracy hardly ever changes; its coefficients are exactly zero although it reads every weight."""
    model = Tiny()
    optimizer = zb.mezo_bcd(model, 1e-3, eps=1e-6)
    micro = [lambda: float((model(TOKENS).argmax(-1) == TOKENS).float().mean())] * 2
    for _ in range(2 * ZERO_STEPS + 5):
        optimizer.step(micro)
        assert not any(optimizer.record.coeffs)


def test_a_block_that_nothing_reads_is_named_once() -> None:
    model = Tiny(tied=False)
    model.spare, model.other = nn.Linear(6, 2), nn.Linear(6, 2)
    optimizer = zb.mezo_bcd(model, 1e-3, schedule=zb.Descending())
    with pytest.warns(ZeroBlockWarning, match=r"reads no weight of block 'other'.*requires_grad_\(False\)"):
        optimizer.step(next_token(model))
    take(optimizer, next_token(model), 2 * len(optimizer.blocks))


def test_compiled_code_is_left_alone_and_suspected_when_nothing_changes() -> None:
    model = Tiny()
    fast = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = zb.mezo_bcd(model, 1e-3)
    take(optimizer, lambda: loss_of(fast(TOKENS)), 7)
    assert optimizer.record.coeffs[0] != 0
    taken = torch.compile(copy.deepcopy(model), backend="eager")
    optimizer = zb.mezo_bcd(taken, 1e-3)
    with pytest.warns(ZeroBlockWarning, match=f"coefficients of {ZERO_STEPS} steps in a row are exactly 0"):
        take(optimizer, lambda: loss_of(fast(TOKENS)), ZERO_STEPS)


def test_ctrl_c_in_a_watched_closure_leaves_no_mode_behind() -> None:
    model = Tiny()

    def interrupted() -> None:
        torch.overrides._pop_mode()  # as torch does while a mode handles a function
        raise KeyboardInterrupt

    def interrupted_later() -> None:
        Mode().__enter__()  # one that was not left
        raise KeyboardInterrupt

    def suspended() -> None:
        self = torch.overrides._pop_mode_temporarily()  # the name that it has within contextlib
        self.__enter__()
        raise KeyboardInterrupt

    closures = (interrupted, interrupted_later, suspended)
    for build, closure in itertools.product((zb.mezo_bcd, zb.mezo), closures):
        optimizer, before = build(model, 1e-3), snapshot(model)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(closure)
        assert torch.overrides._get_current_function_mode_stack() == []
        assert same(snapshot(model), before)


# A model that is no longer the one that the optimizer was built on


def frozen(model: Tiny) -> None:
    model.norm.requires_grad_(False)


def unfrozen(model: Tiny) -> None:
    model.layers[0].requires_grad_(True)


def adapted(model: Tiny) -> None:
    peft = pytest.importorskip("peft")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["up"]))


def frozen_whole(model: Tiny) -> None:
    model.requires_grad_(False)


def with_a_new_head(model: Tiny) -> None:
    model.head = nn.Linear(6, 7, bias=False)


def with_more_words(model: Tiny) -> None:
    model.embed = nn.Embedding(9, 6)


def tied(model: Tiny) -> None:
    model.head.weight = model.embed.weight


def assigned(model: Tiny) -> None:
    model.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()}, assign=True)


def emptied(model: Tiny) -> None:
    model.to("meta")


def offloaded(model: Tiny) -> None:
    pytest.importorskip("accelerate").cpu_offload(model, execution_device="cpu")


def halved(model: Tiny) -> None:
    model.bfloat16()


def reshaped(model: Tiny) -> None:
    for p in model.parameters():
        p.data = p.detach().repeat(2, *(1 for _ in p.shape[1:]))


CHANGES = [
    (frozen, r"'norm.weight' \(and 1 more\) was frozen after the optimizer was built"),
    (unfrozen, r"'layers.0.norm.weight' \(and 5 more\) became trainable after the optimizer was built"),
    (adapted, "PEFT was applied .* call get_peft_model first"),
    (frozen_whole, r"'embed.weight' \(and 15 more\) was frozen"),
    (with_a_new_head, "no longer holds 'head.weight': a new head"),
    (with_more_words, "no longer holds 'embed.weight': .*resize_token_embeddings"),
    (tied, "no longer holds 'head.weight': .*change of tying"),
    (assigned, r"no longer holds 'embed.weight' .*load_state_dict\(assign=True\)"),
    (emptied, r"'embed.weight' \(and 15 more\) was moved to the meta device .*keep the weights loaded"),
    (offloaded, r"'embed.weight' \(and 15 more\) was moved to the meta device .*offloaded by Accelerate"),
    (halved, r"was torch.float32 of .* and is torch.bfloat16 of .* first change the model, then build the optimizer"),
    (reshaped, r"was torch.float32 of \(7, 6\) .* is torch.float32 of \(14, 6\)"),
]


@pytest.mark.parametrize("build", [zb.mezo, zb.mezo_bcd_adam], ids=["mezo", "mezo_bcd_adam"])
@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_model_that_changed_is_refused_at_the_next_step(
    change: Callable[[Tiny], None], message: str, build: Build
) -> None:
    for steps in (0, 2):
        model = Tiny(tied=False)
        model.layers[0].requires_grad_(False)
        optimizer = build(model, 1e-3)
        take(optimizer, next_token(model), steps)
        change(model)
        for _ in range(2):  # not only once
            with pytest.raises(ZeroBlockError, match=message):
                optimizer.step(lambda: pytest.fail("the objective was measured"))


def test_a_weight_that_a_module_without_any_takes_over_is_noticed() -> None:
    """As many places hold as many weights as before; only the places are others."""
    model = nn.Module()
    model.a, model.b = nn.Module(), nn.Module()
    model.a.w = nn.Parameter(torch.ones(3))
    optimizer = zb.mezo(model, 1e-3)
    del model.a.w
    model.b.w = nn.Parameter(torch.ones(3))
    with pytest.raises(ZeroBlockError, match=r"no longer holds 'a\.w'"):
        optimizer.step(lambda: model.b.w.sum())


def test_changes_that_do_no_harm_are_allowed() -> None:
    def trained(change: Callable[[Tiny, int], None]) -> dict[str, Tensor]:
        model = Tiny()
        optimizer = zb.mezo_bcd(model, 1e-2)
        for step in range(4):
            change(model, step)
            optimizer.step(next_token(model))
        return {name: p for name, p in snapshot(model).items() if "extra" not in name}

    def change(model: Tiny, step: int) -> None:
        model.embed.requires_grad_(False).requires_grad_(True)  # and back
        model.to("cpu").train(step % 2 == 0)
        setattr(model, f"extra{step}", nn.Linear(2, 2).requires_grad_(False))
        model.register_buffer("count", torch.tensor(step))

    assert same(trained(change), trained(lambda model, step: None))


@pytest.mark.gpu
@pytest.mark.parametrize("build", [zb.mezo_bcd_adam, lambda m, lr: zb.lozo(m, lr, interval=4, fold=2)])
def test_a_model_may_move_to_the_device_before_the_first_step(build: Build) -> None:
    """As accelerator.prepare(model, optimizer) does."""
    ends = []
    for late in (False, True):
        model = Tiny() if late else Tiny().cuda()
        optimizer = build(model, 1e-2)
        model.cuda()
        take(optimizer, next_token(model), 4)
        ends.append(snapshot(model))
    assert same(*ends)
    model.cpu()
    with pytest.raises(ZeroBlockError, match=r"moved from cuda:0 to cpu in the middle of a run: .*state_dict\(\)"):
        optimizer.step(next_token(model))


# Weights that cannot move


class Packed(Tensor):
    """Two weights to the byte, as quantisation libraries wrap them: the dtype that it shows is not the one it has."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Packed:
        return Tensor._make_wrapper_subclass(cls, (*data.shape[:-1], 2 * data.shape[-1]), dtype=torch.float32)

    def __init__(self, data: Tensor) -> None:
        self.stored = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].stored)
        raise NotImplementedError(func)


def test_packed_weights_are_in_no_block() -> None:
    model = Tiny()
    packed = Packed(torch.zeros(5, 3, dtype=torch.uint8))
    model.layers[1]["up"].weight = nn.Parameter(packed)
    for use in (zb.layers, zb.whole, lambda model: zb.mezo(model, 1e-3)):
        with pytest.raises(ZeroBlockError, match=r"'layers.1.up.weight' is packed as Packed .*get_peft_model"):
            use(model)
    for weight in (packed, torch.zeros(5, 3, dtype=torch.int8)):
        model.layers[1]["up"].weight = nn.Parameter(weight, requires_grad=False)
        assert not any("layers.1.up.weight" in block.params for block in zb.layers(model))
        with pytest.warns(
            ZeroBlockWarning, match=r"1 packed weights, the first 'layers.1.up.weight', .* other 20 .*peft"
        ):
            zb.mezo_bcd(model, 1e-3)
    model.requires_grad_(False)
    with pytest.raises(ZeroBlockError, match="its weights are packed: train an adapter"):
        zb.mezo_bcd(model, 1e-3)
    peft = pytest.importorskip("peft")
    with_adapter = peft.get_peft_model(model, peft.LoraConfig(target_modules=["down"]))
    optimizer = zb.mezo_bcd(with_adapter, 1e-3)
    assert all("lora_" in name for block in optimizer.blocks for name in block.params)


def test_offloaded_weights_are_refused_with_the_fix() -> None:
    model = Tiny(tied=False)
    offloaded(model)
    with pytest.raises(ZeroBlockError, match=r"'embed.weight' is offloaded by Accelerate.*without device_map='auto'"):
        zb.mezo_bcd(model, 1e-3)


def test_a_frozen_base_may_be_offloaded() -> None:
    model = Tiny(tied=False)
    offloaded(model.requires_grad_(False))
    model.head = nn.Linear(6, 7, bias=False)
    optimizer = zb.mezo(model, 1e-2)
    take(optimizer, lambda: loss_of(model(TOKENS)), 3)  # the hooks put new tensors into the model in every call
    assert optimizer.record.coeffs[0] != 0


# Closures that train by themselves


def backward(model: nn.Module, run: Callable[[Tensor], None] = Tensor.backward) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        with torch.enable_grad():
            loss = next_token(model)()
            run(loss)
        return loss.detach()

    return closure


def torch_style(model: nn.Module) -> Callable[[], Tensor]:
    """As torch.optim.LBFGS wants it; without gradients backward() would fail with a message of torch's."""

    def closure() -> Tensor:
        loss = next_token(model)()
        loss.backward()
        return loss

    return closure


@pytest.mark.parametrize("build", [zb.mezo, zb.mezo_bcd], ids=["mezo", "mezo_bcd"])
def test_backward_in_a_closure_is_refused(build: Build) -> None:
    model = Tiny()
    before = snapshot(model)
    for closure in (backward(model), torch_style(model)):
        with pytest.raises(ZeroBlockError, match=r"runs backward\(\).*return the loss.*automatic_optimization = False"):
            build(model, 1e-2).step(closure)
    assert same(snapshot(model), before)


def test_gradients_that_appear_later_are_noticed() -> None:
    model = Tiny()
    optimizer = zb.mezo_bcd(model, 1e-2)
    next_token(model)().backward()  # gradients of an earlier time are the user's own
    take(optimizer, next_token(model), len(optimizer.blocks))
    before = snapshot(model)
    for closure, _ in itertools.product((backward(model), backward(model, torch.autograd.backward)), range(2)):
        with pytest.raises(ZeroBlockError, match=r"runs backward\(\)"):
            optimizer.step(closure)
    assert same(snapshot(model), before)


def test_gradients_that_a_closure_turns_on_cost_memory() -> None:
    model = Tiny()

    def closure() -> Tensor:
        with torch.enable_grad():
            return next_token(model)()

    with pytest.warns(ZeroBlockWarning, match=r"turns gradients on \(leave torch.enable_grad"):
        zb.mezo_bcd(model, 1e-2).step(closure)


def test_a_loss_from_outside_the_closure_is_named() -> None:
    """It is the same at every point, so that the step measures nothing."""
    model = Tiny()
    loss = next_token(model)()
    with pytest.warns(ZeroBlockWarning, match=r"computed outside the closure, .*\(compute it inside\)"):
        zb.mezo_bcd(model, 1e-2).step(lambda: loss)


def test_gradients_of_inputs_are_the_objectives_own_business() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def sensitivity() -> Tensor:
        x = torch.ones(3, requires_grad=True)
        with torch.enable_grad():
            y = model(x).square().sum()
        return torch.autograd.grad(y, x)[0].norm()

    names = [name for name, _ in model.named_parameters()]
    for partition in (zb.whole, [names[:2], names[2:]]):
        optimizer = zb.ZeroOrder(model, 1e-3, partition=partition)
        for _ in range(3):
            optimizer.step(sensitivity)
            assert optimizer.record.coeffs[0] != 0


# Parts that are set too late


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rule", zb.Adam()),
        ("subspace", zb.LowRank(2)),
        ("interval", 3),
        ("fold", 2),
        ("seed", 1),
        ("restore", "subtract"),
        ("rounding", zb.Rounding.NEAREST),
        ("distribution", list(zb.Distribution)[-1]),
        ("model", Tiny()),
        ("blocks", ()),
    ],
)
def test_what_the_state_depends_on_is_fixed(name: str, value: object) -> None:
    optimizer = zb.mezo_bcd(Tiny(), 1e-2)
    before = getattr(optimizer, name)
    with pytest.raises(ZeroBlockError, match=f"{name} is fixed when the optimizer is built.*build another optimizer"):
        setattr(optimizer, name, value)
    assert getattr(optimizer, name) is before


def test_the_learning_rate_is_that_of_the_next_step() -> None:
    model = Tiny()
    optimizer = zb.mezo_bcd(model, 1e-2)
    optimizer.lr = 1e-3
    optimizer.step(next_token(model))
    assert optimizer.record.lr == optimizer.lr == optimizer.param_groups[0]["lr"] == 1e-3
