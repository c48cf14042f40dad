"""SGD with momentum behind the interface of our optimisers: the baseline of the classification study."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from eigenoise.likelihoods import Likelihood


class PointSGD(torch.optim.SGD):
    """SGD on −log p(y | x, w) + γ_in·½‖w‖² with γ_in = λ/(Nη): the most probable weights under the same prior.

    Args:
        model: any ``nn.Module``.
        num_data: N.
        likelihood: what the model's output means.
        lr: learning rate.
        kl_weight: λ.
        prior_var: η.
        momentum: momentum of the gradient.
    """

    noisy = False
    blocks_per_step = 1

    def __init__(
        self,
        model: nn.Module,
        *,
        num_data: int,
        likelihood: Likelihood,
        lr: float,
        kl_weight: float = 1.0,
        prior_var: float = 1.0,
        momentum: float = 0.9,
    ):
        decay = kl_weight / (num_data * prior_var)
        super().__init__(model.parameters(), lr=lr, momentum=momentum, weight_decay=decay)
        self.model, self.likelihood = model, likelihood

    @contextmanager
    def sampled_params(self, generator: torch.Generator | None = None) -> Iterator[None]:
        """No-op: parameters are never sampled."""
        yield
