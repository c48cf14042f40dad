"""Tables and figures of the classification study."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eigenoise import checks, storage
from eigenoise.reporting import figures
from eigenoise.reporting.figures import LABELS
from eigenoise.reporting.tables import Cell, Grid, markdown, paired_differences, score_grid
from eigenoise.studies import runner
from eigenoise.studies.classification.study import Run
from eigenoise.studies.classification.training import METHODS
from eigenoise.studies.recipes import REFERENCE, SETTINGS, load

Result = Mapping[str, Any]
Table = Mapping[str, Mapping[str, Sequence[Result]]]  # method, setting: results by seed
MEASURES = {  # key: title, factor, digits, which is best
    "accuracy": ("Accuracy in per cent", 100.0, 2, max),
    "nll": ("Negative log-likelihood of an image", 1.0, 4, min),
    "brier": ("Brier score", 1.0, 4, min),
    "ece": ("Expected calibration error in per cent", 100.0, 2, min),
    "auroc": ("How well entropy tells {} from CIFAR-10 (AUROC in per cent)", 100.0, 2, max),
}
SMOOTHING = 20  # steps that a point of a training curve averages


def collect(folder: Path) -> list[dict[str, Any]]:
    """Reads all results of the study in a folder."""
    return [
        result for result in runner.collect(sorted(folder.glob("*.json")), Run.FORMAT, _check) if "scores" in result
    ]


def _check(result: Mapping[str, Any]) -> None:
    if "scores" not in result:  # of another study
        return
    checks.choice("method", result["settings"]["method"], METHODS)
    checks.choice("setting", result["settings"]["setting"], [setting.name for setting in SETTINGS])
    checks.integer("seed", result["settings"]["seed"], low=0)
    for scores in (result["scores"]["mean"], _best(result)):
        runner.check_numbers("scores", [scores[key] for key in MEASURES if key != "auroc"])
        runner.check_numbers("auroc", [0.0, *scores["auroc"].values()])
    runner.check_numbers("curve", [loss for loss, _ in result["curve"]])


def check_comparable(results: Sequence[Result], where: str) -> None:
    """Raises ValueError if results differ in more than method, setting and seed, or seeds in anything else."""
    budgets, recipes = {}, {}
    for result in results:
        budget = {**result["settings"], "processes": result.get("processes", 1)}
        cell = budget.pop("method"), budget.pop("setting")
        del budget["seed"]
        recipes[json.dumps([*cell, budget.pop("options")])] = cell
        budgets[json.dumps(budget)] = budget
    if len(budgets) > 1:
        keys = [key for key in next(iter(budgets.values())) if len({str(b.get(key)) for b in budgets.values()}) > 1]
        raise ValueError(f"results in {where} differ in {', '.join(keys)}: choose another folder")
    if len(recipes) > len(set(recipes.values())):
        raise ValueError(f"results in {where} of one method and setting differ in options: choose another folder")


def by_method(results: Sequence[Result]) -> Table:
    """Groups results by method and setting, in the order of the paper's table, and sorts them by seed."""
    table: dict[str, dict[str, list[Result]]] = {}
    order = [(method, setting.name) for method in METHODS for setting in SETTINGS]
    for method, setting in order:
        for result in sorted(results, key=lambda result: result["settings"]["seed"]):
            if (result["settings"]["method"], result["settings"]["setting"]) == (method, setting):
                table.setdefault(method, {}).setdefault(setting, []).append(result)
    return table


def grids(results: Sequence[Result]) -> list[Grid]:
    """Builds a table for each measure; noisy methods have a row for averaged samples and one for the mean alone."""
    table = by_method(results)
    ood_sets = sorted({name for result in results for name in _best(result)["auroc"]})
    tables = [_scores(table, key) for key in MEASURES if key != "auroc"]
    tables += [_scores(table, "auroc", name) for name in ood_sets]
    if REFERENCE in table and len(table) > 1:
        tables += [_differences(table, key) for key in ("accuracy", "nll", "ece")]
    return tables + ([_corrupted(table)] if any(_best(result).get("corrupted") for result in results) else [])


def write(out: Path) -> list[Path]:
    """Writes tables in Markdown and figures of all results in ``out``."""
    results = collect(out)
    path = out / "tables.md"
    storage.write_text(path, markdown(grids(results)))
    return [path, *pictures(results, out)]


def pictures(results: Sequence[Result], out: Path, prefix: str = "") -> list[Path]:
    """Draws training curves and reliability in ``out``, under names that begin with ``prefix``."""
    return [*curves(results, out / f"{prefix}curves"), *reliability(results, out / f"{prefix}reliability")]


def curves(results: Sequence[Result], stem: Path) -> list[Path]:
    """Draws training losses of the first seed."""
    panels = {
        name: {method: [loss for loss, _ in result["curve"]] for method, result in by_method.items()}
        for name, by_method in _first_seed(results).items()
    }
    return figures.losses(panels, SMOOTHING, stem)


def reliability(results: Sequence[Result], stem: Path) -> list[Path]:
    """Draws reliability diagrams of the first seed."""
    panels = {
        name: {method: _best(result)["reliability"] for method, result in by_method.items()}
        for name, by_method in _first_seed(results).items()
    }
    return figures.reliability(panels, stem)


def _first_seed(results: Sequence[Result]) -> dict[str, dict[str, Result]]:
    """The first seed's results by setting and method."""
    table = by_method(results)
    return {name: {method: row[name][0] for method, row in table.items() if name in row} for name in _settings(table)}


def _settings(table: Table) -> list[str]:
    return [setting.name for setting in SETTINGS if any(setting.name in row for row in table.values())]


def _best(result: Result) -> Mapping[str, Any]:
    """The scores of averaged samples, or of the mean where there are none."""
    return result["scores"].get("samples", result["scores"]["mean"])


def _ways(table: Table) -> list[tuple[str, str, str]]:
    """Rows of a table: a method, a way to predict, and their label."""
    rows = []
    for method, row in table.items():
        known = {way for results in row.values() for result in results for way in result["scores"]}
        for way in ("samples", "mean"):
            if way in known:
                alone = ", mean alone" if way == "mean" and "samples" in known else ""
                rows.append((method, way, LABELS[method] + alone))
    return rows


def _scores(table: Table, key: str, ood_set: str | None = None) -> Grid:
    title, factor, digits, best = MEASURES[key]
    settings = _settings(table)
    rows = []
    for method, way, row_label in _ways(table):
        published = load("published")["classification"].get(method, {}).get(key, {})
        cells = []
        for name in settings:
            scores = [result["scores"][way][key] for result in table[method].get(name, ())]
            if ood_set is not None:
                scores = [score[ood_set] for score in scores if ood_set in score]
            in_paper = name in published and row_label == LABELS[method]
            cells.append(Cell([factor * score for score in scores], f"{published[name]:.2f}" if in_paper else ""))
        rows.append((row_label, cells))
    validated = {result["settings"]["validate"] for row in table.values() for runs in row.values() for result in runs}
    on = " and ".join(text for text, flag in (("test images", False), ("held-out images", True)) if flag in validated)
    beside = "; in brackets the paper's, after more training" if key == "accuracy" else ""
    title = f"{title.format(ood_set)}, on {on}, mean ± standard error over seeds{beside}"
    return score_grid(title, ["method", *settings], rows, digits=digits, best=best, best_of="column")


def _differences(table: Table, key: str) -> Grid:
    """Each method less the reference at the same seed, both at their best way to predict."""
    title, factor, digits, _ = MEASURES[key]

    def by_seed(method: str, setting: str) -> dict[int, float]:
        return {result["settings"]["seed"]: _best(result)[key] for result in table[method].get(setting, ())}

    rows = [
        (
            LABELS[method],
            [paired_differences(by_seed(method, name), by_seed(REFERENCE, name), factor) for name in table[REFERENCE]],
        )
        for method in table
        if method != REFERENCE
    ]
    title = f"{title}: difference to {LABELS[REFERENCE]} at the same seed, mean ± standard error over seeds"
    return score_grid(title, ["method", *table[REFERENCE]], rows, digits=digits, signed=True)


def _corrupted(table: Table) -> Grid:
    """Accuracy and log-likelihood on corrupted images for each severity, mean over kinds, of the first seed."""
    rows = []
    for method, way, row_label in _ways(table):
        for setting, results in table[method].items():
            scores = results[0]["scores"].get(way, {}).get("corrupted", {})
            cells = []
            for severity in "12345":
                kinds = [score for name, score in scores.items() if name.endswith(severity)]
                if kinds:
                    accuracy, nll = (np.mean([score[key] for score in kinds]) for key in ("accuracy", "nll"))
                    cells.append(f"{100 * accuracy:.1f} / {nll:.3f}")
            if cells:
                rows.append([f"{row_label}, {setting}", *cells])
    title = "Corrupted images: accuracy in per cent / negative log-likelihood, by severity"
    return Grid(title, ["method", *"12345"], rows)
