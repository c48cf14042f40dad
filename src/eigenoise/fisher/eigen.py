"""The eigenvalue-corrected Fisher: the EMVG posterior, noisy EK-FAC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.distributions import Distribution

from eigenoise import checks, linalg
from eigenoise.distributions.matrix_normal import EigenMatrixNormal
from eigenoise.fisher.base import DAMPINGS, Damping, Fisher, damped
from eigenoise.fisher.diagonal import with_vectors
from eigenoise.fisher.kronecker_factors import BasisOptions, KroneckerFactors
from eigenoise.fisher.second_moments import squared_gradients
from eigenoise.linalg.moving_average import Averaged, MovingAverage


@final
class Eigen(Fisher):
    """F ≈ (Q_S⊗Q_A)·diag(R)·(Q_S⊗Q_A)ᵀ (eq. 7).

    R is the mean of squared per-example gradients in the current basis (eq. 6). When the basis changes, R becomes the
    diagonal of the same matrix in the new basis. Without ``init`` it becomes the K-FAC eigenvalues in the first basis,
    which know what the inputs are like long before R itself has seen enough.

    Args:
        shape: ``(..., p, n)``.
        damping_form: what ``reinitialise`` sets R to: the K-FAC eigenvalues (``"exact"``), or so that R + γ_in is
            what K-FAC has with ``"factored"`` damping. R itself is always damped exactly.
        basis: which basis each side has; R is exact in each.
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
        self._R = MovingAverage(torch.full(self.shape, self.init or 0.0, **self.options), _uniform)
        self._has_basis = torch.tensor(init is not None)

    @property
    def R(self) -> Tensor:
        """Second moments in the basis, ``(..., p, n)``."""
        return self._R.value

    def update(
        self, a: Tensor, g: Tensor, terms: int | None = None, *, factors: bool = True, scale: bool = True
    ) -> None:
        """Gather A and S, and R in the current basis (eq. 12)."""
        a, g, terms = a.to(self.R.dtype), g.to(self.R.dtype), terms or a.shape[-3]
        g = with_vectors(a, g)
        if factors:
            self.factors.update(a, g, terms)
        if scale:
            self._R.add(squared_gradients(a, g, self.factors.out, self.factors.inputs), terms)

    def update_from_sum(self, total: Tensor, terms: int) -> None:
        """Gather R from the squares of ``total (..., v, p, n)`` in the basis."""
        squares = [self.rotate(G).square() for G in total.to(self.R.dtype).unbind(-3)]
        self._R.add(torch.stack(squares).sum(0), terms)

    def commit(self, ema_factors: float, ema_scale: float) -> None:
        """Blend the gathered means into A and S with rate β̃ and into R with rate ω̃ (eq. 12)."""
        if any(mean.count for mean, _ in self.factors.averages()):
            self.factors.commit(self._weight(ema_factors, 0), self._is_first(0))
            self.updates[0] += 1
        if self._R.blend(self._weight(ema_scale, 1), self._is_first(1)):
            self.updates[1] += 1
            self._roots.clear()

    def refresh(
        self,
        coordinates: Sequence[Tensor] = (),
        diagonals: Sequence[Tensor] = (),
        decomposition: list[Tensor] | None = None,
    ) -> bool:
        """Use a new eigenbasis (eq. 5); R → (P_S∘P_S)·R·(P_A∘P_A)ᵀ with P the change of basis."""
        decomposition = self.factors.decompose() if decomposition is None else decomposition
        if decomposition is None:
            return False
        change = self.factors.set_basis(decomposition)
        for V in coordinates:
            V.copy_(change.rotate(V))
        for diagonal in diagonals:
            diagonal.copy_(change.rotate_diagonal(diagonal))
        if not self._has_basis and int(self.updates[0]):
            self.R.copy_(self.kfac_eigenvalues())
            self._has_basis.fill_(True)
        else:
            self.R.copy_(change.rotate_diagonal(self.R))
        self._roots.clear()
        return True

    def kfac_eigenvalues(self) -> Tensor:
        """What K-FAC takes for R: Λ_S⊗Λ_A ``(..., p, n)``, from the current A and S in the current basis."""
        return linalg.outer(self.factors.out.diagonal(), self.factors.inputs.diagonal())

    def reinitialise(self, damping: float) -> None:
        """R ← the K-FAC eigenvalues in the current basis, so that K-FAC would do the next step (section 6.1).

        Λ_S⊗Λ_A, or with factored damping (Λ_S + √γ/π)⊗(Λ_A + π√γ) − γ.
        """
        if self.damping_form == "exact":
            self.R.copy_(self.kfac_eigenvalues())
        else:
            values = self.factors.out.diagonal(), self.factors.inputs.diagonal()
            self.R.copy_(linalg.outer(*linalg.factored_damping(*values, damping)) - damping)
        self._roots.clear()

    def averages(self) -> list[Averaged]:
        """A, S and R."""
        return [*self.factors.averages(), self._R.averaged()]

    def rotate(self, V: Tensor) -> Tensor:
        """Q_SᵀVQ_A."""
        return self.factors.rotate(V)

    def unrotate(self, V: Tensor, overwrite: bool = False) -> Tensor:
        """Q_SVQ_Aᵀ."""
        return self.factors.unrotate(V, overwrite)

    def spectrum(self, damping: Damping) -> Tensor:
        """R + γ (eq. 14)."""
        return damped(self.R, damping)

    def raise_to(self, G: Tensor, rate: float, damping: Damping) -> None:
        """R ← max(R, rate·G²)."""
        torch.maximum(self.R, G.square().mul_(rate), out=self.R)
        self._roots.clear()

    def posterior(self, loc: Tensor, scale: float, damping: Damping) -> Distribution:
        """The EMVG with variance scale/(R + γ) in the basis (eqs 13, 14)."""
        variance = scale * self.inverse(damping)
        return EigenMatrixNormal(loc, self.factors.q_out.clone(), self.factors.q_in.clone(), variance)

    def state(self) -> dict[str, Tensor]:
        """A, S, the basis and R; and whether R has seen its first basis."""
        return {**self.factors.state(), "R": self.R, "updates": self.updates, "has_basis": self._has_basis}


def _uniform(mean: Tensor) -> Tensor:
    """The mean over all directions ``(..., p, n)``, for each of them."""
    return mean.mean((-2, -1), keepdim=True).expand_as(mean)
