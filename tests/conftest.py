"""Shared set-up: without a GPU the Triton kernels run in Triton's interpreter."""

import collections
import contextlib
import importlib
import itertools
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a script; tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

with contextlib.suppress(ImportError):  # a machine lent for its GPU may not have it
    import hypothesis

    hypothesis.settings.register_profile("steady", deadline=None)  # a busy machine is no failure
    hypothesis.settings.load_profile("steady")


def _prepare_once_per_launch() -> None:
    """Halve the time of Triton's interpreter, which prepares its language anew for every function a kernel calls."""
    from triton.runtime import interpreter

    prepare, launch, prepared = interpreter._patch_lang, interpreter.GridExecutor.__call__, set[int]()

    def once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in prepared:
            return interpreter._LangPatchScope()  # with nothing to restore
        prepared.add(module)
        return prepare(function)

    def launched(*arguments: Any, **options: Any) -> Any:
        prepared.clear()  # the end of the last launch restored the language
        return launch(*arguments, **options)

    interpreter._patch_lang = once
    interpreter.GridExecutor.__call__ = launched


if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError, AttributeError):  # no Triton, or another version: it is a matter of time only
        _prepare_once_per_launch()

if os.environ.get("PYTEST_XDIST_WORKER"):
    torch.set_num_threads(1)  # the workers are the parallelism


@pytest.fixture(autouse=True)
def _torch_stays_as_it_was() -> Iterator[None]:
    """A test that leaves gradients off, or a function mode on, breaks others, far from itself."""
    yield
    on, modes = torch.is_grad_enabled(), torch.overrides._get_current_function_mode_stack()
    torch.set_grad_enabled(True)
    for _ in modes:
        torch.overrides._pop_mode()
    assert on, "gradients are off after this test"
    assert not modes, "a function mode is left on torch's stack after this test"


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


# The quick tier: everything but the test functions named in slow.txt, which `make slow` writes by measuring.
SLOW = Path(__file__).with_name("slow.txt")
SLOW_S = 3.0
"""Seconds of processor time, all parameters of a test function together, from which on it is slow."""
BEGAN = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests that slow.txt names")
    parser.addoption("--write-slow", action="store_true", help="measure the tests and write slow.txt")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.getoption("quick") or config.getoption("write_slow"):
        for name in ("torch._dynamo", "transformers.models.llama.modeling_llama"):  # else the first user pays for it
            importlib.import_module(name)
    quick, slow = config.getoption("quick"), set(SLOW.read_text().split())
    wheel = "wheel" in config.option.markexpr  # make wheel-test alone installs the wheel

    def leave_out(item: pytest.Item) -> bool:
        if item.get_closest_marker("wheel"):
            return not wheel
        return quick and (_function(item.nodeid) in slow or item.get_closest_marker("slow") is not None)

    left_out = {item for item in items if leave_out(item)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


TOGETHER = {
    "tests/bench/test_bench_step.py": "bench",
    "tests/docs/test_site.py": "site",
    "tests/examples/": "trl",
    "tests/integrations/": "trl",
    "tests/journal/test_hub.py": "hub",
    "tests/journal/test_journal_crash.py": "crash",
    "tests/ranks/": "ranks",
    "tests/report/test_html.py": "browser",
    "tests/test_fold.py": "fold",
    "tests/test_parts.py": "parts",
    "tests/train/test_ranks_run.py": "train ranks",
}
"""By how a path begins, the group of its tests. They share something that takes seconds, so one worker runs them."""


@pytest.hookimpl(optionalhook=True)  # xdist may not be there
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests of a group; the groups come first, and the other tests go to whichever worker is free.

    xdist 3.8 has groups of its own, but writes their names into a field that pytest 9 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    if config.getoption("dist") != "loadgroup":
        return None
    assert all((config.rootpath / begin).exists() for begin in TOGETHER), "TOGETHER names files that are gone"

    class Together(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((group for begin, group in TOGETHER.items() if nodeid.startswith(begin)), nodeid)

    return Together(config, log)


def _function(nodeid: str) -> str:
    """The name of a test function, whatever file it is in and whatever its parameters are."""
    return nodeid.partition("[")[0].rpartition("::")[2]


def _processor_s() -> float:
    """Processor seconds of this process and of those it has waited for: hardly longer on a busy machine."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[BEGAN] = _processor_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    yield
    item.user_properties.append(("processor_s", _processor_s() - item.stash[BEGAN]))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not (config.getoption("quick") or config.getoption("write_slow")):
        return
    taken: collections.Counter[str] = collections.Counter()
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if getattr(report, "when", None) == "teardown":
            taken[_function(report.nodeid)] += dict(report.user_properties).get("processor_s", 0.0)
    limit = SLOW_S if config.getoption("write_slow") else 2 * SLOW_S  # a measurement varies
    slow = sorted(name for name, seconds in taken.items() if seconds >= limit)
    if config.getoption("write_slow"):
        SLOW.write_text("".join(f"{name}\n" for name in slow))
        return
    text = "".join(path.read_text() for path in SLOW.parent.rglob("test_*.py"))
    gone = [name for name in SLOW.read_text().split() if f"def {name}(" not in text]
    for names, fault in ((slow, "slow, but not in slow.txt"), (gone, "in slow.txt, but no test has this name")):
        if names:
            terminalreporter.write_line(f"{fault} (bring it up to date with: make slow): {', '.join(names)}")
