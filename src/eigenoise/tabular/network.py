"""Networks for a table: a stack of models that train in parallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from eigenoise import models
from eigenoise.distributions.mixtures import CategoricalMixture, GaussianMixture, Predictive
from eigenoise.inference.predict import predict
from eigenoise.likelihoods import CategoricalLikelihood, GaussianLikelihood, Likelihood
from eigenoise.optim import training
from eigenoise.optim.methods import BAYESIAN
from eigenoise.tabular.rows import Rows, sample_epoch

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {"relu": nn.ReLU, "tanh": nn.Tanh, "logistic": nn.Sigmoid, "silu": nn.SiLU, "gelu": nn.GELU}
)
DEFAULT_STEPS = 6_000  # of a training run, if the number of epochs is not given
VALIDATION_SAMPLES = 16  # of the weights

WARM_START_ERROR = (
    "warm_start continues with the networks of the last fit: hidden_layer_sizes, members and the columns of X and y "
    "must be unchanged"
)


@dataclass(frozen=True)
class Candidate:
    """Hyperparameters that validation may select.

    Attributes:
        hidden: sizes of the hidden layers.
        kl_weight: λ.
        prior_var: η.
    """

    hidden: tuple[int, ...]
    kl_weight: float
    prior_var: float

    def __str__(self) -> str:
        """Return a short description, for progress."""
        return f"{'' if self.hidden else 'linear, '}λ = {self.kl_weight:g}, η = {self.prior_var:g}"


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of a training run that validation does not select.

    Attributes:
        activation: one of ``ACTIVATIONS``.
        method: one of ``BAYESIAN``.
        outputs: number of the network's outputs.
        classes: whether the outputs are logits of classes.
        lr: learning rate.
        batch_size: rows of a step.
        seed: seed of initial weights, noise, order and splits.
    """

    activation: str
    method: str
    outputs: int
    classes: bool
    lr: float
    batch_size: int
    seed: int

    def likelihood(self, stack: int) -> Likelihood:
        """Return the likelihood of ``stack`` networks."""
        return CategoricalLikelihood(stack=stack) if self.classes else GaussianLikelihood(stack=stack)

    def model(self, inputs: int, hidden: tuple[int, ...], stack: int) -> nn.Module:
        """Return ``stack`` networks with their initial weights, in float64."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            activation = ACTIVATIONS[self.activation]
            return models.MLP(inputs, hidden, self.outputs, stack=stack, activation=activation).double()


class Stack:
    """Networks that train in parallel, each on its own rows.

    Args:
        config: settings of the training run.
        rows: the table.
        index: the rows ``(s, m)`` of each network.
        candidate: the hyperparameters.
    """

    def __init__(self, config: TrainingConfig, rows: Rows, index: Tensor, candidate: Candidate):
        self.config, self.rows, self.index = config, rows, index
        self.weight = rows.weight[index]
        self.generator = torch.Generator().manual_seed(config.seed)
        self.model = config.model(rows.x.shape[1], candidate.hidden, len(index))
        options: dict[str, Any] = {"samples": 2, "antithetic": True, "parallel": True, "lr": config.lr}
        if config.method != "bbb":
            options |= {"fisher": "sampled" if config.classes else "exact", "memory": None, "max_move": None}
            options["layer_clip"] = 1e-3
        self.optimizer = BAYESIAN[config.method](
            self.model,
            num_data=max(1, round(float(self.weight.sum(-1).mean()))),
            likelihood=config.likelihood(len(index)),
            kl_weight=candidate.kl_weight,
            prior_var=candidate.prior_var,
            generator=torch.Generator().manual_seed(config.seed),
            **options,
        )
        self.optimizer.constant_guess = None  # candidates that learn nothing are not chosen

    def load_means(self, means: Mapping[str, Tensor]) -> None:
        """Start from the mean weights of networks that were trained before.

        Raises:
            ValueError: if they have other sizes.
        """
        params = dict(self.model.named_parameters())
        if any(name not in params or params[name].shape != mean.shape for name, mean in means.items()):
            raise ValueError(WARM_START_ERROR)
        with torch.no_grad():
            for name, mean in means.items():
                params[name].copy_(mean)

    def epochs(self, count: int) -> Iterator[int]:
        """Train for ``count`` epochs, yielding the number of each when it is done."""

        def draw() -> Tensor:
            return self.index.gather(-1, sample_epoch(self.weight, self.generator))

        x, y, batch_size = self.rows.x, self.rows.y, self.config.batch_size
        return training.epochs(self.optimizer, x, y, count=count, batch_size=batch_size, draw=draw, decay=1.0)

    def predictive(self, index: Tensor) -> Predictive:
        """Return each network's predictive distribution of its rows ``(s, v)``."""
        return predict(self.model, self.optimizer, self.rows.x[index], samples=VALIDATION_SAMPLES)


def merge_members(predictive: Predictive) -> Predictive:
    """Merge the mixtures of s members with k samples each, ``(k, s, ...)``, into one mixture, ``(ks, ...)``."""
    if isinstance(predictive, CategoricalMixture):
        return CategoricalMixture(predictive.logits.flatten(0, 1))
    assert isinstance(predictive, GaussianMixture)
    return GaussianMixture(predictive.loc.flatten(0, 1), predictive.scale.flatten(0, 1))


def marginal(predictive: GaussianMixture, target: int) -> GaussianMixture:
    """Return the predictive distribution of one target, ``(..., b, 1)``."""
    return GaussianMixture(*(part[..., target : target + 1] for part in (predictive.loc, predictive.scale)))


def default_epochs(rows: Rows, batch_size: int) -> int:
    """Return the number of epochs that makes ``DEFAULT_STEPS`` steps, between 20 and 200."""
    return round(min(200.0, max(20.0, DEFAULT_STEPS / max(1.0, rows.total / batch_size))))


def default_batch_size(rows: Rows) -> int:
    """Return a thirtieth of the rows, between 10 and 100."""
    return round(min(100.0, max(10.0, rows.total / 30)))
