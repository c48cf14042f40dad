"""The UCI regression sets of the paper, with their canonical splits or random ones."""

from __future__ import annotations

import difflib
import importlib.util
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eigenoise.studies.data.files import DataFileError, cache_folder, fetch_uci
from eigenoise.studies.data.tables import Rows, Splits, Table, boston, standardised


@dataclass(frozen=True)
class Info:
    """Facts about one set that are known before reading it."""

    name: str
    folder: str  # in the source
    rows: int
    inputs: int
    splits: int  # canonical ones
    hidden: int = 50  # units, as in the paper
    batch_size: int = 10


SETS = {
    info.name: info
    for info in (
        Info("boston", "bostonHousing", 506, 13, 20),
        Info("concrete", "concrete", 1030, 8, 20),
        Info("energy", "energy", 768, 8, 20),
        Info("kin8nm", "kin8nm", 8192, 8, 20, batch_size=100),
        Info("naval", "naval-propulsion-plant", 11934, 16, 20, batch_size=100),
        Info("power", "power-plant", 9568, 4, 20, batch_size=100),
        Info("protein", "protein-tertiary-structure", 45730, 9, 5, hidden=100, batch_size=100),
        Info("wine", "wine-quality-red", 1599, 11, 20),
        Info("yacht", "yacht", 308, 6, 20),
        Info("year", "", 515345, 90, 1, hidden=100, batch_size=500),
    )
}
YEAR_FILE, YEAR_SAMPLE = "YearPredictionMSD.txt", "year_sample.npz"
YEAR_TRAIN = 463715  # rows of the official training part; no producer is in both parts


def info(name: str) -> Info:
    """Returns the facts about the set called ``name``.

    Raises:
        ValueError: if there is none, with the nearest name.
    """
    if name not in SETS:
        near = difflib.get_close_matches(name.lower(), SETS, 1, 0.4)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"there is no UCI set {name!r}{hint} The sets are {', '.join(SETS)}")
    return SETS[name]


def presence(name: str, folder: str | os.PathLike | None = None) -> str:
    """Tells whether a set is in the cache: "yes", "no", "a sample" of Year, or "with mlxtend" for bundled Boston."""
    cache, about = cache_folder(folder), info(name)
    if name == "year":
        if (cache / YEAR_FILE).is_file():
            return "yes"
        return "a sample" if (cache / YEAR_SAMPLE).is_file() else "no"
    if (cache / "uci" / about.folder / "data" / "data.txt").is_file():
        return "yes"
    return "with mlxtend" if name == "boston" and importlib.util.find_spec("mlxtend") else "no"


def load(name: str, folder: str | os.PathLike | None = None) -> Table:
    """Loads the table of a set other than Year, inputs and target as published.

    Boston comes from mlxtend if it is not in the cache. Naval predicts column 16 from the 16 before it, as the
    canonical split files say; ``load_naval_turbine`` gives the task of the paper's authors.

    Raises:
        ValueError: for an unknown name or a file that is not a table of numbers.
        DataFileError: if a file is missing or damaged.
    """
    about = info(name)
    if name == "year":
        raise ValueError("Year has an official split and is read with year_splits()")
    if name == "boston" and presence(name, folder) != "yes":
        return boston()
    values = _numbers(about, "data.txt", folder)
    features = _numbers(about, "index_features.txt", folder).astype(int).ravel()
    target = int(_numbers(about, "index_target.txt", folder).ravel()[0])
    return Table(name, values[:, features], values[:, target])


def load_naval_turbine(folder: str | os.PathLike | None = None) -> Table:
    """Loads Naval with the last column as target and the 17 before it as inputs, as the paper's authors do."""
    values = _numbers(info("naval"), "data.txt", folder)
    return Table("naval", values[:, :-1], values[:, -1])


def canonical_rows(name: str, numbers: Sequence[int]) -> list[Rows]:
    """Returns training and test rows of the splits of Hernández-Lobato and Adams (2015), 90 % for training.

    They published index files; the generator that drew them gives the same rows without a download.

    Raises:
        ValueError: if a number is not one of the set's splits.
    """
    about = info(name)
    for number in numbers:
        if not 0 <= number < about.splits:
            raise ValueError(f"split: expected 0 to {about.splits - 1} for {name}, got {number}")
    generator = np.random.RandomState(1)  # numpy promises that this old generator never changes
    orders = [generator.permutation(about.rows) for _ in range(about.splits)]
    end = round(about.rows * 0.9)
    return [(orders[number][:end], orders[number][end:]) for number in numbers]


def canonical_splits(table: Table, numbers: Sequence[int]) -> Splits:
    """Makes the splits of ``canonical_rows``, each standardised by its training part.

    Raises:
        ValueError: if a number is not one of the set's splits.
    """
    return standardised(table, canonical_rows(table.name, numbers))


def year_splits(folder: str | os.PathLike | None = None) -> tuple[Splits, bool]:
    """Loads Year's official split if the full file is in the cache, else the sample; and whether it is only the sample.

    Raises:
        DataFileError: if neither is there.
    """
    cache = cache_folder(folder)
    full, sample = cache / YEAR_FILE, cache / YEAR_SAMPLE
    if full.is_file():
        values = _parse(full, delimiter=",")
        if values.shape != (SETS["year"].rows, SETS["year"].inputs + 1):
            raise DataFileError(f"{full} is not whole: it holds {values.shape} numbers; delete it and fetch it again")
        rows = np.arange(len(values))
        table = Table("year", values[:, 1:], values[:, 0])
        return standardised(table, [(rows[:YEAR_TRAIN], rows[YEAR_TRAIN:])]), False
    if sample.is_file():
        try:
            with sample.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                x = np.concatenate([file["x_train"], file["x_test"]]).astype(np.float64)
                y = np.concatenate([file["y_train"], file["y_test"]]).astype(np.float64)
                train = len(file["y_train"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataFileError(f"{sample} cannot be read: {error}; delete it and fetch again") from error
        rows = np.arange(len(y))
        return standardised(Table("year", x, y), [(rows[:train], rows[train:])]), True
    raise DataFileError(
        f"Year is not in the cache: put YearPredictionMSD.txt from the UCI archive (data set 203) at {full}, "
        "or set EIGENOISE_DATA to a folder that has it"
    )


def _numbers(about: Info, file: str, folder: str | os.PathLike | None) -> np.ndarray:
    return _parse(fetch_uci(f"{about.folder}/data/{file}", folder))


def _parse(path: Path, delimiter: str | None = None) -> np.ndarray:
    try:
        return np.loadtxt(path, ndmin=2, delimiter=delimiter)
    except ValueError as error:
        raise DataFileError(f"{path} is not a table of numbers: {error}") from error
