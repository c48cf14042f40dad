"""Settings of the classification study: how each method trains in each of the four settings of the paper's table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from eigenoise.optim.methods import BAYESIAN, POINT
from eigenoise.studies.classification.point import PointSGD

METHODS: Mapping[str, Callable[..., Any]] = MappingProxyType({"sgd": PointSGD, **POINT, **BAYESIAN})


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

# The paper: T_stats = T_scale = 10, T_eig = 200, β = ω = 0.01. The moving averages start fast, as runs are short, and R
# starts as K-FAC's eigenvalues.
_NATURAL = {
    "momentum": 0.9,
    "damping": 1e-3,
    "ema_factors": 0.01,
    "stats_every": 10,
    "stats_fraction": 1 / 8,
    "layer_clip": 1e-3,
    "guard": False,
}
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "sgd": {"momentum": 0.9},
    "kfac": {**_NATURAL, "refresh_every": 200},
    "ekfac": {**_NATURAL, "ema_scale": 0.01, "refresh_every": 200, "start": "kfac"},
    "bbb": {},
    "noisy-adam": {**_NATURAL, "ema_scale": 0.01},
    "noisy-kfac": {**_NATURAL, "refresh_every": 200},
    "noisy-ekfac": {**_NATURAL, "ema_scale": 0.01, "refresh_every": 200, "start": "kfac"},
}

# Step size, λ and η for plain, D, B and D+B, chosen on held-out images with so many training images.
TUNED_ON = 5_000
_CHOSEN: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    "sgd": ((0.01, 0.3, 0.1), (0.02, 0.1, 0.1), (0.02, 0.3, 1.0), (0.02, 0.1, 0.1)),
    "kfac": ((0.03, 0.1, 0.001), (0.03, 0.1, 0.01), (1.0, 0.3, 1.0), (1.0, 0.1, 1.0)),
    "noisy-kfac": ((0.03, 0.03, 0.001), (0.03, 0.01, 0.001), (1.0, 0.1, 1.0), (1.0, 0.003, 1.0)),
    "noisy-ekfac": ((0.03, 0.03, 0.001), (0.03, 0.01, 0.01), (1.0, 0.3, 1.0), (0.3, 0.03, 1.0)),
}
_LIKE = {"ekfac": "kfac", "noisy-adam": "noisy-ekfac", "bbb": "noisy-ekfac"}  # not tuned themselves


def recipe(method: str, setting: Setting, train_size: int = TUNED_ON) -> dict[str, Any]:
    """Arguments of the method's optimiser.

    λ grows with the number of images, up to 1, so that λ/N, the scale of the covariance, is as it was chosen.
    """
    lr, kl_weight, prior_var = _CHOSEN[_LIKE.get(method, method)][SETTINGS.index(setting)]
    return {
        **_OPTIONS[method],
        "lr": 1e-3 if method == "bbb" else lr,
        "kl_weight": min(1.0, kl_weight * train_size / TUNED_ON),
        "prior_var": prior_var,
    }
