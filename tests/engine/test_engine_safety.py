"""Nothing of a pass is left behind: not by Ctrl-C while it is undone, not by a second thread."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import torch
from decoder import BATCH, LABELS, decoder

import zeroblock as zb
from toy import same, snapshot
from zeroblock.engine import Engine, fork
from zeroblock.engine.attention import attending
from zeroblock.engine.pack import pack


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_a_fork_is_undone_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes inside the clean-up, when half of the replaced forwards are still in place."""
    model = decoder("llama-tied")
    engine, optimizer, before = Engine(model), zb.mezo_bcd(model, lr=1e-3), snapshot(model)
    cached, switch = torch.is_autocast_cache_enabled(), torch.set_autocast_cache_enabled

    def interrupted(enabled: bool) -> None:
        if enabled == cached:
            interrupt()
        switch(enabled)

    monkeypatch.setattr(torch, "set_autocast_cache_enabled", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(engine.objective(BATCH, LABELS))
    monkeypatch.undo()
    assert torch.is_autocast_cache_enabled() == cached
    assert not [module for module in model.modules() if "forward" in vars(module)]
    assert optimizer.steps == 0
    assert same(snapshot(model), before)


class Config:
    """Ctrl-C comes while its attention is put back."""

    def __init__(self, interrupts: bool) -> None:
        self.name, self.interrupts = "sdpa", interrupts

    @property
    def _attn_implementation(self) -> str:
        return self.name

    @_attn_implementation.setter
    def _attn_implementation(self, name: str) -> None:
        if name == "sdpa" and self.interrupts:
            interrupt()
        self.name = name


def test_ctrl_c_while_attention_is_put_back_leaves_none_replaced() -> None:
    configs = [Config(True), Config(False), Config(False)]
    with pytest.raises(KeyboardInterrupt), attending(configs, pack(BATCH)):
        assert {config.name for config in configs} == {"zeroblock"}
    assert {config.name for config in configs} == {"sdpa"}


def test_ctrl_c_within_a_pass_is_heard_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clean-up waits for nothing, and the pass does not wait for its end."""
    model = decoder("llama-tied")
    engine, optimizer = Engine(model), zb.mezo_bcd(model, lr=1e-3)
    reached = []
    head = model.lm_head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        interrupt()
        reached.append(1)
        return head(hidden)

    monkeypatch.setattr(model.lm_head, "forward", forward)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(engine.objective(BATCH, LABELS))
    monkeypatch.undo()
    assert not reached
    assert not [module for module in model.modules() if "forward" in vars(module)]


def in_another_thread(run) -> BaseException | None:
    errors: list[BaseException | None] = []

    def target() -> None:
        try:
            run()
            errors.append(None)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    return errors[0]


@pytest.mark.parametrize("use", ["scores", "objective", "step"])
def test_a_second_thread_is_refused_while_a_model_is_measured(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama-tied")
    engine, optimizer, other = Engine(model), zb.mezo_bcd(model, lr=1e-3), zb.mezo_bcd(model, lr=1e-3)
    uses = {
        "scores": lambda: engine.scores(BATCH),
        "objective": lambda: engine.objective(BATCH, LABELS)(),
        "step": lambda: other.step(engine.objective(BATCH, LABELS)),
    }
    errors = []
    head = model.lm_head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not errors:
            errors.append(None)
            errors[0] = in_another_thread(uses[use])
        return head(hidden)

    expected = decoder("llama-tied")
    zb.mezo_bcd(expected, lr=1e-3).step(Engine(expected).objective(BATCH, LABELS))
    monkeypatch.setattr(model.lm_head, "forward", forward)
    optimizer.step(engine.objective(BATCH, LABELS))
    monkeypatch.undo()
    assert isinstance(errors[0], zb.ZeroBlockError)
    assert "one thread at a time" in str(errors[0])
    assert same(snapshot(model), snapshot(expected))
    assert in_another_thread(uses[use]) is None  # afterwards the model is free again


def test_a_plain_forward_in_a_second_thread_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a forked layer, when its weights are those of a point."""
    model = decoder("llama-tied")
    engine, before, errors = Engine(model), snapshot(model), []
    optimizer = zb.mezo_bcd(model, lr=0.0, schedule=zb.Ascending())
    tokens = torch.tensor([[3, 4, 5]])
    norm = model.model.layers[0].input_layernorm.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is threading.main_thread():
            errors.append(in_another_thread(lambda: model(tokens)))
        return norm(hidden)

    while optimizer.blocks[optimizer.block].name != "model.layers.0":
        optimizer.step(engine.objective(BATCH, LABELS))
    monkeypatch.setattr(model.model.layers[0].input_layernorm, "forward", forward)
    optimizer.step(engine.objective(BATCH, LABELS))
    monkeypatch.undo()
    assert len(errors) >= 2
    assert all(isinstance(error, zb.ZeroBlockError) for error in errors), errors
    assert same(snapshot(model), before)
    assert in_another_thread(lambda: model(tokens)) is None


def test_a_second_ctrl_c_while_weights_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("llama-tied")
    engine, before = Engine(model), snapshot(model)
    optimizer = zb.mezo_bcd(model, lr=0.0, schedule=zb.Ascending())
    while optimizer.blocks[optimizer.block].name != "model.layers.0":
        optimizer.step(engine.objective(BATCH, LABELS))
    norm = model.model.layers[0].input_layernorm
    shields = []
    plain = fork.uninterrupted

    @contextlib.contextmanager
    def interrupted():
        with plain() as shield:
            shields.append(1)
            if len(shields) == 2:  # the first is the pass itself, the second the clean-up of the layer
                interrupt()
            yield shield

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        interrupt()
        return hidden

    monkeypatch.setattr(norm, "forward", forward)
    monkeypatch.setattr(fork, "uninterrupted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step(engine.objective(BATCH, LABELS))
    monkeypatch.undo()
    assert len(shields) >= 2
    assert same(snapshot(model), before)


def test_a_plain_closure_holds_the_model_too() -> None:
    model = decoder("llama-tied")
    engine, optimizer = Engine(model), zb.mezo_bcd(model, lr=1e-3)
    objective, errors = engine.objective(BATCH, LABELS), []

    def closure() -> torch.Tensor:
        errors.append(in_another_thread(lambda: engine.scores(BATCH)))
        return objective()

    optimizer.step(closure)
    assert all(isinstance(error, zb.ZeroBlockError) for error in errors)
    assert len(errors) == 2
