"""Argument checks: one voice for every error message.

Each check returns the value it was given, so that it can stand where the value is used. A message names the
argument, says what it must be and what came instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def number(name: str, value: Any, *, low: float = 0.0, open_low: bool = False, high: float = math.inf) -> float:
    """A finite real number in ``[low, high]``, or ``(low, high]`` with ``open_low``.

    Raises:
        TypeError: if ``value`` is not a real number.
        ValueError: if it is outside the interval, NaN or infinite.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, but a {type(value).__name__} came: {value!r}")
    inside = low < value <= high if open_low else low <= value <= high
    if not (math.isfinite(value) and inside):
        bound = f"greater than {low:g}" if open_low else f"at least {low:g}"
        if math.isfinite(high):
            bound += f" and at most {high:g}"
        raise ValueError(f"{name} must be a finite number {bound}, but {value!r} came")
    return value if isinstance(value, int) else float(value)


def integer(name: str, value: Any, *, low: int = 1) -> int:
    """A whole number of at least ``low``.

    Raises:
        TypeError: if ``value`` is not an int (a bool is none).
        ValueError: if it is below ``low``.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, but a {type(value).__name__} came: {value!r}")
    if value < low:
        raise ValueError(f"{name} must be at least {low}, but {value} came")
    return int(value)


def choice(name: str, value: Any, options: Iterable[str]) -> str:
    """One of a few words.

    Raises:
        ValueError: if ``value`` is none of ``options``.
    """
    options = tuple(options)
    if value not in options:
        listed = ", ".join(repr(o) for o in options)
        raise ValueError(f"{name} must be one of {listed}, but {value!r} came")
    return value


def floating(name: str, value: Any) -> Tensor:
    """A tensor of floating-point numbers.

    Raises:
        TypeError: if ``value`` is not a tensor or holds something else.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, but a {type(value).__name__} came")
    if not value.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, but its dtype is {value.dtype}; use {name}.float()")
    return value


def shape(name: str, value: Tensor, wanted: tuple[int, ...], remedy: str = "") -> Tensor:
    """A tensor of exactly the shape ``wanted``.

    Raises:
        ValueError: if the shape is another one.
    """
    if tuple(value.shape) != tuple(wanted):
        tail = f"; {remedy}" if remedy else ""
        raise ValueError(f"{name} must have the shape {tuple(wanted)}, but {tuple(value.shape)} came{tail}")
    return value


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every number in all ``tensors`` is finite; one host synchronisation however many there are."""
    known = [tensor.detach() for tensor in tensors if tensor.numel()]
    if not known:
        return True
    if math.isfinite(_as_one([tensor.sum() for tensor in known]).sum().item()):
        return True  # a sum that is finite has no other terms; one that is not may only have overflowed
    return math.isfinite(_as_one(torch._foreach_norm(known, ord=math.inf)).max().item())


def _as_one(numbers: Sequence[Tensor]) -> Tensor:
    if any(number.dtype != numbers[0].dtype for number in numbers):
        numbers = [number.double() for number in numbers]
    return torch.stack(tuple(numbers))


class NotFiniteError(ValueError, FloatingPointError):
    """A number that must be finite is NaN or infinite."""
