"""The Kronecker-factored Fisher: a matrix Gaussian posterior (MVG), noisy K-FAC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.distributions import Distribution

from eigenoise import checks, linalg
from eigenoise.distributions.matrix_normal import EigenMatrixNormal, MatrixNormal
from eigenoise.fisher.base import DAMPINGS, MIN_EIGENVALUE, Damping, Fisher, damped
from eigenoise.fisher.diagonal import with_vectors
from eigenoise.fisher.kronecker_factors import BasisOptions, KroneckerFactors
from eigenoise.linalg.moving_average import Averaged


@final
class Kronecker(Fisher):
    """F ≈ S⊗A (eq. 2).

    Args:
        shape: ``(..., p, n)``.
        damping_form: ``"exact"`` adds γ to each product of eigenvalues (eq. 11, first line; the posterior is then
            eigenvalue-corrected); ``"factored"`` splits √γ between the factors with π (second line; the posterior is a
            matrix normal, and most directions get more precision than γ would give them). γ is then one number.
        basis: which basis each side has.
        init: as for ``Fisher``.
        dtype: of all state.
        device: of all state.
    """

    factors: KroneckerFactors

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        damping_form: str = "exact",
        basis: BasisOptions = BasisOptions(),  # noqa: B008
        init: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__(shape, init=init, dtype=dtype, device=device)
        self.damping_form = checks.choice("damping_form", damping_form, DAMPINGS)
        self.factors = KroneckerFactors(self.shape, self.init, self.options, basis)

    def update(
        self, a: Tensor, g: Tensor, terms: int | None = None, *, factors: bool = True, scale: bool = True
    ) -> None:
        """Gather A and S (eq. 12)."""
        if factors:
            a, g = a.to(self.options["dtype"]), g.to(self.options["dtype"])
            self.factors.update(a, with_vectors(a, g), terms or a.shape[-3])

    def update_from_sum(self, total: Tensor, terms: int) -> None:
        """No-op: K-FAC has no scale of its own."""

    def commit(self, ema_factors: float, ema_scale: float) -> None:
        """Blend the gathered means into A and S; the basis and eigenvalues stay until ``refresh``."""
        if any(mean.count for mean, _ in self.averages()):
            self.factors.commit(self._weight(ema_factors, 0), self._is_first(0))
            self.updates[0] += 1

    def refresh(
        self,
        coordinates: Sequence[Tensor] = (),
        diagonals: Sequence[Tensor] = (),
        decomposition: list[Tensor] | None = None,
    ) -> bool:
        """Use new eigendecompositions of A and S (eq. 5)."""
        decomposition = self.factors.decompose() if decomposition is None else decomposition
        if decomposition is None:
            return False
        change = self.factors.set_basis(decomposition)
        for V in coordinates:
            V.copy_(change.rotate(V))
        for diagonal in diagonals:
            diagonal.copy_(change.rotate_diagonal(diagonal))
        self._roots.clear()
        return True

    def averages(self) -> list[Averaged]:
        """A and S."""
        return self.factors.averages()

    def rotate(self, V: Tensor) -> Tensor:
        """Q_SᵀVQ_A."""
        return self.factors.rotate(V)

    def unrotate(self, V: Tensor, overwrite: bool = False) -> Tensor:
        """Q_SVQ_Aᵀ."""
        return self.factors.unrotate(V, overwrite)

    def spectrum(self, damping: Damping) -> Tensor:
        """Λ_S⊗Λ_A + γ, or (Λ_S + √γ/π)⊗(Λ_A + π√γ) (eq. 11)."""
        if self.damping_form == "exact":
            return damped(linalg.outer(self.factors.out.values, self.factors.inputs.values), damping)
        return linalg.outer(*self._damped_values(damping)).clamp_min_(MIN_EIGENVALUE)

    def raise_to(self, G: Tensor, rate: float, damping: Damping) -> None:
        """Let A and S take in G."""
        self.factors.raise_to(G, rate, _as_number(damping))
        self._roots.clear()

    def posterior(self, loc: Tensor, scale: float, damping: Damping) -> Distribution:
        """An eigenvalue-corrected matrix normal with exact damping, a matrix normal with factored damping (eq. 11)."""
        if self.damping_form == "exact":
            variance = scale * self.inverse(damping)
            return EigenMatrixNormal(loc, self.factors.q_out.clone(), self.factors.q_in.clone(), variance)
        out, inputs = (values.clamp_min(MIN_EIGENVALUE**0.5).reciprocal() for values in self._damped_values(damping))
        return MatrixNormal(loc, scale * _assemble(self.factors.q_out, out), _assemble(self.factors.q_in, inputs))

    def _damped_values(self, damping: Damping) -> tuple[Tensor, Tensor]:
        return linalg.factored_damping(self.factors.out.values, self.factors.inputs.values, _as_number(damping))

    def state(self) -> dict[str, Tensor]:
        """A, S and their decompositions."""
        return {**self.factors.state(), "updates": self.updates}


def _as_number(damping: Damping) -> float:
    """A damping that is the same in every direction."""
    if isinstance(damping, Tensor):
        raise TypeError("factored damping is one number for all directions, got one for each")
    return damping


def _assemble(q: Tensor, values: Tensor) -> Tensor:
    """Q·diag(values)·Qᵀ, symmetric to the last bit."""
    matrix = (q * values.unsqueeze(-2)) @ q.mT
    return torch.lerp(matrix, matrix.mT, 0.5)
