"""Argument checks.

Each check returns its value, so that it can wrap the value where it is used. Messages name the argument, what it must
be, what it got, and the remedy where there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def number(name: str, value: Any, *, low: float = 0.0, open_low: bool = False, high: float = math.inf) -> float:
    """Check that ``value`` is a finite real number in ``[low, high]``, or ``(low, high]`` with ``open_low``.

    Raises:
        TypeError: if ``value`` is not a real number.
        ValueError: if it is outside the interval, NaN or infinite.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}: {value!r}")
    inside = low < value <= high if open_low else low <= value <= high
    if not (math.isfinite(value) and inside):
        bound = f"greater than {low:g}" if open_low else f"at least {low:g}"
        if math.isfinite(high):
            bound += f" and at most {high:g}"
        raise ValueError(f"{name} must be a finite number {bound}, got {value!r}")
    return value if isinstance(value, int) else float(value)


def fraction(name: str, value: Any) -> float:
    """Check that ``value`` is a number strictly between 0 and 1; raises as ``number`` does."""
    if number(name, value, open_low=True) >= 1:
        raise ValueError(f"{name} must be less than 1, got {value!r}")
    return float(value)


def integer(name: str, value: Any, *, low: int = 1) -> int:
    """Check that ``value`` is an integer of at least ``low``.

    Raises:
        TypeError: if ``value`` is not an int; bools are rejected.
        ValueError: if it is below ``low``.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}: {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    return int(value)


def choice(name: str, value: Any, options: Iterable[str]) -> str:
    """Check that ``value`` is one of ``options``.

    Raises:
        ValueError: if it is not.
    """
    options = tuple(options)
    if value not in options:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")
    return value


def floating(name: str, value: Any) -> Tensor:
    """Check that ``value`` is a floating-point tensor.

    Raises:
        TypeError: if ``value`` is not a tensor or has another dtype.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {value.dtype}; use {name}.float()")
    return value


def shape(name: str, value: Tensor, wanted: tuple[int, ...], remedy: str = "") -> Tensor:
    """Check that ``value`` has exactly the shape ``wanted``.

    Raises:
        ValueError: if it has another shape.
    """
    if tuple(value.shape) != tuple(wanted):
        tail = f"; {remedy}" if remedy else ""
        raise ValueError(f"{name} must have the shape {tuple(wanted)}, got {tuple(value.shape)}{tail}")
    return value


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements of all ``tensors`` are finite, with at most two host synchronisations."""
    nonempty = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not nonempty:
        return True
    if math.isfinite(_stack([tensor.sum() for tensor in nonempty]).sum().item()):
        return True  # a finite sum has finite terms; a sum that is not finite may only have overflowed
    return math.isfinite(_stack(torch._foreach_norm(nonempty, ord=math.inf)).max().item())


def _stack(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalars, in float64 if their dtypes differ."""
    if any(scalar.dtype != scalars[0].dtype for scalar in scalars):
        scalars = [scalar.double() for scalar in scalars]
    return torch.stack(tuple(scalars))


class NotFiniteError(ValueError, FloatingPointError):
    """A number that must be finite is NaN or infinite."""
