"""Views, which show a run as it happens: live on a terminal, in plain lines elsewhere, or not at all."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ..errors import shown
from ..task.metric import is_loss

if TYPE_CHECKING:
    from rich.console import Console

    from ..evaluate.evaluator import Evaluation
    from ..evaluate.measurement import Measurement
    from ..journal import Record
    from .move import Moves

MAX_NOTE = 4000
"""Maximum characters of a printed note."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Args:
        step: steps taken.
        steps: steps of the whole run.
        loss: the smoothed training loss.
        block: the name of the last active block.
        rate: recent steps per second.
        moved: size of the step relative to the weights of its block; None if unknown.
        spent: seconds of this session so far.
        allowed: time limit of the session in seconds; None if there is none.
    """

    step: int
    steps: int
    loss: float
    block: str
    rate: float
    moved: float | None = None
    spent: float = 0.0
    allowed: float | None = None

    @property
    def left(self) -> float:
        """Seconds left for the steps, without evaluations."""
        return (self.steps - self.step) / self.rate if self.rate else 0.0

    @property
    def timed(self) -> bool:
        """Whether the session will end at its time limit, before the last step."""
        return self.allowed is not None and (not self.rate or self.left > self.allowed - self.spent)

    @property
    def share(self) -> tuple[float, float]:
        """The amount done and the total: in seconds if the time limit ends the session, else in steps."""
        if self.allowed is not None and self.timed:
            return min(self.spent, self.allowed), self.allowed
        return self.step, self.steps

    @property
    def where(self) -> str:
        """The step as text, with the total unless the time limit ends the session.

        >>> Progress(10, 20, 0.5, "b", 2.0).where, Progress(10, 9000, 0.5, "b", 2.0, None, 61, 600).where
        ('10/20', '10')
        """
        return f"{self.step}" if self.timed else f"{self.step}/{self.steps}"

    @property
    def time(self) -> str:
        """The time as text: the time left for the steps, or the part of the time limit that has passed.

        >>> Progress(10, 20, 0.5, "b", 2.0).time, Progress(10, 9000, 0.5, "b", 2.0, None, 61, 600).time
        ('0:05 left', '1:01 of 10:00')
        """
        done, whole = self.share
        return f"{clock(done)} of {clock(whole)}" if self.timed else f"{clock(self.left)} left"


class Meter:
    """Smooths the numbers of the steps.

    Args:
        steps: steps of the whole run.
        blocks: the names of the blocks.
        moves: computes the relative sizes of the steps.
    """

    def __init__(self, steps: int, blocks: tuple[str, ...], moves: Moves | None = None) -> None:
        self.steps, self.blocks, self.moves = steps, blocks, moves
        self._loss: float | None = None
        self._seconds: float | None = None
        self._last: float | None = None
        self._began = 0.0
        self._minutes: float | None = None

    def begin(self, minutes: float | None) -> None:
        """Start the clock of a session that ends after this many minutes; None for no time limit."""
        self._began, self._minutes = time.monotonic(), minutes

    def recall(self, records: Iterable[Record]) -> None:
        """Replay the records of an earlier session, on which the sizes of later steps depend."""
        if self.moves is not None:
            for record in records:
                self.moves.next(record.block, record.lr, record.coeffs)

    def pause(self) -> None:
        """Exclude the time until the next step from the speed."""
        self._last = None

    def step(self, record: Record) -> Progress:
        """Update the numbers after a step."""
        now = time.perf_counter()
        if record.loss == record.loss:  # a NaN would stay forever
            self._loss = record.loss if self._loss is None else 0.98 * self._loss + 0.02 * record.loss
        if self._last is not None:
            took = now - self._last
            self._seconds = took if self._seconds is None else 0.95 * self._seconds + 0.05 * took
        self._last = now
        loss = float("nan") if self._loss is None else self._loss
        speed = 1 / self._seconds if self._seconds else 0.0
        moved = self.moves.next(record.block, record.lr, record.coeffs) if self.moves else None
        progress = Progress(record.step + 1, self.steps, loss, self.blocks[record.block], speed, moved)
        if self._minutes is None:
            return progress
        return replace(progress, spent=time.monotonic() - self._began, allowed=60 * self._minutes)


class View(Protocol):
    """Shows a run; the run calls these methods."""

    def note(self, text: str) -> None:
        """Show a line that stays on the screen."""

    def step(self, progress: Progress) -> None:
        """Show a step that was taken."""

    def replaying(self, step: int, steps: int) -> None:
        """Show the progress of replaying the steps of an earlier session."""

    def evaluating(self, step: int, split: str, done: int, n: int) -> None:
        """Show the progress of an evaluation."""

    def measured(self, measurement: Measurement) -> None:
        """Show the result of an evaluation."""

    def baseline(self, measurement: Measurement) -> None:
        """Remember an evaluation before training, to show with later ones."""

    def close(self) -> None:
        """End the view."""


class Quiet:
    """Shows nothing."""

    def note(self, text: str) -> None:
        pass

    def step(self, progress: Progress) -> None:
        pass

    def replaying(self, step: int, steps: int) -> None:
        pass

    def evaluating(self, step: int, split: str, done: int, n: int) -> None:
        pass

    def measured(self, measurement: Measurement) -> None:
        pass

    def baseline(self, measurement: Measurement) -> None:
        pass

    def close(self) -> None:
        pass


class Lines(Quiet):
    """Plain lines: every evaluation, and a step now and then.

    Args:
        console: the console to print to.
    """

    every = 10.0
    """Seconds between two lines about steps."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._next = 0.0
        self._baseline: dict[str, Evaluation] = {}

    def note(self, text: str) -> None:
        self.console.print(shown(text, MAX_NOTE), markup=False, highlight=False, soft_wrap=True)

    def step(self, progress: Progress) -> None:
        if progress.rate and self._due():
            self.show(progress)

    def replaying(self, step: int, steps: int) -> None:
        begun = self._next > 0  # the run itself reports the start
        if self._due() and begun:
            self.note(f"replayed {step}/{steps}")

    def _due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self.every
        return True

    def show(self, progress: Progress) -> None:
        """Show a step."""
        self.note(f"step {progress.where}  {progress.time}  {step_line(progress, peak_memory())}")

    def measured(self, measurement: Measurement) -> None:
        if measurement.step == 0:
            self.baseline(measurement)
        self.note(measurement_line(measurement, self._baseline.get(measurement.split)))

    def baseline(self, measurement: Measurement) -> None:
        self._baseline[measurement.split] = measurement.evaluation


class Live(Lines):
    """A progress bar with the numbers of the step below it and the evaluations above."""

    every = 0.1

    def __init__(self, console: Console) -> None:
        from rich.console import Group
        from rich.live import Live as Area
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar
        from rich.text import Text

        super().__init__(console)
        self._bar = Bar(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[done]}"),
            TextColumn("{task.fields[left]}"), console=console,
        )  # fmt: skip
        self._train = self._bar.add_task("training", total=None, done="", left="", visible=False)
        self._other = self._bar.add_task("", total=None, done="", left="", visible=False)
        self._text = Text(no_wrap=True, overflow="ellipsis")
        self._area = Area(Group(self._bar, self._text), console=console, transient=True, refresh_per_second=10)

    def show(self, progress: Progress) -> None:
        self._area.start()
        done, whole = progress.share
        self._bar.update(
            self._train, total=whole, completed=done, done=progress.where, left=progress.time, visible=True
        )
        self._text.plain = step_line(progress, peak_memory())

    def replaying(self, step: int, steps: int) -> None:
        if self._due() or step == steps:
            self._beside("replaying", step, steps)

    def evaluating(self, step: int, split: str, done: int, n: int) -> None:
        self._beside(f"{split} at {step}", done, n)

    def _beside(self, what: str, done: int, n: int) -> None:
        """Update the second bar, which shows work other than training."""
        self._area.start()  # not earlier, so that a failure before the first number does not touch the terminal
        self._bar.update(self._other, description=what, total=n, completed=done, done=f"{done}/{n}", visible=done < n)

    def measured(self, measurement: Measurement) -> None:
        self._bar.update(self._other, visible=False)
        super().measured(measurement)

    def close(self) -> None:
        self._area.stop()


def view(quiet: bool, json: bool) -> View:
    """Choose the view that suits the output; with ``json``, standard output is left to the result."""
    if quiet:
        return Quiet()
    from rich.console import Console

    console = Console(stderr=json)
    return Live(console) if console.is_terminal else Lines(console)


def step_line(progress: Progress, memory: int) -> str:
    """Write the numbers of a step in a line.

    Args:
        progress: the progress of the run.
        memory: the peak memory, in bytes.

    >>> step_line(Progress(10, 20, 0.5, "model.layers.3", 2.0), 10**9)
    'loss 0.5000  block model.layers.3  2.00 steps/s  peak 1.0 GB'
    >>> step_line(Progress(10, 20, 0.5, "model.layers.3", 2.0, 0.0042), 10**9)
    'loss 0.5000  block model.layers.3 moved by 0.42 %  2.00 steps/s  peak 1.0 GB'
    """
    speed = f"{progress.rate:.2f} steps/s  peak {memory / 1e9:.1f} GB"
    moved = "" if progress.moved is None else f" moved by {100 * progress.moved:.2g} %"
    return f"loss {progress.loss:.4f}  block {progress.block}{moved}  {speed}"


def clock(seconds: float) -> str:
    """Format a time as minutes and seconds, with hours if needed.

    >>> clock(61), clock(7322)
    ('1:01', '2:02:02')
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def measurement_line(measurement: Measurement, before: Evaluation | None = None) -> str:
    """Write an evaluation in a line.

    Args:
        measurement: the evaluation.
        before: the evaluation of the same split before training, shown in parentheses with later ones.
    """
    result = measurement.evaluation
    value, loss = f"{100 * result.value:.1f} %", f"{result.loss:.4f}"
    if before is not None and measurement.step:
        value += f" (was {100 * before.value:.1f} %)"
        loss += f" (was {before.loss:.4f})"
    exact = "" if result.exact_match is None else f"  exact match {100 * result.exact_match:.1f} %"
    numbers = [f"{result.metric} {value}{exact}", f"loss {loss}"]
    if is_loss(result.metric):  # free text: the loss says more
        numbers.reverse()
    return f"step {measurement.step}  {measurement.split} {'  '.join(numbers)}  n {result.n}  {result.seconds:.1f} s"


def peak_memory() -> int:
    """Peak memory so far in bytes: of the GPU if one is in use, else of the process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
