"""Results of the regression study as tables, ours beside the paper's with paired differences, and as pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eigenoise import storage
from eigenoise.optim.methods import BAYESIAN
from eigenoise.reporting import figures
from eigenoise.reporting.figures import LABELS, Results, label
from eigenoise.reporting.tables import Grid, mean_and_error
from eigenoise.studies.published import PAPER_TABLE

REFERENCE = "noisy-ekfac"


def by_set(results: Sequence[Mapping[str, Any]]) -> Results:
    """Results of one preset by set and method, methods in the order of the paper's table."""
    table: dict[str, dict[str, Mapping[str, Any]]] = {}
    for method in BAYESIAN:
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


def collect(folder: Path, variant: str) -> list[dict[str, Any]]:
    """All results of a preset (or of a preset with another kind of splits) in a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob(f"*-{variant}.json"))]


def write(out: Path, variant: str) -> list[Path]:
    """Tables in Markdown, training curves and calibration as pictures, of all the variant's results in ``out``."""
    results = collect(out, variant)
    table = by_set(results)
    path = out / f"tables-{variant}.md"
    storage.write_text(path, markdown(results))
    curves = figures.training_curves(table, out / f"curves-{variant}")
    return [path, *curves, *figures.calibration(table, out / f"calibration-{variant}")]


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """All tables, one below the other."""
    return "\n".join(grid.markdown() for grid in grids(results))


def _scores(table: Results, key: str, title: str, paper: int | None, best: Any) -> Grid:
    methods = _methods(table)
    rows, bold = [], set()
    for i, (name, runs) in enumerate(table.items()):
        cells = []
        for method in methods:
            cell = mean_and_error(runs[method][key]) if method in runs else "–"
            if paper is not None and method in runs and not runs[method]["sample_of_the_set"]:
                cell += f" ({PAPER_TABLE[name][method][paper]:.3f})"
            cells.append(cell)
        means = [float(np.mean(runs[method][key])) if method in runs else math.nan for method in methods]
        top = best(mean for mean in means if not math.isnan(mean))
        if len(runs) > 1:
            bold |= {(i, 1 + j) for j, mean in enumerate(means) if mean == top or cells[j] == cells[means.index(top)]}
        rows.append([label(name, runs), *cells])
    beside = " (the paper's in brackets)" if paper is not None else ""
    header = ["set", *(LABELS[method] for method in methods)]
    return Grid(f"{title}, mean ± standard error over splits{beside}", header, rows, frozenset(bold))


def _differences(table: Results, key: str, title: str) -> Grid:
    methods = [method for method in _methods(table) if method != REFERENCE]
    rows = []
    for name, runs in table.items():
        if REFERENCE not in runs:
            continue
        rows.append([label(name, runs), *(_difference(runs, method, key) for method in methods)])
    header = ["set", *(f"{LABELS[method]} − {LABELS[REFERENCE]}" for method in methods)]
    return Grid(f"Paired differences in {title}, mean ± standard error over splits", header, rows)


def _difference(runs: Mapping[str, Mapping[str, Any]], method: str, key: str) -> str:
    """Paired by split, where both have the same splits."""
    if method not in runs:
        return "–"
    ours, theirs = runs[REFERENCE], runs[method]
    if any(ours["settings"][name] != theirs["settings"][name] for name in ("splits", "canonical")):
        return "other splits"
    return mean_and_error((np.asarray(theirs[key]) - np.asarray(ours[key])).tolist(), sign=True)


def _methods(table: Results) -> list[str]:
    return [method for method in BAYESIAN if any(method in runs for runs in table.values())]
