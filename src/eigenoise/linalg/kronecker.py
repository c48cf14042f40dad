"""Linear algebra of Kronecker products: the eigendecomposition that cannot fail, rotations and the π split.

Matrices are ``(..., p, n)`` with p outputs and n inputs, flattened row by row, so that ``S ⊗ A`` acts on
``V.flatten()`` as ``S V Aᵀ``: the transpose of the paper's column-major ``vec``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def eigh_psd(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues (clamped at 0) and eigenvectors of a symmetric positive semi-definite matrix (eq. 5).

    A decomposition that raises or returns a number that is not finite is tried again in float64 with a growing
    multiple of the identity added, which leaves the eigenvectors as they are.

    Args:
        matrix: ``(..., n, n)``, symmetric up to rounding.

    Returns:
        Eigenvalues ``(..., n)`` in ascending order and eigenvectors ``(..., n, n)`` as columns, or None if every
        attempt failed; the caller then keeps the basis it has.
    """
    found = _try_eigh(matrix)
    if found is not None:
        return found
    if not bool(torch.isfinite(matrix).all()):
        return None
    wide = matrix.double()
    eye = torch.eye(matrix.shape[-1], dtype=wide.dtype, device=wide.device)
    size = wide.diagonal(dim1=-2, dim2=-1).mean(-1).abs().clamp_min(torch.finfo(wide.dtype).tiny)[..., None, None]
    for jitter in (0.0, 1e-10, 1e-6):
        found = _try_eigh(wide + jitter * size * eye)
        if found is not None:
            values = (found[0] - jitter * size[..., 0]).clamp_min(0.0)
            return values.to(matrix.dtype), found[1].to(matrix.dtype)
    return None


def _try_eigh(matrix: Tensor) -> tuple[Tensor, Tensor] | None:
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except torch.linalg.LinAlgError:
        return None
    # One sum sees every NaN and infinity: the eigenvectors are bounded by 1, so it cannot overflow by itself.
    if not bool(torch.isfinite(values.sum() + vectors.sum())):
        return None
    return values.clamp_min(0.0), vectors


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right``, without torch's search for what might be broadcast."""
    if left.ndim == right.ndim == 3 and left.shape[0] == right.shape[0]:
        return torch.bmm(left, right)
    return left @ right


def rotate(q_out: Tensor, matrix: Tensor, q_in: Tensor) -> Tensor:
    """Into the eigenbasis: ``q_outᵀ · matrix · q_in`` ``(..., p, n)``."""
    return matmul(q_out.mT, matmul(matrix, q_in))


def unrotate(q_out: Tensor, matrix: Tensor, q_in: Tensor) -> Tensor:
    """Back from the eigenbasis: ``q_out · matrix · q_inᵀ`` ``(..., p, n)``."""
    return matmul(q_out, matmul(matrix, q_in.mT))


def full_precision(device: torch.device) -> AbstractContextManager:
    """Within the block matrix products keep their dtype, whatever autocast the user has on."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def outer(column: Tensor, row: Tensor) -> Tensor:
    """``column ⊗ row`` as a matrix: ``(..., p)`` and ``(..., n)`` give ``(..., p, n)``."""
    return column[..., :, None] * row[..., None, :]


def kron(left: Tensor, right: Tensor) -> Tensor:
    """Kronecker product with leading dimensions: ``(..., p, p)`` and ``(..., n, n)`` give ``(..., pn, pn)``."""
    product = left[..., :, None, :, None] * right[..., None, :, None, :]
    p, n = left.shape[-1], right.shape[-1]
    return product.reshape(*product.shape[:-4], p * n, p * n)


def factored_damping(values_out: Tensor, values_in: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """(Λ_S + √γ/π) ``(..., p)`` and (Λ_A + π√γ) ``(..., n)``: damping split between the factors (eq. 11, line 2)."""
    pi = pi_split(values_out, values_in).unsqueeze(-1)
    return values_out + damping**0.5 / pi, values_in + damping**0.5 * pi


def pi_split(values_out: Tensor, values_in: Tensor) -> Tensor:
    """The constant π of factored damping (eq. 11): √(mean eigenvalue of A / mean eigenvalue of S), ``(...)``."""
    tiny = torch.finfo(values_in.dtype).tiny
    return (values_in.mean(-1).clamp_min(tiny) / values_out.mean(-1).clamp_min(tiny)).sqrt()
