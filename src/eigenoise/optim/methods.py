"""The methods by the names that the command line, the studies and the estimators use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from eigenoise.optim.bayes_by_backprop import BayesByBackprop
from eigenoise.optim.noisy_adam import NoisyAdam
from eigenoise.optim.noisy_ekfac import EKFAC, NoisyEKFAC
from eigenoise.optim.noisy_kfac import KFAC, NoisyKFAC

BAYESIAN: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"bbb": BayesByBackprop, "noisy-adam": NoisyAdam, "noisy-kfac": NoisyKFAC, "noisy-ekfac": NoisyEKFAC}
)
POINT: Mapping[str, Callable[..., Any]] = MappingProxyType({"kfac": KFAC, "ekfac": EKFAC})
