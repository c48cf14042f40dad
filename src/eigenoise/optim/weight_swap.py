"""Putting sampled weights into a model and the mean back, whatever happens in between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from eigenoise.fisher.kronecker_factors import KroneckerFactors
from eigenoise.layers.matrix_layer import BareParameter, MatrixLayer, StackedLinearLayer
from eigenoise.models import StackedLinear
from eigenoise.optim.rotated import Keeper


class Slot:
    """One matrix of weights in a model: its mean and its current sample.

    Args:
        layer: how the matrix lies in the model's parameters.
        kept: whether the parameters show the matrix only when someone looks, see ``rotated``.
        basis: in which it is then kept, or None for that of the weights.

    Attributes:
        mean: ``(..., p, n)``, valid between ``Swap.read`` and ``Swap.restore``.
        sample: ``(..., p, n)``, what ``Swap.write`` puts into the model.
        noise: memory for white noise, by default that of ``sample``.
        keeper: of a matrix that is kept in a basis, else None; mean and sample are then coordinates in it.
    """

    def __init__(self, layer: MatrixLayer | BareParameter, kept: bool = False, basis: KroneckerFactors | None = None):
        self.layer = layer
        self.mean, self.sample = (self.empty() for _ in range(2))
        self.noise = self.sample
        self.keeper: Keeper | None = None
        if kept:
            assert isinstance(layer, MatrixLayer)
            self.keeper = Keeper(layer, basis, self.mean, self.sample)

    @property
    def name(self) -> str:
        """The module's name in the model, or the parameter's for a bare one."""
        return self.layer.name

    def white(self, generator: torch.Generator) -> Tensor:
        """Standard normal numbers in the shape of ``sample``, valid until that is filled."""
        if generator.device == self.noise.device:
            self.noise.normal_(generator=generator)
        else:
            options: dict[str, Any] = {"dtype": self.noise.dtype, "device": generator.device}
            self.noise.copy_(torch.randn(self.noise.shape, generator=generator, **options))
        return self.noise if self.noise.ndim == self.mean.ndim else self.noise.movedim(-2, 0)

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

    @abstractmethod
    def show(self) -> None:
        """Leave ordinary parameters behind that hold the means."""


@final
class InPlace(Swap):
    """One sample at a time, written into the parameters themselves, all in single calls; or seen through keepers.

    Parameters keep their identity and their versions move on, so a backward pass that comes too late, after the mean is
    back, is an error in autograd rather than a wrong gradient.
    """

    def __init__(self, slots: Sequence[Slot]):
        self.slots = list(slots)
        self.params = [p for slot in slots for p in slot.layer.params]
        self.keepers = [slot.keeper for slot in slots if slot.keeper is not None]
        plain = [slot for slot in slots if slot.keeper is None]
        self._plain: list[Tensor] = [p for slot in plain for p in slot.layer.params]
        self._mean = [view for slot in plain for view in slot.layer.views(slot.mean)]
        self._sample = [view for slot in plain for view in slot.layer.views(slot.sample)]

    def read(self) -> None:
        """Means from the parameters.

        Raises:
            RuntimeError: if a parameter was frozen, cast or moved since the optimiser was built.
        """
        for param, view in zip(self._plain, self._mean, strict=True):
            if not param.requires_grad or param.dtype != view.dtype or param.device != view.device:
                self._refuse_changed()
        _copy(self._mean, self._plain)
        if self.keepers:
            with torch._C.DisableTorchFunctionSubclass():
                for keeper in self.keepers:
                    if not all(p.requires_grad and p.dtype == keeper.mean.dtype for p in keeper.layer.params):
                        self._refuse_changed()
                    keeper.read()

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
        _copy(self._plain, self._sample)
        for keeper in self.keepers:
            keeper.enter()

    def mean_samples(self) -> list[Tensor]:
        """The sample itself."""
        return [slot.sample for slot in self.slots]

    def take_out(self) -> None:
        """Means back into the parameters."""
        _copy(self._plain, self._mean)
        for keeper in self.keepers:
            keeper.leave()

    def restore(self) -> None:
        """Means into the parameters; those that are kept in a basis are written when someone looks."""
        _copy(self._plain, self._mean)
        for keeper in self.keepers:
            keeper.behind = True

    def show(self) -> None:
        """Means into the parameters that are kept in a basis."""
        for keeper in self.keepers:
            keeper.show()


@final
class SideBySide(Swap):
    """k samples at once, beside the parameters of every ``StackedLinear``, which are not touched.

    Args:
        slots: all of ``StackedLinear`` layers.
        samples: k.
        antithetic: only half of them are drawn, the others are their mirror images.

    Attributes:
        samples: what is in the model during a block, ``(k, s, p, n)`` for each slot.
        each: whether gradients of each sample are wanted, not only their sum in the parameters.
        gradients: those, in the shape of ``samples``, or None, of the last block.

    Raises:
        ValueError: if a slot is another layer's.
    """

    def __init__(self, slots: Sequence[Slot], samples: int, antithetic: bool):
        self.antithetic, self.each = antithetic, False
        self._drawn = samples // 2 if antithetic else samples
        self._memory: list[Tensor] = []  # (s, k, p, n), so that each model's samples count as further examples
        for slot in slots:
            if not isinstance(slot.layer, StackedLinearLayer):
                raise ValueError(
                    f"parallel weight samples need a model of StackedLinear layers alone, but {slot.name!r} is none"
                )
            slot.layer.lead = (samples, *slot.layer.lead)
            s, p, n = slot.layer.shape
            self._memory.append(slot.mean.new_zeros(s, samples, p, n))
            slot.sample = self._memory[-1][:, : self._drawn].movedim(1, 0)
            slot.noise = slot.mean.new_zeros(s, p, self._drawn, n)  # so that rotations need no copy
        self.slots = list(slots)
        self.samples = [memory.movedim(1, 0) for memory in self._memory]
        self.params = [p for slot in slots for p in slot.layer.params]
        self._means = InPlace(slots)
        self.gradients: list[Tensor | None] = []

    def read(self) -> None:
        """Means from the parameters."""
        self._means.read()

    def write(self) -> None:
        """Samples beside the parameters."""
        for slot, samples, memory in zip(self.slots, self.samples, self._memory, strict=True):
            if self.antithetic:
                torch.sub(2 * slot.mean, slot.sample, out=samples[self._drawn :])
            _show(slot.layer.module, memory.detach().requires_grad_(self.each))  # type: ignore[union-attr]

    def mean_samples(self) -> list[Tensor]:
        """The mean over k; mirror images leave the mean itself."""
        return [slot.mean if self.antithetic else slot.sample.mean(0) for slot in self.slots]

    def take_out(self) -> None:
        """Take the samples away; the parameters held the means all the time, and got the gradients."""
        self.gradients = []
        for slot in self.slots:
            sample = slot.layer.module.sample  # type: ignore[union-attr]
            own = None if sample is None else sample.grad
            self.gradients.append(None if own is None else own.movedim(1, 0))
            _show(slot.layer.module, None)  # type: ignore[union-attr]

    def restore(self) -> None:
        """Means into the parameters."""
        self._means.restore()

    def show(self) -> None:
        """They are."""


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, values)


def _show(module: StackedLinear, sample: Tensor | None) -> None:
    """Set ``module.sample`` without the search for parameters and buffers that a module makes on every assignment."""
    object.__setattr__(module, "sample", sample)
