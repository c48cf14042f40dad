"""Tables and curves of the arena's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from eigenoise.reporting.tables import EMPTY, Grid
from eigenoise.studies.arena.learners import METHODS
from eigenoise.studies.arena.tasks import REPORTING, TASKS

REFERENCE = "noisy-ekfac"
SCORES = {"ll": "log-likelihood", "calibration": "calibration error", "auroc": "AUROC on other inputs"}
HIGHER_IS_BETTER = {"ll": True, "calibration": False, "auroc": True}

Runs = Mapping[str, Mapping[str, Any]]


def values(runs: Runs, task: str, method: str, budget: int, score: str) -> dict[int, float]:
    """Returns one score by seed."""
    chosen = [run for run in runs.values() if (run["task"], run["method"], run["budget"]) == (task, method, budget)]
    return {run["seed"]: run["scores"][score] for run in chosen if score in run["scores"]}


def grid(runs: Runs, score: str, budget: int) -> Grid:
    """Builds the table of one score at one budget: tasks by methods, means over seeds, the best in bold."""
    methods = [name for name in METHODS if any(run["method"] == name for run in runs.values())]
    tasks = [name for name in TASKS if any(values(runs, name, method, budget, score) for method in methods)]
    rows, bold = [], set()
    for i, task in enumerate(tasks):
        means = {m: _mean(list(values(runs, task, m, budget, score).values())) for m in methods}
        present = {m: mean for m, mean in means.items() if mean is not None}
        best = (max if HIGHER_IS_BETTER[score] else min)(present, key=lambda m: present[m])
        bold.add((i, 2 + methods.index(best)))
        texts = [EMPTY if means[m] is None else f"{means[m]:.3f}" for m in methods]
        rows.append([task, TASKS[task].role, *texts])
    title = f"{SCORES[score]} at {budget} times the short budget, mean over seeds"
    return Grid(title, ["task", "role", *(METHODS[m].label for m in methods)], rows, frozenset(bold))


def summary(runs: Runs, budgets: Sequence[int]) -> Grid:
    """Builds the table of differences: on how many reporting tasks noisy EK-FAC is better than each other method."""
    rows = []
    for method, about in METHODS.items():
        cells = []
        for budget in budgets:
            pairs = _pairs(runs, method, budget, "ll")
            if pairs:
                better = sum(ours >= theirs for ours, theirs in pairs)
                typical = median(ours - theirs for ours, theirs in pairs)
                cells.append(f"{better} of {len(pairs)} ({typical:+.3f})")
            else:
                cells.append(EMPTY)
        if method != REFERENCE and any(cell != EMPTY for cell in cells):
            rows.append([about.label, *cells])
    header = ["against", *(f"{budget} × the time" for budget in budgets)]
    title = (
        "Reporting tasks on which noisy EK-FAC's log-likelihood is at least as high, and the median difference in nats"
    )
    return Grid(title, header, rows)


def _pairs(runs: Runs, method: str, budget: int, score: str) -> list[tuple[float, float]]:
    """Means over the seeds that both have, one pair for each reporting task."""
    pairs = []
    for task, about in TASKS.items():
        ours, theirs = (values(runs, task, name, budget, score) for name in (REFERENCE, method))
        seeds = ours.keys() & theirs.keys()
        if about.role == REPORTING and seeds:
            pairs.append((sum(ours[s] for s in seeds) / len(seeds), sum(theirs[s] for s in seeds) / len(seeds)))
    return pairs


def grids(content: Mapping[str, Any]) -> list[Grid]:
    """Builds all tables of a file of results."""
    runs = content["runs"]
    budgets = sorted({run["budget"] for run in runs.values()})
    tables = [summary(runs, budgets)]
    for score in SCORES:
        tables += [table for table in (grid(runs, score, budget) for budget in budgets) if table.rows]
    return tables


def draw(content: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws test log-likelihood over CPU seconds, the longest run of each method, one panel for each task."""
    import matplotlib.pyplot as plt

    runs = content["runs"].values()
    names = [name for name in TASKS if any(run["task"] == name for run in runs)]
    shown = [name for name in ("noisy-ekfac", "noisy-kfac", "adamw", "sgd", "ivon", "ensemble") if name in METHODS]
    columns = min(4, max(1, len(names)))
    height = -(-len(names) // columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(3.2 * columns, 2.6 * height), squeeze=False, layout="constrained"
    )
    for axis, task in zip(axes.flat, names, strict=False):
        ends: list[float] = []
        for number, method in enumerate(shown):
            mine = [run for run in runs if (run["task"], run["method"], run["seed"]) == (task, method, 0)]
            if mine:
                longest = max(mine, key=lambda run: run["budget"])
                points = [*longest["curve"], [longest["seconds"], longest["scores"]["ll"]]]
                width = 2.2 if method == REFERENCE else 1.2
                seconds, likely = zip(*points, strict=True)
                axis.plot(seconds, likely, "o-", color=f"C{number}", linewidth=width, label=METHODS[method].label)
                ends.append(likely[-1])
        axis.set(title=task, xlim=(0, None), xlabel="CPU seconds", ylabel="test log-likelihood")
        if ends:
            axis.set_ylim(
                min(ends) - 0.6 * (max(ends) - min(ends)) - 0.02, max(ends) + 0.1 * (max(ends) - min(ends)) + 0.02
            )
    for axis in list(axes.flat)[len(names) :]:
        axis.remove()
    if names:
        axes.flat[0].legend(fontsize=7)
    paths = [folder / "arena.png"]
    for path in paths:
        figure.savefig(path, dpi=110)
    plt.close(figure)
    return paths


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
