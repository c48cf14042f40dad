"""How large a step is: what it remembers, and how far it may move a weight.

Two rates bound a step of the momentum m, in each direction of the Fisher's basis:

- α·m/(R + γ), the natural gradient. Steps of rate α on B examples are a moving average over about B/α of them. For the
  jitter of the mean to vanish they must remember more and more: by default a fixed share of all examples seen so far.
- κ·√η·m/√v, with v the moving average of the squared gradient: Adam's step in the Fisher's basis, as SOAP has it
  (Vyas et al. 2024). However flat the direction, it moves a weight by about κ standard deviations of its prior at most.

The step is m over the sum of both denominators, so that the smaller rate counts: (α/(κ√η))·√v is an extrinsic damping
γ_ex of its own for each direction. Early on the second bound acts almost everywhere. As α falls the first takes over,
in steep directions first, and around a minimum it leaves an excess loss of at most α/(2B(2 − α)) in each direction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eigenoise import checks

MAX_MOVE = 0.05  # κ by default, in standard deviations of the prior
SQUARES_RATE = 0.05  # of the moving average v


def check_step_size(hyper: Mapping[str, Any]) -> None:
    """Require a number as ``damping``, a share or None as ``memory``, and a positive number or None as ``max_move``.

    Raises:
        TypeError, ValueError: if they are something else.
    """
    checks.number("damping", hyper["damping"])
    if hyper["memory"] is not None:
        checks.number("memory", hyper["memory"], open_low=True, high=1.0)
    if hyper["max_move"] is not None:
        checks.number("max_move", hyper["max_move"], open_low=True)


def step_size(group: Mapping[str, Any], terms: float, seen: float) -> float:
    """α: ``lr``, but no more than B/(memory·n), so that a step remembers that share of the n examples seen so far.

    Args:
        group: hyperparameters ``lr`` and ``memory``.
        terms: B, of this step.
        seen: n, this step's included.
    """
    if group["memory"] is None:
        return group["lr"]
    return min(group["lr"], terms / (group["memory"] * seen))


def move_damping(group: Mapping[str, Any], rate: float, updates: int) -> float:
    """α/κ, corrected for the start of v: times √v/√η it is the damping that bounds moves.

    Args:
        group: hyperparameters, with a ``max_move``.
        rate: α.
        updates: steps that v has seen, this one included.
    """
    return rate / group["max_move"] / (1 - (1 - SQUARES_RATE) ** updates) ** 0.5
