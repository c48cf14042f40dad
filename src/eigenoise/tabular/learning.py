"""Fit a table: hold out test rows, fit, and compare with baselines on the test rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.model_selection import train_test_split

from eigenoise import checks
from eigenoise.inference import metrics
from eigenoise.reporting.tables import Grid
from eigenoise.tabular import BayesianMLPClassifier, BayesianMLPRegressor, persistence
from eigenoise.tabular.baselines import CLASSIFIERS, REGRESSORS, GaussianAround
from eigenoise.tabular.schema import Schema

if TYPE_CHECKING:
    import pandas as pd

MAX_PLOTTED_ROWS = 300
MIN_ROWS = 20
MIN_PROBABILITY = 1e-12  # of a label in the log-likelihood, so that one label does not make the mean infinite

Scores = dict[str, dict[str, float]]  # by method and metric
TITLES = {"rmse": "error (RMSE)", "accuracy": "accuracy", "ll": "log-likelihood", "ece": "calibration error"}
TITLES |= {"in50": "in the 50 % interval", "in90": "in the 90 %"}
FORMATS = {"rmse": ".4g", "accuracy": ".1%", "ll": ".4f", "ece": ".1%", "in50": ".0%", "in90": ".0%"}


@dataclass(frozen=True)
class Learned:
    """A model of a table.

    Attributes:
        estimator: the fitted estimator.
        schema: the table's schema.
        scores: test scores of each method, by metric.
        rows: number of training and of test rows.
        details: predictions for test rows and spectra of the networks, for a report.
    """

    estimator: persistence.Estimator
    schema: Schema
    scores: Scores
    rows: tuple[int, int]
    details: dict[str, Any]

    def save(self, path: Path) -> None:
        """Save the model as one file that holds no code."""
        notes = {"schema": self.schema.to_json(), "scores": self.scores, "rows": list(self.rows)}
        persistence.save(self.estimator, path, {**notes, "details": self.details})

    @classmethod
    def load(cls, path: Path) -> Learned:
        """Load what ``save`` wrote.

        Raises:
            FileNotFoundError, ValueError: if there is no such file, or it is not a model of a table.
        """
        estimator, notes = persistence.load(path)
        try:
            schema = Schema.from_json(notes["schema"])
            train, test = notes["rows"]
            model = cls(estimator, schema, notes["scores"], (int(train), int(test)), notes["details"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a model, but not of a table: {error}") from error
        width = estimator.n_features_in_
        if schema.num_inputs != width:
            raise ValueError(f"{path} is damaged: expected columns that make {width} inputs, got {schema.num_inputs}")
        return model

    def grid(self) -> Grid:
        """Return the scores as a table."""
        columns = ("rmse", "ll", "in50", "in90") if self.schema.task == "regression" else ("accuracy", "ll", "ece")
        rows = [[name, *(f"{scores[m]:{FORMATS[m]}}" for m in columns)] for name, scores in self.scores.items()]
        best = int(np.argmax([scores["ll"] for scores in self.scores.values()]))
        header = ["", *(TITLES[metric] for metric in columns)]
        return Grid(f"{self.rows[1]:,} test rows", header, rows, frozenset({(best, 1 + columns.index("ll"))}))


def learn(
    frame: pd.DataFrame,
    target: str,
    *,
    task: str | None = None,
    drop: Sequence[str] = (),
    held_out: float = 0.2,
    seed: int = 0,
    **options: Any,
) -> Learned:
    """Fit a table and compare with baselines on test rows.

    Args:
        frame: the table.
        target: the column to predict; rows without it are left out.
        task: ``"regression"`` or ``"classification"``; by default inferred from the target.
        drop: columns to leave out.
        held_out: the fraction of test rows.
        seed: seed of the split and of the fit.
        **options: arguments of the estimator.

    Raises:
        ValueError: if the table cannot be fitted, naming the column.
    """
    checks.number("held_out", held_out, open_low=True, high=0.9)
    schema = Schema.infer(frame, target, task, drop)
    frame = frame[frame[target].notna()]
    if len(frame) < MIN_ROWS:
        raise ValueError(f"at least {MIN_ROWS} rows with a target are needed, got {len(frame)}")
    schema.inputs(frame)  # raises for any invalid row
    is_classification = schema.task == "classification"
    strata = _strata(schema.targets(frame), held_out) if is_classification else None
    train, test = train_test_split(frame, test_size=held_out, random_state=seed, stratify=strata)
    empty = [name for name in frame.columns if name not in (target, *drop) and train[name].isna().all()]
    schema = Schema.infer(train, target, schema.task, [*drop, *empty])
    x, y, x_test, y_test = schema.inputs(train), schema.targets(train), schema.inputs(test), schema.targets(test)
    new = ~_is_among(x_test, y_test, x, y)
    if not new.any():
        raise ValueError("every test row is a training row too: there is nothing to test on")
    x_test, y_test = x_test[new], y_test[new]
    fit = _classify if is_classification else _regress
    estimator, scores, details = fit(x, y, x_test, y_test, random_state=seed, **options)
    return Learned(estimator, schema, scores, (len(y), len(y_test)), {**details, "spectra": estimator.spectra_})


def _strata(labels: np.ndarray, held_out: float) -> np.ndarray | None:
    """Return the labels to stratify by, or None if a class is too rare or there are too few rows for all classes."""
    classes, counts = np.unique(labels, return_counts=True)
    enough = min(held_out, 1 - held_out) * len(labels) >= len(classes)
    return labels if enough and counts.min() >= 2 else None


def _is_among(x: np.ndarray, y: np.ndarray, known_x: np.ndarray, known_y: np.ndarray) -> np.ndarray:
    """Return which rows ``(N,)`` are equal to a known row."""
    known = {(row.tobytes(), str(target)) for row, target in zip(known_x, known_y, strict=True)}
    return np.array([(row.tobytes(), str(target)) in known for row, target in zip(x, y, strict=True)])


def regression_scores(model: BayesianMLPRegressor | GaussianAround, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return RMSE, log-likelihood, and the coverage of the 50 % and 90 % intervals."""
    coverages = {}
    for level in (0.5, 0.9):
        low, high = model.predict_interval(x, level)
        coverages[f"in{100 * level:.0f}"] = float(np.mean((low <= y) & (y <= high)))
    rmse = float(np.sqrt(np.mean((model.predict(x) - y) ** 2)))
    return {"rmse": rmse, "ll": model.log_likelihood(x, y), **coverages}


def _regress(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, **options: Any
) -> tuple[BayesianMLPRegressor, Scores, dict[str, Any]]:
    estimator = BayesianMLPRegressor(**options).fit(x, y)
    models: dict[str, BayesianMLPRegressor | GaussianAround] = {"eigenoise": estimator}
    models |= {name: GaussianAround.fit(make(), x, y) for name, make in REGRESSORS.items()}
    scores = {name: regression_scores(model, x_test, y_test) for name, model in models.items()}
    plotted = x_test[:MAX_PLOTTED_ROWS]
    predictive, (low, high) = estimator.predictive(plotted), estimator.predict_interval(plotted, 0.9)
    points: dict[str, Any] = {"true": y_test[:MAX_PLOTTED_ROWS], "mean": predictive.mean, "lower": low, "upper": high}
    points |= {"noise": predictive.noise_stddev, "weights": predictive.weights_stddev}
    return estimator, scores, {"points": {name: values.flatten().tolist() for name, values in points.items()}}


def _classify(
    x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray, **options: Any
) -> tuple[BayesianMLPClassifier, Scores, dict[str, Any]]:
    estimator = BayesianMLPClassifier(**options).fit(x, y)
    models = {"eigenoise": estimator, **{name: make().fit(x, y) for name, make in CLASSIFIERS.items()}}
    scores, details = {}, {}
    for name, model in models.items():
        probs = model.predict_proba(x_test)
        onehot = y_test[:, None] == np.asarray(model.classes_)
        known, label = onehot.any(1), onehot.argmax(1)  # a rare label may be in test rows only
        bins = metrics.reliability(torch.from_numpy(probs[known]), torch.from_numpy(label[known]))
        log_likelihood = np.log(np.maximum(MIN_PROBABILITY, (probs * onehot).sum(1))).mean()
        accuracy = (known & (probs.argmax(1) == label)).mean()
        scores[name] = {"accuracy": float(accuracy), "ll": float(log_likelihood), "ece": float(bins.error)}
        details[name] = {"reliability": bins.to_json()}
    return estimator, scores, details["eigenoise"]


def predict(learned: Learned, frame: pd.DataFrame, coverage: float = 0.9) -> pd.DataFrame:
    """Return the table with columns for predictions: mean and interval, or label and probabilities.

    Raises:
        ValueError: if the table does not match the model, naming the column.
    """
    import pandas as pd

    x = learned.schema.inputs(frame)
    target, estimator = learned.schema.target, learned.estimator
    if isinstance(estimator, BayesianMLPRegressor):
        low, high = estimator.predict_interval(x, coverage)
        new = {"prediction": estimator.predict(x), "lower": low, "upper": high}
    else:
        probs = estimator.predict_proba(x)
        new = {"prediction": estimator.classes_[probs.argmax(1)]}
        new |= {f"p({label})": probs[:, i] for i, label in enumerate(estimator.classes_)}
    columns = {f"{target} {name}": values for name, values in new.items()}
    taken = [name for name in columns if name in frame.columns]
    if taken:
        raise ValueError(f"the table has a column {taken[0]!r} already: rename it")
    return pd.concat([frame, pd.DataFrame(columns, index=frame.index)], axis=1)
