"""Precision is a decision, made once: which products may be bfloat16.

Rotations of gradients, steps and noise bear bfloat16. Statistics, among them the squares of rotated gradients, moving
averages and eigendecompositions keep the dtype of the weights.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from eigenoise import checks
from eigenoise.linalg.kronecker import matmul

PRECISIONS = ("auto", "float32", "bfloat16")
MIN_SIZE = 256  # a smaller matrix is multiplied as fast as it is cast


def product_dtype(precision: str, size: int, dtype: torch.dtype, device: torch.device | str | None) -> torch.dtype:
    """The dtype in which products with a ``(size, size)`` basis are done.

    Args:
        precision: ``"float32"`` keeps the weights' dtype, ``"bfloat16"`` lowers it, ``"auto"`` lowers float32 where
            the hardware multiplies bfloat16 faster and the basis is large enough to gain by it.
        size: rows of the basis.
        dtype: of the weights.
        device: of the weights.
    """
    checks.choice("precision", precision, PRECISIONS)
    fast = dtype == torch.float32 and size >= MIN_SIZE and has_fast_bfloat16(torch.device(device or "cpu").type)
    return torch.bfloat16 if precision == "bfloat16" or (precision == "auto" and fast) else dtype


@functools.cache
def has_fast_bfloat16(device_type: str) -> bool:
    """Whether the hardware multiplies bfloat16 natively: AVX512-BF16 or AMX on a CPU, compute capability 8 on CUDA."""
    if device_type == "cuda":
        return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 8
    flags = Path("/proc/cpuinfo")
    if device_type != "cpu" or not flags.is_file():
        return False
    words = set(flags.read_text(errors="replace").split())
    return bool(words & {"avx512_bf16", "amx_bf16"})


def mixed_matmul(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left @ right``, one of which is a basis in the precision of products, given back in ``dtype``."""
    if left.dtype is right.dtype:
        return matmul(left, right)
    low = torch.bfloat16
    return matmul(left.to(low), right.to(low)).to(dtype)
