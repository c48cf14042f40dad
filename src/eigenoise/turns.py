"""Which layers are decomposed at which step: large ones take turns, so that no step waits for more than the largest."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

AT_ONCE = 1 << 24  # n³ of all decompositions that one step does without spreading them


def turns(costs: Sequence[float], every: int, stats_every: Sequence[int]) -> dict[int, list[int]]:
    """Places in a cycle of ``every`` steps where decompositions are due, each with the indices of its layers.

    Statistics are due at the first place too, so it gets no more than a quarter of what others may get; the others are
    where no statistics are due in the first cycle, unless they are at every step. Layers keep their order.

    Args:
        costs: of each layer's decompositions, n³.
        every: steps in a cycle.
        stats_every: statistics are due at multiples of these.
    """
    later = (place for place in range(1, every) if min(stats_every) == 1 or all(place % k for k in stats_every))
    places = [0, *itertools.islice(later, len(costs))]
    limit = max(AT_ONCE, *costs, sum(costs) / (len(places) - 0.75))
    groups: list[list[int]] = [[]]
    spent, allowed = 0.0, max(AT_ONCE, limit / 4)
    for layer, cost in enumerate(costs):
        if spent + cost > allowed and len(groups) < len(places):
            groups.append([])
            spent, allowed = 0.0, limit
        groups[-1].append(layer)
        spent += cost
    return dict(zip(places, groups, strict=False))
