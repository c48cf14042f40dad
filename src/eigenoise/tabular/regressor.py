"""Regression by a Bayesian network, as a scikit-learn estimator."""

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
from eigenoise.tabular.estimator import BayesianMLP, generator, weights
from eigenoise.tabular.rows import Rows, Scale


class BayesianMLPRegressor(RegressorMixin, BayesianMLP):
    """Regression by a Bayesian network: a mean, and how far off it may be.

    Inputs and targets are standardised inside. Rows are held out to choose λ and η, when to stop, a factor on the
    noise, and how wide intervals must be; then networks are trained on all rows. Where a network does not make held-out
    rows clearly more likely than a linear model does, the linear one is used, unless λ or η is given.

    Args:
        hidden_layer_sizes: units of the hidden layers.
        activation: ``"relu"``, ``"tanh"``, ``"logistic"``, ``"silu"`` or ``"gelu"``.
        method: ``"noisy-ekfac"``, ``"noisy-kfac"``, ``"noisy-adam"`` or ``"bbb"``.
        kl_weight: λ, the weight of the KL term: 1 is Bayes, less is a colder posterior.
        prior_var: η, variance of the prior. By default a linear model comes first, then networks with λ and η of 1 and
            0.1, 0.3 and 0.3, 0.1 and 1: the next is taken if it makes held-out rows more likely by more than two
            standard errors. If one of them is given, only the other is chosen, and there is no linear model.
        lr: step size.
        batch_size: rows of a step; by default a thirtieth of them, from 10 to 100.
        max_epochs: passes over the rows at most; by default about 6,000 steps, from 20 to 200 passes.
        early_stopping: whether held-out rows decide how many passes there are.
        validation_fraction: of the rows that is held out. In tables of up to 2,000 rows each row is held out once.
        patience: a training ends when held-out rows did not gain in so many looks, of about 40.
        members: networks of an ensemble, trained at once, which costs little more than one; each has a posterior of its
            own.
        samples: weight samples of a prediction, all members together.
        warm_start: let ``fit`` go on from the weights, and with the choices, of the fit before.
        random_state: seed of divisions, initial weights, order and noise.
        verbose: whether to show progress.

    Attributes:
        posterior_: the ``Posterior`` of all members.
        model_: their networks, as one stack.
        hidden_layer_sizes_: as used; empty for a linear model.
        kl_weight_: λ as used.
        prior_var_: η as used.
        n_iter_: passes over all rows.
        validation_log_likelihood_: of a held-out row in standardised units, NaN without held-out rows.
        noise_scale_: factor on the noise's standard deviation for each target.
        spectra_: of each layer's Fisher, see ``eigenoise.optim.spectra``; only by EK-FAC.
        one_target_: whether ``y`` had no axis for targets.

    Sample weights count observations: a row of weight two is two equal rows.
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
        new = not self._goes_on()
        X, y = validate_data(self, X, y, reset=new, multi_output=True, y_numeric=True, dtype=np.float64)
        if not new and (1 if y.ndim == 1 else y.shape[1]) != len(self.y_scale_.mean):
            raise ValueError("y must have as many targets as in the fit before, as warm_start goes on from it")
        rows = Rows.of(X, y.reshape(len(y), -1).astype(np.float64), weights(sample_weight, X))
        scale = Scale.of(rows.y, rows.weight) if new else self.y_scale_
        self._fit(dataclasses.replace(rows, y=scale.standardise(rows.y)), rows.y.shape[-1])
        self.y_scale_, self.noise_scale_, self.one_target_ = scale, self.choice_.noise.numpy(), y.ndim == 1
        return self

    def predictive(self, X: Any) -> GaussianMixture:
        """The whole predictive distribution of targets ``(N, d)`` in their own units."""
        found = self._predictive(X)
        assert isinstance(found, GaussianMixture)
        loc, scale = (part.flatten(0, 1) for part in (found.loc, found.scale))  # samples of members are samples
        return GaussianMixture(self.y_scale_.restore(loc), scale * self.choice_.noise * self.y_scale_.std)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Means ``(N,)`` or ``(N, d)``; with ``return_std`` standard deviations too, of noise and weights together."""
        found = self.predictive(X)
        return (self._out(found.mean), self._out(found.stddev)) if return_std else self._out(found.mean)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper ends of central intervals that hold a target with probability ``coverage``.

        They are as wide as held-out rows asked for, which may differ a little from what ``predictive`` says.
        """
        checks.number("coverage", coverage, open_low=True)
        if coverage >= 1:
            raise ValueError(f"coverage must be below 1, but {coverage!r} came")
        found = self.predictive(X)
        low, high = (self._quantile(found, (1 + sign * coverage) / 2) for sign in (-1, 1))
        return self._out(low), self._out(high)

    def predict_quantiles(self, X: Any, quantiles: Sequence[float] = (0.05, 0.5, 0.95)) -> np.ndarray:
        """Quantiles ``(N, q)``, or ``(N, d, q)`` for several targets, calibrated as intervals are."""
        for q in quantiles:
            checks.number("quantiles", q, open_low=True)
            if q >= 1:
                raise ValueError(f"quantiles must be below 1, but {q!r} came")
        found = self.predictive(X)
        return np.stack([self._out(self._quantile(found, q)) for q in quantiles], -1)

    def _quantile(self, found: GaussianMixture, q: float) -> Tensor:
        """``(N, d)``, calibrated for each target."""
        each = []
        for j in range(found.loc.shape[-1]):
            own = GaussianMixture(found.loc[..., j : j + 1], found.scale[..., j : j + 1])
            each.append(own.quantile(self.choice_.calibration.quantile(q, j)))
        return torch.cat(each, -1)

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Targets drawn from the predictive distribution: ``(N, n_samples)``, or ``(N, d, n_samples)``."""
        checks.integer("n_samples", n_samples)
        drawn = self.predictive(X).sample((n_samples,), generator(random_state))
        return np.moveaxis(np.stack([self._out(part) for part in drawn]), 0, -1)

    def log_likelihood(self, X: Any, y: Any) -> float:
        """Mean log density of targets, in their own units; several targets of a row are added up."""
        found = self.predictive(X)
        target = torch.tensor(np.asarray(y, np.float64))
        target = target.unsqueeze(-1) if self.one_target_ and target.ndim == 1 else target
        return float(found.log_prob(checks.shape("y", target, tuple(found.mean.shape))).mean())

    def _out(self, values: Tensor) -> np.ndarray:
        return (values.squeeze(-1) if self.one_target_ else values).numpy()
