"""Columns of a table: what they hold, and how they become numbers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

KINDS = ("number", "category", "date")
MAX_CATEGORIES = 30  # of a column; rarer values are encoded as zeros
MISSING = "(missing)"


@dataclass(frozen=True)
class Column:
    """One input column.

    Attributes:
        name: name in the table.
        kind: ``"number"``, ``"category"`` or ``"date"``.
        fill: medians that replace missing numbers: one, or one for each part of a date.
        gaps: whether numbers are missing in the training rows; indicators of missing numbers are then inputs too.
        values: categories.
    """

    name: str
    kind: str
    fill: tuple[float, ...] = ()
    gaps: bool = False
    values: tuple[str, ...] = ()

    @classmethod
    def infer(cls, values: pd.Series) -> Column | str:
        """Return what a column holds, or the reason to leave it out."""
        import pandas as pd

        name = str(values.name)
        present = values.dropna()
        if present.empty:
            raise ValueError(f"the column {name!r} is missing in every row: leave it out with --drop {name!r}")
        gaps = len(present) < len(values)
        if present.nunique() < 2 and not gaps:
            return "is constant"
        if is_numeric(present):
            return cls(name, "number", (float(np.median(as_numbers(present))),), gaps)
        if pd.api.types.is_datetime64_any_dtype(values) or _are_dates(present):
            return cls(name, "date", tuple(float(np.median(part)) for part in _date_parts(present)), gaps)
        texts = as_texts(values)
        counts = pd.Series(texts).value_counts()
        if len(counts) == len(texts) > MAX_CATEGORIES:
            return "has another text in every row"
        return cls(name, "category", values=tuple(sorted(counts.index[:MAX_CATEGORIES])))

    @property
    def width(self) -> int:
        """The number of inputs that the column becomes."""
        return len(self.values) if self.kind == "category" else len(self.fill) * (1 + self.gaps)

    def encode(self, values: pd.Series) -> np.ndarray:
        """Return finite numbers ``(N, width)``.

        Raises:
            ValueError: if the column holds something else than its kind.
        """
        if self.kind == "category":
            index = {value: i for i, value in enumerate(self.values)}
            # Unknown values have the index −1, a row of zeros.
            return np.eye(self.width + 1, self.width)[[index.get(text, -1) for text in as_texts(values)]]
        inputs = []
        for part, fill in zip(
            _date_parts(values) if self.kind == "date" else [as_numbers(values)], self.fill, strict=True
        ):
            missing = np.isnan(part)
            inputs += [np.where(missing, fill, part), missing] if self.gaps else [np.where(missing, fill, part)]
        return np.stack(inputs, 1).astype(np.float64)


def check_scalars(values: pd.Series) -> None:
    """Raise ValueError if a field of the column holds a list or another container."""
    if values.dtype != object:
        return
    wrong = next((value for value in values if isinstance(value, (list, tuple, set, dict, np.ndarray))), None)
    if wrong is not None:
        raise ValueError(
            f"the column {values.name!r} must hold one value in each row, got a {type(wrong).__name__}: leave it out "
            f"with --drop {values.name!r}"
        )


def is_numeric(values: pd.Series) -> bool:
    """Return whether the values are numbers, booleans, exact decimals or time spans."""
    from pandas.api import types

    if types.is_numeric_dtype(values) or types.is_bool_dtype(values) or types.is_timedelta64_dtype(values):
        return True
    return types.is_object_dtype(values) and all(isinstance(value, (Number, Decimal, timedelta)) for value in values)


def as_numbers(values: pd.Series) -> np.ndarray:
    """Return the values as finite numbers ``(N,)``, NaN where they are missing and seconds for time spans.

    Raises:
        ValueError: naming the first row that holds something else.
    """
    import pandas as pd

    spans = pd.api.types.is_object_dtype(values) and any(isinstance(value, timedelta) for value in values)
    if spans or pd.api.types.is_timedelta64_dtype(values):
        values = pd.to_timedelta(values).dt.total_seconds()
    numbers = pd.to_numeric(values, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    _reject(values, np.isnan(numbers) & values.notna().to_numpy(), "numbers")
    _reject(values, np.isinf(numbers), "finite numbers")
    return numbers


def as_texts(values: pd.Series) -> np.ndarray:
    """Return the values as text ``(N,)``, ``MISSING`` where they are missing."""
    present = values.notna().to_numpy()
    return np.array([_text(v) if there else MISSING for v, there in zip(values, present, strict=True)], dtype=object)


def _text(value: Any) -> str:
    """Write integers as in the file: pandas reads a column of integers with gaps as 1.0, 2.0."""
    whole = isinstance(value, (float, np.floating, Decimal)) and float(value).is_integer()
    return str(int(value)) if whole else str(value)


def _reject(values: pd.Series, wrong: np.ndarray, expected: str) -> None:
    """Raise ValueError for the first row that is ``wrong (N,)``."""
    if wrong.any():
        row = int(wrong.argmax())
        value = values.iloc[row]
        got = value if isinstance(value, float) else repr(value)
        raise ValueError(f"the column {values.name!r} must hold {expected}, got {got} in row {row + 1}")


def _are_dates(values: pd.Series) -> bool:
    """Return whether all values are dates with a year of four digits: "May" and "3-4" parse as dates too."""
    texts = values.astype(str)
    if not texts.str.contains(r"\b(?:19|20)\d\d\b").all() or texts.str.fullmatch(r"[\d.,]*,\d+").any():
        return False  # numbers with a decimal comma are not dates
    return bool(_parse_dates(values).notna().all())


def _parse_dates(values: pd.Series) -> pd.Series:
    import pandas as pd

    texts = values.astype(str)
    day_first = bool(texts.str.match(r"\s*(?:\d\d?\.|(?:1[3-9]|2\d|3[01])[/-])").any())  # 3.5.2022, 25/5/2022
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # formats may differ between rows
        return pd.to_datetime(texts, errors="coerce", format="mixed", utc=True, dayfirst=day_first)


def _date_parts(values: pd.Series) -> list[np.ndarray]:
    """Return days since 2000, month, weekday and hour, ``(N,)`` each and NaN where the date is missing."""
    import pandas as pd

    dates = _parse_dates(values)
    _reject(values, (dates.isna() & values.notna()).to_numpy(), "dates")
    days = (dates - pd.Timestamp("2000-01-01", tz="UTC")) / pd.Timedelta(days=1)
    parts = [days, dates.dt.month, dates.dt.day_of_week, dates.dt.hour]
    return [part.to_numpy(np.float64, na_value=np.nan) for part in parts]
