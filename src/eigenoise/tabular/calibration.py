"""How wide an interval must be to hold what it promises, as rows that were held out tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GRID = 100  # coverages that are looked up; between them levels are interpolated
LARGEST = 1 - 1e-12  # level of an interval that is still finite


@dataclass(frozen=True)
class Calibration:
    """For each target, the level of the predictive distribution's central interval that holds a wanted part of rows.

    Attributes:
        levels: ``(d, GRID + 1)``, from 0 to 1 and never falling, for the coverages 0, 1/GRID, ..., 1.
    """

    levels: Tensor

    @classmethod
    def none(cls, targets: int) -> Calibration:
        """The predictive distribution is taken at its word."""
        return cls(torch.linspace(0, 1, GRID + 1, dtype=torch.float64).expand(targets, -1))

    @classmethod
    def of(cls, below: Sequence[Tensor], weight: Tensor) -> Calibration:
        """From P(target ≤ what came) of held-out rows, a tensor for each target, and the rows' weights.

        A row is in the central interval of level l if |2P − 1| ≤ l.
        """
        found = []
        for each in below:
            wanted, order = (2 * each.flatten() - 1).abs().sort()
            own = weight.flatten()[order]
            # Of n rows the i-th is where i/(n + 1) of new ones are expected to lie below; a weight counts rows.
            last = own.cumsum(0)
            first = last - own + own.clamp_max(1.0)
            places = torch.stack([first, last], -1).flatten() / (weight.sum() + 1)
            ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
            points = torch.cat([ends[:1], places, ends[1:]])
            values = torch.cat([ends[:1], wanted.repeat_interleave(2), ends[1:]])
            found.append(_interpolated(torch.linspace(0, 1, GRID + 1, dtype=torch.float64), points, values))
        return cls(torch.stack(found))

    def quantile(self, q: float, target: int) -> float:
        """The quantile of the predictive distribution that a calibrated ``q`` is, for a target."""
        points = torch.linspace(0, 1, GRID + 1, dtype=torch.float64)
        coverage = torch.tensor([abs(2 * q - 1)], dtype=torch.float64)
        level = min(LARGEST, float(_interpolated(coverage, points, self.levels[target])))
        return 0.5 + (0.5 if q > 0.5 else -0.5) * level


def _interpolated(x: Tensor, points: Tensor, values: Tensor) -> Tensor:
    """Between ``values`` at rising ``points``, linearly."""
    right = torch.searchsorted(points, x).clamp(1, len(points) - 1)
    low, high = points[right - 1], points[right]
    part = ((x - low) / (high - low).clamp_min(1e-300)).clamp(0.0, 1.0)
    return torch.lerp(values[right - 1], values[right], part)
