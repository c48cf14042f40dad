"""The evidence lower bound and its parts (eq. 8)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from eigenoise.inference.batch_norm import settling
from eigenoise.inference.forward import evaluating
from eigenoise.inference.turns import PATIENCE, exclusive
from eigenoise.likelihoods import Likelihood


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
    def evidence_per_example(self) -> Tensor:
        """The same with λ = 1, whatever λ is: a bound on log p(D), so that it compares between values of λ."""
        return self._replace(kl_weight=1.0).per_example

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
    chunk_size: int,
    batch_norm: Any,
) -> Tensor:
    """E_q[log p(y | x, w)] of one term, the mean over ``samples`` blocks and over ``x, y``: ``()`` or ``(s,)``.

    ``batch_norm`` is as for ``settling``.
    """
    means: list[Tensor] = []
    axis = 0 if likelihood.stack is None else -2
    y_axis = 0 if likelihood.stack is None else 1
    parts = list(zip(x.split(chunk_size, axis), y.split(chunk_size, y_axis), strict=True))
    settled = settling(model, batch_norm)
    with exclusive(model, PATIENCE), evaluating(model), settled as settle:
        for _ in range(samples):
            with block():
                settle()
                shares = [_weighted(model, likelihood, *part, x.shape[axis]) for part in parts]
            means.append(torch.stack(shares).sum(0))
    return torch.stack(means).mean(0)


def _weighted(model: nn.Module, likelihood: Likelihood, x: Tensor, y: Tensor, size: int) -> Tensor:
    """This part's share of the mean log-likelihood: ``()``, or ``(s,)`` for a stack."""
    log_prob = likelihood.log_prob(*likelihood.fit(model(x), y))
    stack = likelihood.stack
    mean = log_prob.mean() if stack is None else log_prob.mean(-1).reshape(-1, stack).mean(0)
    return mean * (x.shape[0 if stack is None else -2] / size)
