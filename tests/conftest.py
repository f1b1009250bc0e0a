"""Shared set-up: without a GPU the Triton kernels run in Triton's interpreter."""

import os
import shutil
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)  # the workers are the parallelism


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type:
    """Steps may be submitted without a GPU; they end when they are waited for, some waits with Ctrl-C."""

    class Late:
        interrupts = 0
        pace = 1.0

        def __init__(self, enable_timing: bool) -> None: ...

        def elapsed_time(self, later: object) -> float:
            return Late.pace

        def record(self, stream: object) -> None: ...

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            if Late.interrupts:
                Late.interrupts -= 1
                raise KeyboardInterrupt

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Late)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return Late


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
