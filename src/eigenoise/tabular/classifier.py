"""Classification by a Bayesian network, as a scikit-learn estimator."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from eigenoise import checks
from eigenoise.distributions.mixtures import CategoricalMixture
from eigenoise.tabular.estimator import BayesianMLP, generator, weights
from eigenoise.tabular.rows import Rows


class BayesianMLPClassifier(ClassifierMixin, BayesianMLP):
    """Classification by a Bayesian network: probabilities that were averaged over what the weights may be.

    Arguments and attributes as for ``BayesianMLPRegressor``, without the noise's; ``classes_`` holds the labels.
    """

    _classes = True
    classes_: np.ndarray

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianMLPClassifier:
        """Fit to inputs ``X (N, n)`` and labels ``y (N,)``."""
        self.check_arguments()
        X, y = validate_data(self, X, y, reset=not self._goes_on(), dtype=np.float64)
        check_classification_targets(y)
        weight = weights(sample_weight, X)
        kept = slice(None) if weight is None else weight > 0
        classes, index = np.unique(y, return_inverse=True)
        if len(np.unique(y[kept])) < 2:
            raise ValueError(f"y must hold at least two classes, but there is one class only: {y[kept][0]!r}")
        if self._goes_on() and list(classes) != list(self.classes_):
            raise ValueError("y must hold the classes of the fit before, as warm_start goes on from it")
        self._fit(Rows.of(X, index.astype(np.int64), weight), len(classes))
        self.classes_ = classes
        return self

    def predictive(self, X: Any) -> CategoricalMixture:
        """The whole predictive distribution over places in ``classes_``."""
        found = self._predictive(X)
        assert isinstance(found, CategoricalMixture)
        return CategoricalMixture(found.logits.flatten(0, 1))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities ``(N, c)`` in the order of ``classes_``."""
        probs = self.predictive(X).probs
        return (probs / probs.sum(-1, keepdim=True)).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label of each row."""
        probs = self.predict_proba(X)
        return self.classes_[probs.argmax(-1)]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Labels drawn from the predictive distribution: ``(N, n_samples)``."""
        checks.integer("n_samples", n_samples)
        drawn = self.predictive(X).sample((n_samples,), generator(random_state))
        return self.classes_[drawn.numpy().T]

    def log_likelihood(self, X: Any, y: Any) -> float:
        """Mean log probability of labels; −∞ if one of them is unknown."""
        probs, y = self.predict_proba(X), np.asarray(y)
        if y.shape != (len(probs),):
            raise ValueError(f"y must have the shape ({len(probs)},), a label for each row, but {y.shape} came")
        known = (y[:, None] == self.classes_).astype(np.float64)
        with np.errstate(divide="ignore"):
            return float(np.log((probs * known).sum(-1)).mean())
