"""How good predictions are: error, log-likelihood, calibration of intervals."""

from __future__ import annotations

from torch import Tensor

from eigenoise import checks
from eigenoise.predictive import GaussianMixture


def rmse(mean: Tensor, y: Tensor) -> Tensor:
    """Root mean squared error over the last two axes: ``(..., b, d)`` gives ``(...)``."""
    checks.shape("y", y, tuple(mean.shape))
    return (mean - y).square().mean((-2, -1)).sqrt()


def log_likelihood(predictive: GaussianMixture, y: Tensor) -> Tensor:
    """Mean log predictive density of an example, ``(...)``."""
    return predictive.log_prob(y).mean(-1)


def coverage(predictive: GaussianMixture, y: Tensor, level: float = 0.9) -> Tensor:
    """The fraction of targets within the central interval of probability ``level``, ``(...)``."""
    low, high = predictive.interval(level)
    return ((low <= y) & (y <= high)).to(y.dtype).mean((-2, -1))
