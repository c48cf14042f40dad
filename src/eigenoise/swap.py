"""Putting sampled weights into a model and the mean back, whatever happens in between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from eigenoise.layers import BareParameter, MatrixLayer, StackedLinearLayer
from eigenoise.models import StackedLinear


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

    def white(self, generator: torch.Generator) -> Tensor:
        """Standard normal numbers in the memory of ``sample``, and in its shape."""
        memory = self.sample if self.sample.ndim == self.mean.ndim else self.sample.movedim(0, -2)
        if generator.device == memory.device:
            memory.normal_(generator=generator)
        else:
            memory.copy_(torch.randn(memory.shape, generator=generator, dtype=memory.dtype, device=generator.device))
        return self.sample

    def empty(self) -> Tensor:
        """A zero matrix like this slot's."""
        param = self.layer.params[0]
        return torch.zeros(self.layer.shape, dtype=param.dtype, device=param.device)


class Swap(ABC):
    """Puts sampled weights into a model and takes them out again; to be called with gradients disabled."""

    slots: list[Slot]
    params: list[Tensor]

    @abstractmethod
    def read(self) -> None:
        """Means from the parameters."""

    @abstractmethod
    def write(self) -> None:
        """Samples into the model."""

    @abstractmethod
    def mean_samples(self) -> list[Tensor]:
        """For each slot the mean of the samples that ``write`` put into the model, like ``slot.mean``."""

    @abstractmethod
    def take_out(self) -> None:
        """Samples out of the model: its parameters are the means again, bit for bit."""

    @abstractmethod
    def restore(self) -> None:
        """Means into the parameters, after a step has moved them."""


@final
class InPlace(Swap):
    """One sample at a time, written into the parameters themselves, all in single calls.

    Parameters keep their identity and their versions move on, so a backward pass that comes too late, after the mean is
    back, is an error in autograd rather than a wrong gradient.
    """

    def __init__(self, slots: Sequence[Slot]):
        self.slots = list(slots)
        self.params = [p for slot in slots for p in slot.layer.params]
        self._mean = [view for slot in slots for view in slot.layer.views(slot.mean)]
        self._sample = [view for slot in slots for view in slot.layer.views(slot.sample)]

    def read(self) -> None:
        """Means from the parameters.

        Raises:
            RuntimeError: if a parameter was frozen, cast or moved since the optimiser was built.
        """
        for param, view in zip(self.params, self._mean, strict=True):
            if not param.requires_grad or param.dtype != view.dtype or param.device != view.device:
                self._refuse_changed()
        torch._foreach_copy_(self._mean, self.params)

    def _refuse_changed(self) -> None:
        for slot in self.slots:
            for name, param in zip(slot.layer.param_names, slot.layer.params, strict=True):
                if not param.requires_grad:
                    raise RuntimeError(f"{name!r} was frozen after the optimiser was built: build a new optimiser")
                if param.dtype != slot.mean.dtype or param.device != slot.mean.device:
                    raise RuntimeError(
                        f"{name!r} is now {param.dtype} on {param.device}, but it was {slot.mean.dtype} on "
                        f"{slot.mean.device} when the optimiser was built: build a new optimiser"
                    )

    def write(self) -> None:
        """Samples into the parameters."""
        torch._foreach_copy_(self.params, self._sample)

    def mean_samples(self) -> list[Tensor]:
        """The sample itself."""
        return [slot.sample for slot in self.slots]

    def take_out(self) -> None:
        """Means back into the parameters."""
        self.restore()

    def restore(self) -> None:
        """Means into the parameters."""
        torch._foreach_copy_(self.params, self._mean)


@final
class SideBySide(Swap):
    """k samples at once, as one more leading axis of every ``StackedLinear``; parameters are not touched.

    Args:
        slots: all of ``StackedLinear`` layers.
        samples: k.
        antithetic: only half of them are drawn, the others are their mirror images.

    Attributes:
        samples: what is in the model during a block, ``(k, s, p, n)`` for each slot.
        gradients: each sample's own, ``(k, ...)`` for each parameter, of the last block.

    Raises:
        ValueError: if a slot is another layer's.
    """

    def __init__(self, slots: Sequence[Slot], samples: int, antithetic: bool):
        self.antithetic = antithetic
        self._drawn = samples // 2 if antithetic else samples
        for slot in slots:
            if not isinstance(slot.layer, StackedLinearLayer):
                raise ValueError(
                    f"parallel weight samples need a model of StackedLinear layers alone, but {slot.name!r} is none"
                )
            slot.layer.lead = (samples, *slot.layer.lead)
            s, p, n = slot.layer.shape
            slot.sample = slot.mean.new_zeros(s, p, self._drawn, n).movedim(-2, 0)  # so that rotations need no copy
        self.slots = list(slots)
        self.samples = [slot.mean.new_zeros(samples, *slot.mean.shape) for slot in slots]
        self.params = [p for slot in slots for p in slot.layer.params]
        self._means = InPlace(slots)
        self.gradients: list[Tensor | None] = []

    def read(self) -> None:
        """Means from the parameters."""
        self._means.read()

    def write(self) -> None:
        """Samples beside the parameters, each a leaf with a gradient of its own."""
        for slot, samples in zip(self.slots, self.samples, strict=True):
            samples[: self._drawn].copy_(slot.sample)
            if self.antithetic:
                torch.sub(2 * slot.mean, slot.sample, out=samples[self._drawn :])
            leaves = [view.detach().requires_grad_() for view in slot.layer.views(samples)]
            _show(slot.layer.module, tuple(leaves))  # type: ignore[union-attr]

    def mean_samples(self) -> list[Tensor]:
        """The mean over k; mirror images leave the mean itself."""
        return [slot.mean if self.antithetic else slot.sample.mean(0) for slot in self.slots]

    def take_out(self) -> None:
        """Take the samples away and add their gradients to the parameters', which held the means all the time."""
        self.gradients = []
        for slot in self.slots:
            leaves = slot.layer.module.sample or ()  # type: ignore[union-attr]
            for param, leaf in zip(slot.layer.params, leaves, strict=False):
                self.gradients.append(leaf.grad)
                if leaf.grad is not None:
                    own = leaf.grad.sum(0)
                    param.grad = own if param.grad is None else param.grad + own
            _show(slot.layer.module, None)  # type: ignore[union-attr]

    def restore(self) -> None:
        """Means into the parameters."""
        self._means.restore()


def _show(module: StackedLinear, sample: tuple[Tensor, ...] | None) -> None:
    """Set ``module.sample`` without the search for parameters and buffers that a module makes on every assignment."""
    object.__setattr__(module, "sample", sample)


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
