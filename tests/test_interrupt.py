"""Ctrl-C at every place of the code that holds it back."""

from __future__ import annotations

import functools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from zeroblock import interrupt
from zeroblock.interrupt import uninterrupted


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Whatever a test does, the handler of before it is back."""
    handler, trace = signal.getsignal(signal.SIGINT), sys.gettrace()
    yield
    sys.settrace(trace)
    signal.signal(signal.SIGINT, handler)


def ctrl_c_at(place: int, run: Callable[[], None]) -> int:
    """Run with one Ctrl-C before the given instruction of interrupt.py; how many instructions were counted."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != interrupt.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count - 1 == place:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(None)
    return count


def nested(done: list[str]) -> None:
    """A step as the library takes it: a measurement that may be interrupted, and an update that may not."""
    with uninterrupted() as shield:
        with shield.opened():
            done.append("measure")
        with uninterrupted():
            done.append("half")
            done.append("whole")


def test_ctrl_c_at_every_instruction() -> None:
    """It is raised once, the handler of before is back, and no update is left half done."""
    handler = signal.getsignal(signal.SIGINT)
    places = ctrl_c_at(-1, lambda: nested([]))
    assert places > 100
    for place in range(places):
        done: list[str] = []
        with pytest.raises(KeyboardInterrupt):
            ctrl_c_at(place, functools.partial(nested, done))
        assert signal.getsignal(signal.SIGINT) is handler, place
        assert ("half" in done) == ("whole" in done), place
        assert not interrupt._shields, place
        assert not interrupt.held_back(), place


def test_a_handler_that_only_takes_a_note_hears_of_every_ctrl_c() -> None:
    """Such a handler lets the code go on: the shields that follow must hold back as before."""
    heard: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        heard.append(len(done))

    signal.signal(signal.SIGINT, handler)
    done: list[str] = []
    for place in range(ctrl_c_at(-1, lambda: nested([]))):
        done.clear()
        heard.clear()
        ctrl_c_at(place, lambda: nested(done))
        assert done == ["measure", "half", "whole"], place
        assert heard in ([0], [1], [3]), place  # once, and not between the halves of the update
        assert signal.getsignal(signal.SIGINT) is handler, place


def test_a_ctrl_c_that_was_held_back_is_not_delivered_in_another_thread() -> None:
    caught: list[BaseException] = []

    def other() -> None:
        try:
            with uninterrupted() as shield, shield.opened():
                pass
        except BaseException as error:
            caught.append(error)

    def hold_one_back() -> None:
        with uninterrupted() as shield:
            signal.raise_signal(signal.SIGINT)
            shield.closed = False  # as while the main thread is about to open it
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert interrupt.held_back()

    with pytest.raises(KeyboardInterrupt):
        hold_one_back()
    assert not caught
