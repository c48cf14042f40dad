"""Arguments that a method has."""

from __future__ import annotations

import inspect
from typing import Any


def accepted(method: Any, **options: Any) -> dict[str, Any]:
    """Those of ``options`` that are arguments of ``method``."""
    known = inspect.signature(method).parameters
    return {name: value for name, value in options.items() if name in known}


BAYES: dict[str, Any] = {"kl_weight": 1.0, "prior_var": 1.0}  # the posterior of exact cases
PAPER_STEP: dict[str, Any] = {"memory": None, "max_move": None}  # α(F + γ_in·I)⁻¹g with a constant α
