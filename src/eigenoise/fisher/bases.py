"""The two sides of a layer's matrix: second moments of what comes in or goes out there, and an eigenbasis Q of them.

Every kind of side has the same methods: it takes in rows ``x (..., b, t, k)``, is decomposed (eq. 5) and turns rows
``x (..., r, k)`` into its basis, x·Q, and back. Leading dimensions are those of the layer's matrix. ``decompose`` finds
a new basis without taking it over; ``adopt`` does, and returns the change P = Q_newᵀ·Q, which carries coordinates in
the old basis over, x·Pᵀ, and their variances, x·(P∘P)ᵀ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eigenoise import linalg
from eigenoise.fisher.second_moments import gram
from eigenoise.linalg.kronecker import matmul
from eigenoise.linalg.moving_average import Averaged, PendingMean, mirror_


@dataclass(frozen=True)
class Change:
    """A change between bases that are kept as matrices: P ``(..., k, k)``."""

    P: Tensor

    def carry(self, x: Tensor) -> Tensor:
        """x·Pᵀ."""
        return matmul(x, self.P.mT)

    def carry_variances(self, x: Tensor) -> Tensor:
        """x·(P∘P)ᵀ."""
        return matmul(x, self.P.square().mT)


class FullSide:
    """One matrix of moments ``(..., k, k)`` and one orthogonal matrix.

    Args:
        lead: leading dimensions.
        size: k.
        start: the moments start as this times the identity.
        options: dtype and device.

    Attributes:
        turn_cost: multiplications for one row.
        decomposition_cost: k³, of all leading indices together.
    """

    def __init__(self, lead: tuple[int, ...], size: int, start: float, options: dict):
        eye = torch.eye(size, **options)
        self._moments, self._mirrored = (start * eye).repeat(*lead, 1, 1), True
        self.q = eye.repeat(*lead, 1, 1)
        self.values = torch.full((*lead, size), start, **options)
        self.turn_cost = size * size
        self.decomposition_cost = self.q.numel() * size
        self._pending = PendingMean()

    @property
    def moments(self) -> Tensor:
        """The moving average, ``(..., k, k)``."""
        if not self._mirrored:
            mirror_(self._moments)
            self._mirrored = True
        return self._moments

    def update(self, x: Tensor, count: int) -> None:
        """Take in the sum of xxᵀ, which is one over ``count`` members."""
        self._pending.add(gram(x), count)

    def commit(self, ema: float) -> None:
        """Blend the pending mean into the moments (eq. 12)."""
        self._mirrored = not any(product.is_halved for product in self._pending.products) and self._mirrored
        self._pending.blend_into(self._moments, ema)

    def add(self, x: Tensor, weight: float) -> None:
        """Add ``weight``·Σ xxᵀ of rows ``x (..., r, k)`` in the basis to the moments, its diagonal to the values."""
        own = self.turn_back(x)
        self.moments.add_(matmul(own.mT, own), alpha=weight)
        self.values.add_(x.square().sum(-2), alpha=weight)

    def averages(self) -> list[Averaged]:
        """The moments with what was gathered for them."""
        return [(self._pending, self._moments)]

    def decompose(self) -> list[Tensor] | None:
        """Eigenvalues and eigenvectors, or None if they cannot be had."""
        found = linalg.eigh_psd(self.moments)
        return None if found is None else list(found)

    def decomposed(self) -> list[Tensor]:
        """Tensors like those that ``decompose`` gives."""
        return [self.values, self.q]

    def adopt(self, found: list[Tensor]) -> Change:
        """Take them over."""
        values, vectors = found
        change = Change(matmul(vectors.mT, self.q))
        self.values.copy_(values)
        self.q.copy_(vectors)
        return change

    def turn(self, x: Tensor) -> Tensor:
        """x·Q."""
        return matmul(x, self.q)

    def turn_back(self, x: Tensor) -> Tensor:
        """x·Qᵀ."""
        return matmul(x, self.q.mT)

    def turn_back_variances(self, x: Tensor) -> Tensor:
        """x·(Q∘Q)ᵀ."""
        return matmul(x, self.q.square().mT)

    def matrix(self) -> Tensor | None:
        """Q if products with it are the way to turn, else None."""
        return self.q

    def basis(self) -> Tensor:
        """Q ``(..., k, k)``, in any case; not to be written to."""
        return self.q

    def diagonal(self) -> Tensor:
        """The diagonal ``(..., k)`` of the moments in the basis."""
        return (self.q * (self.moments @ self.q)).sum(-2).clamp_min(0.0)

    def state(self, moments: str, end: str) -> dict[str, Tensor]:
        """The tensors that make it up; names are ``moments`` or end in ``end``."""
        return {moments: self.moments, f"q_{end}": self.q, f"values_{end}": self.values}


class FixedSide:
    """Nothing is looked at or turned: Q is the identity for good."""

    turn_cost = decomposition_cost = 0

    def __init__(self, lead: tuple[int, ...], size: int, start: float, options: dict):
        self.values = torch.full((*lead, size), start, **options)

    def update(self, x: Tensor, count: int) -> None:
        """Nothing."""

    def commit(self, ema: float) -> None:
        """Nothing."""

    def add(self, x: Tensor, weight: float) -> None:
        """Nothing."""

    def averages(self) -> list[Averaged]:
        """None."""
        return []

    def decompose(self) -> list[Tensor]:
        """Nothing new."""
        return []

    def decomposed(self) -> list[Tensor]:
        """Nothing."""
        return []

    def adopt(self, found: list[Tensor]) -> None:
        """No change."""

    def turn(self, x: Tensor) -> Tensor:
        """The identity."""
        return x

    def turn_back(self, x: Tensor) -> Tensor:
        """The identity."""
        return x

    def turn_back_variances(self, x: Tensor) -> Tensor:
        """The identity."""
        return x

    def matrix(self) -> None:
        """There is none."""

    def basis(self) -> Tensor:
        """The identity ``(..., k, k)``."""
        return torch.diag_embed(torch.ones_like(self.values))

    def diagonal(self) -> Tensor:
        """Where the moments started."""
        return self.values

    def state(self, moments: str, end: str) -> dict[str, Tensor]:
        """Nothing to keep."""
        return {}
