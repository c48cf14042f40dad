"""What every Fisher structure is: a basis and a spectrum in it.

A structure holds F ≈ Q·diag(r)·Qᵀ for one layer, with weights as matrices ``(..., p, n)``. It is both the
preconditioner (F + γI)⁻¹ and, scaled by λ/N, the posterior covariance (eq. 10). Subclasses say what the basis and the
spectrum are and how statistics move them; everything asked of F follows here, once.

A damping γ is a number, or a tensor ``(..., p, n)`` of one number for each direction of the basis.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from eigenoise import checks
from eigenoise.fisher.kronecker_factors import KroneckerFactors
from eigenoise.linalg.moving_average import Averaged

DAMPINGS = ("exact", "factored")
MIN_EIGENVALUE = 1e-30  # eigenvalues are never taken for smaller: the inverse is finite in float32
MAX_KEPT = 2  # roots of spectra; a damping that changes at every step must not fill the memory

Damping = float | Tensor


class Fisher(ABC):
    """One layer's structured Fisher matrix, of shape ``(..., pn, pn)`` but never formed.

    Args:
        shape: the shape ``(..., p, n)`` of the weights it speaks of.
        init: None to start from the first statistics: F is 0 before them, and the first batch's mean eigenvalue times
            the identity counts as one more batch, so that early directions are not taken for flat. A number to start
            as that times the identity, which the moving averages then forget at their own rate (the authors' code).
        dtype: of all state.
        device: of all state.

    Attributes:
        updates: ``(2,)``, how often statistics were blended into the factors and into the spectrum.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        init: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        self.shape = tuple(shape)
        self.init = None if init is None else checks.number("init", init, open_low=True)
        self.options: dict[str, Any] = {"dtype": dtype or torch.get_default_dtype(), "device": device}
        self.event_dims = 2
        self.factors: KroneckerFactors | None = None  # the basis, if it is another than that of the weights
        self.updates = torch.zeros(2, dtype=torch.int64)
        self._roots: dict[float | int, tuple[Damping, Tensor]] = {}

    # What a subclass says.

    @abstractmethod
    def update(
        self, a: Tensor, g: Tensor, terms: int | None = None, *, factors: bool = True, scale: bool = True
    ) -> None:
        """Gather statistics of one forward pass; nothing moves before ``commit``.

        Args:
            a: activations ``(..., b, t, n)``, bias column included.
            g: gradients of log p by the pre-activations ``(..., b, t, p)``, or ``(..., v, b, t, p)`` with v vectors
                whose outer products add up to the Fisher of the output.
            terms: how many likelihood terms the pass has (b unless each example has several targets).
            factors: whether the Kronecker factors are wanted.
            scale: whether the scale in the basis is wanted.
        """

    @abstractmethod
    def update_from_sum(self, total: Tensor, terms: int) -> None:
        """Gather the scale from gradients of the summed log-likelihood, ``(..., v, p, n)``, along v vectors.

        Scores of different terms must be independent with mean zero, as those of drawn targets are, or those with
        random signs. The square of their sum is then an unbiased estimate of the sum of their squares.
        """

    @abstractmethod
    def commit(self, ema_factors: float, ema_scale: float) -> None:
        """Blend what was gathered since the last call into the moving averages (eq. 12)."""

    @abstractmethod
    def refresh(
        self,
        coordinates: Sequence[Tensor] = (),
        diagonals: Sequence[Tensor] = (),
        decomposition: list[Tensor] | None = None,
    ) -> bool:
        """Decompose the factors and use the new basis; False if that failed and the old one is kept.

        Args:
            coordinates: matrices ``(..., p, n)`` in the basis, rotated in place into the new one.
            diagonals: the diagonals ``(..., p, n)`` of matrices that are diagonal in the basis, which become, in place,
                their diagonals in the new one.
            decomposition: what ``factors.decompose()`` gave, if it was done before, perhaps by another process.
        """

    @abstractmethod
    def averages(self) -> list[Averaged]:
        """Each moving average with what was gathered for it since the last ``commit``."""

    @abstractmethod
    def rotate(self, V: Tensor) -> Tensor:
        """QᵀV: coordinates of ``V`` ``(..., p, n)`` in the basis."""

    @abstractmethod
    def unrotate(self, V: Tensor, overwrite: bool = False) -> Tensor:
        """QV: back to weight coordinates, perhaps in the memory of ``V`` if it may be overwritten."""

    @abstractmethod
    def spectrum(self, damping: Damping) -> Tensor:
        """Eigenvalues ``(..., p, n)`` of F + γI, in the order of the basis, as a new tensor."""

    @abstractmethod
    def raise_to(self, G: Tensor, rate: float, damping: Damping) -> None:
        """Raise F to what an update from a gradient ``G (..., p, n)``, coordinates in the basis, would leave at least.

        Args:
            G: larger than F + γI allows for; zeros, of some leading indices, change nothing there.
            rate: of the update.
            damping: γ.
        """

    @abstractmethod
    def posterior(self, loc: Tensor, scale: float, damping: Damping) -> Distribution:
        """N(loc, scale·(F + γI)⁻¹) as a distribution over ``(..., p, n)`` (eqs 10, 11, 14)."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors that make up the structure, by name."""

    # What follows from it.

    @property
    def is_empty(self) -> bool:
        """Whether F is 0: no statistics have been seen, and there was no ``init``."""
        return self.init is None and not int(self.updates.sum())

    def pending(self) -> list[Tensor]:
        """Numbers that are finite only if all is that the next ``commit`` would use; none if there is nothing."""
        return [number for mean, _ in self.averages() for number in mean.pending()]

    def discard(self) -> None:
        """Forget what was gathered since the last ``commit``."""
        for mean, _ in self.averages():
            mean.clear()

    def solve(self, V: Tensor, damping: Damping) -> Tensor:
        """(F + γI)⁻¹V (eqs 3, 4, 21), shape ``(..., p, n)``: rotate, divide, rotate back."""
        return self.unrotate(self.rotate(V) / self.spectrum(damping), overwrite=True)

    def root(self, X: Tensor, damping: Damping) -> Tensor:
        """L·X with LLᵀ = (F + γI)⁻¹, so that white noise X becomes a posterior sample (eq. 20)."""
        return self.unrotate(X * self.inverse_root(damping), overwrite=True)

    def logdet(self, damping: Damping) -> Tensor:
        """Log det(F + γI), one number for each leading index."""
        return self.spectrum(damping).log().flatten(-self.event_dims).sum(-1)

    def inv_trace(self, damping: Damping) -> Tensor:
        """Trace of (F + γI)⁻¹, one number for each leading index."""
        return self.inverse(damping).flatten(-self.event_dims).sum(-1)

    def dense(self, damping: Damping) -> Tensor:
        """F + γI as a matrix ``(..., pn, pn)``; for tests only."""
        size = self.shape[-2] * self.shape[-1]
        eye = torch.eye(size, **self.options).reshape(size, *(1,) * (len(self.shape) - 2), *self.shape[-2:])
        columns = torch.stack([self.unrotate(self.rotate(e.expand(self.shape)) * self.spectrum(damping)) for e in eye])
        return columns.flatten(-2).movedim(0, -1)

    def inverse(self, damping: Damping) -> Tensor:
        """Eigenvalues ``(..., p, n)`` of (F + γI)⁻¹, in the order of the basis."""
        return self.spectrum(damping).reciprocal_()

    def inverse_root(self, damping: Damping) -> Tensor:
        """Their square roots, kept until the spectrum moves."""
        key = id(damping) if isinstance(damping, Tensor) else damping
        kept = self._roots.get(key)
        if kept is not None:
            return kept[1]
        root = self.inverse(damping).sqrt_()
        if not torch.is_inference_mode_enabled():  # such tensors could never be used in training
            if len(self._roots) >= MAX_KEPT:
                self._roots.clear()
            self._roots[key] = damping, root  # holding the damping keeps its id its own
        return root

    def is_current(self, root: Tensor | None) -> bool:
        """Whether ``root``, which ``inverse_root`` gave, is what it would still give."""
        return any(value is root for _, value in self._roots.values())

    def forget_cache(self) -> None:
        """To be called when the state was changed."""
        self._roots.clear()
        if self.factors is not None:
            self.factors.sync()

    def _weight(self, rate: float, part: int) -> float:
        """Weight of an update of the factors (part 0) or the scale (1): at least 1/(k + 2) for update k."""
        return rate if self.init is not None else max(rate, 1 / (int(self.updates[part]) + 2))

    def _is_first(self, part: int) -> bool:
        return self.init is None and not int(self.updates[part])


def damped(values: Tensor, damping: Damping) -> Tensor:
    """``values + γ``, never too small to be inverted, as a new tensor."""
    return (values + damping).clamp_min_(MIN_EIGENVALUE)
