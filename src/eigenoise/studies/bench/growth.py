"""How the cost of noisy EK-FAC grows with sizes, beside theory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch

import eigenoise as en
from eigenoise import models
from eigenoise.studies.bench.measure import seconds_of_each_kind, warm_up
from eigenoise.studies.bench.steps import Stepper, default_arguments, training_stepper


@dataclass(frozen=True)
class Axis:
    """One size that is varied.

    Attributes:
        title: what the size is.
        sizes: its values, rising.
        make: returns the stepper of a size.
        theory: for each kind of step the power of the size that its cost grows with, once the size is large.
    """

    title: str
    sizes: Sequence[int]
    make: Callable[[int], Stepper]
    theory: Mapping[str, float]


def _network(width: int = 256, batch: int = 128, depth: int = 2) -> Stepper:
    """``depth`` square Linear layers and one to ten classes."""
    model = models.MLP(width, [width] * depth, 10)
    settings = default_arguments("noisy-ekfac")
    optimizer = en.NoisyEKFAC(model, num_data=50_000, likelihood=en.CategoricalLikelihood(), **settings)
    return training_stepper(optimizer, model, torch.randn(batch, width), torch.randint(10, (batch,)))


def _stack(splits: int = 1, samples: int = 1) -> Stepper:
    """Networks 13-50-1 side by side, batch 10."""
    model, likelihood = models.MLP(13, [50], 1, stack=splits), en.GaussianLikelihood(stack=splits)
    settings = {**default_arguments("noisy-ekfac"), "samples": samples, "parallel": True}
    optimizer = en.NoisyEKFAC(model, num_data=455, likelihood=likelihood, **settings)
    return training_stepper(optimizer, model, torch.randn(splits, 10, 13), torch.randn(splits, 10, 1))


_ALL = {"plain": 1.0, "statistics": 1.0, "basis": 1.0}
AXES: Mapping[str, Axis] = MappingProxyType(
    {
        "width": Axis(
            "width of two square Linear layers, batch 128",
            (64, 128, 256, 512, 1024, 2048, 4096),
            lambda size: _network(width=size),
            {"plain": 2.0, "statistics": 2.0, "basis": 3.0},
        ),
        "batch": Axis(
            "batch, two Linear layers of width 256",
            (1, 4, 16, 64, 256, 1024),
            lambda size: _network(batch=size),
            {"plain": 1.0, "statistics": 1.0, "basis": 0.0},
        ),
        "depth": Axis(
            "Linear layers of width 256, batch 128", (1, 2, 4, 8, 16), lambda size: _network(depth=size), _ALL
        ),
        "splits": Axis("networks 13-50-1 side by side, batch 10", (1, 4, 16, 64, 256), lambda size: _stack(size), _ALL),
        "samples": Axis(
            "weight samples a step of ten networks 13-50-1, batch 10",
            (1, 2, 4, 8, 16, 32, 64),
            lambda size: _stack(10, size),
            {"plain": 1.0, "statistics": 1.0, "basis": 0.0},
        ),
    }
)


def measure(axis: Axis, rounds: int) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields for each size milliseconds of a plain step, and of what statistics and a new basis cost on top of one."""
    for size in axis.sizes:
        torch.manual_seed(0)
        stepper = axis.make(size)
        warm_up(stepper)
        costs = [seconds_of_each_kind(stepper) for _ in range(rounds)]
        yield size, {kind: 1e3 * statistics.median(cost[kind] for cost in costs) for kind in costs[0]}


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Fits a power law through the largest three sizes, by least squares of logarithms."""
    return float(np.polyfit(np.log(sizes[-3:]), np.log(np.maximum(costs[-3:], 1e-9)), 1)[0])
