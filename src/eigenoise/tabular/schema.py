"""The schema of a table: input columns and target, inferred once and saved as JSON."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from eigenoise import checks
from eigenoise.tabular.columns import KINDS, Column, as_numbers, as_texts, check_scalars, is_numeric

if TYPE_CHECKING:
    import pandas as pd

TASKS = ("regression", "classification")
MAX_COLUMNS = 2_000
MAX_CLASSES = 200


@dataclass(frozen=True)
class Schema:
    """Input columns and the target.

    Attributes:
        columns: the input columns.
        target: name of the target column.
        task: ``"regression"`` or ``"classification"``.
        left_out: names of unused columns, each with the reason.
    """

    columns: tuple[Column, ...]
    target: str
    task: str
    left_out: tuple[tuple[str, str], ...] = ()

    @classmethod
    def infer(cls, frame: pd.DataFrame, target: str, task: str | None = None, drop: Sequence[str] = ()) -> Schema:
        """Infer the schema of ``frame``.

        Args:
            frame: the table.
            target: the column to predict.
            task: one of ``TASKS``, or None to infer it: text, booleans and two different numbers are classes.
            drop: columns to leave out.

        Raises:
            ValueError: if a column is missing or unusable, naming it.
        """
        if not frame.columns.is_unique or not all(isinstance(name, str) for name in frame.columns):
            raise ValueError("the table's column names must be unique strings")
        for name in (target, *drop):
            _check_name(name, frame.columns)
        kept = [name for name in frame.columns if name not in set(drop)]
        for name in kept:
            check_scalars(frame[name])
        present = frame[target].dropna()
        if present.empty:
            raise ValueError(f"the target {target!r} is missing in every row")
        task = _infer_task(present) if task is None else checks.choice("task", task, TASKS)
        _check_target(present, task)
        names = [name for name in kept if name != target]
        if not names:
            raise ValueError(f"the table has no column besides the target {target!r} to learn from")
        if len(names) > MAX_COLUMNS:
            raise ValueError(
                f"at most {MAX_COLUMNS:,} columns can be used, got {len(names):,}: leave some out with --drop"
            )
        inferred = [Column.infer(frame[name]) for name in names]
        columns = tuple(column for column in inferred if isinstance(column, Column))
        left_out = tuple((name, why) for name, why in zip(names, inferred, strict=True) if isinstance(why, str))
        if not columns:
            raise ValueError("no column is left to learn from: " + "; ".join(f"{n!r} {why}" for n, why in left_out))
        return cls(columns, target, task, left_out)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Schema:
        """Restore what ``to_json`` returned."""
        columns = tuple(
            Column(c["name"], checks.choice("kind", c["kind"], KINDS), tuple(c["fill"]), c["gaps"], tuple(c["values"]))
            for c in content["columns"]
        )
        left_out = tuple((name, why) for name, why in content["left_out"])
        return cls(columns, content["target"], checks.choice("task", content["task"], TASKS), left_out)

    def to_json(self) -> dict[str, Any]:
        """Return the schema as JSON values."""
        return dataclasses.asdict(self)

    @property
    def num_inputs(self) -> int:
        """The number of inputs that a row becomes."""
        return sum(column.width for column in self.columns)

    def inputs(self, frame: pd.DataFrame) -> np.ndarray:
        """Return finite inputs ``(N, n)``.

        Raises:
            ValueError: naming the column that is missing or holds something else than its kind.
        """
        for column in self.columns:
            _check_name(column.name, frame.columns)
        return np.concatenate([column.encode(frame[column.name]) for column in self.columns], 1)

    def targets(self, frame: pd.DataFrame) -> np.ndarray:
        """Return the targets ``(N,)``: numbers, or labels as text.

        Raises:
            ValueError: if the target is missing or holds something else.
        """
        _check_name(self.target, frame.columns)
        values = frame[self.target]
        return as_numbers(values) if self.task == "regression" else as_texts(values)


def _check_name(name: str, columns: Sequence[str]) -> None:
    if name not in columns:
        close = difflib.get_close_matches(name, list(columns), 1)
        hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(map(repr, list(columns)[:10]))}"
        raise ValueError(f"the table has no column {name!r}; {hint}")


def _infer_task(target: pd.Series) -> str:
    return "regression" if is_numeric(target) and target.nunique() > 2 else "classification"


def _check_target(target: pd.Series, task: str) -> None:
    """Raise ValueError if present values of the target cannot be predicted."""
    distinct, max_classes = target.nunique(), min(MAX_CLASSES, max(2, len(target) // 2))
    if distinct < 2:
        raise ValueError(f"the target {target.name!r} is {target.iloc[0]} in every row: there is nothing to predict")
    if task == "regression":
        as_numbers(target)
    elif distinct > max_classes:
        raise ValueError(
            f"the target {target.name!r} must have at most {max_classes} classes in {len(target):,} rows, got "
            f"{distinct:,} different values"
        )
