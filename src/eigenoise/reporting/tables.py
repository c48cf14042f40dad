"""Tables of text, for a terminal, a document or a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Grid:
    """A table of text: its first column names the rows, ``bold`` marks the best cells."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[tuple[int, int]] = frozenset()  # (row, column)

    def markdown(self) -> str:
        """For a document."""
        lines = [f"**{self.title}**", "", _line(self.header), _line(["---", *["---:"] * (len(self.header) - 1)])]
        for i, row in enumerate(self.rows):
            lines.append(_line([f"**{cell}**" if (i, j) in self.bold else cell for j, cell in enumerate(row)]))
        return "\n".join(lines) + "\n"


def mean_and_error(values: Sequence[float], sign: bool = False) -> str:
    """Mean ± standard error over splits, with as many digits as the numbers need."""
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
    smallest = error or abs(mean)
    digits = 3 if smallest >= 0.001 or smallest == 0 else min(6, 1 - math.floor(math.log10(smallest)))
    shown = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
    return f"{shown} ± {error:.{digits}f}" if len(values) > 1 else shown


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
