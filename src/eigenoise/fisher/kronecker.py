"""The Kronecker-factored Fisher: a matrix Gaussian posterior (MVG), noisy K-FAC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from eigenoise import checks, linalg
from eigenoise.distributions.matrix_normal import EigenMatrixNormal, MatrixNormal
from eigenoise.fisher.base import DAMPINGS, FLOOR, Fisher
from eigenoise.fisher.kronecker_factors import KroneckerFactors
from eigenoise.linalg.moving_average import Averaged


class Kronecker(Fisher):
    """F ≈ S⊗A (eq. 2).

    Args:
        shape: ``(..., p, n)``.
        damping_form: ``"exact"`` adds γ to each product of eigenvalues (eq. 11, first line; the posterior is then
            eigenvalue-corrected); ``"factored"`` splits √γ between the factors with π (second line; the posterior is a
            matrix normal, and most directions get more precision than γ would give them).
        kernel: channels and taps of a convolution, for a factored Q_A, see ``taps``.
        **options: as for ``Fisher``.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        damping_form: str = "exact",
        kernel: tuple[int, int] | None = None,
        **options: Any,
    ):
        super().__init__(shape, **options)
        self.damping_form = checks.choice("damping_form", damping_form, DAMPINGS)
        self.factors: KroneckerFactors = KroneckerFactors(self.shape, self.init, self.options, kernel=kernel)

    def update(
        self, a: Tensor, g: Tensor, terms: int | None = None, *, factors: bool = True, scale: bool = True
    ) -> None:
        """Take in one forward pass for A and S (eq. 12)."""
        if factors:
            a, g = a.to(self.options["dtype"]), g.to(self.options["dtype"])
            self.factors.update(a, g, terms or a.shape[-3])

    def commit(self, ema_factors: float, ema_scale: float) -> None:
        """Blend the pending factors; the basis and eigenvalues stay until ``refresh``."""
        self.factors.commit(ema_factors)

    def refresh(self, carry: Sequence[Tensor] = (), found: list[Tensor] | None = None) -> bool:
        """Eigendecompositions of A and S (eq. 5)."""
        self._cache.clear()
        found = self.factors.decompose() if found is None else found
        if found is not None:
            self.factors.adopt(found).carry(carry)
        return found is not None

    def averages(self) -> list[Averaged]:
        """A and S."""
        return self.factors.averages()

    def rotate(self, V: Tensor) -> Tensor:
        """Q_SᵀVQ_A."""
        return self.factors.rotate(V)

    def unrotate(self, V: Tensor) -> Tensor:
        """Q_SVQ_Aᵀ."""
        return self.factors.unrotate(V)

    def spectrum(self, damping: float) -> Tensor:
        """Λ_S⊗Λ_A + γ, or (Λ_S + √γ/π)⊗(Λ_A + π√γ) (eq. 11)."""
        if self.damping_form == "exact":
            return linalg.outer(self.factors.out.values, self.factors.inputs.values).add_(damping).clamp_min_(FLOOR)
        return linalg.outer(*self._damped_values(damping)).clamp_min_(FLOOR)

    def expect(self, G: Tensor, rate: float, damping: float) -> None:
        """Let A and S take in G."""
        self.factors.expect(G, rate, damping)
        self._cache.clear()

    def posterior(self, loc: Tensor, scale: float, damping: float) -> Distribution:
        """An eigenvalue-corrected matrix normal with exact damping, a matrix normal with factored damping (eq. 11)."""
        if self.damping_form == "exact":
            variance = scale * self.inverse(damping)
            return EigenMatrixNormal(loc, self.factors.q_out.clone(), self.factors.q_in.clone(), variance)
        out, into = (values.clamp_min(FLOOR**0.5).reciprocal() for values in self._damped_values(damping))
        return MatrixNormal(loc, scale * _assemble(self.factors.q_out, out), _assemble(self.factors.q_in, into))

    def _damped_values(self, damping: float) -> tuple[Tensor, Tensor]:
        return linalg.factored_damping(self.factors.out.values, self.factors.inputs.values, damping)

    def state(self) -> dict[str, Tensor]:
        """A, S and their decompositions."""
        return self.factors.state()


def _assemble(q: Tensor, values: Tensor) -> Tensor:
    """Q·diag(values)·Qᵀ, symmetric to the last bit."""
    matrix = (q * values.unsqueeze(-2)) @ q.mT
    return torch.lerp(matrix, matrix.mT, 0.5)
