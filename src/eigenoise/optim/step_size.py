"""How large a step is and how it is damped: both follow from how many examples it remembers.

Steps of rate α on B examples are a moving average over about m = B/α of them. Where m examples say less than the prior
N(0, ηI) does, such steps should hardly move: the posterior of m examples has the precision m·F + I/η, so the step is
α·(F + γI)⁻¹g with γ = 1/(mη) = α/(Bη) on top of γ_in. Around a minimum it leaves the mean with an excess loss of about
d_eff/(4m), with d_eff = Σ R/(R + γ) directions: what any estimate from m examples has. With γ_in alone, which is that
of N/λ examples, d_eff counts directions that only all of the data tell, and the loss of long runs climbs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eigenoise import checks

AUTO = "auto"


def check_step_size(hyper: Mapping[str, Any]) -> None:
    """Require a number or ``"auto"`` as ``damping``, and a share or None as ``memory``.

    Raises:
        TypeError, ValueError: if they are something else.
    """
    damping, memory = hyper["damping"], hyper["memory"]
    if isinstance(damping, str):
        if damping != AUTO:
            raise ValueError(f"damping must be a number or {AUTO!r}, got {damping!r}")
    else:
        checks.number("damping", damping)
    if memory is not None:
        checks.number("memory", memory, open_low=True, high=1.0)


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


def extrinsic_damping(group: Mapping[str, Any], rate: float, terms: float, prior_precision: Any) -> Any:
    """γ_ex: α/(Bη), or the number that ``damping`` is.

    Args:
        group: hyperparameters.
        rate: α.
        terms: B.
        prior_precision: 1/η of a layer.
    """
    return rate / terms * prior_precision if group["damping"] == AUTO else group["damping"]
