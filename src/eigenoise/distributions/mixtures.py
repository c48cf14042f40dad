"""Predictive distributions: mixtures over weight samples, each knowing what noise and what weights contribute.

The first axis k of all parameters counts the weight samples; every sample has the same weight in the mixture.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from eigenoise import checks

BISECTIONS = 60
CHUNK = 1 << 22  # numbers in the largest temporary of a quantile


def log_mean_exp(log_values: Tensor) -> Tensor:
    """Log of the mean of exp over the first axis."""
    return torch.logsumexp(log_values, 0) - math.log(log_values.shape[0])


class GaussianMixture(Distribution):
    """Targets ``(..., b, d)`` given k weight samples: (1/k) Σ N(loc_k, scale_k²), outputs independent given weights.

    Args:
        loc: ``(k, ..., b, d)``, the network's output for each weight sample.
        scale: noise standard deviation, broadcastable to ``loc``.
    """

    arg_constraints = {"loc": constraints.real, "scale": constraints.positive}  # noqa: RUF012
    support = constraints.real_vector

    def __init__(self, loc: Tensor, scale: Tensor):
        self.loc, self.scale = torch.broadcast_tensors(loc, scale)
        super().__init__(self.loc.shape[1:-1], self.loc.shape[-1:], validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean over samples, ``(..., b, d)``."""
        return self.loc.mean(0)

    @property
    def noise_stddev(self) -> Tensor:
        """The part of ``stddev`` that more data would not remove: root mean noise variance."""
        return self.scale.square().mean(0).sqrt()

    @property
    def weights_stddev(self) -> Tensor:
        """The part of ``stddev`` that comes from not knowing the weights: spread of the network's output."""
        return self.loc.var(0, correction=0).sqrt()

    @property
    def variance(self) -> Tensor:
        """Noise plus weights."""
        return self.scale.square().mean(0) + self.loc.var(0, correction=0)

    def with_noise_scaled(self, factor: float) -> GaussianMixture:
        """The same with all noise standard deviations times ``factor``, as calibration on held-out rows may ask for."""
        return GaussianMixture(self.loc, self.scale * checks.number("factor", factor, open_low=True))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log (1/k) Σ N(value; ...), summed over the d outputs of one example: ``(..., b)``."""
        checks.shape("value", value, tuple(self.loc.shape[1:]))
        z = (value - self.loc) / self.scale
        per_sample = -0.5 * z.square() - self.scale.log() - 0.5 * math.log(2 * math.pi)
        return log_mean_exp(per_sample.sum(-1))

    def cdf(self, value: Tensor) -> Tensor:
        """P(target ≤ value) for each output on its own; ``value`` broadcasts against ``(..., b, d)``."""
        return _normal_cdf((value - self.loc) / self.scale).mean(0)

    def quantile(self, q: float) -> Tensor:
        """The value below which a target falls with probability ``q``, for each output on its own: ``(..., b, d)``."""
        checks.number("q", q, open_low=True)
        if q >= 1:
            raise ValueError(f"q must be below 1, but {q!r} came")
        k, shape = self.loc.shape[0], self.loc.shape[1:]
        size = max(1, CHUNK // k)
        parts = zip(self.loc.reshape(k, -1).split(size, 1), self.scale.reshape(k, -1).split(size, 1), strict=True)
        if q > 0.5:  # the upper tail is the lower one of the mirror image, where small probabilities keep their digits
            return -torch.cat([_bisect(-loc, scale, 1 - q) for loc, scale in parts]).reshape(shape)
        return torch.cat([_bisect(loc, scale, q) for loc, scale in parts]).reshape(shape)

    def interval(self, coverage: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds a target with probability ``coverage``: lower and upper ``(..., b, d)``."""
        checks.number("coverage", coverage, open_low=True)
        if coverage >= 1:
            raise ValueError(f"coverage must be below 1, but {coverage!r} came")
        return self.quantile((1 - coverage) / 2), self.quantile((1 + coverage) / 2)

    def sample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Targets drawn: for each, one weight sample and then its noise."""
        shape = torch.Size(sample_shape) + self.batch_shape
        index = _choose_samples(self.loc, shape, generator)
        loc, scale = self.loc.gather(0, index), self.scale.gather(0, index)
        noise = torch.randn(loc.shape, generator=generator, dtype=loc.dtype, device=loc.device)
        return (loc + scale * noise).reshape(*shape, self.loc.shape[-1])


def _choose_samples(parameter: Tensor, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
    """For each wanted target of ``shape`` the index of one weight sample, laid out to gather along the first axis."""
    index = torch.randint(parameter.shape[0], shape, generator=generator, device=parameter.device)
    return index.reshape(-1, *parameter.shape[1:-1]).unsqueeze(-1).expand(-1, *parameter.shape[1:])


def _normal_cdf(z: Tensor) -> Tensor:
    """Φ(z), exact in the lower tail, where (1 + erf)/2 would cancel."""
    return 0.5 * torch.special.erfc(z * -(0.5**0.5))


def _bisect(loc: Tensor, scale: Tensor, q: float) -> Tensor:
    """Quantile of each column's mixture: the CDF is monotone, and every component's own quantile brackets it."""
    own = loc + scale * NormalDist().inv_cdf(q)
    low, high = own.amin(0), own.amax(0)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = _normal_cdf((middle - loc) / scale).mean(0) < q
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


class _ProbabilityMixture(Distribution, ABC):
    """Zeros and ones whose probabilities ``(k, ...)`` differ between k weight samples."""

    @property
    @abstractmethod
    def sample_probs(self) -> Tensor:
        """Each weight sample's own probabilities ``(k, ..., b, ·)``."""

    @property
    def probs(self) -> Tensor:
        """Probabilities ``(..., b, ·)``: the mean over weight samples."""
        return self.sample_probs.mean(0)

    @property
    def mean(self) -> Tensor:
        """The probabilities: mean of the targets as zeros and ones."""
        return self.probs

    @property
    def variance(self) -> Tensor:
        """p(1 − p): variance of the targets as zeros and ones."""
        return self.probs * (1 - self.probs)

    @property
    def noise_stddev(self) -> Tensor:
        """The part of ``stddev`` that knowing the weights would leave."""
        return (self.sample_probs * (1 - self.sample_probs)).mean(0).sqrt()

    @property
    def weights_stddev(self) -> Tensor:
        """The part of ``stddev`` that comes from not knowing the weights."""
        return self.sample_probs.var(0, correction=0).sqrt()


class CategoricalMixture(_ProbabilityMixture):
    """Classes ``(..., b)`` given k weight samples: (1/k) Σ softmax(logits_k).

    Args:
        logits: ``(k, ..., b, c)``.
    """

    arg_constraints = {"logits": constraints.real_vector}  # noqa: RUF012

    def __init__(self, logits: Tensor):
        self.logits = logits.log_softmax(-1)
        super().__init__(self.logits.shape[1:-1], validate_args=False)

    @property
    def sample_probs(self) -> Tensor:
        """Each weight sample's class probabilities ``(k, ..., b, c)``."""
        return self.logits.exp()

    @property
    def mode(self) -> Tensor:
        """The most probable class ``(..., b)``."""
        return self.probs.argmax(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log (1/k) Σ p_k(value): ``(..., b)``."""
        checks.shape("value", value, tuple(self.batch_shape))
        return log_mean_exp(self.logits).gather(-1, value.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy of the class probabilities in nats, all causes together."""
        return torch.special.entr(self.probs).sum(-1)

    def mutual_information(self) -> Tensor:
        """The part of the entropy that knowing the weights would remove: high where the model has not seen data."""
        expected = torch.special.entr(self.logits.exp()).sum(-1).mean(0)
        return (self.entropy() - expected).clamp_min(0.0)

    def sample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Classes drawn."""
        flat = self.probs.reshape(-1, self.logits.shape[-1])
        count = torch.Size(sample_shape).numel()
        drawn = torch.multinomial(flat, count, replacement=True, generator=generator)
        return drawn.mT.reshape(torch.Size(sample_shape) + self.batch_shape)


class BernoulliMixture(_ProbabilityMixture):
    """Independent yes/no targets ``(..., b, d)`` given k weight samples.

    Args:
        logits: ``(k, ..., b, d)``.
    """

    arg_constraints = {"logits": constraints.real}  # noqa: RUF012

    def __init__(self, logits: Tensor):
        self.logits = logits
        super().__init__(logits.shape[1:-1], logits.shape[-1:], validate_args=False)

    @property
    def sample_probs(self) -> Tensor:
        """Each weight sample's probability of yes, ``(k, ..., b, d)``."""
        return self.logits.sigmoid()

    def entropy(self) -> Tensor:
        """Entropy of each yes/no target on its own in nats, ``(..., b, d)``."""
        return torch.special.entr(self.probs) + torch.special.entr(1 - self.probs)

    def log_prob(self, value: Tensor) -> Tensor:
        """Log (1/k) Σ p_k(value), the d targets of an example jointly: ``(..., b)``."""
        checks.shape("value", value, tuple(self.logits.shape[1:]))
        sign = 2 * value - 1
        return log_mean_exp(torch.nn.functional.logsigmoid(sign * self.logits).sum(-1))

    def sample(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Targets drawn, 0 or 1; outputs share the weight sample."""
        shape = torch.Size(sample_shape) + self.batch_shape
        index = _choose_samples(self.logits, shape, generator)
        p = self.logits.sigmoid().gather(0, index)
        return torch.bernoulli(p, generator=generator).reshape(*shape, self.logits.shape[-1])


Predictive = GaussianMixture | CategoricalMixture | BernoulliMixture
