"""Training and testing one recipe on a stack of splits: one model for each split, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from eigenoise import models
from eigenoise.distributions.mixtures import GaussianMixture
from eigenoise.inference import metrics
from eigenoise.inference.predict import predict
from eigenoise.likelihoods import GaussianLikelihood, HeteroscedasticGaussianLikelihood
from eigenoise.optim import training
from eigenoise.optim.methods import BAYESIAN
from eigenoise.studies.data import Splits
from eigenoise.studies.recipes import Recipe

INTERVAL_LEVELS = tuple(round(0.05 * i, 2) for i in range(1, 20))  # 5 % to 95 %
ELBO_SAMPLES = 20


class Training:
    """Models, optimiser and the order of the data, all from one seed.

    Args:
        recipe: settings of training and test.
        method: one of ``BAYESIAN``.
        splits: training and test parts, s of them.
        hidden: units of the one hidden layer.
        batch_size: examples per step.
        seed: seed of initial weights, weight noise and the order of the data.

    Attributes:
        curve: training ELBO (with λ = 1) per example after each epoch, mean over splits.
    """

    def __init__(self, recipe: Recipe, method: str, splits: Splits, *, hidden: int, batch_size: int, seed: int = 0):
        self.recipe, self.splits, self.batch_size = recipe, splits, batch_size
        stack, rows, inputs = splits.x_train.shape
        torch.manual_seed(seed)
        kind = HeteroscedasticGaussianLikelihood if recipe.input_noise else GaussianLikelihood
        likelihood = kind(stack=stack, **recipe.noise)
        self.model = models.MLP(inputs, [hidden], 2 if recipe.input_noise else 1, stack=stack)
        self.optimizer = BAYESIAN[method](self.model, num_data=rows, likelihood=likelihood, **recipe.optimizer)
        self.order = torch.Generator().manual_seed(seed)
        self.curve: list[float] = []

    def steps(self) -> Iterator[int]:
        """Trains on from the current state and yields the number of epochs so far after each."""
        for epoch in training.epochs(
            self.optimizer,
            self.splits.x_train,
            self.splits.y_train,
            count=self.recipe.epochs,
            batch_size=self.batch_size,
            generator=self.order,
            start=len(self.curve),
            decay=self.recipe.decay,
        ):
            self.curve.append(float(self.optimizer.elbo_terms().evidence_per_example.mean()))
            yield epoch

    def predictive(self) -> GaussianMixture:
        """Returns the predictive distribution of the test parts, in standardised units."""
        predicted = predict(self.model, self.optimizer, self.splits.x_test, samples=self.recipe.test_samples)
        assert isinstance(predicted, GaussianMixture)
        return predicted.with_noise_scaled(self.recipe.noise_scale)

    def scores(self, on_pass: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Tests: RMSE and log-likelihood in the table's units, ELBO (λ = 1) per example, coverage; lists over splits.

        Args:
            on_pass: called once all test rows are predicted.
        """
        predicted, y = self.predictive(), self.splits.y_test
        on_pass()
        scale = self.splits.y_std.flatten()
        terms = self.optimizer.elbo(self.splits.x_train, self.splits.y_train, samples=ELBO_SAMPLES)
        return {
            "rmse": (metrics.rmse(predicted.mean, y) * scale).tolist(),
            "ll": (metrics.log_likelihood(predicted, y) - scale.log()).tolist(),
            "elbo": terms.evidence_per_example.tolist(),
            "coverage": {str(level): metrics.coverage(predicted, y, level).tolist() for level in INTERVAL_LEVELS},
            "iterations": self.optimizer.steps,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that a bit-exact resume needs."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.order.get_state(),
            "curve": list(self.curve),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.set_state(state["order"])
        self.curve = list(state["curve"])
