"""Baselines: scikit-learn's linear and boosted models, with Gaussian noise for regression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import Any

import numpy as np
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.model_selection import KFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

NUM_FOLDS = 5
RIDGE_ALPHAS = tuple(10.0**i for i in range(-3, 5))


def ridge() -> Any:
    """Return a ridge regression with its penalty selected by leave-one-out cross-validation."""
    return make_pipeline(StandardScaler(), RidgeCV(alphas=RIDGE_ALPHAS))


REGRESSORS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"ridge": ridge, "gradient boosting": lambda: HistGradientBoostingRegressor(random_state=0)}
)
CLASSIFIERS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "logistic regression": lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)),
        "gradient boosting": lambda: HistGradientBoostingClassifier(random_state=0, early_stopping=False),
    }
)


@dataclass(frozen=True)
class GaussianAround:
    """A regressor with Gaussian noise of constant variance.

    Attributes:
        model: the fitted regressor.
        std: standard deviation of the noise: the cross-validated root mean squared error.
    """

    model: Any
    std: float

    @classmethod
    def fit(cls, model: Any, x: np.ndarray, y: np.ndarray) -> GaussianAround:
        """Fit ``model`` to ``x (N, n)`` and ``y (N,)``, and estimate the noise by cross-validation."""
        folds = KFold(min(NUM_FOLDS, len(y)), shuffle=True, random_state=0)
        std = float(np.sqrt(np.mean((cross_val_predict(model, x, y, cv=folds) - y) ** 2)))
        return cls(model.fit(x, y), max(std, 1e-12))

    def log_likelihood(self, x: np.ndarray, y: np.ndarray) -> float:
        """Return the mean log-density of targets ``y (N,)``."""
        z = (y - self.model.predict(x)) / self.std
        return float(np.mean(-0.5 * z**2) - np.log(self.std) - 0.5 * np.log(2 * np.pi))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return means ``(N,)``."""
        return self.model.predict(x)

    def predict_interval(self, x: np.ndarray, coverage: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper ends ``(N,)`` of central intervals."""
        mean, half = self.model.predict(x), self.std * NormalDist().inv_cdf((1 + coverage) / 2)
        return mean - half, mean + half
