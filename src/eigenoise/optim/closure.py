"""Steps by a closure, as ``torch.optim.LBFGS`` and Lightning make them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class SamplesInBlocks(Protocol):
    """What is needed of an optimiser here."""

    in_closure: bool  # whether a closure is running, which may clear gradients

    @property
    def group(self) -> dict[str, Any]:
        """The one parameter group."""

    @property
    def blocks_per_step(self) -> int:
        """How many blocks come before each step."""

    def zero_grad(self) -> None:
        """Clear gradients."""

    def sampled_params(self) -> AbstractContextManager[None]:
        """A block of sampled weights."""


def run_closure(optimizer: SamplesInBlocks, closure: Callable[[], Any]) -> Any:
    """Call ``closure`` for each weight sample of a step; it may clear gradients itself, so they are summed here.

    Returns:
        The mean of the losses that it returned, or None.
    """
    optimizer.zero_grad()
    params = optimizer.group["params"]
    total: list[Tensor | None] = [None] * len(params)
    losses = []
    for _ in range(optimizer.blocks_per_step):
        for param in params:
            param.grad = None
        optimizer.in_closure = True
        try:
            with torch.enable_grad(), optimizer.sampled_params():
                losses.append(closure())
        finally:
            optimizer.in_closure = False
        grads = [None if param.grad is None else param.grad.clone() for param in params]  # DDP may reuse its memory
        total = [g if t is None else t if g is None else t + g for t, g in zip(total, grads, strict=True)]
    for param, grad in zip(params, total, strict=True):
        param.grad = grad
    return None if losses[0] is None else sum(losses) / len(losses)
