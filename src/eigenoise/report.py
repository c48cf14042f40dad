"""Results of the regression study as tables, ours beside the paper's with paired differences, and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eigenoise import atomic, figures
from eigenoise.figures import LABELS, Results
from eigenoise.presets import METHODS
from eigenoise.published import PAPER_TABLE

REFERENCE = "noisy-ekfac"


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


def by_set(results: Sequence[Mapping[str, Any]]) -> Results:
    """Results of one preset by set and method, methods in the order of the paper's table."""
    table: dict[str, dict[str, Mapping[str, Any]]] = {}
    for method in METHODS:
        for result in results:
            if result["settings"]["method"] == method:
                table.setdefault(result["settings"]["set"], {})[method] = result
    return {name: table[name] for name in sorted(table)}


def grids(results: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """All tables of one preset's results."""
    table = by_set(results)
    found = [
        _scores(table, "ll", "Test log-likelihood", paper=2, best=max),
        _scores(table, "rmse", "Test RMSE", paper=0, best=min),
        _scores(table, "elbo", "ELBO per training example", paper=None, best=max),
    ]
    return found + [
        _differences(table, key, name)
        for key, name in (("ll", "test log-likelihood"), ("rmse", "test RMSE"), ("elbo", "ELBO per training example"))
        if any(REFERENCE in methods and len(methods) > 1 for methods in table.values())
    ]


def write(results: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """Tables in Markdown, training curves and calibration as pictures, named after the results' preset."""
    table, preset = by_set(results), results[0]["settings"]["preset"]
    path = out / f"tables-{preset}.md"
    atomic.write_text(path, markdown(results))
    curves = figures.training_curves(table, out / f"curves-{preset}")
    return [path, *curves, *figures.calibration(table, out / f"calibration-{preset}")]


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """All tables, one below the other."""
    return "\n".join(grid.markdown() for grid in grids(results))


def mean_and_error(values: Sequence[float], sign: bool = False) -> str:
    """Mean ± standard error over splits, with as many digits as the numbers need."""
    mean = float(np.mean(values))
    digits = 3 if max(map(abs, values)) >= 0.01 else 5
    shown = f"{mean:+.{digits}f}" if sign else f"{mean:.{digits}f}"
    if len(values) < 2:
        return shown
    return f"{shown} ± {np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}"


def _scores(table: Results, key: str, title: str, paper: int | None, best: Any) -> Grid:
    methods = _methods(table)
    rows, bold = [], set()
    for i, (name, runs) in enumerate(table.items()):
        cells = []
        for method in methods:
            cell = mean_and_error(runs[method][key]) if method in runs else "–"
            if paper is not None and method in runs:
                cell += f" ({PAPER_TABLE[name][method][paper]:.3f})"
            cells.append(cell)
        means = {method: float(np.mean(runs[method][key])) for method in methods if method in runs}
        bold.add((i, 1 + methods.index(best(means, key=means.__getitem__))))
        rows.append([_set_label(name, runs), *cells])
    beside = " (the paper's in brackets)" if paper is not None else ""
    header = ["set", *(LABELS[method] for method in methods)]
    return Grid(f"{title}, mean ± standard error over splits{beside}", header, rows, frozenset(bold))


def _differences(table: Results, key: str, title: str) -> Grid:
    methods = [method for method in _methods(table) if method != REFERENCE]
    rows = []
    for name, runs in table.items():
        if REFERENCE not in runs:
            continue
        base = np.asarray(runs[REFERENCE][key])
        differences = [
            mean_and_error((np.asarray(runs[method][key]) - base).tolist(), sign=True) if method in runs else "–"
            for method in methods
        ]
        rows.append([_set_label(name, runs), *differences])
    header = ["set", *(f"{LABELS[method]} − {LABELS[REFERENCE]}" for method in methods)]
    return Grid(f"Paired differences in {title}, mean ± standard error over splits", header, rows)


def _methods(table: Results) -> list[str]:
    return [method for method in METHODS if any(method in runs for runs in table.values())]


def _set_label(name: str, runs: Mapping[str, Mapping[str, Any]]) -> str:
    return name + (" (sample)" if any(run["sample_of_the_set"] for run in runs.values()) else "")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
