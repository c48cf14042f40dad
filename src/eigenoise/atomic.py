"""Files that appear only when they are complete."""

from __future__ import annotations

import contextlib
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


def write(path: str | os.PathLike, fill: Callable[[str], None]) -> None:
    """Let ``fill`` write a temporary file beside ``path``, then put it in its place; an old file stays until then."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=f".{path.name}.")
    os.close(handle)
    try:
        fill(temporary)
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's files are private, a user's are as the umask says
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # it may be in its place already
            os.unlink(temporary)
        raise


def write_json(path: str | os.PathLike, content: Any) -> None:
    """``content`` as readable JSON; NaN and infinities are refused."""
    write_text(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike, text: str) -> None:
    """A file of text."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """A file of bytes."""
    write(path, lambda temporary: _fill(temporary, content))


def _fill(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
