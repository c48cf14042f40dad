"""The moving average of the second moments of one side of a layer's matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eigenoise.fisher.second_moments import gram
from eigenoise.linalg.kronecker import matmul
from eigenoise.linalg.moving_average import Averaged, MovingAverage, mirror_


class GramAverage:
    """The moving average of a symmetric matrix Σ xxᵀ ``(..., k, k)``, large ones updated below the diagonal only.

    Args:
        lead: leading dimensions.
        size: k.
        init: it starts as this times the identity, or None to start from the first statistics.
        options: dtype and device.
    """

    def __init__(self, lead: tuple[int, ...], size: int, init: float | None, options: dict[str, Any]):
        start = torch.zeros(*lead, size, size, **options)
        start.diagonal(dim1=-2, dim2=-1).fill_(init or 0.0)
        self._average = MovingAverage(start, scaled_identity)
        self._mirrored = True  # the upper triangle is as new as the lower one

    @property
    def value(self) -> Tensor:
        """The moving average, ``(..., k, k)``."""
        if not self._mirrored:
            mirror_(self._average.value)
            self._mirrored = True
        return self._average.value

    def update(self, x: Tensor, count: int) -> None:
        """Gather Σ xxᵀ over ``x (..., b, t, k)``, a sum over ``count`` members."""
        self._average.add(gram(x), count)

    def commit(self, rate: float, first: bool) -> None:
        """Blend what was gathered into the average (eq. 12)."""
        self._mirrored = self._mirrored and not any(product.is_halved for product in self._average.pending.products)
        self._average.blend(rate, first)

    def averaged(self) -> Averaged:
        """For those who sum over processes."""
        return self._average.averaged()

    def add(self, rows: Tensor, weight: float) -> None:
        """Add ``weight``·Σ xxᵀ of ``rows (..., r, k)``."""
        self.value.add_(matmul(rows.mT, rows), alpha=weight)


def scaled_identity(mean: Tensor) -> Tensor:
    """The identity times the mean eigenvalue of ``mean (..., k, k)``."""
    trace = mean.diagonal(dim1=-2, dim2=-1).mean(-1)
    return torch.diag_embed(trace.unsqueeze(-1).expand(mean.shape[:-1]))
