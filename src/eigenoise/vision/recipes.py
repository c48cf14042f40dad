"""Settings of the classification study: how each method trains in each of the four settings of the paper's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from eigenoise.bbb import BayesByBackprop
from eigenoise.optim import EKFAC, KFAC, NoisyAdam, NoisyEKFAC, NoisyKFAC
from eigenoise.vision.point import PointSGD

METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "sgd": PointSGD,
        "kfac": KFAC,
        "ekfac": EKFAC,
        "bbb": BayesByBackprop,
        "noisy-adam": NoisyAdam,
        "noisy-kfac": NoisyKFAC,
        "noisy-ekfac": NoisyEKFAC,
    }
)


@dataclass(frozen=True)
class Setting:
    """A column of the table."""

    augmented: bool
    batch_norm: bool

    @property
    def name(self) -> str:
        """``"plain"``, ``"D"``, ``"B"`` or ``"D+B"``."""
        return "+".join(["D"] * self.augmented + ["B"] * self.batch_norm) or "plain"


SETTINGS = tuple(Setting(augmented, batch_norm) for batch_norm in (False, True) for augmented in (False, True))

# The paper: T_stats = T_scale = 10, T_eig = 200, β = ω = 0.01, η = 0.1 without and 1 with batch norm, a smaller λ with
# augmentation. It does not say step sizes, damping or clips. The moving averages start fast, as runs are short.
_NATURAL = {
    "lr": 0.03,
    "momentum": 0.9,
    "damping": 1e-3,
    "ema_factors": 0.01,
    "stats_every": 10,
    "stats_fraction": 1 / 8,
    "layer_clip": 1e-3,
}
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"lr": 0.05, "momentum": 0.9},
    "kfac": {**_NATURAL, "inv_every": 200},
    "ekfac": {**_NATURAL, "ema_scale": 0.01, "eig_every": 200},
    "bbb": {"lr": 1e-3},
    "noisy-adam": {**_NATURAL, "ema_scale": 0.01},
    "noisy-kfac": {**_NATURAL, "inv_every": 200},
    "noisy-ekfac": {**_NATURAL, "ema_scale": 0.01, "eig_every": 200},
}


def recipe(method: str, setting: Setting) -> dict[str, Any]:
    """Arguments of the method's optimiser."""
    return {
        **_OPTIONS[method],
        "kl_weight": 0.1 if setting.augmented else 0.3,
        "prior_var": 1.0 if setting.batch_norm else 0.1,
    }
