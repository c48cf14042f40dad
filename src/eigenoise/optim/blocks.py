"""The life of a ``sampled_params()`` block: weights go in, a loss is backpropagated, the mean comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from eigenoise import checks
from eigenoise.layers.snapshot import ModelSnapshot
from eigenoise.linalg import full_precision
from eigenoise.optim.weight_swap import InPlace, SideBySide, Slot, Swap

NOISE_RAMP = 500  # steps


@dataclass(frozen=True)
class Sampling:
    """How weights are sampled in training.

    Attributes:
        samples: weight samples in one step.
        parallel: whether all samples of a step are drawn in one block, as one more leading axis.
        antithetic: whether every second sample of a step mirrors the one before.
        ramp: steps over which the noise's standard deviation grows from 0 to that of the posterior.
        generator: source of all noise, or None for one seeded from torch's global generator.
    """

    samples: int = 1
    parallel: bool = False
    antithetic: bool = False
    ramp: int = 0
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        checks.integer("samples", self.samples)
        checks.integer("noise_ramp", self.ramp, low=0)
        if self.antithetic and self.samples % 2:
            raise ValueError(f"antithetic samples come in pairs: samples must be even, got {self.samples}")
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got a {type(self.generator).__name__}")


class Blocks:
    """Counts the blocks of one step and keeps the sum of the weights they trained with.

    Args:
        model: the model.
        slots: its matrices.
        sampling: how weights are sampled.

    Attributes:
        per_step: blocks that come before each step.
        inside: whether a block is running.
        trained: whether the running block's loss was backpropagated.
        count: blocks with a backpropagated loss since ``forget``.
        drawn: for each slot the sum over blocks of their (mean) sample.
    """

    def __init__(self, model: nn.Module, slots: Sequence[Slot], sampling: Sampling):
        self._snapshot = ModelSnapshot(model)
        self.slots, self.antithetic, self.parallel = slots, sampling.antithetic, sampling.parallel
        self.per_step = 1 if sampling.parallel else sampling.samples
        self.swap: Swap = InPlace(slots)
        if sampling.parallel:
            self.swap = SideBySide(slots, sampling.samples, sampling.antithetic)
        self.inside = self.trained = False
        self.count = 0
        self.drawn: list[Tensor] = []
        self._last: list[Tensor] | None = None  # the sample that waits for its mirror image

    @contextmanager
    def run(
        self,
        draw: Callable[[], None],
        begin: Callable[[], AbstractContextManager],
        end: Callable[[bool], None],
        mirror: bool,
    ) -> Iterator[None]:
        """One block.

        Args:
            draw: fills every slot's ``sample`` from its ``mean``.
            begin: called when the sample is in the model; what it returns is around the block.
            end: called when the mean is back, with whether the block trained.
            mirror: whether this sample may be the mirror image of the last block's.

        Raises:
            RuntimeError: if a block is running, or the model is no longer the one that it was.
        """
        if self.inside:
            raise RuntimeError("sampled_params() blocks cannot be nested: the weights are sampled already")
        last = self._last if mirror else None
        try:
            with torch.no_grad(), full_precision(self.slots[0].mean.device):
                self.read_means()
                if self.count == 1:  # the first sum is the slots' own sample, which is about to be overwritten
                    self.drawn = [sample.clone() for sample in self.drawn]
                if last is not None:
                    for slot, sample in zip(self.slots, last, strict=True):
                        torch.sub(2 * slot.mean, sample, out=slot.sample)
                else:
                    draw()
                self.inside, self.trained = True, False
                self.swap.write()
            with begin():
                yield
        finally:
            if self.inside:
                with torch.no_grad():
                    self.swap.take_out()
                    self.inside = False
                    end(self.trained)
        if self.trained:
            self._record(is_mirror=last is not None)

    def _record(self, is_mirror: bool) -> None:
        samples = self.swap.mean_samples()
        if self.count:
            torch._foreach_add_(self.drawn, samples)
        else:
            self.drawn = samples
        self.count += 1
        waits = self.antithetic and not self.parallel and not is_mirror
        self._last = [sample.clone() for sample in samples] if waits else None

    def read_means(self) -> None:
        """Means from the model's parameters.

        Raises:
            RuntimeError: if the model is no longer the one that the optimiser was built for.
        """
        self._snapshot.refuse_changes()
        self.swap.read()

    @property
    def cancels(self) -> bool:
        """Whether the mean of the samples of a block is the mean of the weights itself."""
        return self.antithetic and self.parallel

    def check_ready(self) -> None:
        """Raise RuntimeError unless there is something to step from."""
        if not self.count:
            raise RuntimeError(
                "step() found no training loss: call likelihood.nll(model(x), y).backward() inside sampled_params()"
            )
        if self.count % self.per_step:
            raise RuntimeError(
                f"step() expected {self.per_step} sampled_params() blocks, one for each sample, got {self.count}"
            )
        if all(p.grad is None for p in self.swap.params):
            raise RuntimeError("step() found no gradients: call backward() inside sampled_params(), then step()")

    def forget(self) -> None:
        """Start counting for the next step."""
        self.count, self._last = 0, None

    def refuse_inside(self, what: str) -> None:
        """Raise RuntimeError if a block is running: ``what`` needs the mean."""
        if self.inside:
            raise RuntimeError(
                f"{what} inside sampled_params() would see a sample, not the mean: leave the block first"
            )
