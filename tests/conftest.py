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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
