"""Argument checks: what passes, what does not, and whether the message names the argument and what it got."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor

from eigenoise import checks

NAN, INF = math.nan, math.inf


# number


@pytest.mark.parametrize("value", [0, 0.0, 1, 0.5, 1e-300, 1e300, np.float64(0.25)])
def test_a_number_comes_back_as_it_is(value: float) -> None:
    assert checks.number("lr", value) == value


@pytest.mark.parametrize("value", [True, False, "1", None, 1j, [1.0], np.ones(1), torch.tensor(1.0)])
def test_what_is_no_number_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=f"lr must be a number, got {type(value).__name__}: "):
        checks.number("lr", value)


@pytest.mark.parametrize("value", [NAN, INF, -INF, -1e-9, -1])
@pytest.mark.parametrize("open_low", [False, True])
def test_a_number_must_be_finite_and_not_below(value: float, open_low: bool) -> None:
    bound = "greater than 0" if open_low else "at least 0"
    with pytest.raises(ValueError, match=f"lr must be a finite number {bound}, got {re.escape(repr(value))}$"):
        checks.number("lr", value, open_low=open_low)


def test_the_low_end_is_open_only_on_demand() -> None:
    assert checks.number("x", 2.0, low=2.0) == 2.0
    assert checks.number("x", 2.0 + 1e-9, low=2.0, open_low=True) > 2.0
    with pytest.raises(ValueError, match=r"x must be a finite number greater than 2, got 2\.0$"):
        checks.number("x", 2.0, low=2.0, open_low=True)


def test_the_high_end_is_closed() -> None:
    assert checks.number("x", 1, high=1.0) == 1
    with pytest.raises(ValueError, match=r"x must be a finite number at least 0 and at most 1, got 1\.5$"):
        checks.number("x", 1.5, high=1.0)
    with pytest.raises(ValueError, match=r"greater than 0 and at most 1, got 2$"):
        checks.number("x", 2, open_low=True, high=1.0)


def test_negative_bounds() -> None:
    assert checks.number("x", -3, low=-3.0) == -3
    with pytest.raises(ValueError, match=r"at least -3, got -4$"):
        checks.number("x", -4, low=-3.0)


def test_infinity_is_no_number_even_without_a_bound() -> None:
    with pytest.raises(ValueError, match=r"got inf$"):
        checks.number("x", INF, low=-INF)


# fraction


@pytest.mark.parametrize("value", [1e-300, 0.5, np.float64(0.25), 1 - 1e-12])
def test_a_fraction_is_returned(value: float) -> None:
    assert checks.fraction("q", value) == value


@pytest.mark.parametrize("value", [0, 0.0, 1, 1.0, 1.5, -0.5, NAN, INF])
def test_a_fraction_is_strictly_between_0_and_1(value: float) -> None:
    with pytest.raises(ValueError, match=f"q must be .*, got {re.escape(repr(value))}$"):
        checks.fraction("q", value)


def test_a_fraction_is_a_number() -> None:
    with pytest.raises(TypeError, match=r"q must be a number, got str: '0\.5'"):
        checks.fraction("q", "0.5")


# integer


@pytest.mark.parametrize(("value", "low"), [(1, 1), (10**20, 1), (0, 0), (-2, -2)])
def test_a_whole_number_comes_back_as_it_is(value: int, low: int) -> None:
    assert checks.integer("samples", value, low=low) == value


@pytest.mark.parametrize("value", [True, False, 1.0, NAN, INF, "3", None, torch.tensor(1)])
def test_what_is_no_int_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=f"samples must be an int, got {type(value).__name__}: "):
        checks.integer("samples", value)


@pytest.mark.parametrize(("value", "low"), [(0, 1), (-5, 1), (-1, 0), (2, 3)])
def test_an_int_must_not_be_below(value: int, low: int) -> None:
    with pytest.raises(ValueError, match=f"samples must be at least {low}, got {value}$"):
        checks.integer("samples", value, low=low)


# choice


def test_a_word_of_the_list_comes_back() -> None:
    assert checks.choice("fisher", "exact", ("sampled", "exact")) == "exact"
    assert checks.choice("fisher", "exact", (word for word in ("sampled", "exact"))) == "exact"


@pytest.mark.parametrize("value", ["Exact", "", "exac", None, 1, True, ["exact"]])
def test_another_word_is_refused_with_the_list(value: object) -> None:
    message = f"fisher must be one of 'sampled', 'exact', got {value!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
        checks.choice("fisher", value, (word for word in ("sampled", "exact")))


# floating


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_floating_tensor_comes_back_as_it_is(dtype: torch.dtype) -> None:
    value = torch.ones(2, dtype=dtype)
    assert checks.floating("y", value) is value


@pytest.mark.parametrize("value", [1.0, [1.0], None, np.ones(2)])
def test_what_is_no_tensor_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError, match=f"y must be a tensor, got {type(value).__name__}$"):
        checks.floating("y", value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_a_tensor_of_something_else_is_a_type_error_with_the_remedy(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=rf"y must be a floating-point tensor, got {dtype}; use y\.float"):
        checks.floating("y", torch.ones(2).to(dtype))


# shape


@pytest.mark.parametrize("wanted", [(), (0,), (2, 3), torch.Size((1, 1))])
def test_the_wanted_shape_passes(wanted: tuple[int, ...]) -> None:
    value = torch.zeros(wanted)
    assert checks.shape("y", value, wanted) is value


@pytest.mark.parametrize(("got", "wanted"), [((3,), (3, 1)), ((3, 1), (3,)), ((), (1,)), ((2, 3), (3, 2))])
def test_another_shape_is_refused(got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    message = re.escape(f"y must have the shape {wanted}, got {got}") + "$"
    with pytest.raises(ValueError, match=message):
        checks.shape("y", torch.zeros(got), wanted)


def test_the_remedy_ends_the_message() -> None:
    with pytest.raises(ValueError, match=r", got \(3,\); use y\.unsqueeze\(-1\)$"):
        checks.shape("y", torch.zeros(3), (3, 1), "use y.unsqueeze(-1)")


# all_finite

MIXED = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.zeros(0)],
        [torch.zeros(0, 3), torch.zeros(0, dtype=torch.float64)],
        [torch.tensor(1.0)],
        [torch.ones(2, 3), torch.zeros(0), torch.tensor(-1.0)],
        [torch.ones(2, dtype=dtype) for dtype in MIXED],
        [torch.ones(2, dtype=dtype) for dtype in reversed(MIXED)],
        [torch.ones(2, requires_grad=True) * 2],
    ],
)
def test_finite_numbers_are_finite(tensors: list[Tensor]) -> None:
    assert checks.all_finite(tensors) is True
    assert checks.all_finite(iter(tensors)) is True


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", range(4))
def test_one_bad_number_is_found_wherever_it_is(bad: float, where: int) -> None:
    tensors = [torch.zeros(0), *(torch.ones(2, 3, dtype=dtype) for dtype in MIXED)]
    tensors[1 + where][1, 2] = bad
    assert checks.all_finite(tensors) is False


def test_infinities_of_both_signs_do_not_cancel() -> None:
    assert not checks.all_finite([torch.tensor([INF, -INF])])
    assert not checks.all_finite([torch.tensor(INF), torch.tensor(-INF)])


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.full((4,), 3e38, dtype=torch.float32)],
        [torch.tensor(3e38, dtype=torch.float32)] * 2,
        [torch.ones(2, dtype=torch.float32), torch.full((2,), 1e300, dtype=torch.float64)],
    ],
    ids=["sum in one tensor", "sum over tensors", "wider than the first"],
)
def test_large_numbers_are_still_finite(tensors: list[Tensor]) -> None:
    """Each number is finite; only an intermediate sum or conversion could overflow."""
    assert checks.all_finite(tensors)


def test_not_finite_is_both_kinds_of_error() -> None:
    for kind in (ValueError, FloatingPointError):
        with pytest.raises(kind, match="the loss"):
            raise checks.NotFiniteError("the loss")
