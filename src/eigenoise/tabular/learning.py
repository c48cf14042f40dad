"""From a table to a tested model: hold rows out, fit, compare with scikit-learn's models on the same rows."""

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

SHOWN = 300  # rows whose predictions are kept for a picture
FEWEST = 20  # rows with a target
LEAST = 1e-12  # probability that is counted, so that one surprise does not make a mean infinite


@dataclass(frozen=True)
class Learned:
    """A model of a table.

    Attributes:
        estimator: fitted.
        schema: of the table.
        scores: of each method on held-out rows, by measure.
        rows: how many it learned from and how many were held out.
        details: of predictions for held-out rows and of the networks, for a report.
    """

    estimator: persistence.Estimator
    schema: Schema
    scores: dict[str, dict[str, float]]
    rows: tuple[int, int]
    details: dict[str, Any]

    def save(self, path: Path) -> None:
        """In one file without code."""
        notes = {"schema": self.schema.to_json(), "scores": self.scores, "rows": list(self.rows)}
        notes["details"] = self.details
        persistence.save(self.estimator, path, notes)

    @classmethod
    def load(cls, path: Path) -> Learned:
        """What ``save`` wrote.

        Raises:
            FileNotFoundError, ValueError: if there is no such file or it is no model of a table.
        """
        estimator, notes = persistence.load(path)
        try:
            schema = Schema.from_json(notes["schema"])
            learned, held_out = notes["rows"]
            found = cls(estimator, schema, notes["scores"], (int(learned), int(held_out)), notes["details"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is a model, but not of a table: {error}") from error
        width = schema.inputs_count
        if width != estimator.n_features_in_:
            raise ValueError(f"{path} is damaged: its columns make {width} inputs, its networks have others")
        return found

    def grid(self) -> Grid:
        """Scores as a table."""
        regression = self.schema.task == "regression"
        titles = (
            {"rmse": "error (RMSE)", "ll": "log-likelihood", "in50": "in the 50 % interval", "in90": "in the 90 %"}
            if regression
            else {"accuracy": "right", "ll": "log-likelihood", "ece": "calibration error"}
        )
        digits = {"rmse": ".4g", "ll": ".4f", "in50": ".0%", "in90": ".0%", "accuracy": ".1%", "ece": ".1%"}
        rows = [[name, *(f"{own[key]:{digits[key]}}" for key in titles)] for name, own in self.scores.items()]
        best = max(range(len(rows)), key=lambda i: list(self.scores.values())[i]["ll"])
        title = f"{self.rows[1]:,} rows that no model has seen"
        return Grid(title, ["", *titles.values()], rows, frozenset({(best, 2)}))


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
    """Fit to a table and compare on held-out rows.

    Args:
        frame: the table.
        target: column to predict; rows without it are left out.
        task: ``"regression"`` or ``"classification"``; by default seen from the target.
        drop: columns not to learn from.
        held_out: the part of the rows to be tested on.
        seed: of which rows, and of the fit.
        **options: of the estimator.

    Raises:
        ValueError: if the table cannot be learned from, naming the column.
    """
    checks.number("held_out", held_out, open_low=True, high=0.9)
    whole = Schema.of(frame, target, task, drop)
    frame = frame[frame[target].notna()]
    if len(frame) < FEWEST:
        raise ValueError(f"the table has {len(frame)} rows with a target, and at least {FEWEST} are needed")
    whole.inputs(frame)  # says what is wrong with any row
    classes = whole.task == "classification"
    goal = whole.targets(frame)
    labels, counts = np.unique(goal, return_counts=True) if classes else (goal, np.array([0]))
    room = min(held_out, 1 - held_out) * len(goal) >= len(labels)
    even = goal if classes and counts.min() >= 2 and room else None
    known, held = train_test_split(frame, test_size=held_out, random_state=seed, stratify=even)
    gone = [name for name in frame.columns if name != target and known[name].isna().all()]
    schema = Schema.of(known, target, whole.task, [*drop, *(name for name in gone if name not in drop)])
    x, y, x_held, y_held = schema.inputs(known), schema.targets(known), schema.inputs(held), schema.targets(held)
    new = ~_seen(x_held, y_held, x, y)
    if not new.any():
        raise ValueError("every row that was held out is in the rest of the table too: there is nothing to test on")
    parts = [x, x_held[new], y, y_held[new]]
    rows = len(y), int(new.sum())
    estimator: persistence.Estimator
    if classes:
        estimator, scores, details = _classify(parts, seed, options)
    else:
        estimator, scores, details = _regress(parts, seed, options)
    return Learned(estimator, schema, scores, rows, {**details, "spectra": estimator.spectra_})


def _seen(x: np.ndarray, y: np.ndarray, known_x: np.ndarray, known_y: np.ndarray) -> np.ndarray:
    """Which rows are among the known ones, word for word."""
    known = {(row.tobytes(), str(goal)) for row, goal in zip(known_x, known_y, strict=True)}
    return np.array([(row.tobytes(), str(goal)) in known for row, goal in zip(x, y, strict=True)])


def regression_scores(model: BayesianMLPRegressor | GaussianAround, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Root mean squared error, log-likelihood, and the part of targets in the 50 and 90 % intervals."""
    inside = {}
    for level in (0.5, 0.9):
        low, high = model.predict_interval(x, level)
        inside[f"in{100 * level:.0f}"] = float(np.mean((low <= y) & (y <= high)))
    error = float(np.sqrt(np.mean((model.predict(x) - y) ** 2)))
    return {"rmse": error, "ll": model.log_likelihood(x, y), **inside}


def _regress(
    parts: list[np.ndarray], seed: int, options: dict[str, Any]
) -> tuple[BayesianMLPRegressor, dict[str, dict[str, float]], dict[str, Any]]:
    x, x_test, y, y_test = parts
    own = BayesianMLPRegressor(random_state=seed, **options).fit(x, y)
    models: dict[str, BayesianMLPRegressor | GaussianAround] = {"eigenoise": own}
    models |= {name: GaussianAround.fit(make(), x, y) for name, make in REGRESSORS.items()}
    scores = {name: regression_scores(model, x_test, y_test) for name, model in models.items()}
    some = own.predictive(x_test[:SHOWN])
    ends = [torch.from_numpy(end) for end in own.predict_interval(x_test[:SHOWN], 0.9)]
    columns: dict[str, torch.Tensor] = {"mean": some.mean, "lower": ends[0], "upper": ends[1]}
    columns |= {"noise": some.noise_stddev, "weights": some.weights_stddev}
    points = {"true": y_test[:SHOWN].tolist(), **{name: part.flatten().tolist() for name, part in columns.items()}}
    return own, scores, {"points": points}


def _classify(
    parts: list[np.ndarray], seed: int, options: dict[str, Any]
) -> tuple[BayesianMLPClassifier, dict[str, dict[str, float]], dict[str, Any]]:
    x, x_test, y, y_test = parts
    own = BayesianMLPClassifier(random_state=seed, **options).fit(x, y)
    others = {name: make().fit(x, y) for name, make in CLASSIFIERS.items()}
    scores, reliability = {}, {}
    for name, model in {"eigenoise": own, **others}.items():
        probs, classes = model.predict_proba(x_test), list(model.classes_)
        truth = np.asarray(y_test)[:, None] == np.asarray(classes)[None]
        right = probs.argmax(1) == np.where(truth.any(1), truth.argmax(1), -1)
        known = truth.any(1)
        bins = metrics.reliability(torch.from_numpy(probs[known]), torch.from_numpy(truth[known].argmax(1)))
        likelihood = np.log(np.maximum(LEAST, (probs * truth).sum(1))).mean()
        scores[name] = {"accuracy": float(right.mean()), "ll": float(likelihood), "ece": float(bins.error)}
        reliability[name] = bins.to_json()
    return own, scores, {"reliability": reliability["eigenoise"]}


def predict(learned: Learned, frame: pd.DataFrame, coverage: float = 0.9) -> pd.DataFrame:
    """The table with columns for predictions: mean and interval, or label and probabilities.

    Raises:
        ValueError: if the table does not fit the model, naming the column.
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
    names = {f"{target} {name}": values for name, values in new.items()}
    taken = [name for name in names if name in frame.columns]
    if taken:
        raise ValueError(f"the table has a column {taken[0]!r} already: rename it")
    return pd.concat([frame, pd.DataFrame(names, index=frame.index)], axis=1)
