"""How the cost of noisy EK-FAC grows with the size of what it is given, beside how it should."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

import eigenoise as en
from eigenoise import models
from eigenoise.studies.bench.measure import seconds_of_each_kind, warm_up
from eigenoise.studies.bench.steps import CYCLE, STATS_EVERY, Stepper


@dataclass(frozen=True)
class Axis:
    """One size that is varied.

    Attributes:
        title: what it is.
        sizes: its values, rising.
        make: a stepper for one of them.
        theory: for each kind of step the power of the size that its cost grows with, once the size is large.
    """

    title: str
    sizes: Sequence[int]
    make: Callable[[int], Stepper]
    theory: Mapping[str, float]


def _network(width: int = 256, batch: int = 128, depth: int = 2, **options: Any) -> Stepper:
    """``depth`` square Linear layers and one to ten classes."""
    model = models.MLP(width, [width] * depth, 10)
    likelihood = en.CategoricalLikelihood()
    x, y = torch.randn(batch, width), torch.randint(10, (batch,))
    optimizer = en.NoisyEKFAC(
        model, num_data=50_000, likelihood=likelihood, lr=1e-4, stats_every=STATS_EVERY, refresh_every=CYCLE, **options
    )

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(optimizer.blocks_per_step):
            with optimizer.sampled_params():
                likelihood.nll(model(x), y).backward()
        optimizer.step()

    return Stepper(step, optimizer)


def _stack(splits: int = 1, samples: int = 1) -> Stepper:
    """Networks 13-50-1 side by side, batch 10."""
    model, likelihood = models.MLP(13, [50], 1, stack=splits), en.GaussianLikelihood(stack=splits)
    x, y = torch.randn(splits, 10, 13), torch.randn(splits, 10, 1)
    optimizer = en.NoisyEKFAC(
        model,
        num_data=455,
        likelihood=likelihood,
        samples=samples,
        parallel=True,
        stats_every=STATS_EVERY,
        refresh_every=CYCLE,
    )

    def step() -> None:
        optimizer.zero_grad()
        with optimizer.sampled_params():
            likelihood.nll(model(x), y).backward()
        optimizer.step()

    return Stepper(step, optimizer)


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
    """For each size, milliseconds of a plain step, and of what statistics and a new basis cost on top of one."""
    for size in axis.sizes:
        torch.manual_seed(0)
        stepper = axis.make(size)
        warm_up(stepper)
        found = [seconds_of_each_kind(stepper) for _ in range(rounds)]
        yield size, {kind: 1e3 * statistics.median(one[kind] for one in found) for kind in found[0]}


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """The power law through the largest three sizes, by least squares of logarithms."""
    return float(np.polyfit(np.log(sizes[-3:]), np.log(np.maximum(costs[-3:], 1e-9)), 1)[0])
