"""What every Fisher structure is: a basis and a spectrum in it.

A structure holds F ≈ Q·diag(r)·Qᵀ for one layer, with weights as matrices ``(..., p, n)``. It is both the
preconditioner (F + γI)⁻¹ and, scaled by λ/N, the posterior covariance (eq. 10). Subclasses say what the basis and the
spectrum are and how statistics move them; everything asked of F follows here, once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from eigenoise import checks
from eigenoise.fisher.kronecker_factors import KroneckerFactors
from eigenoise.linalg.moving_average import Averaged

DAMPINGS = ("exact", "factored")
FLOOR = 1e-30  # eigenvalues are never taken for smaller: 1/FLOOR is finite in float32


class Fisher(ABC):
    """One layer's structured Fisher matrix, of shape ``(..., pn, pn)`` but never formed.

    Args:
        shape: the shape ``(..., p, n)`` of the weights it speaks of.
        init: F starts as ``init`` times the identity. Zero would give every unseen direction the prior's noise.
        dtype: of all state.
        device: of all state.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        init: float = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        self.shape = tuple(shape)
        self.init = checks.number("init", init, open_low=True)
        self.options: dict[str, Any] = {"dtype": dtype or torch.get_default_dtype(), "device": device}
        self.event_dims = 2
        self.factors: KroneckerFactors | None = None  # the basis, if it is another than that of the weights
        self._offset: Tensor | None = None
        self._cache: dict[tuple[str, float], Tensor] = {}

    # What a subclass says.

    @abstractmethod
    def update(
        self, a: Tensor, g: Tensor, terms: int | None = None, *, factors: bool = True, scale: bool = True
    ) -> None:
        """Take in one forward pass; nothing moves before ``commit``.

        Args:
            a: activations ``(..., b, t, n)``, bias column included.
            g: gradients of log p by the pre-activations ``(..., b, t, p)``, or ``(..., v, b, t, p)`` with v vectors
                whose outer products add up to the Fisher of the output.
            terms: how many likelihood terms the pass has (b unless each example has several targets).
            factors: whether the Kronecker factors are wanted now.
            scale: whether the scale in the basis is wanted now.
        """

    @abstractmethod
    def commit(self, ema_factors: float, ema_scale: float) -> None:
        """Blend what was taken in since the last call into the moving averages (eq. 12)."""

    @abstractmethod
    def refresh(self, carry: Sequence[Tensor] = (), found: list[Tensor] | None = None) -> bool:
        """Recompute what is amortised; False if a decomposition failed and the old one was kept.

        Args:
            carry: matrices ``(..., p, n)`` of coordinates in the basis, turned in place into those in the new one.
            found: the decomposition, if it was done before, perhaps by another process.
        """

    @abstractmethod
    def averages(self) -> list[Averaged]:
        """Each moving average with what was taken in for it since the last ``commit``."""

    @abstractmethod
    def rotate(self, V: Tensor) -> Tensor:
        """QᵀV: coordinates of ``V`` ``(..., p, n)`` in the basis."""

    @abstractmethod
    def unrotate(self, V: Tensor) -> Tensor:
        """QV: back to weight coordinates."""

    @abstractmethod
    def spectrum(self, damping: float) -> Tensor:
        """Eigenvalues ``(..., p, n)`` of the damped Fisher, in the order of the basis, as a new tensor."""

    @abstractmethod
    def expect(self, G: Tensor, rate: float, damping: float) -> None:
        """Raise F to what an update from a gradient ``G (..., p, n)``, coordinates in the basis, would leave at least.

        Args:
            G: larger than F + γI allows for; zeros, of some leading indices, change nothing there.
            rate: of the update.
            damping: γ.
        """

    @abstractmethod
    def posterior(self, loc: Tensor, scale: float, damping: float) -> Distribution:
        """N(loc, scale·(F + γI)⁻¹) as a distribution over ``(..., p, n)`` (eqs 10, 11, 14)."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors that make up the structure, by name."""

    # What follows from it.

    def pending(self) -> list[Tensor]:
        """Numbers that are finite only if all is that the next ``commit`` would use; none if there is nothing."""
        return [number for mean, _ in self.averages() for number in mean.pending()]

    def discard(self) -> None:
        """Forget what was taken in since the last ``commit``."""
        for mean, _ in self.averages():
            mean.clear()

    def solve(self, V: Tensor, damping: float) -> Tensor:
        """(F + γI)⁻¹V (eqs 3, 4, 21), shape ``(..., p, n)``."""
        return self.unrotate(self.rotate(V) * self.inverse(damping))

    def root(self, X: Tensor, damping: float) -> Tensor:
        """L·X with LLᵀ = (F + γI)⁻¹, so that white noise X becomes a posterior sample (eq. 20)."""
        return self.unrotate(X * self.inverse_root(damping))

    def logdet(self, damping: float) -> Tensor:
        """Log det(F + γI), one number for each leading index."""
        return self.spectrum(damping).log().flatten(-self.event_dims).sum(-1)

    def inv_trace(self, damping: float) -> Tensor:
        """Trace of (F + γI)⁻¹, one number for each leading index."""
        return self.inverse(damping).flatten(-self.event_dims).sum(-1)

    def dense(self, damping: float) -> Tensor:
        """F + γI as a matrix ``(..., pn, pn)``; for tests only."""
        size = self.shape[-2] * self.shape[-1]
        eye = torch.eye(size, **self.options).reshape(size, *(1,) * (len(self.shape) - 2), *self.shape[-2:])
        columns = self.unrotate(self.rotate(eye) * self.spectrum(damping))
        return columns.flatten(-2).movedim(0, -1)

    def add_to_spectrum(self, offset: Tensor) -> None:
        """From now on the spectrum is larger by ``offset (..., p, n)``, until told otherwise or the basis changes."""
        self._offset = offset
        self._cache.clear()

    def _damped(self, values: Tensor, damping: float) -> Tensor:
        """Values + γ, with what was added to them, never too small to be inverted."""
        found = values + damping
        return (found if self._offset is None else found.add_(self._offset)).clamp_min_(FLOOR)

    def forget_cache(self) -> None:
        """To be called when the state was changed from outside."""
        self._cache.clear()

    def inverse(self, damping: float) -> Tensor:
        """Eigenvalues ``(..., p, n)`` of (F + γI)⁻¹, in the order of the basis; kept until the spectrum moves."""
        return self._cached("inverse", damping, lambda: self.spectrum(damping).reciprocal_())

    def inverse_root(self, damping: float) -> Tensor:
        """Their square roots, kept likewise."""
        return self._cached("root", damping, lambda: self.inverse(damping).sqrt())

    def _cached(self, kind: str, damping: float, compute: Callable[[], Tensor]) -> Tensor:
        key = (kind, damping)
        if key not in self._cache:
            if len(self._cache) > 8:  # a damping that is scheduled at every step must not fill the memory
                self._cache.clear()
            value = compute()
            if torch.is_inference_mode_enabled():  # such tensors could never be used in training
                return value
            self._cache[key] = value
        return self._cache[key]
