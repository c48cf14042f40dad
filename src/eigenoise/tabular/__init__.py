"""Bayesian neural networks for tables: scikit-learn estimators, tables from files, calibration, saved models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eigenoise.tabular.classifier import BayesianMLPClassifier
    from eigenoise.tabular.regressor import BayesianMLPRegressor

__all__ = ["BayesianMLPClassifier", "BayesianMLPRegressor"]

_MODULES = {"BayesianMLPClassifier": "classifier", "BayesianMLPRegressor": "regressor"}


def __getattr__(name: str) -> Any:
    """Import torch and scikit-learn on first access, so that the command line starts without them."""
    if name in _MODULES:
        return getattr(import_module(f"eigenoise.tabular.{_MODULES[name]}"), name)
    raise AttributeError(f"module 'eigenoise.tabular' has no attribute {name!r}")
