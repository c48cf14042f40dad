"""Which layers are decomposed at which step and by which process, so that no step waits for more than the largest."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

from torch import Tensor

from eigenoise.optim.fisher_slot import FisherSlot
from eigenoise.optim.statistics import Schedule
from eigenoise.parallel.ranks import Ranks

MAX_COST_PER_STEP = 1 << 24  # n³ of all decompositions that one step does without spreading them


class DecompositionSchedule:
    """New bases for the layers of a model, large ones in turns.

    Args:
        slots: of all layers.
        schedule: steps between decompositions, and between statistics.
        ranks: the processes that divide the work, or None.
    """

    def __init__(self, slots: Sequence[FisherSlot], schedule: Schedule, ranks: Ranks | None):
        self.every, self.ranks = schedule.refresh_every, ranks
        self._slots = slots
        self._costs = [0 if slot.fisher.factors is None else slot.fisher.factors.decomposition_cost for slot in slots]
        stats_every = (schedule.stats_every, schedule.scale_every)
        self._turns = turns(self._costs, self.every, stats_every, 1 if ranks is None else ranks.size)
        self._warned = False

    @property
    def places(self) -> list[int]:
        """Where in a cycle of ``every`` steps something is decomposed."""
        return [place for place, layers in self._turns.items() if any(self._costs[i] for i in layers)]

    def refresh(self, step: int) -> None:
        """Compute and use the bases that are due; one warning for the first that fails."""
        due = self._turns.get(step % self.every, ())
        decompositions = self._decompose(due)
        failed = []
        for index, decomposition in zip(due, decompositions, strict=True):
            if not self._slots[index].refresh(decomposition):
                failed.append(self._slots[index].name)
        if failed and not self._warned:
            warnings.warn(
                f"the eigendecomposition failed for {', '.join(failed)} at step {step}, even in float64: the "
                "old basis is kept; this is said only once",
                RuntimeWarning,
                stacklevel=5,
            )
            self._warned = True

    def _decompose(self, due: Sequence[int]) -> list[list[Tensor] | None]:
        """Decompositions, each computed by one of the processes; an empty one where a layer has no factors."""
        factors = [self._slots[index].fisher.factors for index in due]
        if self.ranks is None:
            return [[] if sides is None else sides.decompose() for sides in factors]
        work = [(i, sides) for i, sides in enumerate(factors) if sides is not None and sides.decomposition_cost]
        costs = [self._costs[due[i]] for i, _ in work]
        done = self.ranks.divide(costs, lambda k: work[k][1].decompose(), lambda k: work[k][1].decomposed())
        decompositions: list[list[Tensor] | None] = [[] for _ in due]
        for (i, _), decomposition in zip(work, done, strict=True):
            decompositions[i] = decomposition
        return decompositions


def turns(costs: Sequence[float], every: int, stats_every: Sequence[int], ranks: int = 1) -> dict[int, list[int]]:
    """Places in a cycle of ``every`` steps where decompositions are due, each with the indices of its layers.

    Statistics are due at the first place too, so it gets no more than a quarter of what others may get; the others are
    where no statistics are due in the first cycle, unless they are at every step. Layers keep their order.

    Args:
        costs: of each layer's decompositions, n³.
        every: steps in a cycle.
        stats_every: statistics are due at multiples of these.
        ranks: so many processes work at a place at once.
    """
    later = (place for place in range(1, every) if min(stats_every) == 1 or all(place % k for k in stats_every))
    places = [0, *itertools.islice(later, len(costs))]
    limit = max(MAX_COST_PER_STEP, *costs, sum(costs) / (len(places) - 0.75) / ranks)
    groups: list[list[int]] = [[]]
    spent, allowed = 0.0, max(MAX_COST_PER_STEP, limit / 4) * ranks
    for layer, cost in enumerate(costs):
        if spent + cost > allowed and len(groups) < len(places):
            groups.append([])
            spent, allowed = 0.0, limit * ranks
        groups[-1].append(layer)
        spent += cost
    return dict(zip(places, groups, strict=False))
