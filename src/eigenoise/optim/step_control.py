"""How far a step may go: the guard raises a Fisher that does not allow for a gradient, the clip bounds the change.

A direction that was flat for long, such as the weights of a dead ReLU, has the prior's noise and steps of g/γ_in. When
it suddenly matters, a single batch would throw the mean away, and the next samples too, until the moving averages have
caught up. Had R been updated from this batch's own gradients, it would be at least ω̃·g², as the mean of their squares
is no less than the square of their mean. So the guard makes it that, at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eigenoise.fisher.base import MIN_EIGENVALUE, Damping
from eigenoise.optim.fisher_slot import FisherSlot

MAX_RATE = 0.03  # of the guard: gradients that are not many times what the Fisher expects leave it unchanged
MAX_RAISE = 1e12  # factor by which one step may raise a Fisher, so that K-FAC's, a product, stays finite


def to_host(numbers: Sequence[Tensor]) -> list[tuple[float, ...]]:
    """``numbers``, each ``()`` or ``(s,)``, of each model in turn: one host synchronisation."""
    if any(number.ndim for number in numbers):
        return list(zip(*torch.stack(torch.broadcast_tensors(*numbers)).tolist(), strict=True))
    return [tuple(torch.stack(list(numbers)).tolist())]


def raise_fishers(slots: Sequence[FisherSlot], dampings: Sequence[Damping], rate: float, loss: Tensor) -> None:
    """R ← max(R, ω̃·g²) in layers where R + γ is smaller than that; A and S of K-FAC likewise.

    Args:
        slots: with the coordinates g of this step's gradients.
        dampings: γ of each.
        rate: ω̃; more than 0.03 counts as that.
        loss: of this step; if it or a gradient is not finite nothing is done, as there will be no step.
    """
    rate = min(rate, MAX_RATE)
    pairs = list(zip(slots, dampings, strict=True))
    extremes = [extreme for slot, damping in pairs for extreme in torch.aminmax(_ratio(slot, damping))]
    *numbers, on_host = torch.stack([*extremes, loss]).tolist()
    strains = [rate * max(low * low, high * high) for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
    if not math.isfinite(sum(strains) + on_host):
        return
    for (slot, damping), strain in zip(pairs, strains, strict=True):
        if strain > 1:
            slot.fisher.raise_to(_surprising(slot, damping, rate), rate, damping)


def _ratio(slot: FisherSlot, damping: Damping) -> Tensor:
    """g/√(R + γ)."""
    return slot.coordinates * slot.fisher.inverse_root(damping)


def _surprising(slot: FisherSlot, damping: Damping, rate: float) -> Tensor:
    """The gradients of those models of a stack that did not expect them, and zeros for the others."""
    axes = tuple(range(-slot.fisher.event_dims, 0))
    strain = _ratio(slot, damping).square().amax(axes, keepdim=True) * rate
    return slot.coordinates * torch.where(strain > 1, (MAX_RAISE / strain).clamp_max(1).sqrt(), 0)


def clip_rates(
    rates: Sequence[float], sizes: Sequence[float], layer_clip: float | None, kl_clip: float | None
) -> list[float]:
    """Rates α that keep each layer's change α²·gᵀF⁻¹g below ``layer_clip`` and the sum of all below ``kl_clip``.

    They are few, and plain numbers cost the least.

    Args:
        rates: of one model's layers.
        sizes: gᵀF⁻¹g of each.
        layer_clip: or None for no bound.
        kl_clip: or None for no bound.
    """
    if layer_clip is not None:
        rates = [rate * _scale(layer_clip, rate**2 * size) for rate, size in zip(rates, sizes, strict=True)]
    change = sum(rate**2 * size for rate, size in zip(rates, sizes, strict=True))
    scale = 1.0 if kl_clip is None else _scale(kl_clip, change)
    return [rate * scale for rate in rates]


def _scale(bound: float, change: float) -> float:
    """Factor on rates that keeps ``change``, a square of them, below ``bound``."""
    return min(math.sqrt(bound / max(change, MIN_EIGENVALUE)), 1.0)
