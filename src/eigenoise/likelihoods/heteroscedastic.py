"""Gaussian noise whose variance is an output of the network."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from eigenoise.distributions.mixtures import GaussianMixture
from eigenoise.likelihoods.base import Likelihood, check_real_targets, scaled_unit_vectors


class HeteroscedasticGaussianLikelihood(Likelihood):
    """y ~ N(m, exp(s)) where the output ``(..., b, 2d)`` holds the means m, then the log-variances s."""

    learns_noise = True

    def check(self, f: Tensor, y: Tensor) -> None:
        """Require targets ``(..., b, d)`` for outputs ``(..., b, 2d)``."""
        if f.shape[-1] % 2:
            raise ValueError(
                f"the model's last axis must hold d means and d log-variances, an even number, got {f.shape[-1]}"
            )
        check_real_targets(y, torch.Size((*f.shape[:-1], f.shape[-1] // 2)))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return log N(y; m, eˢ), summed over the d outputs, ``(..., b)``."""
        mean, log_var = f.chunk(2, -1)
        return -0.5 * ((y - mean).square() * (-log_var).exp() + log_var + math.log(2 * math.pi)).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sample m + noise with the predicted variances, ``(..., b, d)``."""
        mean, log_var = f.chunk(2, -1)
        noise = torch.randn(mean.shape, generator=generator, dtype=f.dtype, device=f.device)
        return mean + noise * (0.5 * log_var).exp()

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Return (y − m)e⁻ˢ for the means, then ½((y − m)²e⁻ˢ − 1) for the log-variances, ``(..., b, 2d)``."""
        mean, log_var = f.chunk(2, -1)
        weighted = (y - mean) * (-log_var).exp()
        return torch.cat([weighted, 0.5 * (weighted * (y - mean) - 1)], -1)

    def fisher_vectors(self, f: Tensor) -> Tensor:
        """Return the root of the Fisher diag(e⁻ˢ, ½), means then log-variances: ``(2d, ..., b, 2d)``."""
        mean, log_var = f.chunk(2, -1)
        return scaled_unit_vectors(torch.cat([(-0.5 * log_var).exp(), torch.full_like(mean, 0.5**0.5)], -1))

    def constant_loss(self, f: Tensor, y: Tensor) -> float:
        """Return the loss of the targets' means and variances."""
        variance = y.double().var(0, unbiased=False).clamp_min(1e-30)
        return float(0.5 * (1 + math.log(2 * math.pi) + variance.log()).sum())

    def predictive(self, f: Tensor, generator: torch.Generator | None = None) -> GaussianMixture:
        """Return a mixture of normals with the predicted variances."""
        mean, log_var = f.chunk(2, -1)
        return GaussianMixture(mean, (0.5 * log_var).exp())
