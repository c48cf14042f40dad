"""Steps by a closure, as ``torch.optim.LBFGS`` and Lightning make them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from eigenoise.optim.blocks import Blocks


class SamplesInBlocks(Protocol):
    """What is needed of an optimiser here."""

    blocks: Blocks
    closure_sample: int | None  # the weight sample whose closure is running, which may clear gradients
    cleared: bool  # whether gradients were cleared since the last step

    @property
    def group(self) -> dict[str, Any]:
        """The one parameter group."""

    def zero_grad(self) -> None:
        """Clear gradients."""

    def sampled_params(self) -> AbstractContextManager[None]:
        """A block of sampled weights."""


def run_closure(optimizer: SamplesInBlocks, closure: Callable[[], Any]) -> Any:
    """Call ``closure`` for each weight sample of a step; it may clear gradients itself, so they are summed here.

    Gradients of blocks that were run since the last step, as in gradient accumulation, are kept, unless the closure
    clears them.

    Returns:
        The mean of the losses that it returned, or None.

    Raises:
        RuntimeError: if there are gradients from outside blocks, which would be dropped.
    """
    params = optimizer.group["params"]
    total: list[Tensor | None] = [None] * len(params)
    if optimizer.blocks.count:
        total = [None if param.grad is None else param.grad.clone() for param in params]
    else:
        if optimizer.cleared and any(param.grad is not None and bool(param.grad.any()) for param in params):
            raise RuntimeError(
                "step(closure) would drop gradients that were backpropagated outside sampled_params(): run each part "
                "of an accumulated batch in a block of its own; examples/lightning_module.py shows it for Lightning"
            )
        optimizer.zero_grad()
    optimizer.cleared = False
    losses = []
    for sample in range(optimizer.blocks.per_step):
        for param in params:
            param.grad = None
        optimizer.closure_sample = sample
        try:
            with torch.enable_grad(), optimizer.sampled_params():
                losses.append(closure())
        finally:
            optimizer.closure_sample = None
        if sample == 0 and optimizer.cleared:
            total = [None] * len(params)
        grads = [None if param.grad is None else param.grad.clone() for param in params]  # DDP may reuse its memory
        total = [g if t is None else t if g is None else t + g for t, g in zip(total, grads, strict=True)]
    for param, grad in zip(params, total, strict=True):
        param.grad = grad
    return None if losses[0] is None else sum(losses) / len(losses)
