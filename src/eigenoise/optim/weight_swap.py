"""Putting sampled weights into a model and the mean back, whatever happens in between."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution

from eigenoise.layers.matrix_layer import BareParameter, MatrixLayer, StackedLinearLayer
from eigenoise.models import StackedLinear
from eigenoise.optim.prior_variance import PriorVar, prior_variance

Group = Mapping[str, Any]  # the hyperparameters of a parameter group


class Slot(ABC):
    """One matrix of weights in a model, with its posterior.

    Args:
        layer: how the matrix lies in the model's parameters.
        has_posterior: whether it has a posterior rather than a point estimate.

    Attributes:
        mean: ``(..., p, n)``, valid between ``Swap.read`` and ``Swap.write_means``.
        sample: ``(..., p, n)``, what ``Swap.write`` puts into the model.
        noise: memory for white noise, by default that of ``sample``.
    """

    def __init__(self, layer: MatrixLayer | BareParameter, has_posterior: bool):
        self.layer, self.has_posterior = layer, has_posterior
        self.mean, self.sample = (self.empty() for _ in range(2))
        self.noise = self.sample
        self._prior_var: tuple[PriorVar, float] | None = None  # η and the hyperparameter that it follows from

    @abstractmethod
    def draw(self, generator: torch.Generator, group: Group, ramp: float | None = None) -> None:
        """Fill ``sample`` with weights W ~ q (eq. 20).

        Args:
            generator: source of the noise.
            group: hyperparameters.
            ramp: factor on the standard deviation in a training block, None elsewhere.
        """

    @abstractmethod
    def distribution(self, group: Group) -> Distribution:
        """The current posterior."""

    @abstractmethod
    def kl(self, group: Group) -> Tensor:
        """KL of the posterior to the prior."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors that survive a restart."""

    @abstractmethod
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave."""

    @abstractmethod
    def describe(self) -> str:
        """A few words on how the matrix is treated."""

    def prior_var(self, group: Group) -> float:
        """η, the variance of this matrix's prior N(0, ηI)."""
        value = group["prior_var"]
        if self._prior_var is None or self._prior_var[0] is not value:
            self._prior_var = value, prior_variance(value, self.layer)
        return self._prior_var[1]

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
    def write_means(self) -> None:
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
        """Means from the parameters."""
        torch._foreach_copy_(self._mean, self.params)

    def write(self) -> None:
        """Samples into the parameters."""
        torch._foreach_copy_(self.params, self._sample)

    def mean_samples(self) -> list[Tensor]:
        """The sample itself."""
        return [slot.sample for slot in self.slots]

    def take_out(self) -> None:
        """Means back into the parameters."""
        torch._foreach_copy_(self.params, self._mean)

    write_means = take_out


@final
class SideBySide(Swap):
    """k samples at once, beside the parameters of every ``StackedLinear``, which are not touched.

    Args:
        slots: all of ``StackedLinear`` layers.
        samples: k.
        antithetic: only half of them are drawn, the others are their mirror images.

    Attributes:
        samples: what is in the model during a block, ``(k, s, p, n)`` for each slot.
        keeps_gradients: whether gradients of each sample are wanted, not only their sum in the parameters.
        gradients: those, in the shape of ``samples``, or None, of the last block.

    Raises:
        ValueError: if a slot is another layer's.
    """

    def __init__(self, slots: Sequence[Slot], samples: int, antithetic: bool):
        self.antithetic, self.keeps_gradients = antithetic, False
        self._drawn = samples // 2 if antithetic else samples
        self._memory: list[Tensor] = []  # (s, k, p, n), so that each model's samples count as further examples
        for slot in slots:
            if not isinstance(slot.layer, StackedLinearLayer):
                raise ValueError(
                    f"parallel weight samples need a model of StackedLinear layers alone, got {slot.name!r}"
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
            _set_sample(slot.layer.module, memory.detach().requires_grad_(self.keeps_gradients))  # type: ignore[union-attr]

    def mean_samples(self) -> list[Tensor]:
        """The mean over k; mirror images leave the mean itself."""
        return [slot.mean if self.antithetic else slot.sample.mean(0) for slot in self.slots]

    def take_out(self) -> None:
        """Take the samples away; the parameters held the means all the time, and got the gradients."""
        self.gradients = []
        for slot in self.slots:
            sample = slot.layer.module.sample  # type: ignore[union-attr]
            gradient = None if sample is None else sample.grad
            self.gradients.append(None if gradient is None else gradient.movedim(1, 0))
            _set_sample(slot.layer.module, None)  # type: ignore[union-attr]

    def write_means(self) -> None:
        """Means into the parameters."""
        self._means.write_means()


def _set_sample(module: StackedLinear, sample: Tensor | None) -> None:
    """Set ``module.sample`` without the search for parameters and buffers that a module makes on every assignment."""
    object.__setattr__(module, "sample", sample)
