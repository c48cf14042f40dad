"""The Kronecker factors A and S of one layer and their eigenbasis, shared by noisy K-FAC and noisy EK-FAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eigenoise.fisher.bases import Basis, FullBasis, IdentityBasis, SideChange
from eigenoise.fisher.factored_basis import FactoredBasis
from eigenoise.linalg.moving_average import Averaged

MAX_SIDE = 4609  # inputs and bias of a 3×3 convolution over 512 channels; eigh of it takes about ten seconds on a core
MIN_EIGENVALUE = 1e-15  # of a side that is divided by


@dataclass(frozen=True)
class BasisOptions:
    """Which basis each side of a layer's matrix has.

    Attributes:
        precision: of rotations and of squared gradients in the basis, see ``linalg.precision``.
        fixed_input: Q_A stays the identity.
        kernel: channels and taps of a convolution, if Q_A is to be factored into bases for taps and for channels.
        max_side: sides larger than this keep the identity as their basis.
    """

    precision: str = "float32"
    fixed_input: bool = False
    kernel: tuple[int, int] | None = None
    max_side: int = MAX_SIDE


@dataclass(frozen=True)
class BasisChange:
    """A change of both sides' bases; None for a side whose basis never changes."""

    out: SideChange | None
    inputs: SideChange | None

    def rotate(self, V: Tensor) -> Tensor:
        """Coordinates ``(..., p, n)`` in the old basis as those in the new one: P_S·V·P_Aᵀ."""
        V = V if self.out is None else self.out.rotate(V.mT).mT
        return V if self.inputs is None else self.inputs.rotate(V)

    def rotate_diagonal(self, R: Tensor) -> Tensor:
        """The diagonal of Q·diag(R)·Qᵀ in the new basis: (P_S∘P_S)·R·(P_A∘P_A)ᵀ."""
        R = R if self.out is None else self.out.rotate_variances(R.mT).mT
        return R if self.inputs is None else self.inputs.rotate_variances(R)


class KroneckerFactors:
    """Moving averages A = E[aaᵀ] ``(..., n, n)`` and S = E[ggᵀ] ``(..., p, p)`` with F ≈ S⊗A (eq. 2).

    With t shared positions A is the mean over examples and positions and S the sum over positions, averaged over
    likelihood terms, which is K-FAC's convolution with spatially uncorrelated derivatives.

    Args:
        shape: ``(..., p, n)``.
        init: S⊗A starts as this times the identity, or None to start from the first statistics.
        options: dtype and device.
        basis: which basis each side has.
    """

    def __init__(self, shape: tuple[int, ...], init: float | None, options: dict[str, Any], basis: BasisOptions):
        *some, p, n = shape
        self._max_side = basis.max_side
        lead, start = tuple(some), None if init is None else init**0.5  # so that S⊗A starts as init·I
        self.ndim = len(shape)
        self.out: Basis = _side(lead, p, start, options, basis)
        self.inputs: Basis
        if basis.fixed_input:
            self.inputs = IdentityBasis(lead, n, start, options)
        elif basis.kernel is not None:
            self.inputs = FactoredBasis(lead, n, basis.kernel, start, options)
        else:
            self.inputs = _side(lead, n, start, options, basis)

    def update(self, a: Tensor, g: Tensor, terms: int) -> None:
        """Gather from ``a (..., b, t, n)`` and ``g (..., v, b, t, p)``."""
        self.inputs.update(a, a.shape[-3] * a.shape[-2])
        self.out.update(g.flatten(-4, -3), terms)

    def commit(self, rate: float, first: bool) -> None:
        """Blend the gathered means into A and S with rate β̃ (eq. 12)."""
        self.inputs.commit(rate, first)
        self.out.commit(rate, first)

    def raise_to(self, G: Tensor, rate: float, damping: float) -> None:
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
            side.add(x / _effective_rows(x / _deviations(side.values, damping).unsqueeze(-2)).sqrt(), rate)

    def averages(self) -> list[Averaged]:
        """A and S with what was gathered for them."""
        return [*self.inputs.averages(), *self.out.averages()]

    @property
    def decomposition_cost(self) -> int:
        """p³ + n³, for each leading index."""
        return self.out.decomposition_cost + self.inputs.decomposition_cost

    def decompose(self) -> list[Tensor] | None:
        """A new eigenbasis and eigenvalues (eq. 5), not yet used; None if either side fails."""
        out, inputs = self.out.decompose(), self.inputs.decompose()
        return None if out is None or inputs is None else [*out, *inputs]

    def decomposed(self) -> list[Tensor]:
        """Tensors of the shapes that ``decompose`` gives."""
        return [*self.out.decomposed(), *self.inputs.decomposed()]

    def set_basis(self, decomposition: list[Tensor]) -> BasisChange:
        """Use what ``decompose`` gave, here or in another process."""
        split = len(self.out.decomposed())
        return BasisChange(self.out.set_basis(decomposition[:split]), self.inputs.set_basis(decomposition[split:]))

    @property
    def q_out(self) -> Tensor:
        """Q_S ``(..., p, p)``."""
        return self.out.matrix()

    @property
    def q_in(self) -> Tensor:
        """Q_A ``(..., n, n)``."""
        return self.inputs.matrix()

    def rotate(self, V: Tensor) -> Tensor:
        """Q_SᵀVQ_A."""
        return self.out.rotate_columns(self.inputs.rotate(V))

    def unrotate(self, V: Tensor) -> Tensor:
        """Q_SVQ_Aᵀ, of ``(..., p, n)`` or of k matrices ``(k, ..., p, n)`` at once."""
        if V.ndim == self.ndim:
            return self.out.unrotate_columns(self.inputs.unrotate(V))
        k, p = V.shape[0], V.shape[-2]  # one product for all k; no copy if memory has the order (..., p, k, n)
        columns = self.out.unrotate_columns(V.movedim(0, -2).flatten(-2)).unflatten(-1, (k, -1))
        return self.inputs.unrotate(columns.flatten(-3, -2)).unflatten(-2, (p, k)).movedim(-2, 0)

    def state(self) -> dict[str, Tensor]:
        """A, S, their bases and eigenvalues."""
        return {**self.inputs.state("A", "in"), **self.out.state("S", "out")}

    def describe(self) -> list[str]:
        """Which sides are too large to decompose."""
        sides = {"outputs": self.out.size, "inputs": self.inputs.size}
        return [f"{n} {side} are too many to decompose" for side, n in sides.items() if n > self._max_side]

    def sync(self) -> None:
        """Follow bases that were written to from outside."""
        for side in (self.out, self.inputs):
            if isinstance(side, FullBasis):
                side.sync()


def _side(
    lead: tuple[int, ...], size: int, init: float | None, options: dict[str, Any], basis: BasisOptions
) -> FullBasis | IdentityBasis:
    if size > basis.max_side:
        return IdentityBasis(lead, size, init, options)
    return FullBasis(lead, size, init, options, basis.precision)


def _deviations(values: Tensor, damping: float) -> Tensor:
    """Roots of eigenvalues ``(..., k)`` that are to be divided by: no less than a thousandth of their mean."""
    return (values + damping**0.5).maximum(1e-3 * values.mean(-1, keepdim=True)).clamp_min_(MIN_EIGENVALUE).sqrt_()


def _effective_rows(x: Tensor) -> Tensor:
    """How many entries of the largest column of ``x (..., r, k)`` are about as large as the largest of all."""
    squares = x.square()
    largest = squares.amax((-2, -1), keepdim=True).clamp_min_(MIN_EIGENVALUE)
    return (squares.sum(-2, keepdim=True).amax(-1, keepdim=True) / largest).clamp_min_(1.0)
