"""Progress of a run: bars with the time left in a terminal, plain lines in a file or pipe, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS_BETWEEN_LINES = 10.0


class Task(Protocol):
    """Something in progress."""

    def to(self, done: float, now: str = "", total: float | None = None) -> None:
        """Sets how much is done, what to show beside it and, if given, how much there is to do."""

    def end(self, how: str = "done") -> None:
        """Ends the task."""


class Watch(Protocol):
    """Shows tasks."""

    def task(self, name: str, total: float | None = None) -> Task:
        """Starts a task."""


@contextmanager
def watching(wanted: bool = True) -> Iterator[Watch]:
    """Shows tasks of the block on stderr, if ``wanted``."""
    if not wanted:
        yield Lines(lambda line: None)
        return
    if not sys.stderr.isatty():
        yield Lines(lambda line: print(line, file=sys.stderr, flush=True))
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:12}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[now]}", markup=False),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), redirect_stdout=False) as bars:
        yield _Bars(bars)


class _Bars:
    def __init__(self, bars: Progress):
        self.bars = bars

    def task(self, name: str, total: float | None = None) -> Task:
        return _Bar(self.bars, name, total)


class _Bar:
    def __init__(self, bars: Progress, name: str, total: float | None):
        self.bars, self.name, self.now, self.began = bars, name, "", time.monotonic()
        self.number = bars.add_task(name, total=total, now="")

    def to(self, done: float, now: str = "", total: float | None = None) -> None:
        self.now = now
        self.bars.update(self.number, completed=done, now=now, total=total)  # None leaves it

    def end(self, how: str = "done") -> None:
        """Replaces the bar by a line above the others."""
        self.bars.remove_task(self.number)
        line = _line(self.name, how, self.now, duration(time.monotonic() - self.began))
        self.bars.console.print(line, markup=False, highlight=False)


class Lines:
    """Prints a line for each task every few seconds, and one at its end.

    Args:
        say: prints a line.
        clock: returns seconds.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self.say, self.clock = say, clock

    def task(self, name: str, total: float | None = None) -> Task:
        """Starts a task."""
        return _Text(self, name, total)


class _Text:
    def __init__(self, lines: Lines, name: str, total: float | None):
        self.lines, self.name, self.total, self.now = lines, name, total, ""
        self.began = self.last = lines.clock()
        self.first: tuple[float, float] | None = None  # when, and how much was done: a resumed task does not begin at 0

    def to(self, done: float, now: str = "", total: float | None = None) -> None:
        self.now, self.total, clock = now, self.total if total is None else total, self.lines.clock()
        self.first = self.first or (clock, done)
        if clock - self.last < SECONDS_BETWEEN_LINES:
            return
        self.last = clock
        share = left = ""
        if self.total:
            share = f"{min(1.0, done / self.total):.0%}"
            if self.total >= done > self.first[1]:
                rate = (clock - self.first[0]) / (done - self.first[1])
                left = f"{duration((self.total - done) * rate)} left"
        self.lines.say(_line(self.name, share, now, left))

    def end(self, how: str = "done") -> None:
        self.lines.say(_line(self.name, how, self.now, duration(self.lines.clock() - self.began)))


def _line(name: str, *parts: str) -> str:
    return f"{name}: {', '.join(part for part in parts if part)}"


def duration(seconds: float) -> str:
    """Formats seconds as 7 s, 3:05 min or 2:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest, unit = (*divmod(whole, 60), "min") if whole < 3600 else (*divmod(whole // 60, 60), "h")
    return f"{minutes}:{rest:02} {unit}"
