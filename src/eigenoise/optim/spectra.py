"""The spectrum of each layer's Fisher: R as EK-FAC measures it, and what K-FAC takes for it."""

from __future__ import annotations

import torch
from torch import Tensor

from eigenoise import checks
from eigenoise.fisher import Eigen
from eigenoise.optim.natural_gradient import NaturalGradient


def spectra(optimizer: NaturalGradient, points: int = 33) -> dict[str, dict[str, list[float]]]:
    """For each layer with an eigenbasis, values at evenly spaced places of the sorted spectrum, smallest first.

    Args:
        optimizer: ``NoisyEKFAC`` or ``EKFAC``; of any other there is nothing.
        points: how many values, from the smallest to the largest.

    Returns:
        By layer: ``"R"``, the means of squared gradients in the basis (eq. 6); ``"kfac"``, the products Λ_S⊗Λ_A, sorted
        on their own; and ``"R where kfac"``, R in the order of those products, its mean around each place.
    """
    checks.integer("points", points, low=2)
    found = {}
    for slot in optimizer.slots:
        if isinstance(slot.fisher, Eigen):
            R, kfac = slot.fisher.R.detach().flatten().cpu(), slot.fisher.kfac_eigenvalues().detach().flatten().cpu()
            order = kfac.argsort()
            found[slot.name] = {
                "R": _at(R.sort().values, points),
                "kfac": _at(kfac[order], points),
                "R where kfac": [float(part.mean()) for part in R[order].tensor_split(min(points, len(R)))],
            }
    return found


def _at(values: Tensor, points: int) -> list[float]:
    """``points`` values from the first to the last."""
    places = torch.linspace(0, len(values) - 1, points, dtype=torch.float64).round().long()
    return values[places].tolist()
