"""Means gathered over the forward passes of one step, then blended into moving averages."""

from __future__ import annotations

from torch import Tensor


class PendingMean:
    """A mean gathered over the forward passes of one step, then blended into a moving average."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.count = 0

    def add(self, total: Tensor, count: int) -> None:
        """Add a sum over ``count`` members."""
        self.total = total if self.total is None else self.total + total
        self.count += count

    def blend_into(self, average: Tensor, rate: float) -> bool:
        """Average ← (1 − rate)·average + rate·mean (eq. 12), and start anew; False if nothing was gathered."""
        if self.total is None:
            return False
        average.lerp_(self.total / self.count, rate)
        self.clear()
        return True

    def clear(self) -> None:
        """Forget what was gathered."""
        self.total, self.count = None, 0


def pending_totals(*means: PendingMean) -> list[Tensor]:
    """The sums that are waiting in ``means``."""
    return [mean.total for mean in means if mean.total is not None]
