"""A table's rows with their weights, the parts they are held out in, and the order they are seen in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Distinct rows, sorted, and how often each counts: the same whatever order and form a table comes in.

    Attributes:
        x: ``(N, n)``.
        y: ``(N, d)``, or classes ``(N,)``.
        weight: ``(N,)``, above zero.
    """

    x: Tensor
    y: Tensor
    weight: Tensor

    @classmethod
    def of(cls, x: np.ndarray, y: np.ndarray, weight: np.ndarray | None = None) -> Rows:
        """Equal rows become one whose weight is their sum; rows without weight are left out.

        A row with weight two is then the same as two equal rows, not only nearly.
        """
        weight = np.ones(len(x)) if weight is None else np.asarray(weight, np.float64)
        kept = weight > 0
        columns = y.reshape(len(y), -1)
        whole = np.concatenate([x, columns], 1, dtype=np.float64)[kept] + 0.0  # there is only one zero
        unique, first, where = np.unique(whole, axis=0, return_index=True, return_inverse=True)
        total = np.bincount(where.reshape(-1), weight[kept], minlength=len(unique))
        return cls(
            torch.from_numpy(unique[:, : x.shape[1]].copy()),
            torch.from_numpy(y[kept][first]),
            torch.from_numpy(total),
        )

    def __len__(self) -> int:
        return len(self.x)

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self.weight.sum())


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of columns, ``(n,)`` each."""

    mean: Tensor
    std: Tensor

    @classmethod
    def of(cls, values: Tensor, weight: Tensor) -> Scale:
        """Of ``values (N, n)`` with ``weight (N,)``; a column that does not vary keeps its unit."""
        share = (weight / weight.sum()).unsqueeze(-1)
        mean = (share * values).sum(0)
        largest = (values - mean).abs().amax(0).clamp_min(1e-300)  # squares alone would over- or underflow
        std = (share * ((values - mean) / largest).square()).sum(0).sqrt() * largest
        rounding = 10 * torch.finfo(values.dtype).eps * mean.abs()
        return cls(mean, torch.where(std <= rounding, 1.0, std))

    def standardise(self, values: Tensor) -> Tensor:
        """To mean 0 and standard deviation 1."""
        return (values - self.mean) / self.std

    def restore(self, values: Tensor) -> Tensor:
        """Back to where they came from."""
        return values * self.std + self.mean


def parts(rows: Rows, count: int, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rows to train on ``(s, m)`` and held-out rows ``(s, v)`` of ``count`` random divisions, classes spread evenly.

    Held-out parts do not overlap if there is room for them.
    """
    held = min(len(rows) - 1, max(1, round(len(rows) * fraction)))
    order = torch.randperm(len(rows), generator=generator)
    if rows.y.ndim == 1:
        order = order[rows.y[order].argsort(stable=True)]
    stride = max(1, len(rows) // held)
    spread = torch.cat([order[start::stride] for start in range(stride)])  # every class in each stretch of it
    shifts = [spread.roll(-held * i) for i in range(count)]
    return torch.stack([each[held:] for each in shifts]), torch.stack([each[:held] for each in shifts])


def one_pass(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Places ``(s, m)`` of one pass for rows of ``weight (s, N)``, in random order; each comes as often as it weighs.

    m is the smallest total weight, but at least N and at most ten times that. A row comes the whole number below its
    share of times, or once more: exactly its weight if that is whole, exactly once if all weigh the same.
    """
    total = weight.sum(-1, keepdim=True)
    rows = weight.shape[-1]
    count = min(10 * rows, max(rows, round(float(total.min()))))
    edges = (weight / total).cumsum(-1)
    start = torch.rand(len(weight), 1, generator=generator, dtype=weight.dtype)
    # Away from the edges, so that rounding decides nothing where weights are whole numbers.
    start = start.clamp(0.01, 0.99)
    ticks = (torch.arange(count, dtype=weight.dtype) + start) / count
    places = torch.searchsorted(edges, ticks).clamp_max(weight.shape[-1] - 1)
    order = torch.rand(places.shape, generator=generator, dtype=weight.dtype).argsort(-1)
    return places.gather(-1, order)
