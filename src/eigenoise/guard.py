"""Gradients that are far larger than a layer's Fisher allows for: it is raised before the step is made.

A direction that was flat for long, such as the weights of a dead ReLU, has the prior's noise and steps of g/γ_in. When
it suddenly matters, a single batch would throw the mean away, and the next samples too, until the moving averages have
caught up. Had R been updated from this batch's own gradients, it would be at least ω̃·g², as the mean of their squares
is no less than the square of their mean. So that is what it is made, at once. K-FAC's A and S take the gradient in as
well as they can.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eigenoise.clip import on_host
from eigenoise.statistics import FisherSlot

LARGEST = 0.03  # rate: gradients that are not many times what is expected are nobody's business


def guard(slots: Sequence[FisherSlot], loss: Tensor, rate: float, damping: float) -> None:
    """R ← max(R, ω̃·g²) in layers where R + γ_in is smaller than that; A and S of K-FAC likewise.

    Args:
        slots: with their gradients g of this step, in the Fishers' bases of now.
        loss: of this step; if it or a gradient is no number, nothing is done, as there will be no step.
        rate: ω̃; more than 0.03 counts as that.
        damping: γ_in, or γ if there is no noise that γ_ex would not bound.
    """
    rate = min(rate, LARGEST)
    gradients = [slot.coordinates() for slot in slots]
    roots = [slot.fisher.inverse_root(slot.intrinsic(damping)) for slot in slots]
    ends = [end for ratio in torch._foreach_mul(gradients, roots) for end in torch.aminmax(ratio)]  # of g/√(R + γ_in)
    found = on_host([*ends, loss])
    if not np.isfinite(found).all():
        return
    strains = np.square(found[:-1]).reshape(len(slots), -1).max(1)
    for slot, gradient, strain in zip(slots, gradients, strains, strict=True):
        if rate * strain > 1:
            slot.fisher.expect(gradient, rate, slot.intrinsic(damping))
