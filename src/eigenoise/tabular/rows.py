"""Rows of a table with their weights: standardisation, validation splits and sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MAX_REPEATS = 10  # of the rows in one epoch, on average


@dataclass(frozen=True)
class Rows:
    """Distinct rows in sorted order, with weights that count observations.

    Attributes:
        x: inputs ``(N, n)``.
        y: targets ``(N, d)``, or classes ``(N,)``.
        weight: positive weights ``(N,)``.
    """

    x: Tensor
    y: Tensor
    weight: Tensor

    @classmethod
    def from_arrays(cls, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> Rows:
        """Merge equal rows, adding their weights, and leave out rows of weight zero.

        A row of weight two is then exactly the same as two equal rows.
        """
        weight = np.ones(len(x)) if weight is None else np.asarray(weight, np.float64)
        used = weight > 0
        table = np.concatenate([x, y.reshape(len(y), -1)], 1, dtype=np.float64)[used] + 0.0  # −0.0 becomes 0.0
        unique, first, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
        total = np.bincount(inverse.reshape(-1), weight[used], minlength=len(unique))
        return cls(*map(torch.from_numpy, (unique[:, : x.shape[1]].copy(), y[used][first], total)))

    def __len__(self) -> int:
        return len(self.x)

    @property
    def total(self) -> float:
        """The sum of the weights."""
        return float(self.weight.sum())


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of columns, ``(n,)`` each."""

    mean: Tensor
    std: Tensor

    @classmethod
    def fit(cls, values: Tensor, weight: Tensor) -> Scale:
        """Return the scale of ``values (N, n)`` with ``weight (N,)``; constant columns get the standard deviation 1."""
        share = (weight / weight.sum()).unsqueeze(-1)
        mean = (share * values).sum(0)
        largest = (values - mean).abs().amax(0).clamp_min(1e-300)  # squares alone would over- or underflow
        std = (share * ((values - mean) / largest).square()).sum(0).sqrt() * largest
        rounding = 10 * torch.finfo(values.dtype).eps * mean.abs()
        return cls(mean, torch.where(std <= rounding, 1.0, std))

    def standardise(self, values: Tensor) -> Tensor:
        """Scale ``values (..., n)`` to mean 0 and standard deviation 1."""
        return (values - self.mean) / self.std

    def restore(self, values: Tensor) -> Tensor:
        """Invert ``standardise``."""
        return values * self.std + self.mean


def validation_splits(rows: Rows, count: int, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the training rows ``(s, m)`` and validation rows ``(s, v)`` of ``count`` random splits.

    Splits are stratified by class. Validation rows of different splits do not overlap while there are enough rows.
    """
    held = min(len(rows) - 1, max(1, round(len(rows) * fraction)))
    order = torch.randperm(len(rows), generator=generator)
    if rows.y.ndim == 1:
        order = order[rows.y[order].argsort(stable=True)]
    stride = max(1, len(rows) // held)
    stratified = torch.cat([order[start::stride] for start in range(stride)])
    rotated = torch.stack([stratified.roll(-held * i) for i in range(count)])
    return rotated[:, held:], rotated[:, :held]


def sample_epoch(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Sample the rows ``(s, m)`` of one epoch in random order, in proportion to ``weight (s, N)``.

    m is the smallest total weight, between N and ``MAX_REPEATS``·N. Systematic sampling rounds each row's expected
    count down or up: a row with an integer weight occurs exactly as often, and exactly once if all weights are equal.
    """
    total = weight.sum(-1, keepdim=True)
    rows = weight.shape[-1]
    count = min(MAX_REPEATS * rows, max(rows, round(float(total.min()))))
    edges = (weight / total).cumsum(-1)
    start = torch.rand(len(weight), 1, generator=generator, dtype=weight.dtype)
    start = start.clamp(0.01, 0.99)  # away from the edges of integer weights, where rounding would decide
    ticks = (torch.arange(count, dtype=weight.dtype) + start) / count
    index = torch.searchsorted(edges, ticks).clamp_max(rows - 1)
    order = torch.rand(index.shape, generator=generator, dtype=weight.dtype).argsort(-1)
    return index.gather(-1, order)
