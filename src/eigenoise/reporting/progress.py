"""Seeing a run: bars with the time left in a terminal, plain lines in a file or pipe, or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress

SECONDS = 10.0  # between two lines


class Task(Protocol):
    """Something that is being done."""

    def to(self, done: float, now: str = "", total: float | None = None) -> None:
        """So much of it is ``done``, and ``now`` says how it goes; with ``total`` how much there is to do at all."""

    def end(self, how: str = "done") -> None:
        """It is over."""


class Watch(Protocol):
    """Where tasks are seen."""

    def task(self, name: str, total: float | None = None) -> Task:
        """A new one."""


@contextmanager
def watching(wanted: bool = True) -> Iterator[Watch]:
    """Within the block tasks are seen on stderr, if ``wanted``."""
    if not wanted:
        yield _Nothing()
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


class _Nothing:
    def task(self, name: str, total: float | None = None) -> Task:
        return self

    def to(self, done: float, now: str = "", total: float | None = None) -> None:
        pass

    def end(self, how: str = "done") -> None:
        pass


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
        """A line above the bars takes its place."""
        self.bars.remove_task(self.number)
        line = _line(self.name, how, self.now, duration(time.monotonic() - self.began))
        self.bars.console.print(line, markup=False, highlight=False)


class Lines:
    """A line for each task now and then, and one when it is done.

    Args:
        say: takes a line.
        clock: seconds from anywhere.
    """

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self.say, self.clock = say, clock

    def task(self, name: str, total: float | None = None) -> Task:
        """A new one."""
        return _Text(self, name, total)


class _Text:
    def __init__(self, lines: Lines, name: str, total: float | None):
        self.lines, self.name, self.total, self.now = lines, name, total, ""
        self.began = self.last = lines.clock()
        self.first: tuple[float, float] | None = None  # when, and how much was done: a resumed task does not begin at 0

    def to(self, done: float, now: str = "", total: float | None = None) -> None:
        self.now, self.total, clock = now, self.total if total is None else total, self.lines.clock()
        self.first = self.first or (clock, done)
        if clock - self.last < SECONDS:
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
    """Such as 7 s, 3:05 min or 2:05 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
