"""Files that appear only when they are complete."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def folder(path: str | os.PathLike) -> Path:
    """A folder that exists, made if need be, and that can be written to: found out before work is done, not after.

    Raises:
        OSError: if it cannot, saying where to write instead.
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
    """Let ``fill`` write a temporary file beside ``path``, then put it in its place; an old file stays until then.

    Args:
        path: of the file.
        fill: writes what it is to hold to the path it is given.
        older: where an old file is moved to; by default it is replaced.
    """
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.")
    os.close(handle)
    try:
        fill(temporary)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are private, a user's are as the umask says
        _sync(temporary, os.O_RDWR)
        if older is not None and path.exists():
            os.replace(path, older)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # it may be in its place already
            os.unlink(temporary)
        raise
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _sync(path.parent or ".", os.O_RDONLY)


def sweep(path: str | os.PathLike) -> None:
    """Remove what a process that was killed while writing ``path`` left beside it."""
    path = Path(path)
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 8}"):
        with contextlib.suppress(FileNotFoundError):
            left.unlink()


def write_json(path: str | os.PathLike, content: Any) -> None:
    """``content`` as readable JSON; NaN and infinities are refused."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike, text: str) -> None:
    """A file of text."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike, *parts: bytes | memoryview, older: Path | None = None) -> None:
    """A file of bytes, which may come in parts."""

    def fill(temporary: str) -> None:
        with open(temporary, "wb") as file:
            file.writelines(parts)

    write(path, fill, older)


def _sync(path: str | os.PathLike, mode: int) -> None:
    """Have a file's content, or a folder's names, on the disk and not only on its way there."""
    handle = os.open(path, mode)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
