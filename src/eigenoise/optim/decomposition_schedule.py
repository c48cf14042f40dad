"""Which layers are decomposed at which step and by which process, so that no step waits for more than the largest."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

from eigenoise.optim.statistics import FisherSlot
from eigenoise.parallel.ranks import Ranks

AT_ONCE = 1 << 24  # n³ of all decompositions that one step does without spreading them


class Decompositions:
    """New bases for the layers of a model, large ones in turns.

    Args:
        slots: of all layers.
        every: steps between two decompositions of a layer.
        stats_every: statistics are due at multiples of these.
        ranks: the processes that divide the work, or None.
    """

    def __init__(self, slots: Sequence[FisherSlot], every: int, stats_every: Sequence[int], ranks: Ranks | None):
        self.every, self.ranks = every, ranks
        self._slots = slots
        self._costs = [0 if slot.fisher.factors is None else slot.fisher.factors.decomposition_cost for slot in slots]
        self._turns = turns(self._costs, every, stats_every, 1 if ranks is None else ranks.size)
        self._warned = False

    @property
    def places(self) -> list[int]:
        """Where in a cycle of ``every`` steps something is decomposed."""
        return [place for place, layers in self._turns.items() if any(self._costs[i] for i in layers)]

    def renew(self, step: int) -> list[FisherSlot]:
        """Find and take over the bases that are due; the slots it tried, a warning for the first that failed."""
        places = self._turns.get(step % self.every, ())
        due = [self._slots[index] for index in places]
        found = self._find(places)
        failed = [slot.name for slot, each in zip(due, found, strict=True) if each is None or not slot.refresh(each)]
        if failed and not self._warned:
            warnings.warn(
                f"the eigendecomposition failed for {', '.join(failed)} at step {step}, even in float64: the "
                "old basis is kept; this is said only once",
                RuntimeWarning,
                stacklevel=5,
            )
            self._warned = True
        return due

    def _find(self, places: Sequence[int]) -> list[list | None]:
        """Decompositions, each done by one of the processes; of nothing where a layer has no factors."""
        factors = [self._slots[index].fisher.factors for index in places]
        if self.ranks is None:
            return [[] if each is None else each.decompose() for each in factors]
        own = [(i, each) for i, each in enumerate(factors) if each is not None and each.decomposition_cost]
        costs = [self._costs[places[i]] for i, _ in own]
        done = self.ranks.divide(costs, lambda k: own[k][1].decompose(), lambda k: own[k][1].decomposed())
        found: list[list | None] = [[] for _ in places]
        for (i, _), each in zip(own, done, strict=True):
            found[i] = each
        return found


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
    limit = max(AT_ONCE, *costs, sum(costs) / (len(places) - 0.75) / ranks)
    groups: list[list[int]] = [[]]
    spent, allowed = 0.0, max(AT_ONCE, limit / 4) * ranks
    for layer, cost in enumerate(costs):
        if spent + cost > allowed and len(groups) < len(places):
            groups.append([])
            spent, allowed = 0.0, limit * ranks
        groups[-1].append(layer)
        spent += cost
    return dict(zip(places, groups, strict=False))
