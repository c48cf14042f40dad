"""The demo: four Bayesian methods on the Boston housing table, random splits trained all at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eigenoise.reporting import figures
from eigenoise.reporting.figures import LABELS
from eigenoise.reporting.tables import Grid, mean_and_error
from eigenoise.studies import data
from eigenoise.studies.data import uci
from eigenoise.studies.recipes import DEMO
from eigenoise.studies.regression.training import Training


@dataclasses.dataclass(frozen=True)
class Result:
    """One method's training and its scores on the test parts, in the table's units."""

    method: str
    training: Training
    scores: dict[str, Any]
    seconds: float


def run(
    method: str,
    table: data.Table,
    *,
    epochs: int,
    splits: int,
    on_epoch: Callable[[Training], None] = lambda training: None,
) -> Result:
    """Trains one method on ``splits`` random splits at once with its default settings, and tests it."""
    began, about = time.perf_counter(), uci.info("boston")
    recipe = dataclasses.replace(DEMO.recipe("boston", method), epochs=epochs)
    parts = data.split(table, range(1, splits + 1))
    training = Training(recipe, method, parts, hidden=about.hidden, batch_size=about.batch_size)
    for _ in training.steps():
        on_epoch(training)
    return Result(method, training, training.scores(), time.perf_counter() - began)


def grid(results: Sequence[Result]) -> Grid:
    """Builds the table of scores."""
    rows = [
        [
            LABELS[result.method],
            mean_and_error(result.scores["rmse"]),
            mean_and_error(result.scores["ll"]),
            f"{sum(result.scores['coverage']['0.9']) / len(result.scores['rmse']):.0%}",
            f"{result.training.curve[-1]:.3f}",
            f"{result.seconds:.0f}",
        ]
        for result in results
    ]
    header = ["method", "RMSE", "log-lik.", "90 % cover", "ELBO", "s"]
    return Grid("Test parts, mean ± standard error over splits (price in 1000 $)", header, rows)


def draw(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draws training curves of all methods, and predictions of the last one on the first split."""
    runs = {result.method: {"curve": result.training.curve, "sample_of_the_set": False} for result in results}
    curves = figures.training_curves({"Boston housing": runs}, folder / "elbo")
    splits, predicted = results[-1].training.splits, results[-1].training.predictive()
    low, high = predicted.interval(0.9)
    scale, shift = float(splits.y_std[0]), float(splits.y_mean[0])
    places = {"true": splits.y_test, "mean": predicted.mean, "lower": low, "upper": high}
    points = {name: (value[0].flatten() * scale + shift).tolist() for name, value in places.items()}
    spreads = {"noise": predicted.noise_stddev, "weights": predicted.weights_stddev}
    points |= {name: (value[0].flatten() * scale).tolist() for name, value in spreads.items()}
    return [*curves, *figures.predicted(points, folder / "predictions")]
