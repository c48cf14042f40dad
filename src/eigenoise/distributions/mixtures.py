"""Predictive distributions: equally weighted mixtures over k weight samples, the first axis of every parameter.

Each splits its variance into noise, which more data would not remove, and the uncertainty of the weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints
from torch.nn import functional

from eigenoise import checks

NUM_BISECTIONS = 60
MAX_ELEMENTS_PER_CHUNK = 1 << 22  # of the largest temporary tensor of a quantile


def log_mean_exp(log_values: Tensor) -> Tensor:
    """Return the log of the mean of exp(``log_values``) over the first axis."""
    return torch.logsumexp(log_values, 0) - math.log(log_values.shape[0])


class GaussianMixture(Distribution):
    """(1/k) Σ N(loc_k, scale_k²) over targets ``(..., b, d)``; the d outputs are independent given the weights.

    Args:
        loc: the network's output for each weight sample ``(k, ..., b, d)``.
        scale: standard deviation of the noise, broadcastable to ``loc``.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # noqa: RUF012
    support = constraints.real_vector

    def __init__(self, loc: Tensor, scale: Tensor):
        self.loc, self.scale = torch.broadcast_tensors(loc, scale)
        super().__init__(self.loc.shape[1:-1], self.loc.shape[-1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean ``(..., b, d)``."""
        return self.loc.mean(0)

    @property
    def noise_stddev(self) -> Tensor:
        """Standard deviation of the noise ``(..., b, d)``: the part of ``stddev`` that more data would not remove."""
        return self.scale.square().mean(0).sqrt()

    @property
    def weights_stddev(self) -> Tensor:
        """Standard deviation of the network's output over weight samples ``(..., b, d)``."""
        return self.loc.var(0, correction=0).sqrt()

    @property
    def variance(self) -> Tensor:
        """Variance ``(..., b, d)``: of the noise plus of the output over weight samples."""
        return self.scale.square().mean(0) + self.loc.var(0, correction=0)

    def with_noise_scaled(self, factor: float) -> GaussianMixture:
        """Return the mixture with all noise standard deviations multiplied by ``factor``, for calibration."""
        return GaussianMixture(self.loc, self.scale * checks.number("factor", factor, open_low=True))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the joint log-density of the d outputs of each example, ``(..., b)``."""
        checks.shape("value", value, tuple(self.loc.shape[1:]))
        z = (value - self.loc) / self.scale
        per_sample = -0.5 * z.square() - self.scale.log() - 0.5 * math.log(2 * math.pi)
        return log_mean_exp(per_sample.sum(-1))

    def cdf(self, value: Tensor) -> Tensor:
        """Return P(target ≤ value) of each output; ``value`` broadcasts against ``(..., b, d)``."""
        return _normal_cdf((value - self.loc) / self.scale).mean(0)

    def quantile(self, q: float) -> Tensor:
        """Return the ``q``-quantile of each output, ``(..., b, d)``."""
        checks.fraction("q", q)
        k, shape = self.loc.shape[0], self.loc.shape[1:]
        size = max(1, MAX_ELEMENTS_PER_CHUNK // k)
        parts = zip(self.loc.reshape(k, -1).split(size, 1), self.scale.reshape(k, -1).split(size, 1), strict=True)
        if q > 0.5:  # the lower tail of the mirror image: small probabilities keep their digits
            return -torch.cat([_bisect(-loc, scale, 1 - q) for loc, scale in parts]).reshape(shape)
        return torch.cat([_bisect(loc, scale, q) for loc, scale in parts]).reshape(shape)

    def interval(self, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """Return the lower and upper end ``(..., b, d)`` of the central interval of probability ``coverage``."""
        checks.fraction("coverage", coverage)
        return self.quantile((1 - coverage) / 2), self.quantile((1 + coverage) / 2)

    def sample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Sample targets ``(*sample_shape, ..., b, d)``: a weight sample for each example, then its noise."""
        shape = torch.Size(sample_shape) + self.batch_shape
        index = _choose_samples(self.loc, shape, generator)
        loc, scale = self.loc.gather(0, index), self.scale.gather(0, index)
        noise = torch.randn(loc.shape, generator=generator, dtype=loc.dtype, device=loc.device)
        return (loc + scale * noise).reshape(*shape, self.loc.shape[-1])


def _choose_samples(parameter: Tensor, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """Draw the index of one weight sample for each target of ``shape``, expanded to gather along the first axis."""
    index = torch.randint(parameter.shape[0], shape, generator=generator, device=parameter.device)
    return index.reshape(-1, *parameter.shape[1:-1]).unsqueeze(-1).expand(-1, *parameter.shape[1:])


def _normal_cdf(z: Tensor) -> Tensor:
    """Return Φ(z), accurate in the lower tail, where (1 + erf)/2 cancels."""
    return 0.5 * torch.special.erfc(z * -(0.5**0.5))


def _bisect(loc: Tensor, scale: Tensor, q: float) -> Tensor:
    """Return the quantile of each column's mixture; it lies between the smallest and largest component quantile."""
    component_quantiles = loc + scale * NormalDist().inv_cdf(q)
    low, high = component_quantiles.amin(0), component_quantiles.amax(0)
    for _ in range(NUM_BISECTIONS):
        middle = (low + high) / 2
        below = _normal_cdf((middle - loc) / scale).mean(0) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


class _ProbabilityMixture(Distribution, ABC):
    """Binary targets, or one-hot classes, with probabilities ``(k, ...)`` given the weights."""

    @property
    @abstractmethod
    def sample_probs(self) -> Tensor:
        """Probabilities given each weight sample, ``(k, ..., b, ·)``."""

    @property
    def probs(self) -> Tensor:
        """Probabilities, the mean over weight samples, ``(..., b, ·)``."""
        return self.sample_probs.mean(0)

    @property
    def mean(self) -> Tensor:
        """Mean of the targets as zeros and ones: the probabilities ``(..., b, ·)``."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        """Variance p(1 − p) of the targets as zeros and ones, ``(..., b, ·)``."""
        return self.probs * (1 - self.probs)

    @property
    def noise_stddev(self) -> Tensor:
        """Root mean variance of the targets given the weights, ``(..., b, ·)``."""
        return (self.sample_probs * (1 - self.sample_probs)).mean(0).sqrt()

    @property
    def weights_stddev(self) -> Tensor:
        """Standard deviation of the probabilities over weight samples, ``(..., b, ·)``."""
        return self.sample_probs.var(0, correction=0).sqrt()


class CategoricalMixture(_ProbabilityMixture):
    """(1/k) Σ softmax(logits_k) over classes ``(..., b)``.

    Args:
        logits: ``(k, ..., b, c)``.
    """

    arg_constraints = {"logits": constraints.real_vector}  # noqa: RUF012

    def __init__(self, logits: Tensor):
        self.logits = logits.log_softmax(-1)
        super().__init__(self.logits.shape[1:-1], validate_args=False)

    @property
    def sample_probs(self) -> Tensor:
        """Class probabilities given each weight sample, ``(k, ..., b, c)``."""
        return self.logits.exp()

    @property
    def mode(self) -> Tensor:
        """The most probable class ``(..., b)``."""
        return self.probs.argmax(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log-probability of classes ``value (..., b)``, ``(..., b)``."""
        checks.shape("value", value, tuple(self.batch_shape))
        return log_mean_exp(self.logits).gather(-1, value.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return the entropy of the class probabilities in nats, ``(..., b)``."""
        return torch.special.entr(self.probs).sum(-1)

    def mutual_information(self) -> Tensor:
        """Return the mutual information of class and weights in nats, ``(..., b)``; high far from the training data."""
        expected = torch.special.entr(self.sample_probs).sum(-1).mean(0)
        return (self.entropy() - expected).clamp_min(0.0)

    def sample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Sample classes ``(*sample_shape, ..., b)``."""
        flat = self.probs.reshape(-1, self.logits.shape[-1])
        count = torch.Size(sample_shape).numel()
        drawn = torch.multinomial(flat, count, replacement=True, generator=generator)
        return drawn.mT.reshape(torch.Size(sample_shape) + self.batch_shape)


class BernoulliMixture(_ProbabilityMixture):
    """(1/k) Σ Bernoulli(sigmoid(logits_k)) over d binary targets ``(..., b, d)``, independent given the weights.

    Args:
        logits: ``(k, ..., b, d)``.
    """

    arg_constraints = {"logits": constraints.real}  # noqa: RUF012

    def __init__(self, logits: Tensor):
        self.logits = logits
        super().__init__(logits.shape[1:-1], logits.shape[-1:], validate_args=False)

    @property
    def sample_probs(self) -> Tensor:
        """Probabilities of 1 given each weight sample, ``(k, ..., b, d)``."""
        return self.logits.sigmoid()

    def entropy(self) -> Tensor:
        """Return the entropy of each binary target in nats, ``(..., b, d)``."""
        return torch.special.entr(self.probs) + torch.special.entr(1 - self.probs)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the joint log-probability of the d targets of each example, ``(..., b)``."""
        checks.shape("value", value, tuple(self.logits.shape[1:]))
        sign = 2 * value - 1
        return log_mean_exp(functional.logsigmoid(sign * self.logits).sum(-1))

    def sample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Sample targets ``(*sample_shape, ..., b, d)``; the d targets of an example share a weight sample."""
        shape = torch.Size(sample_shape) + self.batch_shape
        index = _choose_samples(self.logits, shape, generator)
        p = self.sample_probs.gather(0, index)
        return torch.bernoulli(p, generator=generator).reshape(*shape, self.logits.shape[-1])


Predictive = GaussianMixture | CategoricalMixture | BernoulliMixture
