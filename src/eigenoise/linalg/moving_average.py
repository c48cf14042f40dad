"""Means gathered over the forward passes of one step, then blended into moving averages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from eigenoise.linalg.kronecker import matmul

HALVED, STRIPS = 512, 8  # symmetric matrices of this size are updated in strips, below the diagonal only


@dataclass(frozen=True)
class Product:
    """A sum of outer products that is not multiplied out: leftᵀ·right ``(..., p, n)``.

    Attributes:
        left: ``(..., rows, p)``.
        right: ``(..., rows, n)``.
    """

    left: Tensor
    right: Tensor

    def value(self) -> Tensor:
        """Multiplied out."""
        return matmul(self.left.mT, self.right)

    def add_to(self, average: Tensor, beta: float, alpha: float) -> None:
        """Average ← beta·average + alpha·value; of a large symmetric one only what is on and below the diagonal."""
        if self.is_halved:
            for start, stop in _strips(average.shape[-1]):
                average[start:stop, :stop].addmm_(
                    self.left[:, start:stop].mT, self.right[:, :stop], beta=beta, alpha=alpha
                )
            return
        add = torch.Tensor.addmm_ if average.ndim == 2 else torch.Tensor.baddbmm_
        add(average, self.left.mT, self.right, beta=beta, alpha=alpha)

    def bound(self) -> Tensor:
        """A number that no entry's size exceeds: finite only if they all are."""
        if self.left is self.right:
            return self.left.square().sum()
        return (self.left.abs().sum(-1) * self.right.abs().sum(-1)).sum()

    def is_small(self, beside: int = 0) -> bool:
        """Whether it, with ``beside`` more rows, takes less memory than its value, and torch can add it in one go."""
        rows, p, n = beside + self.left.shape[-2], self.left.shape[-1], self.right.shape[-1]
        return rows * (n if self.left is self.right else p + n) <= p * n and self.left.ndim <= 3

    @property
    def is_halved(self) -> bool:
        """Whether ``add_to`` leaves out what is above the diagonal."""
        return self.left is self.right and self.left.ndim == 2 and self.left.shape[-1] >= HALVED


class PendingMean:
    """A mean gathered over the forward passes of one step, then blended into a moving average."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.products: list[Product] = []
        self.count = 0

    def add(self, total: Tensor | Product, count: int) -> None:
        """Add a sum over ``count`` members."""
        if isinstance(total, Product) and total.is_small(beside=sum(p.left.shape[-2] for p in self.products)):
            self.products.append(total)
        else:
            value = total.value() if isinstance(total, Product) else total
            self.total = value if self.total is None else self.total + value
        self.count += count

    def blend_into(self, average: Tensor, rate: float) -> bool:
        """Average ← (1 − rate)·average + rate·mean (eq. 12), and clear; False if nothing was gathered."""
        if not self.count:
            return False
        keep = 1.0 - rate
        if self.total is not None:
            average.lerp_(self.total.div_(self.count), rate)
            keep = 1.0
        for product in self.products:
            product.add_to(average, keep, rate / self.count)
            keep = 1.0
        self.clear()
        return True

    def write_to(self, out: Tensor) -> None:
        """Multiply out the sum that was gathered, zeros if there is none, into memory that holds anything."""
        keep = 1.0
        if self.total is not None:
            out.copy_(self.total)
        elif self.products:
            keep = 0.0  # of what is there nothing, not even a NaN
        else:
            out.zero_()
        for product in self.products:
            product.add_to(out, keep, 1.0)
            keep = 1.0
        if any(product.is_halved for product in self.products):
            mirror_(out)

    def mean_like(self, average: Tensor) -> Tensor:
        """The mean that was gathered, as a new tensor like ``average``."""
        mean = torch.empty_like(average)
        self.write_to(mean)
        return mean.div_(self.count)

    def replace(self, total: Tensor, count: int) -> None:
        """Have gathered this instead."""
        self.total, self.products, self.count = (total if count else None), [], count

    def clear(self) -> None:
        """Forget what was gathered."""
        self.total, self.products, self.count = None, [], 0

    def pending(self) -> list[Tensor]:
        """Numbers that are finite only if all that was gathered is; none if nothing was."""
        return [*([] if self.total is None else [self.total]), *(product.bound() for product in self.products)]


Averaged = tuple[PendingMean, Tensor]  # what was gathered, and the moving average that it goes into


class MovingAverage:
    """An exponential moving average with what was gathered for its next update.

    Args:
        value: the average; written to in place.
        start: what the average starts as, given the first mean. The start has the weight that the first update leaves
            it, so that directions that the first batch did not show are not taken for flat.
    """

    def __init__(self, value: Tensor, start: Callable[[Tensor], Tensor]):
        self.value, self._start = value, start
        self.pending = PendingMean()

    def add(self, total: Tensor | Product, count: int) -> None:
        """Gather a sum over ``count`` members."""
        self.pending.add(total, count)

    def blend(self, rate: float, first: bool) -> bool:
        """Value ← (1 − rate)·value + rate·mean (eq. 12); False if nothing was gathered.

        Args:
            rate: weight of what was gathered.
            first: whether the value is still to start from the first mean.
        """
        if first and self.pending.count:
            self.value.copy_(self._start(self.pending.mean_like(self.value)))
        return self.pending.blend_into(self.value, rate)

    def averaged(self) -> Averaged:
        """For those who sum over processes."""
        return self.pending, self.value


def mirror_(matrix: Tensor) -> None:
    """Write what is below the diagonal of ``matrix (n, n)`` above it too."""
    for start, stop in _strips(matrix.shape[-1]):
        matrix[:start, start:stop] = matrix[start:stop, :start].mT


def _strips(size: int) -> list[tuple[int, int]]:
    edges = [size * i // STRIPS for i in range(STRIPS + 1)]
    return list(itertools.pairwise(edges))
