"""The Kronecker factors A and S of one layer and their eigenbasis, shared by noisy K-FAC and noisy EK-FAC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eigenoise import linalg
from eigenoise.fisher.bases import Change, FixedSide, FullSide
from eigenoise.fisher.factored_basis import TapChange, TapSide
from eigenoise.linalg.moving_average import Averaged

SMALLEST = 1e-15  # eigenvalue of a side that is divided by


@dataclass(frozen=True)
class BasisChange:
    """A change of both sides' bases; None for inputs that are fixed."""

    out: Change
    into: Change | TapChange | None

    def carry(self, matrices: Sequence[Tensor]) -> None:
        """Turn coordinates ``(..., p, n)`` in the old basis into those in the new one, P_S·V·P_Aᵀ, in place."""
        for V in matrices:
            columns = self.out.carry(V.mT).mT
            V.copy_(columns if self.into is None else self.into.carry(columns))

    def of_diagonal(self, R: Tensor) -> Tensor:
        """The diagonal of Q·diag(R)·Qᵀ in the new basis: (P_S∘P_S)·R·(P_A∘P_A)ᵀ."""
        columns = self.out.carry_variances(R.mT).mT
        return columns if self.into is None else self.into.carry_variances(columns)


class KroneckerFactors:
    """Moving averages A = E[aaᵀ] ``(..., n, n)`` and S = E[gg ᵀ] ``(..., p, p)`` with F ≈ S⊗A (eq. 2).

    With t shared positions A is the mean over examples and positions and S the sum over positions, averaged over
    likelihood terms, which is K-FAC's convolution with spatially uncorrelated derivatives.

    Args:
        shape: ``(..., p, n)``.
        init: S⊗A starts as this times the identity.
        options: dtype and device.
        fixed_input: Q_A stays the identity, and A is not looked at.
        kernel: channels and taps of a convolution, if Q_A is to be factored into bases for taps and for channels.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        init: float,
        options: dict,
        fixed_input: bool = False,
        kernel: tuple[int, int] | None = None,
    ):
        *some, p, n = shape
        lead, start = tuple(some), init**0.5  # so that S⊗A starts as init·I
        self.out = FullSide(lead, p, start, options)
        self.inputs: FullSide | FixedSide | TapSide
        if fixed_input:
            self.inputs = FixedSide(lead, n, start, options)
        elif kernel is None:
            self.inputs = FullSide(lead, n, start, options)
        else:
            self.inputs = TapSide(lead, n, kernel, start, options)

    def update(self, a: Tensor, g: Tensor, terms: int) -> None:
        """Take in ``a (..., b, t, n)`` and ``g (..., [v,] b, t, p)``."""
        self.inputs.update(a, a.shape[-3] * a.shape[-2])
        self.out.update(g if g.ndim == a.ndim else g.flatten(-4, -3), terms)

    def commit(self, ema: float) -> None:
        """Blend the pending means into A and S with rate β̃ (eq. 12)."""
        self.inputs.commit(ema)
        self.out.commit(ema)

    def expect(self, G: Tensor, rate: float, damping: float) -> None:
        """Add to S, then to A, and to their eigenvalues until the next decomposition, what a gradient G says of them.

        For a matrix normal G with covariances S and A, S is the mean of G·A⁻¹·Gᵀ/n, and A that of Gᵀ·S⁻¹·G/p. If few
        of G's entries are large, their number takes the place of n and p. So where G is largest S⊗A becomes about
        rate·G², however G is made.

        Args:
            G: ``(..., p, n)``, coordinates in the basis; zeros add nothing.
            rate: how much of it is added.
            damping: γ, whose root is added to the eigenvalues that are divided by.
        """
        for side, other, x in ((self.out, self.inputs, G.mT), (self.inputs, self.out, G)):  # x (..., other's, side's)
            x = x / _deviations(other.values, damping).unsqueeze(-1)
            side.add(x / _large(x / _deviations(side.values, damping).unsqueeze(-2)).sqrt(), rate)

    def averages(self) -> list[Averaged]:
        """A and S with what was gathered for them."""
        return [*self.inputs.averages(), *self.out.averages()]

    @property
    def decomposition_cost(self) -> int:
        """p³ + n³, for each leading index."""
        return self.out.decomposition_cost + self.inputs.decomposition_cost

    def decompose(self) -> list[Tensor] | None:
        """A new eigenbasis and eigenvalues (eq. 5), not yet taken over; None if either side fails."""
        out, into = self.out.decompose(), self.inputs.decompose()
        return None if out is None or into is None else [*out, *into]

    def decomposed(self) -> list[Tensor]:
        """Tensors like those that ``decompose`` gives."""
        return [*self.out.decomposed(), *self.inputs.decomposed()]

    def adopt(self, found: list[Tensor]) -> BasisChange:
        """Take over what ``decompose`` gave, here or in another process."""
        own = len(self.out.decomposed())
        return BasisChange(self.out.adopt(found[:own]), self.inputs.adopt(found[own:]))

    @property
    def q_out(self) -> Tensor:
        """Q_S ``(..., p, p)``."""
        return self.out.q

    @property
    def q_in(self) -> Tensor:
        """Q_A ``(..., n, n)``, multiplied out if need be."""
        return self.inputs.basis()

    def rotate(self, V: Tensor) -> Tensor:
        """Q_SᵀVQ_A."""
        q_in = self.inputs.matrix()
        return linalg.rotate(self.out.q, self.inputs.turn(V) if q_in is None else V, q_in)

    def unrotate(self, V: Tensor) -> Tensor:
        """Q_SVQ_Aᵀ."""
        q_in = self.inputs.matrix()
        return linalg.unrotate(self.out.q, self.inputs.turn_back(V) if q_in is None else V, q_in)

    def unrotate_variances(self, V: Tensor) -> Tensor:
        """(Q_S∘Q_S)V(Q_A∘Q_A)ᵀ."""
        return linalg.unrotate(self.out.q.square(), self.inputs.turn_back_variances(V), None)

    def add_unrotated(self, base: Tensor, V: Tensor, alpha: float, out: Tensor) -> None:
        """Out ← base + alpha·Q_SVQ_Aᵀ."""
        q_in = self.inputs.matrix()
        V = self.inputs.turn_back(V) if q_in is None else V
        linalg.add_unrotated(base, self.out.q, V, q_in, alpha, out)

    def state(self) -> dict[str, Tensor]:
        """A, S, their bases and eigenvalues."""
        return {**self.inputs.state("A", "in"), **self.out.state("S", "out")}


def _deviations(values: Tensor, damping: float) -> Tensor:
    """Roots of eigenvalues ``(..., k)`` that are to be divided by: no less than a thousandth of their mean."""
    return (values + damping**0.5).maximum(1e-3 * values.mean(-1, keepdim=True)).clamp_min_(SMALLEST).sqrt_()


def _large(x: Tensor) -> Tensor:
    """How many entries of the largest column of ``x (..., r, k)`` are about as large as the largest of all."""
    squares = x.square()
    largest = squares.amax((-2, -1), keepdim=True).clamp_min_(SMALLEST)
    return (squares.sum(-2, keepdim=True).amax(-1, keepdim=True) / largest).clamp_min_(1.0)
