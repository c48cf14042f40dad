"""How far a step may go: the numbers that decide it, brought to the host in one go, and the rates they leave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eigenoise.fisher.base import FLOOR


def on_host(numbers: Sequence[Tensor]) -> np.ndarray:
    """``numbers``, each ``()`` or ``(s,)``, as one array of as many rows: one host synchronisation."""
    if any(number.ndim for number in numbers):
        numbers = torch.broadcast_tensors(*numbers)
    return torch.stack(list(numbers)).cpu().numpy()


def clipped(rates: np.ndarray, sizes: np.ndarray, layer_clip: float | None, kl_clip: float | None) -> np.ndarray:
    """Rates α that keep each layer's change α²·gᵀF⁻¹g below ``layer_clip`` and the sum of all below ``kl_clip``.

    Args:
        rates: ``(slots,)``, or ``(slots, 1)`` for a stack of models.
        sizes: gᵀF⁻¹g, ``(slots,)`` or ``(slots, s)``.
        layer_clip: or None for no bound.
        kl_clip: or None for no bound.

    Returns:
        ``(slots,)`` or ``(slots, s)``.
    """
    changes = np.maximum(rates**2 * sizes, FLOOR)
    scales = np.ones_like(changes) if layer_clip is None else np.minimum(np.sqrt(layer_clip / changes), 1.0)
    if kl_clip is not None:
        scales = scales * np.minimum(np.sqrt(kl_clip / (scales**2 * changes).sum(0)), 1.0)
    return rates * scales
