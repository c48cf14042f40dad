"""Calibration of central intervals on validation rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_STEPS = 100  # between the tabulated coverages; levels are interpolated
MAX_LEVEL = 1 - 1e-12  # of a finite interval


@dataclass(frozen=True)
class Calibration:
    """For each target, the nominal level of the central interval that has a wanted coverage.

    Attributes:
        levels: ``(d, NUM_STEPS + 1)``, non-decreasing from 0 to 1, for the coverages 0, 1/NUM_STEPS, ..., 1.
    """

    levels: Tensor

    @classmethod
    def identity(cls, targets: int) -> Calibration:
        """Return the calibration that leaves the predictive distribution unchanged."""
        return cls(_coverages().expand(targets, -1))

    @classmethod
    def fit(cls, below: Sequence[Tensor], weight: Tensor) -> Calibration:
        """Calibrate on validation rows.

        A row is in the central interval of level l if |2P − 1| ≤ l.

        Args:
            below: for each target, the predicted P(target ≤ observed) of each row.
            weight: weights of the rows, of the same shape.
        """
        levels = []
        for probability in below:
            level, order = (2 * probability.flatten() - 1).abs().sort()
            count = weight.flatten()[order]
            # The i-th of n sorted rows has the expected coverage i/(n + 1); a weight counts rows.
            last = count.cumsum(0)
            first = last - count + count.clamp_max(1.0)
            coverage = torch.stack([first, last], -1).flatten() / (weight.sum() + 1)
            ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
            points = torch.cat([ends[:1], coverage, ends[1:]])
            values = torch.cat([ends[:1], level.repeat_interleave(2), ends[1:]])
            levels.append(_interpolate(_coverages(), points, values))
        return cls(torch.stack(levels))

    def quantile(self, q: float, target: int) -> float:
        """Return the nominal quantile of the predictive distribution that is the calibrated quantile ``q``."""
        coverage = torch.tensor([abs(2 * q - 1)], dtype=torch.float64)
        level = min(MAX_LEVEL, float(_interpolate(coverage, _coverages(), self.levels[target])))
        return 0.5 + (0.5 if q > 0.5 else -0.5) * level


def _coverages() -> Tensor:
    return torch.linspace(0, 1, NUM_STEPS + 1, dtype=torch.float64)


def _interpolate(x: Tensor, points: Tensor, values: Tensor) -> Tensor:
    """Interpolate ``values`` at increasing ``points`` linearly."""
    right = torch.searchsorted(points, x).clamp(1, len(points) - 1)
    low, high = points[right - 1], points[right]
    part = ((x - low) / (high - low).clamp_min(1e-300)).clamp(0.0, 1.0)
    return torch.lerp(values[right - 1], values[right], part)
