"""Putting sampled weights into a model and the mean back, whatever happens in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from eigenoise.layers import BareParameter, MatrixLayer


class Slot:
    """One matrix of weights in a model: its mean and its current sample.

    Attributes:
        layer: how the matrix lies in the model's parameters.
        mean: ``(..., p, n)``, valid between ``Swap.read`` and ``Swap.restore``.
        sample: ``(..., p, n)``, what ``Swap.write`` puts into the model.
    """

    def __init__(self, layer: MatrixLayer | BareParameter):
        self.layer = layer
        self.mean, self.sample = (self.empty() for _ in range(2))

    @property
    def name(self) -> str:
        """The module's name in the model, or the parameter's for a bare one."""
        return self.layer.name

    def empty(self) -> Tensor:
        """A zero matrix like this slot's."""
        param = self.layer.params[0]
        return torch.zeros(self.layer.shape, dtype=param.dtype, device=param.device)


class Swap:
    """Moves whole sets of weights between slots and parameters in single calls.

    All methods are to be called with gradients disabled. Parameters are written in place and their versions move on, so
    a backward pass that comes too late, after the mean is back, is an error in autograd rather than a wrong gradient.
    """

    def __init__(self, slots: Sequence[Slot]):
        self.slots = list(slots)
        self.params: list[Tensor] = [p for slot in slots for p in slot.layer.params]
        self._mean = [view for slot in slots for view in slot.layer.views(slot.mean)]
        self._sample = [view for slot in slots for view in slot.layer.views(slot.sample)]

    def read(self) -> None:
        """Means from the parameters."""
        torch._foreach_copy_(self._mean, self.params)

    def write(self) -> None:
        """Samples into the parameters."""
        torch._foreach_copy_(self.params, self._sample)

    def restore(self) -> None:
        """Means back into the parameters, bit for bit."""
        torch._foreach_copy_(self.params, self._mean)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block every module is in evaluation mode; afterwards each is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
