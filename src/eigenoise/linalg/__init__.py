"""Linear algebra of Kronecker products, and the moving averages that statistics are kept in."""

from eigenoise.linalg.kronecker import (
    eigh_psd,
    factored_damping,
    full_precision,
    kron,
    matmul,
    outer,
    pi_split,
    rotate,
    unrotate,
)

__all__ = [
    "eigh_psd",
    "factored_damping",
    "full_precision",
    "kron",
    "matmul",
    "outer",
    "pi_split",
    "rotate",
    "unrotate",
]
