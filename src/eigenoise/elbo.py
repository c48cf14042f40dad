"""The evidence lower bound and its parts (eq. 8)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eigenoise.likelihoods import Likelihood
from eigenoise.swap import evaluating


class ElboTerms(NamedTuple):
    """The evidence lower bound and its parts, sums over all ``num_data`` terms; ``(s,)`` for a stack of models."""

    log_likelihood: Tensor  # E_q[log p(D | w, τ)]
    kl_weights: Tensor  # KL(q(w) ‖ p(w))
    kl_noise: Tensor  # KL(q(τ) ‖ p(τ))
    kl_weight: float  # λ
    num_data: int

    @property
    def value(self) -> Tensor:
        """E_q[log p(D | w)] − λ·KL(q(w) ‖ p(w)) − KL(q(τ) ‖ p(τ)) (eq. 8)."""
        return self.log_likelihood - self.kl_weight * self.kl_weights - self.kl_noise

    @property
    def per_example(self) -> Tensor:
        """``value`` for each of the ``num_data`` terms."""
        return self.value / self.num_data


@torch.no_grad()
def expected_log_likelihood(
    model: nn.Module,
    likelihood: Likelihood,
    block: Callable[[], AbstractContextManager],
    x: Tensor,
    y: Tensor,
    samples: int,
) -> Tensor:
    """E_q[log p(y | x, w)] of one term, the mean over ``samples`` blocks and over ``x, y``: ``()`` or ``(s,)``."""
    means = []
    with evaluating(model):
        for _ in range(samples):
            with block():
                f = model(x)
                likelihood.check(f, y)
                log_prob = likelihood.log_prob(f, y)
            means.append(log_prob.mean() if likelihood.stack is None else log_prob.mean(-1))
    return torch.stack(means).mean(0)
