"""One training loop for all methods and for one model or a stack of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from eigenoise import checks
from eigenoise.optim.base import BayesianOptimizer


def epochs(
    optimizer: BayesianOptimizer,
    x: Tensor,
    y: Tensor,
    *,
    count: int,
    batch_size: int,
    generator: torch.Generator | None = None,
    start: int = 0,
    draw: Callable[[], Tensor] | None = None,
    decay: float = 0.1,
    decayed: tuple[str, ...] = ("lr", "ema_factors", "ema_scale"),
) -> Iterator[int]:
    """Train for ``count`` passes over the data, yielding the number of each pass when it is done.

    Args:
        optimizer: any of eigenoise's; its ``samples`` decides how many weight samples a step takes.
        x: inputs ``(N, ...)``, or ``(s, N, ...)`` for a stack of models, each with its own order of the data.
        y: targets with the same leading axes.
        count: passes over the data.
        batch_size: examples of a step; the last batch of a pass may be smaller.
        generator: of the order of the data.
        start: passes already done, by a run that is now continued.
        draw: the rows ``(s, m)`` of one pass of a stack whose models share ``x`` and ``y``, which have no axis for
            them; by default every row, in a random order.
        decay: factor on the rates named ``decayed`` for the second half, as in the paper.
        decayed: hyperparameters that decay; those that the method does not have are passed over.
    """
    checks.integer("count", count)
    checks.integer("batch_size", batch_size)
    likelihood, model = optimizer.likelihood, optimizer.model
    stack = likelihood.stack
    size = x.shape[0] if stack is None or draw else x.shape[1]
    group = optimizer.param_groups[0]
    rates = {name: group[name] for name in decayed if name in group}
    try:
        for epoch in range(start + 1, count + 1):
            group.update({name: value * (decay if 2 * epoch > count + 1 else 1.0) for name, value in rates.items()})
            batches = draw().split(batch_size, -1) if draw else _batches(size, stack, batch_size, generator)
            for index in batches:
                rows = index if stack is None or draw else (torch.arange(stack).unsqueeze(-1), index)
                x_batch, y_batch = x[rows], y[rows]
                optimizer.zero_grad()
                for _ in range(optimizer.blocks_per_step):
                    with optimizer.sampled_params():
                        likelihood.nll(model(x_batch), y_batch).backward()
                optimizer.step()
            group.update(rates)  # what is saved between passes is the undecayed schedule
            yield epoch
    finally:
        group.update(rates)


def _batches(size: int, stack: int | None, batch_size: int, generator: torch.Generator | None) -> tuple[Tensor, ...]:
    """One pass in random order: indices ``(b,)`` or ``(s, b)``, each model's order its own."""
    if stack is None:
        return torch.randperm(size, generator=generator).split(batch_size)
    return torch.rand(stack, size, generator=generator).argsort(-1).split(batch_size, -1)
