"""λ by default: how cold a posterior predicts best, from what the optimiser can see."""

from __future__ import annotations

from typing import Any

from eigenoise import checks
from eigenoise.likelihoods import Likelihood

AUTO = "auto"
COLD = 0.1
COLD_PER_ROOT = 0.3  # of examples for each weight
COLD_WITH_NOISE_LEVEL = 0.3


def resolve_kl_weight(value: Any, likelihood: Likelihood, num_data: int, weights: int) -> float:
    """λ as a number.

    ``"auto"`` is 0.1, or less for a network with more than nine weights for each example: 0.3·√(N/weights). It is 0.3
    where the likelihood learns the level of the noise, which a colder posterior underestimates.

    Args:
        value: a number or ``"auto"``.
        likelihood: of the targets.
        num_data: N.
        weights: how many have a posterior, in one of the models of a stack.
    """
    if not isinstance(value, str):
        return checks.number("kl_weight", value)
    if value != AUTO:
        raise ValueError(f"kl_weight must be a number or {AUTO!r}, got {value!r}")
    if likelihood.learns_noise:
        return COLD_WITH_NOISE_LEVEL
    return min(COLD, COLD_PER_ROOT * (num_data / max(1, weights)) ** 0.5)
