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

from eigenoise.optim.clip import on_host
from eigenoise.optim.statistics import FisherSlot

LARGEST = 0.03  # rate: gradients that are not many times what is expected are nobody's business
MOST = 1e12  # factor by which one step may raise a Fisher: K-FAC's, a product, stays finite too


def guard(slots: Sequence[FisherSlot], loss: Tensor, rate: float, damping: float, extra: float) -> None:
    """R ← max(R, ω̃·g²) in layers where R + γ is smaller than that; A and S of K-FAC likewise.

    Args:
        slots: with their gradients g of this step, in the Fishers' bases of now.
        loss: of this step; if it, a gradient or its size is no number, nothing is done, as there will be no step.
        rate: ω̃; more than 0.03 counts as that.
        damping: γ_in.
        extra: γ_ex if there is no noise, which it does not bound; else 0.
    """
    rate = min(rate, LARGEST)
    gradients = [slot.coordinates() for slot in slots]
    dampings = [slot.intrinsic(damping) + extra for slot in slots]
    roots = [slot.fisher.inverse_root(own) for slot, own in zip(slots, dampings, strict=True)]
    ends = [end for ratio in torch._foreach_mul(gradients, roots) for end in torch.aminmax(ratio)]  # of g/√(R + γ)
    found = on_host([*ends, loss])
    with np.errstate(over="ignore"):
        found[:-1] *= found[:-1]
    if not np.isfinite(found).all():
        return
    strains = found[:-1].reshape(len(slots), -1).max(1)
    for slot, gradient, root, own, strain in zip(slots, gradients, roots, dampings, strains, strict=True):
        if rate * strain > 1:
            slot.fisher.expect(_surprising(gradient, root, rate, slot.fisher.event_dims), rate, own)


def _surprising(gradient: Tensor, root: Tensor, rate: float, dims: int) -> Tensor:
    """The gradients of those models of a stack that did not expect them, and zeros for the others.

    Args:
        gradient: ``(..., p, n)``.
        root: 1/√(R + γ), of the same shape.
        rate: ω̃.
        dims: how many of the axes are one model's.
    """
    strain = (gradient * root).square_().amax(tuple(range(-dims, 0)), keepdim=True) * rate
    return gradient * torch.where(strain > 1, (MOST / strain).clamp_max(1).sqrt(), 0)
