"""A run: where it happened, the file of its result, and how it hears that it is to stop."""

from __future__ import annotations

import json
import platform
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from eigenoise.version import __version__


def environment() -> dict[str, Any]:
    """Where a result came from."""
    return {
        "eigenoise": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
    }


def finished(path: Path, settings: Mapping[str, Any], form: int) -> dict[str, Any] | None:
    """The result in the file ``path``, or None if there is none yet.

    Args:
        path: of the result.
        settings: that it must be of.
        form: the format's number that this version writes and reads.

    Raises:
        ValueError: if the file cannot be read or is the result of other settings; it is left as it is.
    """
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text())
        if result["format"] != form:
            raise ValueError(f"its format is {result['format']}, this version reads {form}")
        found = result["settings"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result that this version can read ({error}); move it away") from error
    if found != settings:
        raise ValueError(f"{path} is the result of other settings; choose another folder or move it away")
    return result


@contextmanager
def stops() -> Iterator[list[int]]:
    """A list that an interrupt or a request to end is put into, so that a step can be finished first.

    A second interrupt is raised at once. Only the main thread hears signals; in others the list stays empty.
    """
    asked: list[int] = []

    def note(number: int, frame: Any) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as in the background, where an interrupt is for others
            signal.signal(number, note)
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
