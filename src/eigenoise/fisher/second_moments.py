"""Second moments of per-example gradients, the raw material of every Fisher structure (eqs 2, 6, 12).

An example's gradient is the sum over its t shared positions (a convolution's places, a sequence's tokens) of the outer
products g·aᵀ; it is summed before it is squared.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from eigenoise.linalg.kronecker import matmul
from eigenoise.linalg.moving_average import Product

CHUNK = 1 << 21  # numbers in the largest temporary, which then stays in a processor's cache
FEW = 4  # positions whose pairs cost less to multiply than gradients of examples cost to write and read


class Turner(Protocol):
    """Turns rows ``(..., r, n)`` into a basis."""

    turn_cost: int  # multiplications for one row

    def turn(self, x: Tensor) -> Tensor:
        """x·Q."""


def gram(x: Tensor) -> Product:
    """Σ x·xᵀ over examples and positions: ``(..., b, t, n)`` gives ``(..., n, n)``."""
    rows = x.flatten(-3, -2)
    return Product(rows, rows)


def squared_gradients(
    a: Tensor, g: Tensor, q_out: Tensor | None = None, inputs: Turner | None = None
) -> Tensor | Product:
    """Σ over examples of (q_outᵀ·G·Q_A)² elementwise, with G = Σₜ g·aᵀ one example's gradient (eq. 6).

    Activations and gradients are rotated first or gradients formed first, whichever costs less. With few positions no
    gradient is formed at all, as (Σₜ gaᵀ)² is the sum over pairs of positions of the products of their squares' roots;
    with many, examples are taken in chunks so that memory stays bounded.

    Args:
        a: ``(..., b, t, n)``.
        g: ``(..., b, t, p)`` or ``(..., v, b, t, p)``; the v vectors count as further examples.
        q_out: ``(..., p, p)``, or None for the identity.
        inputs: turns rows into the basis Q_A, or None for the identity; never without ``q_out``.

    Returns:
        ``(..., p, n)``.
    """
    if g.ndim == a.ndim:
        g = g.unsqueeze(-4)
    b, t, n = a.shape[-3:]
    v, p = g.shape[-4], g.shape[-1]
    into, out = (0 if inputs is None else inputs.turn_cost), (0 if q_out is None else p * p)
    rotate_first = t == 1 or t * (into + out) <= p * into + n * out
    if inputs is not None and rotate_first:
        a = _turned(a, inputs)
    if q_out is not None and rotate_first:
        g = matmul(g.flatten(-4, -2), q_out).unflatten(-2, (v, b, t))
    if t <= FEW and rotate_first:
        return _over_pairs(a, g)
    lead = a.shape[:-3].numel()
    size = max(1, CHUNK // (lead * v * p * n))
    total = torch.zeros(*a.shape[:-3], p, n, dtype=a.dtype, device=a.device)
    for a_part, g_part in zip(a.split(size, -3), g.split(size, -3), strict=True):
        gradients = (g_part.mT @ a_part.unsqueeze(-4)).flatten(-4, -3)  # (..., v·b, p, n)
        if q_out is not None and not rotate_first:
            gradients = q_out.unsqueeze(-3).mT @ (gradients if inputs is None else _turned(gradients, inputs))
        total += gradients.square_().sum(-3)
    return total


def _over_pairs(a: Tensor, g: Tensor) -> Product:
    """Σ over examples of (Σₜ gₜ·aₜᵀ)² as Σ over pairs t ≤ u, twice if t < u, of (gₜ∘g_u)·(aₜ∘a_u)ᵀ."""
    t = a.shape[-2]
    if t == 1:
        return Product(g.squeeze(-2).square().sum(-3), a.squeeze(-2).square())
    first, second = torch.triu_indices(t, t, device=a.device).unbind()
    left = (g[..., first, :] * g[..., second, :]).sum(-4)  # (..., b, pairs, p)
    right = a[..., first, :] * a[..., second, :]
    right = right * torch.where(first == second, 1.0, 2.0).to(a.dtype).unsqueeze(-1)
    return Product(left.flatten(-3, -2), right.flatten(-3, -2))


def _turned(x: Tensor, inputs: Turner) -> Tensor:
    """``x (..., b, t, n)`` in the basis, as one product for each leading index."""
    return inputs.turn(x.flatten(-3, -2)).unflatten(-2, x.shape[-3:-1])
