"""The Kronecker factors A and S of one layer and their eigenbasis, shared by noisy K-FAC and noisy EK-FAC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eigenoise import linalg
from eigenoise.averages import PendingMean
from eigenoise.fisher.moments import gram
from eigenoise.linalg import matmul


@dataclass(frozen=True)
class Change:
    """A change of basis: P_S = Q_S,newᵀ·Q_S ``(..., p, p)`` and P_A alike ``(..., n, n)``, None if Q_A is fixed."""

    out: Tensor
    into: Tensor | None

    def carry(self, matrices: Sequence[Tensor]) -> None:
        """Turn coordinates ``(..., p, n)`` in the old basis into those in the new one, in place."""
        for matrix in matrices:
            matrix.copy_(linalg.unrotate(self.out, matrix, self.into))

    def of_diagonal(self, R: Tensor) -> Tensor:
        """The diagonal of Q·diag(R)·Qᵀ in the new basis: (P_S∘P_S)·R·(P_A∘P_A)ᵀ."""
        return linalg.unrotate(self.out.square(), R, None if self.into is None else self.into.square())


class KroneckerFactors:
    """Moving averages A = E[aaᵀ] ``(..., n, n)`` and S = E[gg ᵀ] ``(..., p, p)`` with F ≈ S⊗A (eq. 2).

    With t shared positions A is the mean over examples and positions and S the sum over positions, averaged over
    likelihood terms, which is K-FAC's convolution with spatially uncorrelated derivatives.

    Args:
        shape: ``(..., p, n)``.
        init: S⊗A starts as this times the identity.
        options: dtype and device.
        fixed_input: Q_A stays the identity, and A is not looked at.
    """

    def __init__(self, shape: tuple[int, ...], init: float, options: dict, fixed_input: bool = False):
        *lead, p, n = shape
        self.fixed_input = fixed_input
        side = init**0.5  # so that S⊗A starts as init·I
        self.S, self.A = (side * torch.eye(k, **options).repeat(*lead, 1, 1) for k in (p, n))
        self.q_out, self.q_in = (torch.eye(k, **options).repeat(*lead, 1, 1) for k in (p, n))
        self.values_out, self.values_in = (torch.full((*lead, k), side, **options) for k in (p, n))
        self._S, self._A = PendingMean(), PendingMean()

    def update(self, a: Tensor, g: Tensor, terms: int) -> None:
        """Take in ``a (..., b, t, n)`` and ``g (..., [v,] b, t, p)``."""
        if not self.fixed_input:
            self._A.add(gram(a), a.shape[-3] * a.shape[-2])
        self._S.add(gram(g if g.ndim == a.ndim else g.flatten(-4, -3)), terms)

    def commit(self, ema: float) -> None:
        """Blend the pending means into A and S with rate β̃ (eq. 12)."""
        self._A.blend_into(self.A, ema)
        self._S.blend_into(self.S, ema)

    def pending(self) -> list[Tensor]:
        """The pending sums."""
        return [*self._A.pending(), *self._S.pending()]

    def discard(self) -> None:
        """Forget the pending sums."""
        self._A.clear()
        self._S.clear()

    @property
    def decomposition_cost(self) -> int:
        """p³ + n³, for each leading index."""
        into = 0 if self.fixed_input else self.A.shape[-1] ** 3
        return self.A.shape[:-2].numel() * (into + self.S.shape[-1] ** 3)

    def decompose(self) -> Change | None:
        """Renew the eigenbasis and eigenvalues (eq. 5); None, with all as it was, if either side fails."""
        out = linalg.eigh_psd(self.S)
        into = (self.values_in, self.q_in) if self.fixed_input else linalg.eigh_psd(self.A)
        if out is None or into is None:
            return None
        turn = None if self.fixed_input else matmul(into[1].mT, self.q_in)
        change = Change(matmul(out[1].mT, self.q_out), turn)
        for own, new in zip((self.values_out, self.q_out, self.values_in, self.q_in), (*out, *into), strict=True):
            own.copy_(new)
        return change

    @property
    def turn_in(self) -> Tensor | None:
        """Q_A, or None if there is nothing to turn."""
        return None if self.fixed_input else self.q_in

    def rotate(self, V: Tensor) -> Tensor:
        """Q_SᵀVQ_A."""
        return linalg.rotate(self.q_out, V, self.turn_in)

    def unrotate(self, V: Tensor) -> Tensor:
        """Q_SVQ_Aᵀ."""
        return linalg.unrotate(self.q_out, V, self.turn_in)

    def add_unrotated(self, base: Tensor, V: Tensor, alpha: float, out: Tensor) -> None:
        """Out ← base + alpha·Q_SVQ_Aᵀ."""
        linalg.add_unrotated(base, self.q_out, V, self.turn_in, alpha, out)
