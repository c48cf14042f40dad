"""The scikit-learn regressor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils.validation import validate_data
from torch import Tensor

from eigenoise import checks
from eigenoise.distributions.mixtures import GaussianMixture
from eigenoise.tabular.estimator import BayesianMLP, as_generator, check_weights
from eigenoise.tabular.network import marginal
from eigenoise.tabular.rows import Rows, Scale


class BayesianMLPRegressor(RegressorMixin, BayesianMLP):
    """A Bayesian neural network for regression: means with calibrated uncertainty.

    Inputs and targets are standardised internally. Validation rows select λ and η, the number of epochs, a factor on
    the noise and the width of intervals; then networks train on all rows. A linear model is used where no network is
    significantly better on validation rows, unless λ or η is given.

    Args:
        hidden_layer_sizes: sizes of the hidden layers.
        activation: ``"relu"``, ``"tanh"``, ``"logistic"``, ``"silu"`` or ``"gelu"``.
        method: ``"noisy-ekfac"``, ``"noisy-kfac"``, ``"noisy-adam"`` or ``"bbb"``.
        kl_weight: λ, the weight of the KL term; 1 is the Bayesian posterior, less a colder one.
        prior_var: η, the variance of the prior. By default a linear model is tried first, then networks with (λ, η) of
            (1, 0.1), (0.3, 0.3) and (0.1, 1): each replaces the last if its log-likelihood on validation rows is higher
            by more than two standard errors. If λ or η is given, only the other is selected, without a linear model.
        lr: learning rate.
        batch_size: rows of a step; by default a thirtieth of them, between 10 and 100.
        max_epochs: maximum number of epochs; by default about 6,000 steps, between 20 and 200 epochs.
        early_stopping: whether validation rows select the number of epochs.
        validation_fraction: the fraction of validation rows. Up to 2,000 rows, cross-validation uses every row once.
        patience: number of validations without improvement, of about 40, after which training stops.
        members: size of the ensemble; members train in parallel, and each has its own posterior.
        samples: weight samples of a prediction, over all members.
        warm_start: whether ``fit`` continues from the weights and the selection of the last fit.
        random_state: seed of splits, initial weights, order and noise.
        verbose: whether to show progress.

    Attributes:
        posterior_: the ``Posterior`` of all members.
        model_: the networks of all members, as one stack.
        hidden_layer_sizes_: selected sizes; empty for a linear model.
        kl_weight_: selected λ.
        prior_var_: selected η.
        n_iter_: number of epochs over all rows.
        validation_log_likelihood_: mean over validation rows in standardised units, NaN without validation.
        noise_scale_: factor on the standard deviation of the noise for each target ``(d,)``.
        spectra_: spectrum of each layer's Fisher for EK-FAC, see ``eigenoise.optim.spectra``.
        one_target_: whether ``y`` was one-dimensional.

    Sample weights count observations: a row of weight two is the same as two equal rows.
    """

    _classes = False
    y_scale_: Scale

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> BayesianMLPRegressor:
        """Fit to inputs ``X (N, n)`` and targets ``y (N,)`` or ``(N, d)``."""
        self.check_arguments()
        warm = self._is_warm()
        X, y = validate_data(self, X, y, reset=not warm, multi_output=True, y_numeric=True, dtype=np.float64)
        targets = y.reshape(len(y), -1).astype(np.float64)
        if warm and targets.shape[1] != len(self.y_scale_.mean):
            raise ValueError("y must have as many targets as in the last fit with warm_start")
        rows = Rows.from_arrays(X, targets, check_weights(sample_weight, X))
        scale = self.y_scale_ if warm else Scale.fit(rows.y, rows.weight)
        self._fit(dataclasses.replace(rows, y=scale.standardise(rows.y)), targets.shape[1])
        self.y_scale_, self.noise_scale_, self.one_target_ = scale, self.selection_.noise.numpy(), y.ndim == 1
        return self

    def predictive(self, X: Any) -> GaussianMixture:
        """Return the predictive distribution of targets ``(N, d)``, in their units."""
        predictive = self._predictive(X)
        assert isinstance(predictive, GaussianMixture)
        scale = predictive.scale * self.selection_.noise * self.y_scale_.std
        return GaussianMixture(self.y_scale_.restore(predictive.loc), scale)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return means ``(N,)`` or ``(N, d)``; with ``return_std`` also the predictive standard deviations."""
        predictive = self.predictive(X)
        mean = self._to_numpy(predictive.mean)
        return (mean, self._to_numpy(predictive.stddev)) if return_std else mean

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper ends of central intervals that contain a target with probability ``coverage``.

        They are calibrated on validation rows, so they may differ slightly from the intervals of ``predictive``.
        """
        checks.fraction("coverage", coverage)
        low, high = np.moveaxis(self.predict_quantiles(X, [(1 - coverage) / 2, (1 + coverage) / 2]), -1, 0)
        return low, high

    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Return calibrated quantiles ``(N, q)``, or ``(N, d, q)`` for several targets."""
        for q in quantiles:
            checks.fraction("quantiles", q)
        predictive, calibration = self.predictive(X), self.selection_.calibration
        marginals = [marginal(predictive, j) for j in range(predictive.loc.shape[-1])]
        values = [
            torch.cat([mixture.quantile(calibration.quantile(q, j)) for j, mixture in enumerate(marginals)], -1)
            for q in quantiles
        ]
        return np.stack([self._to_numpy(value) for value in values], -1)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Sample targets ``(N, n_samples)``, or ``(N, d, n_samples)``, from the predictive distribution."""
        checks.integer("n_samples", n_samples)
        samples = self.predictive(X).sample((n_samples,), as_generator(random_state))
        return np.moveaxis(self._to_numpy(samples), 0, -1)

    def log_likelihood(self, X: Any, y: Any) -> float:
        """Return the mean log-density of targets in their units, the joint one of several targets."""
        predictive = self.predictive(X)
        target = torch.tensor(np.asarray(y, np.float64))
        target = target.unsqueeze(-1) if self.one_target_ and target.ndim == 1 else target
        return float(predictive.log_prob(checks.shape("y", target, tuple(predictive.mean.shape))).mean())

    def _to_numpy(self, values: Tensor) -> np.ndarray:
        """Return targets ``(..., d)`` in the shape of the ``y`` that was fitted."""
        return (values.squeeze(-1) if self.one_target_ else values).numpy()
