"""What a run that was stopped or killed goes on from: its last two good states, each in a file with a checksum."""

from __future__ import annotations

import hashlib
import io
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eigenoise import storage
from eigenoise.parallel.ranks import Ranks
from eigenoise.studies.runs import stops

MAGIC = b"eigenoise checkpoint 1\n"
SECONDS, STEPS = 300.0, 1000  # between saves, whichever comes first

TakeOver = Callable[[dict[str, Any]], None]


class Checkpoints:
    """The files ``path`` and, one save older, ``path`` with ``.before`` at its end.

    A save writes a third file, makes it durable, and only then renames: whenever the process ends, one whole state is
    there. Which file is newer is said by their names alone, so clocks may go backwards.

    Args:
        path: of the newer file.
        marks: what run it is of; files with others are refused.
        seconds: between saves.
        steps: between saves.
        ranks: the processes of a run that is one of several: they stop together, and the first one saves for all.

    Attributes:
        spent: the seconds that the run took so far, in all its sittings.
    """

    def __init__(
        self, path: Path, marks: str, *, seconds: float = SECONDS, steps: int = STEPS, ranks: Ranks | None = None
    ):
        self.ranks = ranks
        self.path, self.older = path, path.with_name(path.name + ".before")
        self.marks, self.seconds, self.steps = marks, seconds, steps
        self.spent = 0.0

    @property
    def exist(self) -> bool:
        """Whether there is a file to go on from."""
        return self.path.exists() or self.older.exists()

    def resume(self, take_over: TakeOver) -> None:
        """Let ``take_over`` have the newest good state, if there is one.

        Raises:
            ValueError: if no file is good or they are of another run; they are left as they are.
        """
        storage.sweep(self.path)
        problems, damaged = [], []
        for path in (path for path in (self.path, self.older) if path.exists()):
            try:
                kept = read(path)
            except ValueError as error:
                problems.append(str(error))
                damaged.append(path)
                continue
            if kept["settings"] != self.marks:
                raise ValueError(
                    f"{path} is a stopped run of other settings; finish it with those, delete it, or choose another "
                    "folder"
                )
            try:
                take_over(kept["state"])
            except Exception as error:
                raise ValueError(f"{path} cannot be used ({error}); delete it to start this run anew") from error
            self._put_aside(damaged)
            if problems:
                warnings.warn(f"{problems[0]}; the run goes on from the state before it", RuntimeWarning, stacklevel=2)
            self.spent = float(kept["seconds"])
            return
        if problems:
            raise ValueError(f"{'; '.join(problems)}; delete it to start this run anew")

    def _put_aside(self, damaged: Sequence[Path]) -> None:
        """Rename damaged files, which the next save would put in the place of a good one."""
        if self.writes:
            for path in damaged:
                os.replace(path, path.with_name(path.name + ".damaged"))

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes."""
        return self.ranks is None or self.ranks.rank == 0

    def save(self, state: dict[str, Any]) -> None:
        """Write the state of now; what was newest becomes the older file."""
        content = {"settings": self.marks, "state": state, "seconds": self.spent}
        buffer = io.BytesIO()
        torch.save(content, buffer)
        payload = buffer.getbuffer()
        head = MAGIC + hashlib.sha256(payload).hexdigest().encode() + b"\n"
        storage.write_bytes(self.path, head, payload, older=self.older)

    def remove(self) -> None:
        """The run is finished."""
        if not self.writes:
            return
        storage.sweep(self.path)
        self.path.unlink(missing_ok=True)
        self.older.unlink(missing_ok=True)

    def kept(self, steps: Iterable[int], state: Callable[[], dict[str, Any]]) -> Iterator[int]:
        """The numbers of ``steps`` as they are done, saving every so often and at the end.

        An interrupt or a request to end (SIGINT, SIGTERM) lets the step be finished, saves, and raises
        KeyboardInterrupt. A save that fails, as on a full disk, is warned about: the run goes on, and the files of
        before stay.
        """
        began = last = time.monotonic()
        before, unsaved = self.spent, 0
        with stops() as asked:
            for step in steps:
                yield step
                now, unsaved = time.monotonic(), unsaved + 1
                self.spent = before + now - began
                if asked if self.ranks is None else self.ranks.any(bool(asked)):
                    if self.writes:
                        self.save(state())
                    raise KeyboardInterrupt
                if now - last >= self.seconds or unsaved >= self.steps:
                    self._try_to_save(state, step)
                    last, unsaved = now, 0
        if unsaved:  # what follows may take long, and may be stopped
            self._try_to_save(state, step)

    def _try_to_save(self, state: Callable[[], dict[str, Any]], step: int) -> None:
        if not self.writes:
            return
        try:
            self.save(state())
        except OSError as error:
            warnings.warn(
                f"{self.path} could not be written after step {step} ({error}); the run goes on, and would go on from "
                "the state before if it were stopped",
                RuntimeWarning,
                stacklevel=3,
            )


def read(path: Path) -> dict[str, Any]:
    """What a file holds: plain values and tensors, no code.

    Raises:
        ValueError: if it is not whole or not a checkpoint.
    """
    content = path.read_bytes()
    digest, payload = content[len(MAGIC) : len(MAGIC) + 64], memoryview(content)[len(MAGIC) + 65 :]
    if not content.startswith(MAGIC):
        raise ValueError(f"{path} is no checkpoint of this version")
    if hashlib.sha256(payload).hexdigest().encode() != digest:
        raise ValueError(f"{path} is damaged: its checksum is not that of its content")
    try:
        kept = torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
        if not isinstance(kept, dict) or not {"settings", "state", "seconds"} <= set(kept):
            raise ValueError("it holds something else")
    except Exception as error:
        raise ValueError(f"{path} is no checkpoint of this version ({error})") from error
    return kept


def digest(state: Any) -> str:
    """A SHA-256 of all tensors and values in nested dicts and lists: equal only for equal states, bit for bit."""
    found = hashlib.sha256()
    for name, leaf in _leaves("", state):
        found.update(f"\0{name}\0".encode())
        if isinstance(leaf, Tensor):
            whole = leaf.detach().cpu().contiguous()
            found.update(f"{whole.dtype}{tuple(whole.shape)}".encode())
            found.update(whole.reshape(-1).view(torch.uint8).numpy().data)
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def _leaves(name: str, state: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(state, Mapping):
        yield f"{name}#", len(state)
        for key, value in state.items():
            yield from _leaves(f"{name}.{key}", value)
    elif isinstance(state, (list, tuple)):
        yield f"{name}#", len(state)
        for i, value in enumerate(state):
            yield from _leaves(f"{name}.{i}", value)
    else:
        yield name, state
