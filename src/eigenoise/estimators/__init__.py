"""scikit-learn estimators: Bayesian networks for tables."""

from eigenoise.estimators.mlp import BayesianMLPClassifier, BayesianMLPRegressor

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor"]
