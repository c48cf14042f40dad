"""scikit-learn estimators: Bayesian networks for tables."""

from eigenoise.estimators.classifier import BayesianMLPClassifier
from eigenoise.estimators.regressor import BayesianMLPRegressor

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor"]
