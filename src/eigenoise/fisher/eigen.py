"""The eigenvalue-corrected Fisher: the EMVG posterior, noisy EK-FAC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from eigenoise import checks, linalg
from eigenoise.distributions.matrix_normal import EigenMatrixNormal
from eigenoise.fisher.base import DAMPINGS, Fisher
from eigenoise.fisher.kronecker_factors import KroneckerFactors
from eigenoise.fisher.second_moments import squared_gradients
from eigenoise.linalg.moving_average import Averaged, PendingMean

STARTS = ("init", "kfac")


class Eigen(Fisher):
    """F ≈ (Q_S⊗Q_A)·diag(R)·(Q_S⊗Q_A)ᵀ (eq. 7).

    R is the mean of squared per-example gradients in the current basis (eq. 6). When the basis changes, R is carried
    over as the diagonal of the same matrix in the new basis.

    Args:
        shape: ``(..., p, n)``.
        damping_form: what ``reinitialise`` sets R to: the K-FAC eigenvalues (``"exact"``), or so that R + γ_in is
            what K-FAC has with ``"factored"`` damping. R itself is always damped exactly.
        fixed_input: Q_A stays the identity; R is exact in that basis too, and nothing is turned on that side.
        kernel: channels and taps of a convolution, for a factored Q_A, see ``taps``; R is exact in that basis too.
        start: ``"init"``: R starts as ``init``; ``"kfac"``: and becomes the K-FAC eigenvalues in the first basis, which
            know what the inputs are like long before R itself has seen enough. With a fixed input there are none.
        **options: as for ``Fisher``.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        damping_form: str = "exact",
        fixed_input: bool = False,
        kernel: tuple[int, int] | None = None,
        start: str = "init",
        **options: Any,
    ):
        super().__init__(shape, **options)
        self.start = "init" if fixed_input else checks.choice("start", start, STARTS)
        self._waits = torch.full((), float(self.start == "kfac"), **self.options)  # for its first basis
        self.damping_form = checks.choice("damping_form", damping_form, DAMPINGS)
        self.factors: KroneckerFactors = KroneckerFactors(self.shape, self.init, self.options, fixed_input, kernel)
        self.R = torch.full(self.shape, self.init, **self.options)
        self._R = PendingMean()

    def update(
        self, a: Tensor, g: Tensor, terms: int | None = None, *, factors: bool = True, scale: bool = True
    ) -> None:
        """Take in one forward pass for A and S, and for R in the current basis (eq. 12)."""
        a, g, terms = a.to(self.R.dtype), g.to(self.R.dtype), terms or a.shape[-3]
        if factors:
            self.factors.update(a, g, terms)
        if scale:
            self._R.add(squared_gradients(a, g, self.factors.out.q, self.factors.inputs), terms)

    def commit(self, ema_factors: float, ema_scale: float) -> None:
        """Blend the pending means into A and S with rate β̃ and into R with rate ω̃ (eq. 12)."""
        self.factors.commit(ema_factors)
        if self._R.blend_into(self.R, ema_scale):
            self._cache.clear()

    def refresh(self, carry: Sequence[Tensor] = (), found: list[Tensor] | None = None) -> bool:
        """New eigenbasis (eq. 5); R → (P_S∘P_S)·R·(P_A∘P_A)ᵀ with P the change of basis."""
        found = self.factors.decompose() if found is None else found
        if found is None:
            return False
        change = self.factors.adopt(found)
        change.carry(carry)
        if self._waits:
            self.R.copy_(self.kfac())
            self._waits.zero_()
        else:
            self.R.copy_(change.of_diagonal(self.R))
        self._cache.clear()
        return True

    def kfac(self) -> Tensor:
        """What K-FAC takes for R: Λ_S⊗Λ_A ``(..., p, n)``, from A and S of now in the current basis."""
        return linalg.outer(self.factors.out.diagonal(), self.factors.inputs.diagonal())

    def reinitialise(self, damping: float) -> None:
        """R ← the K-FAC eigenvalues in the current basis, so that K-FAC would do the next step (section 6.1).

        Λ_S⊗Λ_A, or with factored damping (Λ_S + √γ/π)⊗(Λ_A + π√γ) − γ.
        """
        if self.damping_form == "exact":
            self.R.copy_(self.kfac())
        else:
            values = self.factors.out.diagonal(), self.factors.inputs.diagonal()
            self.R.copy_(linalg.outer(*linalg.factored_damping(*values, damping)) - damping)
        self._cache.clear()

    def averages(self) -> list[Averaged]:
        """A, S and R."""
        return [*self.factors.averages(), (self._R, self.R)]

    def rotate(self, V: Tensor) -> Tensor:
        """Q_SᵀVQ_A."""
        return self.factors.rotate(V)

    def unrotate(self, V: Tensor) -> Tensor:
        """Q_SVQ_Aᵀ."""
        return self.factors.unrotate(V)

    def spectrum(self, damping: float) -> Tensor:
        """R + γ (eq. 14)."""
        return self._damped(self.R, damping)

    def expect(self, G: Tensor, rate: float, damping: float) -> None:
        """R ← max(R, rate·G²)."""
        torch.maximum(self.R, G.square().mul_(rate), out=self.R)
        self._cache.clear()

    def posterior(self, loc: Tensor, scale: float, damping: float) -> Distribution:
        """The EMVG with variance scale/(R + γ) in the basis (eqs 13, 14)."""
        variance = scale * self.inverse(damping)
        return EigenMatrixNormal(loc, self.factors.q_out.clone(), self.factors.q_in.clone(), variance)

    def state(self) -> dict[str, Tensor]:
        """A, S, the basis and R; and whether R waits for its first basis."""
        waits = {"waits": self._waits} if self.start == "kfac" else {}
        return {**self.factors.state(), "R": self.R, **waits}
