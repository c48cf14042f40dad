"""Tables of text for a terminal, a document or an HTML page, and tables of scores with standard errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

EMPTY = "–"


@dataclass(frozen=True)
class Grid:
    """A table of text: its first column names the rows, ``bold`` marks the best cells."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    bold: frozenset[tuple[int, int]] = frozenset()  # (row, column)

    def markdown(self) -> str:
        """Returns the table in Markdown."""
        lines = [f"**{self.title}**", "", _line(self.header), _line(["---", *["---:"] * (len(self.header) - 1)])]
        for i, row in enumerate(self.rows):
            lines.append(_line([f"**{cell}**" if (i, j) in self.bold else cell for j, cell in enumerate(row)]))
        return "\n".join(lines) + "\n"


def markdown(grids: Iterable[Grid]) -> str:
    """Returns all tables in Markdown, one below the other."""
    return "\n".join(grid.markdown() for grid in grids)


@dataclass(frozen=True)
class Cell:
    """A score as it was measured several times.

    Attributes:
        values: one value for each split or seed; without any the cell shows ``remark``.
        paper: the paper's number, shown in brackets.
        remark: why there are no values.
    """

    values: Sequence[float] = ()
    paper: str = ""
    remark: str = EMPTY

    def text(self, digits: int | None = None, signed: bool = False) -> str:
        """Returns mean ± standard error, and the paper's number in brackets."""
        if not len(self.values):
            return self.remark
        return mean_and_error(self.values, signed, digits) + (f" ({self.paper})" if self.paper else "")


def score_grid(
    title: str,
    header: Sequence[str],
    rows: Sequence[tuple[str, Sequence[Cell]]],
    *,
    digits: int | None = None,
    signed: bool = False,
    best: Callable[[Iterable[float]], float] | None = None,
    best_of: str = "row",
) -> Grid:
    """Builds a table of means with standard errors, the best ones bold.

    Args:
        title: title of the table.
        header: names of the columns, that of the rows' names first.
        rows: a name and one cell for each further column.
        digits: digits after the point; None for as many as each cell needs.
        signed: whether positive numbers have a sign, as differences do.
        best: ``max``, ``min``, or None for a table without a best.
        best_of: ``"row"`` or ``"column"``: where the best is sought; one score alone is not marked.
    """
    texts = [[cell.text(digits, signed) for cell in cells] for _, cells in rows]
    bold: set[tuple[int, int]] = set()
    places = [[(i, j) for j in range(len(header) - 1)] for i in range(len(rows))]
    for group in [] if best is None else places if best_of == "row" else zip(*places, strict=True):
        means = {(i, j): float(np.mean(rows[i][1][j].values)) for i, j in group if len(rows[i][1][j].values)}
        if best is not None and len(means) > 1:
            top = best(means.values())
            shown = {texts[i][j] for (i, j), mean in means.items() if mean == top}
            bold |= {(i, 1 + j) for (i, j) in means if texts[i][j] in shown}
    return Grid(title, header, [[name, *text] for (name, _), text in zip(rows, texts, strict=True)], frozenset(bold))


def paired_differences(scores: Mapping[int, float], reference: Mapping[int, float], factor: float = 1.0) -> Cell:
    """Returns scores less those of the reference at the same split or seed, for those that both have."""
    return Cell([factor * (scores[key] - reference[key]) for key in reference if key in scores])


def mean_and_error(values: Sequence[float], signed: bool = False, digits: int | None = None) -> str:
    """Returns mean ± standard error with ``digits`` after the point, or with as many as the numbers need."""
    mean = float(np.mean(values))
    error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else 0.0
    if digits is None:
        smallest = error or abs(mean)
        digits = 3 if smallest >= 0.001 or smallest == 0 else min(6, 1 - math.floor(math.log10(smallest)))
    shown = f"{mean:+.{digits}f}" if signed else f"{mean:.{digits}f}"
    return f"{shown} ± {error:.{digits}f}" if len(values) > 1 else shown


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
