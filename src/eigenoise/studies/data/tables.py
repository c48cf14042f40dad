"""Tables of numbers, their random splits, and standardising by the training part alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eigenoise import checks
from eigenoise.tabular.rows import Scale


@dataclass(frozen=True)
class Table:
    """Inputs ``x (rows, n)`` and one target ``y (rows,)`` of a regression task."""

    name: str
    x: np.ndarray
    y: np.ndarray


def boston() -> Table:
    """Loads Boston housing, 506 rows and 13 inputs, as bundled in mlxtend (the ``demo`` extra).

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
    """s splits of a table, each standardised by its training part.

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
    """Splits ``rows`` rows at random.

    Raises:
        ValueError: if a part would be too small.
    """
    checks.number("test_fraction", test_fraction, open_low=True, high=0.99)
    test_rows = max(1, round(test_fraction * rows))
    if rows - test_rows < 2:
        raise ValueError(f"rows: expected at least 3 to split, got {rows}")
    order = np.random.default_rng(seed).permutation(rows)
    return order[test_rows:], order[:test_rows]


def standardised(table: Table, splits: Sequence[Rows], dtype: torch.dtype = torch.float32) -> Splits:
    """Stacks splits along the first axis, each standardised by its training part.

    A column that is constant in the training part is only centred.

    Raises:
        ValueError: if there is no split.
    """
    if not splits:
        raise ValueError("splits: expected at least one, got none")
    x, y = (torch.as_tensor(values, dtype=torch.float64) for values in (table.x, table.y[:, None]))
    parts = []
    for train, test in splits:
        weight = torch.ones(len(train), dtype=torch.float64)
        x_scale, y_scale = Scale.fit(x[train], weight), Scale.fit(y[train], weight)
        scaled = [
            scale.standardise(values[rows]) for rows in (train, test) for scale, values in ((x_scale, x), (y_scale, y))
        ]
        parts.append((*scaled, y_scale.mean[None], y_scale.std[None]))
    return Splits(*(torch.stack(part).to(dtype) for part in zip(*parts, strict=True)))


def split(table: Table, seeds: Sequence[int], test_fraction: float = 0.1, dtype: torch.dtype = torch.float32) -> Splits:
    """Makes a random split for each seed, standardised by its training part.

    Raises:
        ValueError: if there are no seeds, or a part would be empty.
    """
    return standardised(table, [random_rows(len(table.y), seed, test_fraction) for seed in seeds], dtype)
