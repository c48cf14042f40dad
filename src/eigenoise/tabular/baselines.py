"""What is compared with: scikit-learn's linear and boosted models, with Gaussian noise where a density is wanted."""

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

FOLDS = 5
ALPHAS = tuple(10.0**i for i in range(-3, 5))


def ridge() -> Any:
    """Linear, its penalty chosen by leaving rows out."""
    return make_pipeline(StandardScaler(), RidgeCV(alphas=ALPHAS))


def logistic() -> Any:
    """Linear in the log odds."""
    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))


REGRESSORS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {"ridge": ridge, "gradient boosting": lambda: HistGradientBoostingRegressor(random_state=0)}
)
CLASSIFIERS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "logistic regression": logistic,
        "gradient boosting": lambda: HistGradientBoostingClassifier(random_state=0, early_stopping=False),
    }
)


@dataclass(frozen=True)
class GaussianAround:
    """A regressor's prediction with Gaussian noise of one size.

    Attributes:
        model: fitted.
        std: of the noise: root mean squared error on rows that were left out.
    """

    model: Any
    std: float

    @classmethod
    def fit(cls, model: Any, x: np.ndarray, y: np.ndarray) -> GaussianAround:
        """Fit, and measure the noise by cross-validation."""
        folds = KFold(min(FOLDS, len(y)), shuffle=True, random_state=0)
        left_out = cross_val_predict(model, x, y, cv=folds)
        std = float(np.sqrt(np.mean((left_out - y) ** 2)))
        return cls(model.fit(x, y), max(std, 1e-12))

    def log_likelihood(self, x: np.ndarray, y: np.ndarray) -> float:
        """Mean log density of targets."""
        z = (y - self.model.predict(x)) / self.std
        return float(np.mean(-0.5 * z**2) - np.log(self.std) - 0.5 * np.log(2 * np.pi))

    def predict(self, x: np.ndarray) -> np.ndarray:
        """The mean."""
        return self.model.predict(x)

    def predict_interval(self, x: np.ndarray, coverage: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Ends of central intervals."""
        mean, half = self.model.predict(x), self.std * NormalDist().inv_cdf((1 + coverage) / 2)
        return mean - half, mean + half
