"""The last two good states of a run, each in a file with a checksum, so that a stopped or killed run resumes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eigenoise import storage
from eigenoise.parallel.ranks import Ranks

MAGIC = b"eigenoise checkpoint 1\n"
SAVE_SECONDS, SAVE_STEPS = 60.0, 1000  # between saves, whichever comes first

State = dict[str, Any]


class Checkpoints:
    """The files ``path`` and, one save older, ``path`` with ``.before`` at its end.

    A save writes a third file, syncs it to the disk and only then renames: whenever the process ends, one complete
    state exists. The names alone tell which file is newer, so clocks may go backwards.

    Args:
        path: the newer file.
        settings: settings of the run as JSON values; files of other settings are refused.
        seconds: time between saves.
        steps: steps between saves.
        ranks: the processes that train together: they stop together, and rank 0 saves for all.

    Attributes:
        seconds_spent: training time of the run so far, over all sessions.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        *,
        seconds: float = SAVE_SECONDS,
        steps: int = SAVE_STEPS,
        ranks: Ranks | None = None,
    ):
        self.path, self.older = path, path.with_name(path.name + ".before")
        self.settings, self.seconds, self.steps = dict(settings), seconds, steps
        self.ranks, self.writes = ranks, ranks is None or ranks.rank == 0
        self.seconds_spent = 0.0

    @property
    def exist(self) -> bool:
        """Whether there is a file to resume from."""
        return self.path.exists() or self.older.exists()

    def resume(self, load_state: Callable[[State], None]) -> None:
        """Passes the newest good state to ``load_state``, if there is one.

        Raises:
            ValueError: if no file is good or they belong to another run; they are left unchanged.
        """
        storage.sweep(self.path)
        problems: list[str] = []
        damaged: list[Path] = []
        for path in (path for path in (self.path, self.older) if path.exists()):
            try:
                content = read(path)
            except ValueError as error:
                problems.append(str(error))
                damaged.append(path)
                continue
            if content["settings"] != self.settings:
                raise ValueError(
                    f"{path} is a stopped run of other settings ({_differences(content['settings'], self.settings)}); "
                    "finish it with those, delete it, or choose another folder"
                )
            try:
                load_state(content["state"])
            except Exception as error:
                raise ValueError(f"{path} cannot be used ({error}); delete it to restart this run") from error
            self._set_aside(damaged)
            if problems:
                warnings.warn(f"{problems[0]}; the run resumes from the state before it", RuntimeWarning, stacklevel=2)
            self.seconds_spent = float(content["seconds"])
            return
        if problems:
            raise ValueError(f"{'; '.join(problems)}; delete it to restart this run")

    def _set_aside(self, damaged: Sequence[Path]) -> None:
        """Renames damaged files, which the next save would otherwise move over a good one."""
        if self.writes:
            for path in damaged:
                os.replace(path, path.with_name(path.name + ".damaged"))

    def save(self, state: State) -> None:
        """Writes the current state; the newest file becomes the older one."""
        buffer = io.BytesIO()
        content = {"settings": json.dumps(self.settings), "state": state, "seconds": self.seconds_spent}
        torch.save(content, buffer)
        payload = buffer.getbuffer()
        head = MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n"
        storage.write_bytes(self.path, head, payload, older=self.older)

    def remove(self) -> None:
        """Deletes the files, once the run is finished."""
        if self.writes:
            storage.sweep(self.path)
            self.path.unlink(missing_ok=True)
            self.older.unlink(missing_ok=True)

    def saving(self, steps: Iterable[int], state: Callable[[], State]) -> Iterator[int]:
        """Yields from ``steps``, saving every so often and at the end.

        SIGINT and SIGTERM let the current step finish, save, and raise KeyboardInterrupt. A save that fails, as on a
        full disk, warns: the run continues, and the previous files stay.
        """
        began = last = time.monotonic()
        before, unsaved = self.seconds_spent, 0
        with stop_requests() as requests:
            for step in steps:
                yield step
                now, unsaved = time.monotonic(), unsaved + 1
                self.seconds_spent = before + now - began
                if requests if self.ranks is None else self.ranks.any(bool(requests)):
                    if self.writes:
                        self.save(state())
                    raise KeyboardInterrupt
                if now - last >= self.seconds or unsaved >= self.steps:
                    self._try_to_save(state, step)
                    last, unsaved = now, 0
        if unsaved:  # testing may take long, and may be stopped
            self._try_to_save(state, step)

    def _try_to_save(self, state: Callable[[], State], step: int) -> None:
        if not self.writes:
            return
        try:
            self.save(state())
        except OSError as error:
            warnings.warn(
                f"{self.path} could not be written after step {step} ({error}); the run continues, and would resume "
                "from the previous state if it were stopped",
                RuntimeWarning,
                stacklevel=3,
            )


def _differences(there: Any, here: Mapping[str, Any]) -> str:
    """What two runs' settings differ in, as text."""
    there = there if isinstance(there, Mapping) else {}
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return ", ".join(f"{name}: {there.get(name)!r} there, {here.get(name)!r} now" for name in names)


def read(path: Path) -> State:
    """Reads a checkpoint: plain values and tensors, no code.

    Raises:
        ValueError: if the file is damaged or not a checkpoint.
    """
    content = path.read_bytes()
    digest, payload = content[len(MAGIC) : len(MAGIC) + 64], memoryview(content)[len(MAGIC) + 65 :]
    if not content.startswith(MAGIC):
        raise ValueError(f"{path} is no checkpoint of this version")
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise ValueError(f"{path} is damaged: its checksum does not match its content")
    try:
        checkpoint = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, dict) or not {"settings", "state", "seconds"} <= set(checkpoint):
            raise ValueError("expected settings, state and seconds")
        return {**checkpoint, "settings": json.loads(checkpoint["settings"])}
    except Exception as error:
        raise ValueError(f"{path} is no checkpoint of this version ({error})") from error


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in a list, so that the current step can finish first.

    A second SIGINT raises at once. Only the main thread receives signals; in others the list stays empty.
    """
    requests: list[int] = []

    def note(number: int, frame: Any) -> None:
        if requests and number == signal.SIGINT:
            raise KeyboardInterrupt
        requests.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:  # a background job ignores interrupts, which are meant for others
            signal.signal(number, note)
    try:
        yield requests
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def digest(state: Any) -> str:
    """Returns a SHA-256 of all tensors and values in nested dicts and lists: equal only for bit-identical states."""
    sha = hashlib.sha256()
    for name, leaf in leaves("", state):
        sha.update(f"\0{name}\0".encode())
        if isinstance(leaf, Tensor):
            tensor = leaf.detach().cpu().contiguous()
            sha.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        else:
            sha.update(repr(leaf).encode())
    return sha.hexdigest()


def leaves(name: str, state: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values in nested dicts and lists with their dotted names, and the length of each dict and list."""
    if not isinstance(state, (Mapping, list, tuple)):
        yield name, state
        return
    yield f"{name}#", len(state)
    for key, value in state.items() if isinstance(state, Mapping) else enumerate(state):
        yield from leaves(f"{name}.{key}", value)
