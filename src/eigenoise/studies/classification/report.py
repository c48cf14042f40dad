"""Results of the classification study as tables, beside the paper's, and as pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eigenoise import storage
from eigenoise.reporting import figures
from eigenoise.reporting.figures import LABELS
from eigenoise.reporting.tables import Grid
from eigenoise.studies.classification.recipes import METHODS, SETTINGS
from eigenoise.studies.classification.study import FORMAT
from eigenoise.studies.published import PAPER_ACCURACY

Table = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]  # method, setting: results by seed
MEASURES = {  # key, factor, digits, whether more is better
    "accuracy": ("Accuracy in per cent", 100.0, 2, True),
    "nll": ("Negative log-likelihood of an image", 1.0, 4, False),
    "brier": ("Brier score", 1.0, 4, False),
    "ece": ("Expected calibration error in per cent", 100.0, 2, False),
}
HEART = "noisy-ekfac"  # what the others are compared with
SMOOTH = 20


def collect(folder: Path) -> list[dict[str, Any]]:
    """All results of the study in a folder."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        if isinstance(content, dict) and content.get("format") == FORMAT and "scores" in content:
            found.append(content)
    return found


def check_comparable(results: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise ValueError if results differ in more than method, setting and seed, or seeds in anything else."""
    budgets, recipes = {}, {}
    for result in results:
        own = dict(result["settings"])
        cell = own.pop("method"), own.pop("setting")
        del own["seed"]
        recipes[json.dumps([*cell, own.pop("options")])] = cell
        own["processes"] = result.get("processes", 1)
        budgets[json.dumps(own)] = own
    if len(budgets) > 1:
        keys = [key for key in next(iter(budgets.values())) if len({str(own.get(key)) for own in budgets.values()}) > 1]
        raise ValueError(f"results in {where} differ in {', '.join(keys)}: choose another folder")
    if len(recipes) > len(set(recipes.values())):
        raise ValueError(f"results in {where} of one method and setting differ in options: choose another folder")


def by_method(results: Sequence[Mapping[str, Any]]) -> Table:
    """Results by method and setting, in the order of the paper's table."""
    table: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for method in METHODS:
        for setting in SETTINGS:
            own = [
                result
                for result in results
                if (result["settings"]["method"], result["settings"]["setting"]) == (method, setting.name)
            ]
            if own:
                table.setdefault(method, {})[setting.name] = sorted(own, key=lambda r: r["settings"]["seed"])
    return table


def grids(results: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """A table for each measure; noisy methods predict with averaged samples, and once more with the mean alone."""
    table = by_method(results)
    found = [_grid(table, key) for key in MEASURES]
    names = sorted({name for result in results for name in _best(result)["auroc"]})
    found += [_grid(table, "auroc", name) for name in names]
    if len(table.get(HEART, ())) and len(table) > 1:
        found += [_differences(table, key) for key in ("accuracy", "nll", "ece")]
    return found + ([_corrupted(table)] if any(_best(result).get("corrupted") for result in results) else [])


def write(out: Path) -> list[Path]:
    """Tables in Markdown and pictures of all results in ``out``."""
    results = collect(out)
    path = out / "tables.md"
    storage.write_text(path, markdown(results))
    return [path, *pictures(results, out)]


def markdown(results: Sequence[Mapping[str, Any]]) -> str:
    """All tables."""
    return "\n".join(grid.markdown() for grid in grids(results))


def pictures(results: Sequence[Mapping[str, Any]], out: Path, prefix: str = "") -> list[Path]:
    """Training curves and reliability in ``out``, under names that begin with ``prefix``."""
    return [*curves(results, out / f"{prefix}curves"), *reliability(results, out / f"{prefix}reliability")]


def curves(results: Sequence[Mapping[str, Any]], stem: Path) -> list[Path]:
    """Training losses of the first seed."""
    panels = {
        name: {method: [loss for loss, _ in result["curve"]] for method, result in own.items()}
        for name, own in _first(results).items()
    }
    return figures.losses(panels, SMOOTH, stem)


def reliability(results: Sequence[Mapping[str, Any]], stem: Path) -> list[Path]:
    """How often predictions of the first seed are right."""
    panels = {
        name: {method: _best(result)["reliability"] for method, result in own.items()}
        for name, own in _first(results).items()
    }
    return figures.reliability(panels, stem)


def _first(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The first seed's results by setting and method."""
    table = by_method(results)
    settings = [s.name for s in SETTINGS if any(s.name in row for row in table.values())]
    return {name: {method: row[name][0] for method, row in table.items() if name in row} for name in settings}


def _best(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The scores of averaged samples, or of the mean where there are none."""
    return result["scores"].get("samples", result["scores"]["mean"])


def _ways(table: Table) -> list[tuple[str, str, bool]]:
    """Rows of a table: a method, a way to predict, and whether it is the method's best way."""
    found = []
    for method, row in table.items():
        known = {way for results in row.values() for result in results for way in result["scores"]}
        best = "samples" if "samples" in known else "mean"
        found += [(method, way, way == best) for way in ("samples", "mean") if way in known]
    return found


def _grid(table: Table, key: str, other: str | None = None) -> Grid:
    title, factor, digits, more = MEASURES.get(
        key, (f"How well entropy tells {other} from CIFAR-10 (AUROC in per cent)", 100.0, 2, True)
    )
    settings = [s.name for s in SETTINGS if any(s.name in row for row in table.values())]
    rows, means = [], []
    for method, way, is_best in _ways(table):
        cells = []
        for name in settings:
            scores = [result["scores"][way][key] for result in table[method].get(name, ())]
            picked = scores if other is None else [score[other] for score in scores if other in score]
            values = [factor * score for score in picked]
            paper = PAPER_ACCURACY.get(method, {}).get(name) if key == "accuracy" and is_best and values else None
            cells.append(_cell(values, digits) + ("" if paper is None else f" ({paper:.2f})"))
            means.append(float(np.mean(values)) if values else np.nan)
        rows.append([LABELS[method] + ("" if is_best else ", mean alone"), *cells])
    columns = np.array(means).reshape(len(rows), len(settings)).T
    best = np.nanargmax if more else np.nanargmin
    bold = {(int(best(column)), 1 + j) for j, column in enumerate(columns) if np.isfinite(column).sum() > 1}
    tested = {result["settings"]["validate"] for row in table.values() for runs in row.values() for result in runs}
    on = " and ".join(
        name for name, held_out in (("test images", False), ("held-out images", True)) if held_out in tested
    )
    beside = "; in brackets the paper's, after more training" if key == "accuracy" else ""
    title = f"{title}, on {on}, mean ± standard error over seeds{beside}"
    return Grid(title, ["method", *settings], rows, frozenset(bold))


def _differences(table: Table, key: str) -> Grid:
    """Each method less noisy EK-FAC, seed by seed, both at their best way to predict."""
    title, factor, digits, _ = MEASURES[key]
    settings = list(table[HEART])
    rows = []
    for method in table:
        if method == HEART:
            continue
        cells = []
        for name in settings:
            ours, theirs = (
                {result["settings"]["seed"]: _best(result)[key] for result in table[m].get(name, ())}
                for m in (HEART, method)
            )
            cells.append(_cell([factor * (theirs[seed] - ours[seed]) for seed in ours if seed in theirs], digits, "+"))
        rows.append([LABELS[method], *cells])
    title = f"{title}: difference to noisy EK-FAC at the same seed, mean ± standard error over seeds"
    return Grid(title, ["method", *settings], rows)


def _corrupted(table: Table) -> Grid:
    """Accuracy and log-likelihood on corrupted images, mean over kinds, for each severity; the first seed's."""
    rows = []
    for method, way, is_best in _ways(table):
        for setting, results in table[method].items():
            own = results[0]["scores"].get(way, {}).get("corrupted")
            if not own:
                continue
            cells = []
            for severity in "12345":
                picked = [score for name, score in own.items() if name.endswith(severity)]
                right, nll = (np.mean([score[key] for score in picked]) for key in ("accuracy", "nll"))
                cells.append(f"{100 * right:.1f} / {nll:.3f}")
            rows.append([f"{LABELS[method]}{'' if is_best else ', mean alone'}, {setting}", *cells])
    title = "Corrupted images: accuracy in per cent / negative log-likelihood, by severity"
    return Grid(title, ["method", *"12345"], rows)


def _cell(values: Sequence[float], digits: int, sign: str = "") -> str:
    if not values:
        return "–"
    mean = f"{np.mean(values):{sign}.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {np.std(values, ddof=1) / len(values) ** 0.5:.{digits}f}"
