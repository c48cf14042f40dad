"""One side of a layer's matrix: second moments of what comes in or goes out there, and an eigenbasis Q of them.

Every kind of basis answers the same questions. It gathers rows ``x (..., b, t, k)``, is decomposed (eq. 5) and rotates
rows ``x (..., r, k)`` into itself, x·Q, and back. Leading dimensions are those of the layer's matrix. ``decompose``
computes a new basis without using it; ``set_basis`` uses it and returns the change P = Q_newᵀ·Q_old.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from eigenoise import linalg
from eigenoise.fisher.gram_average import GramAverage
from eigenoise.linalg.kronecker import matmul
from eigenoise.linalg.moving_average import Averaged, MovingAverage
from eigenoise.linalg.precision import mixed_matmul, product_dtype


class SideChange(ABC):
    """A change from one basis of a side to another, P = Q_newᵀ·Q_old."""

    @abstractmethod
    def rotate(self, x: Tensor) -> Tensor:
        """Coordinates ``x (..., r, k)`` in the old basis as those in the new one: x·Pᵀ."""

    @abstractmethod
    def rotate_variances(self, x: Tensor) -> Tensor:
        """Variances of such coordinates, if they are uncorrelated: x·(P∘P)ᵀ."""


class Basis(ABC):
    """Second moments of one side and an orthogonal basis for it.

    Attributes:
        size: k.
        dtype: of the products that rotate.
        values: ``(..., k)``, eigenvalues of the moments when they were last decomposed.
        rotation_cost: multiplications to rotate one row.
        decomposition_cost: of all leading indices together, in units of k³.
    """

    size: int
    dtype: torch.dtype
    values: Tensor
    rotation_cost: int
    decomposition_cost: int

    @abstractmethod
    def update(self, x: Tensor, count: int) -> None:
        """Gather Σ xxᵀ over ``x (..., b, t, k)``, a sum over ``count`` members."""

    @abstractmethod
    def commit(self, rate: float, first: bool) -> None:
        """Blend what was gathered into the moments (eq. 12); before the ``first`` time they hold nothing."""

    @abstractmethod
    def averages(self) -> list[Averaged]:
        """Each moving average with what was gathered for it."""

    @abstractmethod
    def add(self, x: Tensor, weight: float) -> None:
        """Add ``weight``·Σ xxᵀ of rows ``x (..., r, k)`` in the basis to the moments, its diagonal to the values."""

    @abstractmethod
    def decompose(self) -> list[Tensor] | None:
        """A new basis and what belongs to it, for ``set_basis``; None if the decomposition failed."""

    @abstractmethod
    def decomposed(self) -> list[Tensor]:
        """Tensors of the shapes that ``decompose`` gives."""

    @abstractmethod
    def set_basis(self, decomposition: list[Tensor]) -> SideChange | None:
        """Use a decomposition; returns the change of basis, None if there is none."""

    @abstractmethod
    def rotate(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """x·Q for rows ``x (..., r, k)``.

        Args:
            x: the rows.
            exact: in the weights' dtype, whatever precision rotations have. What is squared afterwards wants that, or
                the rounding of large directions would be what small ones are made of.
        """

    @abstractmethod
    def unrotate(self, x: Tensor, overwrite: bool = False) -> Tensor:
        """x·Qᵀ for rows ``x (..., r, k)``; ``overwrite`` as for ``rotate_columns``."""

    @abstractmethod
    def rotate_columns(self, x: Tensor, overwrite: bool = False, *, exact: bool = False) -> Tensor:
        """Qᵀ·x for columns ``x (..., k, r)``, or ``(..., b, k, r)`` with one more axis after the leading ones.

        Args:
            x: the columns.
            overwrite: whether the memory of ``x`` may be used for the result.
            exact: as for ``rotate``.
        """

    @abstractmethod
    def unrotate_columns(self, x: Tensor, overwrite: bool = False) -> Tensor:
        """Q·x for columns ``x (..., k, r)``; ``overwrite`` as for ``rotate_columns``."""

    @abstractmethod
    def matrix(self) -> Tensor:
        """Q ``(..., k, k)``; not to be written to."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal ``(..., k)`` of the current moments in the basis."""

    @abstractmethod
    def sync(self) -> None:
        """Bring what is derived from the tensors of ``state`` up to date after they were written to."""

    @abstractmethod
    def state(self, moments: str, side: str) -> dict[str, Tensor]:
        """The tensors that make it up, named after ``moments`` and ``side``."""


@dataclass(frozen=True)
class MatrixChange(SideChange):
    """A change between bases that are matrices: P ``(..., k, k)``."""

    P: Tensor

    def rotate(self, x: Tensor) -> Tensor:
        """x·Pᵀ."""
        return matmul(x, self.P.mT)

    def rotate_variances(self, x: Tensor) -> Tensor:
        """x·(P∘P)ᵀ."""
        return matmul(x, self.P.square().mT)


class GramBasis(Basis):
    """A basis that follows from a whole matrix of moments ``(..., k, k)``.

    Args:
        lead: leading dimensions.
        size: k.
        init: the moments start as this times the identity, or None to start from the first statistics.
        options: dtype and device.
    """

    def __init__(self, lead: tuple[int, ...], size: int, init: float | None, options: dict[str, Any]):
        self.size = size
        self.values = torch.full((*lead, size), init or 0.0, **options)
        self._gram = GramAverage(lead, size, init, options)

    @property
    def moments(self) -> Tensor:
        """The moving average of the moments, ``(..., k, k)``."""
        return self._gram.value

    def update(self, x: Tensor, count: int) -> None:
        """Gather Σ xxᵀ."""
        self._gram.update(x, count)

    def commit(self, rate: float, first: bool) -> None:
        """Blend into the moments."""
        self._gram.commit(rate, first)

    def averages(self) -> list[Averaged]:
        """The moments."""
        return [self._gram.averaged()]

    def add(self, x: Tensor, weight: float) -> None:
        """Add to the moments and to the values."""
        self._gram.add(self.unrotate(x), weight)
        self.values.add_(x.square().sum(-2), alpha=weight)


@final
class FullBasis(GramBasis):
    """One matrix of moments ``(..., k, k)`` and one orthogonal matrix: the paper's.

    Args:
        lead: leading dimensions.
        size: k.
        init: the moments start as this times the identity, or None to start from the first statistics.
        options: dtype and device.
        precision: of rotations, see ``linalg.precision``.
    """

    def __init__(
        self, lead: tuple[int, ...], size: int, init: float | None, options: dict[str, Any], precision: str = "float32"
    ):
        super().__init__(lead, size, init, options)
        self.q = torch.eye(size, **options).repeat(*lead, 1, 1)
        self.dtype = product_dtype(precision, size, self.q.dtype, self.q.device)
        self._q = self.q.to(self.dtype)  # the same tensor unless rotations have another precision
        self._q_mT = self._q.mT  # shares its memory
        self.rotation_cost = size * size
        self.decomposition_cost = self.q.numel() * size

    def decompose(self) -> list[Tensor] | None:
        """Eigenvalues and eigenvectors."""
        decomposition = linalg.eigh_psd(self.moments)
        return None if decomposition is None else list(decomposition)

    def decomposed(self) -> list[Tensor]:
        """Eigenvalues and eigenvectors."""
        return [self.values, self.q]

    def set_basis(self, decomposition: list[Tensor]) -> MatrixChange:
        """Use new eigenvectors."""
        values, vectors = decomposition
        change = MatrixChange(matmul(vectors.mT, self.q))
        self.values.copy_(values)
        self.q.copy_(vectors)
        self.sync()
        return change

    def sync(self) -> None:
        """Bring the low-precision copy up to date after ``q`` was written to."""
        if self._q is not self.q:
            self._q.copy_(self.q)

    def rotate(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """x·Q."""
        return mixed_matmul(x, self.q if exact else self._q, x.dtype)

    def unrotate(self, x: Tensor, overwrite: bool = False) -> Tensor:
        """x·Qᵀ."""
        return mixed_matmul(x, self._q_mT, x.dtype)

    def rotate_columns(self, x: Tensor, overwrite: bool = False, *, exact: bool = False) -> Tensor:
        """Qᵀ·x."""
        q = self.q.mT if exact else self._q_mT
        q = q if x.ndim == q.ndim else q.unsqueeze(-3)
        return mixed_matmul(q, x, x.dtype)

    def unrotate_columns(self, x: Tensor, overwrite: bool = False) -> Tensor:
        """Q·x."""
        return mixed_matmul(self._q, x, x.dtype)

    def matrix(self) -> Tensor:
        """Q."""
        return self.q

    def diagonal(self) -> Tensor:
        """diag(QᵀAQ)."""
        return (self.q * (self.moments @ self.q)).sum(-2).clamp_min(0.0)

    def state(self, moments: str, side: str) -> dict[str, Tensor]:
        """Moments, Q and eigenvalues."""
        return {moments: self.moments, f"q_{side}": self.q, f"values_{side}": self.values}


@final
class IdentityBasis(Basis):
    """Q is the identity for good and only the diagonal of the moments is kept, for a side too large to decompose.

    Arguments as for ``FullBasis``.
    """

    rotation_cost = decomposition_cost = 0

    def __init__(self, lead: tuple[int, ...], size: int, init: float | None, options: dict[str, Any]):
        self.size = size
        self._moments = MovingAverage(torch.full((*lead, size), init or 0.0, **options), mean_of_entries)
        self.values = self._moments.value
        self.dtype = self.values.dtype

    def update(self, x: Tensor, count: int) -> None:
        """Gather Σ x²."""
        self._moments.add(x.square().sum((-3, -2)), count)

    def commit(self, rate: float, first: bool) -> None:
        """Blend into the diagonal."""
        self._moments.blend(rate, first)

    def averages(self) -> list[Averaged]:
        """The diagonal."""
        return [self._moments.averaged()]

    def add(self, x: Tensor, weight: float) -> None:
        """Add to the diagonal."""
        self.values.add_(x.square().sum(-2), alpha=weight)

    def decompose(self) -> list[Tensor]:
        """No-op: there is nothing to decompose."""
        return []

    def decomposed(self) -> list[Tensor]:
        """No tensors."""
        return []

    def set_basis(self, decomposition: list[Tensor]) -> None:
        """No-op: the basis never changes."""

    def rotate(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """The identity."""
        return x

    def unrotate(self, x: Tensor, overwrite: bool = False) -> Tensor:
        """The identity."""
        return x

    def rotate_columns(self, x: Tensor, overwrite: bool = False, *, exact: bool = False) -> Tensor:
        """The identity."""
        return x

    def unrotate_columns(self, x: Tensor, overwrite: bool = False) -> Tensor:
        """The identity."""
        return x

    def matrix(self) -> Tensor:
        """The identity ``(..., k, k)``."""
        return torch.diag_embed(torch.ones_like(self.values))

    def sync(self) -> None:
        """No-op: nothing is derived."""

    def diagonal(self) -> Tensor:
        """The diagonal itself."""
        return self.values

    def state(self, moments: str, side: str) -> dict[str, Tensor]:
        """The diagonal."""
        return {moments: self.values}


def mean_of_entries(mean: Tensor) -> Tensor:
    """The mean over the last axis, for each of its entries."""
    return mean.mean(-1, keepdim=True).expand_as(mean)
