"""The diagonal Fisher: a fully factorised Gaussian posterior (FFG), noisy Adam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from eigenoise.fisher.base import Damping, Fisher, damped
from eigenoise.fisher.second_moments import squared_gradients
from eigenoise.linalg.moving_average import Averaged, MovingAverage


@final
class Diagonal(Fisher):
    """F ≈ diag(r): the basis is the identity and r the mean of squared per-example gradients.

    It also serves parameters that are no layer's matrix; ``event_dims`` is then the whole shape, and their statistics
    come through ``update_from_sum``.

    Args:
        shape: ``(..., p, n)``, or any shape with ``event_dims``.
        event_dims: how many of the last axes are one model's weights.
        init: as for ``Fisher``.
        dtype: of all state.
        device: of all state.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        event_dims: int = 2,
        init: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(shape, init=init, dtype=dtype, device=device)
        self.event_dims = event_dims
        self._r = MovingAverage(torch.full(self.shape, self.init or 0.0, **self.options), self._uniform)

    @property
    def r(self) -> Tensor:
        """The diagonal, in the shape of the weights."""
        return self._r.value

    def _uniform(self, mean: Tensor) -> Tensor:
        """The mean over all weights of a model, for each of them."""
        axes = tuple(range(-self.event_dims, 0))
        return (mean.mean(axes, keepdim=True) if axes else mean).expand_as(mean)

    def update(
        self, a: Tensor, g: Tensor, terms: int | None = None, *, factors: bool = True, scale: bool = True
    ) -> None:
        """Gather the sum over examples of (Σₜ g·aᵀ)²."""
        if scale:
            a, g = a.to(self.r.dtype), g.to(self.r.dtype)
            self._r.add(squared_gradients(a, with_vectors(a, g)), terms or a.shape[-3])

    def update_from_sum(self, total: Tensor, terms: int) -> None:
        """Gather the squares of ``total (v, *shape)``."""
        self._r.add(total.to(self.r.dtype).square().sum(-self.event_dims - 1), terms)

    def commit(self, ema_factors: float, ema_scale: float) -> None:
        """Blend the gathered mean into r with the rate of the scale (eq. 12)."""
        if self._r.blend(self._weight(ema_scale, 1), self._is_first(1)):
            self.updates[1] += 1
            self._roots.clear()

    def refresh(
        self,
        coordinates: Sequence[Tensor] = (),
        diagonals: Sequence[Tensor] = (),
        decomposition: list[Tensor] | None = None,
    ) -> bool:
        """No-op: nothing is amortised."""
        return True

    def averages(self) -> list[Averaged]:
        """The diagonal r."""
        return [self._r.averaged()]

    def rotate(self, V: Tensor) -> Tensor:
        """The identity."""
        return V

    def unrotate(self, V: Tensor, overwrite: bool = False) -> Tensor:
        """The identity."""
        return V

    def spectrum(self, damping: Damping) -> Tensor:
        """``r + γ``."""
        return damped(self.r, damping)

    def state(self) -> dict[str, Tensor]:
        """The diagonal r."""
        return {"r": self.r, "updates": self.updates}

    def raise_to(self, G: Tensor, rate: float, damping: Damping) -> None:
        """``r ← max(r, rate·G²)``."""
        torch.maximum(self.r, G.square().mul_(rate), out=self.r)
        self._roots.clear()

    def posterior(self, loc: Tensor, scale: float, damping: Damping) -> Distribution:
        """Independent normals with variance scale/(r + γ)."""
        return Independent(Normal(loc, self.inverse_root(damping) * scale**0.5), self.event_dims)


def with_vectors(a: Tensor, g: Tensor) -> Any:
    """``g`` with its axis of vectors, ``(..., v, b, t, p)``."""
    return g.unsqueeze(-4) if g.ndim == a.ndim else g
