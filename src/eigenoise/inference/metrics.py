"""How good predictions are: error, log-likelihood, calibration of intervals and of probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eigenoise import checks
from eigenoise.distributions.mixtures import GaussianMixture

BINS = 15


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


def accuracy(probs: Tensor, y: Tensor) -> Tensor:
    """The part of targets ``y (b,)`` that the most probable class of ``probs (b, c)`` is."""
    _check_classes(probs, y)
    return (probs.argmax(-1) == y).to(probs.dtype).mean()


def brier(probs: Tensor, y: Tensor) -> Tensor:
    """Mean over examples of the squared distance between probabilities and the truth, from 0 to 2."""
    _check_classes(probs, y)
    truth = torch.nn.functional.one_hot(y, probs.shape[-1]).to(probs.dtype)
    return (probs - truth).square().sum(-1).mean()


@dataclass(frozen=True)
class Reliability:
    """Predictions sorted into bins by the probability of the predicted class, ``(bins,)`` each; empty bins hold 0.

    Attributes:
        weight: the part of all predictions that is in the bin.
        confidence: the mean probability there.
        accuracy: how often they are right.
    """

    weight: Tensor
    confidence: Tensor
    accuracy: Tensor

    @property
    def error(self) -> Tensor:
        """The expected calibration error: mean distance between confidence and accuracy."""
        return (self.weight * (self.confidence - self.accuracy).abs()).sum()

    def to_json(self) -> dict[str, list[float]]:
        """As JSON knows it."""
        return {name: getattr(self, name).tolist() for name in ("weight", "confidence", "accuracy")}


def reliability(probs: Tensor, y: Tensor, bins: int = BINS) -> Reliability:
    """How often predictions ``probs (b, c)`` of each confidence are right, in bins of equal width."""
    _check_classes(probs, y)
    confidence, predicted = probs.max(-1)
    index = (confidence * checks.integer("bins", bins)).ceil().long().sub_(1).clamp_(0, bins - 1)
    count, sure, right = (
        torch.zeros(bins, dtype=torch.float64).index_add_(0, index.cpu(), values.double().cpu())
        for values in (torch.ones_like(confidence), confidence, predicted == y)
    )
    held = count.clamp_min(1.0)
    return Reliability(count / len(y), sure / held, right / held)


def auroc(known: Tensor, strange: Tensor) -> float:
    """How often a strange example's score is above a known one's: 1 if always, 0.5 if scores say nothing."""
    from sklearn.metrics import roc_auc_score

    labels = torch.cat([torch.zeros(len(known)), torch.ones(len(strange))])
    return float(roc_auc_score(labels.numpy(), torch.cat([known, strange]).cpu().numpy()))


def _check_classes(probs: Tensor, y: Tensor) -> None:
    if probs.ndim != 2 or not len(probs):
        raise ValueError(f"probs must have the shape (b, c), got {tuple(probs.shape)}")
    checks.shape("y", y, (len(probs),))
    if not 0 <= int(y.min()) <= int(y.max()) < probs.shape[-1]:
        raise ValueError(f"y must be classes from 0 to {probs.shape[-1] - 1}, got {int(y.min())} to {int(y.max())}")
