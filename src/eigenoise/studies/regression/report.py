"""Tables and figures of the regression study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eigenoise import checks, storage
from eigenoise.optim.methods import BAYESIAN
from eigenoise.reporting import figures
from eigenoise.reporting.figures import LABELS, Results, label
from eigenoise.reporting.tables import Cell, Grid, markdown, paired_differences, score_grid
from eigenoise.studies import runner
from eigenoise.studies.recipes import REFERENCE, load
from eigenoise.studies.regression.study import Run

MEASURES = {  # key: title, which is best
    "ll": ("Test log-likelihood", max),
    "rmse": ("Test RMSE", min),
    "elbo": ("ELBO per training example", max),
}


def collect(folder: Path, variant: str) -> list[dict[str, Any]]:
    """Reads all results of a preset (or of a preset with another kind of splits) in a folder."""
    return runner.collect(sorted(folder.glob(f"*-{variant}.json")), Run.FORMAT, _check)


def _check(result: Mapping[str, Any]) -> None:
    checks.choice("method", result["settings"]["method"], BAYESIAN)
    if not isinstance(result["settings"]["set"], str) or not isinstance(result["coverage"], dict):
        raise TypeError("set: expected a name, and coverage: expected one number for each level")
    for key in (*MEASURES, "curve"):
        runner.check_numbers(key, result[key])


def by_set(results: Sequence[Mapping[str, Any]]) -> Results:
    """Groups results of one preset by set and method, methods in the order of the paper's table."""
    table: dict[str, dict[str, Mapping[str, Any]]] = {}
    for result in sorted(results, key=lambda result: list(BAYESIAN).index(result["settings"]["method"])):
        table.setdefault(result["settings"]["set"], {})[result["settings"]["method"]] = result
    return {name: table[name] for name in sorted(table)}


def grids(results: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """Builds all tables of one preset's results: scores, and paired differences to the reference method."""
    table = by_set(results)
    methods = [method for method in BAYESIAN if any(method in runs for runs in table.values())]
    tables = [_scores(table, methods, key) for key in MEASURES]
    if any(REFERENCE in runs and len(runs) > 1 for runs in table.values()):
        tables += [_differences(table, methods, key) for key in MEASURES]
    return tables


def write(out: Path, variant: str) -> list[Path]:
    """Writes tables in Markdown, training curves and calibration of all results of a variant in ``out``."""
    results = collect(out, variant)
    table = by_set(results)
    path = out / f"tables-{variant}.md"
    storage.write_text(path, markdown(grids(results)))
    curves = figures.training_curves(table, out / f"curves-{variant}")
    return [path, *curves, *figures.calibration(table, out / f"calibration-{variant}")]


def _scores(table: Results, methods: Sequence[str], key: str) -> Grid:
    title, best = MEASURES[key]
    rows = []
    for name, runs in table.items():
        cells = []
        for method in methods:
            run = runs.get(method, {key: [], "sample_of_the_set": True})
            published = load("published")["regression"].get(name, {}).get(method, {})
            in_paper = key in published and not run["sample_of_the_set"]
            cells.append(Cell(run[key], f"{published[key][0]:.3f}" if in_paper else ""))
        rows.append((label(name, runs), cells))
    beside = " (the paper's in brackets)" if key != "elbo" else ""
    header = ["set", *(LABELS[method] for method in methods)]
    return score_grid(f"{title}, mean ± standard error over splits{beside}", header, rows, best=best)


def _differences(table: Results, methods: Sequence[str], key: str) -> Grid:
    others = [method for method in methods if method != REFERENCE]
    title = MEASURES[key][0].replace("Test", "test")
    rows = [
        (label(name, runs), [_difference(runs, method, key) for method in others])
        for name, runs in table.items()
        if REFERENCE in runs
    ]
    header = ["set", *(f"{LABELS[method]} − {LABELS[REFERENCE]}" for method in others)]
    return score_grid(f"Paired differences in {title}, mean ± standard error over splits", header, rows, signed=True)


def _difference(runs: Mapping[str, Mapping[str, Any]], method: str, key: str) -> Cell:
    """Pairs a method with the reference by split, where both have the same splits."""
    if method not in runs:
        return Cell()
    scores, reference = runs[method], runs[REFERENCE]
    if any(scores["settings"][name] != reference["settings"][name] for name in ("splits", "canonical")):
        return Cell(remark="other splits")
    return paired_differences(dict(enumerate(scores[key])), dict(enumerate(reference[key])))
