"""The scikit-learn classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from eigenoise import checks
from eigenoise.distributions.mixtures import CategoricalMixture
from eigenoise.tabular.estimator import BayesianMLP, as_generator, check_weights
from eigenoise.tabular.rows import Rows


class BayesianMLPClassifier(ClassifierMixin, BayesianMLP):
    """A Bayesian neural network for classification: class probabilities averaged over the posterior of the weights.

    Arguments and attributes are those of ``BayesianMLPRegressor``, without the noise; ``classes_`` holds the labels.
    """

    _classes = True
    classes_: np.ndarray

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianMLPClassifier:
        """Fit to inputs ``X (N, n)`` and labels ``y (N,)``."""
        self.check_arguments()
        X, y = validate_data(self, X, y, reset=not self._is_warm(), dtype=np.float64)
        check_classification_targets(y)
        weight = check_weights(sample_weight, X)
        used = np.unique(y if weight is None else y[weight > 0])
        classes, index = np.unique(y, return_inverse=True)
        if len(used) < 2:
            raise ValueError(f"y must hold at least two classes, got one class: {used[0]!r}")
        if self._is_warm() and list(classes) != list(self.classes_):
            raise ValueError("y must hold the classes of the last fit with warm_start")
        self._fit(Rows.from_arrays(X, index.astype(np.int64), weight), len(classes))
        self.classes_ = classes
        return self

    def predictive(self, X: Any) -> CategoricalMixture:
        """Return the predictive distribution ``(N,)`` over indices into ``classes_``."""
        predictive = self._predictive(X)
        assert isinstance(predictive, CategoricalMixture)
        return predictive

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return probabilities ``(N, c)`` in the order of ``classes_``."""
        probs = self.predictive(X).probs
        return (probs / probs.sum(-1, keepdim=True)).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each row, ``(N,)``."""
        index = self.predict_proba(X).argmax(-1)
        return self.classes_[index]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Sample labels ``(N, n_samples)`` from the predictive distribution."""
        checks.integer("n_samples", n_samples)
        index = self.predictive(X).sample((n_samples,), as_generator(random_state))
        return self.classes_[index.numpy().T]

    def log_likelihood(self, X: Any, y: Any) -> float:
        """Return the mean log-probability of labels ``y (N,)``; −∞ if one of them is unknown."""
        probs, y = self.predict_proba(X), np.asarray(y)
        if y.shape != (len(probs),):
            raise ValueError(f"y must have the shape ({len(probs)},), got {y.shape}")
        onehot = (y[:, None] == self.classes_).astype(np.float64)
        with np.errstate(divide="ignore"):
            return float(np.log((probs * onehot).sum(-1)).mean())
