"""Atomic file writes: a file appears only when it is complete."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def folder(path: str | os.PathLike) -> Path:
    """Create a folder if needed and check that it is writable, before any work is done.

    Raises:
        OSError: if it is not writable.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        handle, probe = tempfile.mkstemp(dir=path, prefix=".probe.")
        os.close(handle)
        os.unlink(probe)
    except OSError as error:
        raise OSError(f"{path} cannot be written to ({error.strerror}); choose another folder with --out") from error
    return path


def write(path: str | os.PathLike, fill: Callable[[str], None], older: Path | None = None) -> None:
    """Write a temporary file beside ``path``, then move it into place; an existing file remains until then.

    Args:
        path: the file to write.
        fill: a function that writes the content to the path it is given.
        older: where to move an existing file; by default it is replaced.
    """
    path = Path(path)
    sweep(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.")
    try:
        _lock(handle)
        fill(temporary)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are private
        _sync(temporary, os.O_RDWR)
        if older is not None and path.exists():
            os.replace(path, older)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # it may have been moved into place
            os.unlink(temporary)
        raise
    finally:
        os.close(handle)
    if os.name == "posix":  # Windows cannot open folders
        _sync(path.parent or ".", os.O_RDONLY)


def sweep(path: str | os.PathLike) -> None:
    """Remove the temporary files that killed processes left beside ``path``; those of living ones are locked."""
    path = Path(path)
    for temporary in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}"):
        with contextlib.suppress(OSError):  # it is gone, or its process lives
            handle = os.open(temporary, os.O_RDWR)
            try:
                _lock(handle)
                os.unlink(temporary)
            finally:
                os.close(handle)


def _lock(handle: int) -> None:
    """Lock an open file while its process lives.

    Raises:
        OSError: if another process has it.
    """
    if fcntl is not None:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def write_json(path: str | os.PathLike, content: Any) -> None:
    """Write ``content`` as indented JSON; NaN and infinities raise ValueError."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike, *parts: bytes | memoryview, older: Path | None = None) -> None:
    """Write the concatenated ``parts``."""

    def fill(temporary: str) -> None:
        with open(temporary, "wb") as file:
            file.writelines(parts)

    write(path, fill, older)


def _sync(path: str | os.PathLike, mode: int) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
