"""The diagonal Fisher: a fully factorised Gaussian posterior (FFG), noisy Adam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from eigenoise.fisher.base import Fisher
from eigenoise.fisher.second_moments import squared_gradients
from eigenoise.linalg.moving_average import Averaged, PendingMean


class Diagonal(Fisher):
    """F ≈ diag(r): the basis is the identity and r the mean of squared per-example gradients.

    It also serves parameters that are no layer's matrix (``event_dims`` is then the whole shape): those send the
    gradient summed over the batch through ``update_from_sum``.
    """

    def __init__(self, shape: tuple[int, ...], *, event_dims: int = 2, **options: Any):
        super().__init__(shape, **options)
        self.event_dims = event_dims
        self.r = torch.full(self.shape, self.init, **self.options)
        self._r = PendingMean()

    def update(
        self, a: Tensor, g: Tensor, terms: int | None = None, *, factors: bool = True, scale: bool = True
    ) -> None:
        """Take in one forward pass: r is the mean over examples of (Σₜ g·aᵀ)²."""
        if scale:
            a, g = a.to(self.r.dtype), g.to(self.r.dtype)
            self._r.add(squared_gradients(a, g), terms or a.shape[-3])

    def update_from_sum(self, total: Tensor, terms: int) -> None:
        """Take in gradients of the summed log-likelihood, ``(v, *shape)``, along v vectors as for ``update``.

        With targets drawn from the model the scores of different terms are independent with mean zero, so the square
        of their sum is an unbiased estimate of the sum of their squares.
        """
        self._r.add(total.to(self.r.dtype).square().sum(0), terms)

    def commit(self, ema_factors: float, ema_scale: float) -> None:
        """Blend the pending mean into r with the rate of the scale."""
        if self._r.blend_into(self.r, ema_scale):
            self._cache.clear()

    def refresh(self, carry: Sequence[Tensor] = (), found: list[Tensor] | None = None) -> bool:
        """Nothing is amortised."""
        return True

    def averages(self) -> list[Averaged]:
        """The diagonal r."""
        return [(self._r, self.r)]

    def rotate(self, V: Tensor) -> Tensor:
        """The identity."""
        return V

    def unrotate(self, V: Tensor) -> Tensor:
        """The identity."""
        return V

    def spectrum(self, damping: float) -> Tensor:
        """R + γ."""
        return self._damped(self.r, damping)

    def state(self) -> dict[str, Tensor]:
        """The diagonal r."""
        return {"r": self.r}

    def expect(self, G: Tensor, rate: float, damping: float) -> None:
        """The diagonal r ← max(r, rate·G²)."""
        torch.maximum(self.r, G.square().mul_(rate), out=self.r)
        self._cache.clear()

    def posterior(self, loc: Tensor, scale: float, damping: float) -> Distribution:
        """Independent normals with variance scale/(r + γ)."""
        return Independent(Normal(loc, self.inverse_root(damping) * scale**0.5), self.event_dims)
