"""Second moments of per-example gradients, the raw material of every Fisher structure (eqs 2, 6, 12).

An example's gradient is the sum over its t shared positions (a convolution's places, a sequence's tokens) of the outer
products g·aᵀ; it is summed before it is squared.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from eigenoise.linalg.moving_average import Product

MAX_NUMBERS_PER_CHUNK = 1 << 21  # in the largest temporary, which then stays in a processor's cache
MAX_POSITIONS_FOR_PAIRS = 4  # pairs of so few positions cost less than forming the gradients of examples


class Rotation(Protocol):
    """Rotates rows ``(..., r, k)`` into a basis."""

    rotation_cost: int  # multiplications for one row

    def rotate(self, x: Tensor, *, exact: bool = False) -> Tensor:
        """x·Q."""

    def rotate_columns(self, x: Tensor, overwrite: bool = False, *, exact: bool = False) -> Tensor:
        """Qᵀ·x for ``x (..., [b,] k, r)``."""


def gram(x: Tensor) -> Product:
    """Σ x·xᵀ over examples and positions: ``(..., b, t, n)`` gives ``(..., n, n)``."""
    rows = x.flatten(-3, -2)
    return Product(rows, rows)


def squared_gradients(
    a: Tensor, g: Tensor, out: Rotation | None = None, inputs: Rotation | None = None
) -> Tensor | Product:
    """Σ over examples of (Q_Sᵀ·G·Q_A)² elementwise, with G = Σₜ g·aᵀ one example's gradient (eq. 6).

    Activations and gradients are rotated first or G is formed first, whichever costs less. With few positions no G is
    formed at all, as (Σₜ gaᵀ)² is a sum over pairs of positions; with many, examples are taken in chunks so that memory
    stays bounded.

    Args:
        a: ``(..., b, t, n)``.
        g: ``(..., v, b, t, p)``; the v vectors count as further examples.
        out: the basis Q_S, or None for the identity.
        inputs: the basis Q_A, or None for the identity; given exactly if ``out`` is.

    Returns:
        ``(..., p, n)``.
    """
    b, t, n = a.shape[-3:]
    v, p = g.shape[-4], g.shape[-1]
    if out is None or inputs is None:
        rotate_first, out, inputs = True, None, None
    else:
        per_row = inputs.rotation_cost + out.rotation_cost
        per_example = p * inputs.rotation_cost + n * out.rotation_cost
        rotate_first = t == 1 or t * per_row <= per_example
    if rotate_first and out is not None and inputs is not None:
        a = _rotated(a, inputs)
        g = out.rotate(g.flatten(-4, -2), exact=True).unflatten(-2, (v, b, t))
    if rotate_first and t <= MAX_POSITIONS_FOR_PAIRS:
        return _over_pairs(a, g)
    lead = a.shape[:-3].numel()
    size = max(1, MAX_NUMBERS_PER_CHUNK // (lead * v * p * n))
    total = torch.zeros(*a.shape[:-3], p, n, dtype=a.dtype, device=a.device)
    for a_part, g_part in zip(a.split(size, -3), g.split(size, -3), strict=True):
        gradients = (g_part.mT @ a_part.unsqueeze(-4)).flatten(-4, -3)  # (..., v·b, p, n)
        if not rotate_first and out is not None and inputs is not None:
            gradients = out.rotate_columns(_rotated(gradients, inputs), exact=True)
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


def _rotated(x: Tensor, basis: Rotation) -> Tensor:
    """``x (..., b, t, k)`` in the basis, as one product for each leading index."""
    return basis.rotate(x.flatten(-3, -2), exact=True).unflatten(-2, x.shape[-3:-1])
