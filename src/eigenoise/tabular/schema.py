"""What the columns of a table are, and how they become numbers; known from the table once, kept as JSON."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from functools import cached_property
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

from eigenoise import checks

if TYPE_CHECKING:
    import pandas as pd
    from sklearn.compose import ColumnTransformer

TASKS = ("regression", "classification")
KINDS = ("number", "category", "date")
MOST_VALUES = 30  # of a category; rarer ones are all alike
MOST_COLUMNS = 2_000
MOST_CLASSES = 200
MISSING = "(missing)"
DATE_PARTS = ("days", "month", "weekday", "hour")


@dataclass(frozen=True)
class Column:
    """One input column.

    Attributes:
        name: in the table.
        kind: ``"number"``, ``"category"`` or ``"date"``.
        fill: what stands for missing numbers: the median; of a date one for each of its parts.
        gaps: whether any are missing, which is then an input of its own.
        values: of a category.
    """

    name: str
    kind: str
    fill: tuple[float, ...] = ()
    gaps: bool = False
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schema:
    """Input columns and the target.

    Attributes:
        columns: the inputs.
        target: the target's name.
        task: ``"regression"`` or ``"classification"``.
        left_out: columns that say nothing, and why.
    """

    columns: tuple[Column, ...]
    target: str
    task: str
    left_out: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, frame: pd.DataFrame, target: str, task: str | None = None, drop: Sequence[str] = ()) -> Schema:
        """Find out what the columns of ``frame`` are.

        Args:
            frame: the table.
            target: the column to predict.
            task: one of ``TASKS``, or None to see: text, yes/no and two different numbers are classes.
            drop: columns not to learn from.

        Raises:
            ValueError: if a column is missing, or cannot be learned from or predicted.
        """
        if not frame.columns.is_unique or not all(isinstance(name, str) for name in frame.columns):
            raise ValueError("the table's column names must be texts, each its own")
        for name in (target, *drop):
            _known(name, frame.columns)
        for name in frame.columns:
            if name not in set(drop):
                _single(frame[name])
        goal = frame[target].dropna()
        if goal.empty:
            raise ValueError(f"the target {target!r} is missing in every row")
        task = _task(goal) if task is None else checks.choice("task", task, TASKS)
        _check_goal(goal, target, task)
        names = [name for name in frame.columns if name != target and name not in set(drop)]
        if not names:
            raise ValueError(f"there is no column besides the target {target!r} to learn from")
        if len(names) > MOST_COLUMNS:
            raise ValueError(
                f"the table has {len(names):,} columns to learn from, and at most {MOST_COLUMNS:,} can be: leave some "
                "out with --drop"
            )
        found = [_column(frame[name]) for name in names]
        columns = tuple(column for column in found if isinstance(column, Column))
        left_out = tuple((name, why) for name, why in zip(names, found, strict=True) if isinstance(why, str))
        if not columns:
            raise ValueError("no column is left to learn from: " + "; ".join(f"{n!r} {why}" for n, why in left_out))
        return cls(columns, target, task, left_out)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Schema:
        """What ``to_json`` gave."""
        columns = tuple(
            Column(c["name"], checks.choice("kind", c["kind"], KINDS), tuple(c["fill"]), c["gaps"], tuple(c["values"]))
            for c in content["columns"]
        )
        left_out = tuple((name, why) for name, why in content["left_out"])
        return cls(columns, content["target"], checks.choice("task", content["task"], TASKS), left_out)

    def to_json(self) -> dict[str, Any]:
        """As JSON knows it."""
        return dataclasses.asdict(self)

    @cached_property
    def transformer(self) -> ColumnTransformer:
        """scikit-learn's transformers for the columns; all that they would learn from a table is in the schema."""
        from sklearn.compose import ColumnTransformer
        from sklearn.impute import SimpleImputer
        from sklearn.preprocessing import OneHotEncoder

        steps: list[tuple[str, Any, list[str]]] = []
        for i, column in enumerate(self.columns):
            if column.kind == "category":
                known = OneHotEncoder(categories=[list(column.values)], handle_unknown="ignore", sparse_output=False)
                steps.append((f"{i}", known, [f"{i}"]))
                continue
            for part, fill in zip(_parts(i, column), column.fill, strict=True):
                gaps = SimpleImputer(strategy="constant", fill_value=fill, add_indicator=column.gaps)
                steps.append((part, gaps, [part]))
        return ColumnTransformer(steps).fit(self._example())

    def _example(self) -> pd.DataFrame:
        """Two rows that show the transformers each category, and a gap wherever there are some."""
        import pandas as pd

        content: dict[str, Any] = {}
        for i, column in enumerate(self.columns):
            if column.kind == "category":
                content[f"{i}"] = [column.values[0]] * 2
            else:
                for part, fill in zip(_parts(i, column), column.fill, strict=True):
                    content[part] = [fill, np.nan if column.gaps else fill]
        return pd.DataFrame(content)

    @property
    def inputs_count(self) -> int:
        """How many numbers a row becomes."""
        return len(self.transformer.get_feature_names_out())

    def inputs(self, frame: pd.DataFrame) -> np.ndarray:
        """Numbers ``(N, n)`` without gaps.

        Raises:
            ValueError: naming the column that is missing or holds something else than it did.
        """
        import pandas as pd

        content: dict[str, Any] = {}
        for i, column in enumerate(self.columns):
            _known(column.name, frame.columns)
            values = frame[column.name]
            if column.kind == "number":
                content[f"{i}"] = _numbers(values)
            elif column.kind == "date":
                content |= dict(zip(_parts(i, column), _date_parts(_dates(values)), strict=True))
            else:
                content[f"{i}"] = _texts(values)
        return np.ascontiguousarray(self.transformer.transform(pd.DataFrame(content)), dtype=np.float64)

    def targets(self, frame: pd.DataFrame) -> np.ndarray:
        """The target's values: numbers, or labels as text.

        Raises:
            ValueError: naming the target if it is missing or holds something else.
        """
        _known(self.target, frame.columns)
        values = frame[self.target]
        return _numbers(values) if self.task == "regression" else _texts(values)


def _known(name: str, columns: Sequence[str]) -> None:
    if name not in columns:
        close = difflib.get_close_matches(name, list(columns), 1)
        hint = f"; is it {close[0]!r}?" if close else f"; there are {', '.join(map(repr, list(columns)[:10]))}"
        raise ValueError(f"the table has no column {name!r}{hint}")


def _task(goal: pd.Series) -> str:
    import pandas as pd

    numbers = _are_numbers(goal) and not pd.api.types.is_bool_dtype(goal)
    return "regression" if numbers and goal.nunique() > 2 else "classification"


def _check_goal(goal: pd.Series, target: str, task: str) -> None:
    different = goal.nunique()
    if different < 2:
        raise ValueError(f"the target {target!r} is {goal.iloc[0]} in every row: there is nothing to predict")
    if task == "regression":
        _numbers(goal)
    elif different > min(MOST_CLASSES, max(2, len(goal) // 2)):
        raise ValueError(
            f"the target {target!r} has {different:,} different values in {len(goal):,} rows, which are no classes; at "
            f"most {MOST_CLASSES} can be told apart"
        )


def _column(values: pd.Series) -> Column | str:
    """What a column is, or why it is left out."""
    import pandas as pd

    name = str(values.name)
    present = values.dropna()
    if present.empty:
        raise ValueError(f"the column {name!r} is missing in every row: leave it out with --drop {name!r}")
    gaps = len(present) < len(values)
    if present.nunique() < 2 and not gaps:
        return "is the same in every row"
    if _are_numbers(present):
        return Column(name, "number", (float(np.median(_numbers(present))),), gaps)
    if pd.api.types.is_datetime64_any_dtype(values) or _are_dates(present):
        parts = _date_parts(_dates(present))
        return Column(name, "date", tuple(float(np.median(part)) for part in parts), gaps)
    texts = pd.Series(_texts(values))
    counts = texts.value_counts()
    if len(counts) == len(texts) and len(texts) > MOST_VALUES:
        return "is another text in every row"
    return Column(name, "category", values=tuple(sorted(counts.index[:MOST_VALUES])))


def _parts(place: int, column: Column) -> list[str]:
    """What the columns of numbers are called that a column becomes; by its place, as names may be like each other."""
    return [f"{place}"] if column.kind == "number" else [f"{place} {part}" for part in DATE_PARTS]


def _single(values: pd.Series) -> None:
    """Refuse lists, tables and the like in the fields of a column."""
    if values.dtype != object:
        return
    wrong = next((value for value in values if isinstance(value, (list, tuple, set, dict, np.ndarray))), None)
    if wrong is not None:
        kind = type(wrong).__name__
        raise ValueError(
            f"the column {values.name!r} must hold one value in each row, but a {kind} is in it: leave it out with "
            f"--drop {values.name!r}"
        )


def _are_numbers(values: pd.Series) -> bool:
    """Whether they are numbers, yes or no, exact decimals or spans of time."""
    import pandas as pd

    types = pd.api.types
    if types.is_numeric_dtype(values) or types.is_bool_dtype(values) or types.is_timedelta64_dtype(values):
        return True
    return types.is_object_dtype(values) and all(isinstance(value, (Number, Decimal, timedelta)) for value in values)


def _numbers(values: pd.Series) -> np.ndarray:
    import pandas as pd

    spans = pd.api.types.is_object_dtype(values) and any(isinstance(value, timedelta) for value in values)
    if spans or pd.api.types.is_timedelta64_dtype(values):
        values = pd.to_timedelta(values).dt.total_seconds()
    found = pd.to_numeric(values, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    wrong = np.isnan(found) & values.notna().to_numpy()
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"the column {values.name!r} must hold numbers, but row {row + 1} is {values.iloc[row]!r}")
    if np.isinf(found).any():
        row = int(np.isinf(found).argmax())
        raise ValueError(f"the column {values.name!r} must hold finite numbers, but row {row + 1} is infinite")
    return found


def _texts(values: pd.Series) -> np.ndarray:
    present = values.notna().to_numpy()
    return np.array([_text(v) if there else MISSING for v, there in zip(values, present, strict=True)], dtype=object)


def _text(value: Any) -> str:
    """As in the file: a column of whole numbers with gaps is read as 1.0, 2.0."""
    whole = isinstance(value, (float, np.floating, Decimal)) and float(value).is_integer()
    return str(int(value)) if whole else str(value)


def _are_dates(values: pd.Series) -> bool:
    """Whether all are dates with a year of four digits: "May" and "3-4" can be read as dates, but hardly are."""
    texts = values.astype(str)
    if not texts.str.contains(r"\b(?:19|20)\d\d\b").all() or texts.str.fullmatch(r"[\d.,]*,\d+").any():
        return False  # numbers with a decimal comma are no dates
    return bool(_parse_dates(values).notna().all())


def _parse_dates(values: pd.Series) -> pd.Series:
    import pandas as pd

    texts = values.astype(str)
    day_first = bool(texts.str.match(r"\s*(?:\d\d?\.|(?:1[3-9]|2\d|3[01])[/-])").any())  # 3.5.2022, 25/5/2022
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that formats differ from row to row is not new to the user
        return pd.to_datetime(texts, errors="coerce", format="mixed", utc=True, dayfirst=day_first)


def _dates(values: pd.Series) -> pd.Series:
    found = _parse_dates(values)
    wrong = (found.isna() & values.notna()).to_numpy()
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"the column {values.name!r} must hold dates, but row {row + 1} is {values.iloc[row]!r}")
    return found


def _date_parts(dates: pd.Series) -> list[np.ndarray]:
    """Days since 2000, month, weekday and hour, NaN where there is no date."""
    import pandas as pd

    days = (dates - pd.Timestamp("2000-01-01", tz="UTC")) / pd.Timedelta(days=1)
    parts = [days, dates.dt.month, dates.dt.day_of_week, dates.dt.hour]
    return [part.to_numpy(np.float64, na_value=np.nan) for part in parts]
