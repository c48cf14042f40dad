"""A basis of a large side that is cheap to rotate into: its leading eigenvectors, and any basis for the rest.

The second moments of a wide layer's inputs fall off quickly: most eigenvectors belong to eigenvalues far below any
damping, and which basis their subspace has makes no difference there. Only the k leading eigenvectors are kept. The
Householder reflections that map the first k unit vectors to them make up one orthogonal matrix in compact WY form,
Q = I − Y·T·Yᵀ: its first k columns are the eigenvectors (up to sign), the others an orthonormal basis of the rest.
A rotation costs 2·k instead of n multiplications for each number, and R is exact in this basis as in every other.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor

from eigenoise import linalg
from eigenoise.fisher.bases import GramBasis, MatrixChange
from eigenoise.linalg.kronecker import matmul
from eigenoise.linalg.precision import product_dtype

ITERATIONS = 2  # of the subspace; it goes on from the last one, and R is exact in whatever basis that gives


@final
class LeadingBasis(GramBasis):
    """The ``rank`` leading eigenvectors of a side, completed by Householder reflections.

    Args:
        lead: leading dimensions.
        size: n.
        rank: k.
        init: the moments start as this times the identity, or None to start from the first statistics.
        options: dtype and device.
        precision: of rotations, see ``linalg.precision``.

    Attributes:
        vectors: ``(..., n, k)``, the leading eigenvectors.
    """

    def __init__(
        self,
        lead: tuple[int, ...],
        size: int,
        rank: int,
        init: float | None,
        options: dict[str, Any],
        precision: str = "float32",
    ):
        super().__init__(lead, size, init, options)
        self.rank = rank
        start = torch.randn(size, rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.vectors = torch.linalg.qr(start)[0].to(**options).repeat(*lead, 1, 1)
        self.dtype = product_dtype(precision, size, self.vectors.dtype, self.vectors.device)
        self._exact = torch.empty_like(self.vectors), torch.empty_like(self.vectors)  # Y and W = Y·Tᵀ, (..., n, k)
        self._Y, self._W = (part.to(self.dtype) for part in self._exact)  # the same tensors unless precision is lower
        self.rotation_cost = 2 * rank * size
        self.decomposition_cost = (ITERATIONS + 1) * rank * size * self.values.numel()
        self.sync()

    def decompose(self) -> list[Tensor] | None:
        """The leading eigenvectors, by subspace iteration from the current ones and a Rayleigh–Ritz step."""
        moments, vectors = self.moments, self.vectors
        for _ in range(ITERATIONS):
            vectors, _ = torch.linalg.qr(matmul(moments, vectors))
        small = linalg.eigh_psd(matmul(vectors.mT, matmul(moments, vectors)))
        return None if small is None else [matmul(vectors, small[1])]

    def decomposed(self) -> list[Tensor]:
        """The leading eigenvectors."""
        return [self.vectors]

    def set_basis(self, decomposition: list[Tensor]) -> MatrixChange:
        """Use new leading eigenvectors."""
        old = self.matrix()
        self.vectors.copy_(decomposition[0])
        self.sync()
        self.values.copy_(self.diagonal())
        return MatrixChange(self.rotate_columns(old, exact=True))

    def sync(self) -> None:
        """Reflections that map the first unit vectors to ``vectors``, after those were written to."""
        reflectors, tau = torch.geqrf(self.vectors)
        Y = reflectors.tril(-1)
        Y.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        D, eye = torch.diag_embed(tau), torch.eye(self.rank, dtype=tau.dtype, device=tau.device)
        T = torch.linalg.solve_triangular(eye + D @ (Y.mT @ Y).triu(1), D, upper=True, unitriangular=True)
        for part, exact, value in zip((self._Y, self._W), self._exact, (Y, Y @ T.mT), strict=True):
            exact.copy_(value)
            if part is not exact:
                part.copy_(value)

    def rotate(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """x·Q = x − (x·Y)·Wᵀ."""
        Y, W = self._exact if exact else (self._Y, self._W)
        return self._reflect(x, Y, W, False)

    def unrotate(self, x: Tensor, overwrite: bool = False) -> Tensor:
        """x·Qᵀ = x − (x·W)·Yᵀ."""
        return self._reflect(x, self._W, self._Y, overwrite)

    def rotate_columns(self, x: Tensor, overwrite: bool = False, *, exact: bool = False) -> Tensor:
        """Qᵀ·x."""
        Y, W = self._exact if exact else (self._Y, self._W)
        return self._reflect_columns(x, W, Y, overwrite)

    def unrotate_columns(self, x: Tensor, overwrite: bool = False) -> Tensor:
        """Q·x."""
        return self._reflect_columns(x, self._Y, self._W, overwrite)

    def matrix(self) -> Tensor:
        """Q, formed at each call."""
        eye = torch.eye(self.size, dtype=self.vectors.dtype, device=self.vectors.device)
        return self.rotate(eye.expand(*self.vectors.shape[:-2], self.size, self.size), exact=True)

    def diagonal(self) -> Tensor:
        """diag(QᵀAQ)."""
        q = self.matrix()
        return (q * (self.moments @ q)).sum(-2).clamp_min(0.0)

    def state(self, moments: str, side: str) -> dict[str, Tensor]:
        """Moments, the leading eigenvectors and the diagonal of the moments in the basis."""
        return {moments: self.moments, f"q_{side}": self.vectors, f"values_{side}": self.values}

    def _reflect(self, x: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> Tensor:
        """The rows minus (x·left)·rightᵀ."""
        rows = x.to(left.dtype)
        if rows.ndim == 2:
            memory = rows if overwrite or rows is not x else None
            return torch.addmm(rows, torch.mm(rows, left), right.mT, alpha=-1, out=memory).to(x.dtype)
        return (rows - matmul(matmul(rows, left), right.mT)).to(x.dtype)

    def _reflect_columns(self, x: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> Tensor:
        """The columns minus left·(rightᵀ·x)."""
        columns = x.to(left.dtype)
        if columns.ndim == 2:
            memory = columns if overwrite or columns is not x else None
            return torch.addmm(columns, left, torch.mm(right.mT, columns), alpha=-1, out=memory).to(x.dtype)
        if columns.ndim > left.ndim:
            left, right = left.unsqueeze(-3), right.unsqueeze(-3)
        return (columns - matmul(left, matmul(right.mT, columns))).to(x.dtype)
