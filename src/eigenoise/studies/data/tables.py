"""Tables of numbers, their random splits, and standardising that never looks at the test part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eigenoise import checks


@dataclass(frozen=True)
class Table:
    """Inputs ``x (rows, n)`` and one target ``y (rows,)`` of a regression task."""

    name: str
    x: np.ndarray
    y: np.ndarray


def boston() -> Table:
    """Boston housing, 506 rows and 13 inputs, as bundled in mlxtend (the ``demo`` extra).

    Raises:
        ImportError: if mlxtend is not installed.
    """
    try:
        from mlxtend.data import boston_housing_data
    except ImportError as error:
        raise ImportError("the Boston table comes with mlxtend: pip install 'eigenoise[demo]'") from error
    x, y = boston_housing_data()
    return Table("boston", np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64))


@dataclass(frozen=True)
class Splits:
    """s random splits of a table, each standardised by its own training part.

    Attributes:
        x_train: ``(s, N, n)`` in units of the training part's standard deviation.
        y_train: ``(s, N, 1)``, likewise.
        x_test: ``(s, M, n)``, scaled as the training part is.
        y_test: ``(s, M, 1)``, scaled as the training part is.
        y_mean: ``(s, 1, 1)`` of the training part, in the table's units.
        y_std: ``(s, 1, 1)``, likewise.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    y_mean: Tensor
    y_std: Tensor


Rows = tuple[np.ndarray, np.ndarray]  # indices of the training rows and of the test rows


def random_rows(rows: int, seed: int, test_fraction: float = 0.1) -> Rows:
    """A random split of ``rows`` rows.

    Raises:
        ValueError: if a part would be too small.
    """
    checks.number("test_fraction", test_fraction, open_low=True, high=0.99)
    test_rows = max(1, round(test_fraction * rows))
    if rows - test_rows < 2:
        raise ValueError(f"a split needs at least 3 rows, but {rows} came")
    order = np.random.default_rng(seed).permutation(rows)
    return order[test_rows:], order[:test_rows]


def standardised(table: Table, splits: Sequence[Rows], dtype: torch.dtype = torch.float32) -> Splits:
    """Splits stacked along the first axis, each scaled by its own training part.

    A column that is constant in the training part is only centred.

    Raises:
        ValueError: if there is no split.
    """
    if not splits:
        raise ValueError("at least one split is needed, but none came")
    parts = []
    for train, test in splits:
        (x_train, x_test), _, _ = _standardise(table.x[train], table.x[test])
        (y_train, y_test), mean, std = _standardise(table.y[train, None], table.y[test, None])
        parts.append((x_train, y_train, x_test, y_test, mean[None], std[None]))
    stacked = (torch.as_tensor(np.stack(part), dtype=dtype) for part in zip(*parts, strict=True))
    return Splits(*stacked)


def split(table: Table, seeds: Sequence[int], test_fraction: float = 0.1, dtype: torch.dtype = torch.float32) -> Splits:
    """Random splits, one for each seed, stacked along the first axis and standardised by their training parts.

    Raises:
        ValueError: if there are no seeds, or a part would be empty.
    """
    return standardised(table, [random_rows(len(table.y), seed, test_fraction) for seed in seeds], dtype)


def _standardise(train: np.ndarray, test: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
    mean, std = train.mean(0), train.std(0)
    std = np.where(np.ptp(train, axis=0) > 0, std, 1.0)  # rounding gives a constant column a tiny spread
    return ((train - mean) / std, (test - mean) / std), mean, std
