"""What the paper reports, to stand beside our own numbers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Table 1: test RMSE, its standard error, test log-likelihood, its standard error (None where the paper has none).
PAPER_TABLE: Mapping[str, Mapping[str, tuple[float, float | None, float, float | None]]] = MappingProxyType(
    {
        "boston": {
            "bbb": (3.171, 0.149, -2.602, 0.031),
            "noisy-adam": (3.031, 0.155, -2.558, 0.032),
            "noisy-kfac": (2.742, 0.015, -2.409, 0.047),
            "noisy-ekfac": (2.527, 0.158, -2.378, 0.044),
        },
        "concrete": {
            "bbb": (5.678, 0.087, -3.149, 0.018),
            "noisy-adam": (5.613, 0.113, -3.145, 0.023),
            "noisy-kfac": (5.019, 0.127, -3.039, 0.025),
            "noisy-ekfac": (4.880, 0.120, -3.002, 0.025),
        },
        "energy": {
            "bbb": (0.565, 0.018, -1.500, 0.006),
            "noisy-adam": (0.839, 0.046, -1.629, 0.020),
            "noisy-kfac": (0.485, 0.019, -1.421, 0.004),
            "noisy-ekfac": (0.497, 0.023, -1.448, 0.004),
        },
        "kin8nm": {
            "bbb": (0.080, 0.001, 1.111, 0.007),
            "noisy-adam": (0.079, 0.001, 1.112, 0.008),
            "noisy-kfac": (0.076, 0.001, 1.148, 0.007),
            "noisy-ekfac": (0.076, 0.000, 1.149, 0.012),
        },
        "naval": {
            "bbb": (0.000, 0.000, 6.143, 0.032),
            "noisy-adam": (0.001, 0.000, 6.231, 0.041),
            "noisy-kfac": (0.000, 0.000, 7.079, 0.034),
            "noisy-ekfac": (0.000, 0.000, 7.287, 0.002),
        },
        "power": {
            "bbb": (4.023, 0.036, -2.807, 0.010),
            "noisy-adam": (4.002, 0.039, -2.803, 0.010),
            "noisy-kfac": (3.886, 0.041, -2.776, 0.012),
            "noisy-ekfac": (3.895, 0.053, -2.774, 0.012),
        },
        "protein": {
            "bbb": (4.321, 0.017, -2.882, 0.004),
            "noisy-adam": (4.380, 0.016, -2.896, 0.004),
            "noisy-kfac": (4.097, 0.009, -2.836, 0.002),
            "noisy-ekfac": (4.042, 0.027, -2.819, 0.007),
        },
        "wine": {
            "bbb": (0.643, 0.012, -0.977, 0.017),
            "noisy-adam": (0.644, 0.011, -0.976, 0.016),
            "noisy-kfac": (0.637, 0.011, -0.969, 0.014),
            "noisy-ekfac": (0.635, 0.013, -0.964, 0.002),
        },
        "yacht": {
            "bbb": (1.174, 0.086, -2.408, 0.007),
            "noisy-adam": (1.289, 0.069, -2.412, 0.006),
            "noisy-kfac": (0.979, 0.077, -2.316, 0.006),
            "noisy-ekfac": (0.974, 0.116, -2.224, 0.007),
        },
        "year": {
            "bbb": (9.076, None, -3.614, None),
            "noisy-adam": (9.071, None, -3.620, None),
            "noisy-kfac": (8.885, None, -3.595, None),
            "noisy-ekfac": (8.642, None, -3.573, None),
        },
    }
)

# Table 2: test accuracy on CIFAR-10 in per cent, by setting; D is data augmentation, B batch normalisation.
PAPER_ACCURACY: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "sgd": {"plain": 81.79, "D": 88.35, "B": 85.75, "D+B": 91.39},
        "kfac": {"plain": 82.39, "D": 88.89, "B": 86.86, "D+B": 92.13},
        "noisy-kfac": {"plain": 85.52, "D": 89.35, "B": 88.22, "D+B": 92.01},
        "noisy-ekfac": {"plain": 87.07, "D": 89.86, "B": 88.45, "D+B": 92.22},
    }
)
