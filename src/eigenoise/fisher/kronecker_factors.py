"""The Kronecker factors A and S of one layer and their eigenbasis, shared by noisy K-FAC and noisy EK-FAC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eigenoise import checks
from eigenoise.fisher.bases import Basis, FullBasis, IdentityBasis, SideChange
from eigenoise.fisher.leading_basis import LeadingBasis
from eigenoise.linalg.moving_average import Averaged
from eigenoise.linalg.precision import PRECISIONS

MAX_SIDE = 4609  # inputs and bias of a 3×3 convolution over 512 channels; eigh of it takes about ten seconds on a core
MIN_SIZE_FOR_LEADING, MIN_RANK, AUTO_RANK = 256, 32, 1 / 16  # by default; benchmarks/learning_curves.py
MIN_EIGENVALUE = 1e-15  # of a side that is divided by


@dataclass(frozen=True)
class BasisOptions:
    """Which basis each side of a layer's matrix has.

    Attributes:
        precision: of rotations and of squared gradients in the basis, see ``linalg.precision``.
        rank: the share of a side's eigenvectors that its basis has, the leading ones; 1 for all of them. ``"auto"``
            is a sixteenth, but at least 32, of sides from 256 on, and all of smaller ones.
        max_side: sides larger than this keep the identity as their basis.
    """

    precision: str = "float32"
    rank: float | str = 1.0
    max_side: int = MAX_SIDE

    def __post_init__(self) -> None:
        checks.choice("precision", self.precision, PRECISIONS)
        checks.integer("max_side", self.max_side)
        if self.rank != "auto":
            checks.number("basis_rank", self.rank, open_low=True, high=1.0)

    def make(self, lead: tuple[int, ...], size: int, init: float | None, options: dict[str, Any]) -> Basis:
        """The basis of a side; arguments as for ``FullBasis``."""
        if size > self.max_side:
            return IdentityBasis(lead, size, init, options)
        if self.rank == "auto":
            rank = size if size < MIN_SIZE_FOR_LEADING else max(MIN_RANK, round(AUTO_RANK * size))
        else:
            rank = max(1, round(float(self.rank) * size))
        if 2 * rank < size:
            return LeadingBasis(lead, size, rank, init, options, self.precision)
        return FullBasis(lead, size, init, options, self.precision)


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
        lead, start = tuple(some), None if init is None else init**0.5  # so that S⊗A starts as init·I
        self.ndim = len(shape)
        self.out = basis.make(lead, p, start, options)
        self.inputs = basis.make(lead, n, start, options)

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
        half = self.inputs.rotate(self._lowered(V))
        if self.out.size > 1:  # the basis of a single output is 1
            half = self.out.rotate_columns(half, overwrite=half is not V)
        return _as(half, V.dtype)

    def unrotate(self, V: Tensor, overwrite: bool = False) -> Tensor:
        """Q_SVQ_Aᵀ, of ``(..., p, n)`` or of k matrices ``(k, ..., p, n)`` at once.

        Args:
            V: the coordinates.
            overwrite: whether the memory of ``V`` may be used for the result.
        """
        if V.ndim == self.ndim:
            low = self._lowered(V)
            half = self.inputs.unrotate(low, overwrite or low is not V)
            if self.out.size > 1:
                half = self.out.unrotate_columns(half, overwrite or half is not V)
            return _as(half, V.dtype)
        k, p = V.shape[0], V.shape[-2]  # one product for all k; no copy if memory has the order (..., p, k, n)
        columns = self.out.unrotate_columns(V.movedim(0, -2).flatten(-2)).unflatten(-1, (k, -1))
        return self.inputs.unrotate(columns.flatten(-3, -2)).unflatten(-2, (p, k)).movedim(-2, 0)

    def _lowered(self, V: Tensor) -> Tensor:
        """``V`` in the precision that both sides rotate in, so that it is rounded once."""
        return _as(V, self.out.dtype) if self.out.dtype is self.inputs.dtype else V

    def state(self) -> dict[str, Tensor]:
        """A, S, their bases and eigenvalues."""
        return {**self.inputs.state("A", "in"), **self.out.state("S", "out")}

    def describe(self) -> list[str]:
        """What is special about the bases."""
        notes = []
        for name, side in (("outputs", self.out), ("inputs", self.inputs)):
            if isinstance(side, IdentityBasis):
                notes.append(f"{side.size} {name} are too many to decompose")
            elif isinstance(side, LeadingBasis):
                notes.append(f"{side.rank} leading eigenvectors for {side.size} {name}")
        return notes

    def sync(self) -> None:
        """Follow bases that were written to from outside."""
        for side in (self.out, self.inputs):
            side.sync()


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without asking torch where there is nothing to do."""
    return x if x.dtype is dtype else x.to(dtype)


def _deviations(values: Tensor, damping: float) -> Tensor:
    """Roots of eigenvalues ``(..., k)`` that are to be divided by: no less than a thousandth of their mean."""
    return (values + damping**0.5).maximum(1e-3 * values.mean(-1, keepdim=True)).clamp_min_(MIN_EIGENVALUE).sqrt_()


def _effective_rows(x: Tensor) -> Tensor:
    """How many entries of the largest column of ``x (..., r, k)`` are about as large as the largest of all."""
    squares = x.square()
    largest = squares.amax((-2, -1), keepdim=True).clamp_min_(MIN_EIGENVALUE)
    return (squares.sum(-2, keepdim=True).amax(-1, keepdim=True) / largest).clamp_min_(1.0)
