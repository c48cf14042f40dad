"""The life of a ``sampled_params()`` block: weights go in, a loss is backpropagated, the mean comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from eigenoise.linalg.kronecker import full_precision
from eigenoise.optim.weight_swap import InPlace, SideBySide, Slot, Swap


class Blocks:
    """Counts the blocks of one step and keeps the sum of the weights they trained with.

    Args:
        slots: the matrices of the model.
        antithetic: every second sample of a step mirrors the one before.
        parallel: draw so many samples in one block, as one more leading axis; None for one in each block.

    Attributes:
        inside: whether a block is running.
        trained: whether the running block's loss was backpropagated.
        count: blocks with a backpropagated loss since ``forget``.
        drawn: for each slot the sum over blocks of their (mean) sample.
    """

    def __init__(self, slots: Sequence[Slot], antithetic: bool, parallel: int | None = None):
        self.slots, self.antithetic, self.parallel = slots, antithetic, parallel
        self.swap: Swap = InPlace(slots) if parallel is None else SideBySide(slots, parallel, antithetic)
        self.inside = self.trained = False
        self.count = 0
        self.drawn: list[Tensor] = []
        self._last: list[Tensor] | None = None  # the sample that waits for its mirror image

    @contextmanager
    def run(
        self, draw: Callable[[], None], begin: Callable[[], None], end: Callable[[bool], None], mirror: bool
    ) -> Iterator[None]:
        """One block.

        Args:
            draw: fills every slot's ``sample`` from its ``mean``.
            begin: called when the sample is in the model.
            end: called when the mean is back, with whether the block trained.
            mirror: whether this sample may be the mirror image of the last block's.

        Raises:
            RuntimeError: if a block is running.
        """
        if self.inside:
            raise RuntimeError("sampled_params() blocks cannot be nested: the weights are sampled already")
        last = self._last if mirror else None
        with torch.no_grad(), full_precision(self.slots[0].mean.device):
            self.swap.read()
            if self.count == 1:  # the first sum is the slots' own sample, which is about to be drawn anew
                self.drawn = [sample.clone() for sample in self.drawn]
            if last is not None:
                for slot, sample in zip(self.slots, last, strict=True):
                    torch.sub(2 * slot.mean, sample, out=slot.sample)
            else:
                draw()
        self.inside, self.trained = True, False
        try:
            with torch.no_grad():
                self.swap.write()
            begin()
            yield
        finally:
            with torch.no_grad():
                self.swap.take_out()
                self.inside = False
                end(self.trained)
        if self.trained:
            samples = self.swap.mean_samples()
            if self.count:
                torch._foreach_add_(self.drawn, samples)
            else:
                self.drawn = samples
            self.count += 1
            wait = self.antithetic and self.parallel is None and last is None
            self._last = [sample.clone() for sample in samples] if wait else None

    @property
    def cancels(self) -> bool:
        """Whether the mean of the samples of a block is the mean of the weights itself."""
        return self.antithetic and self.parallel is not None

    def forget(self) -> None:
        """Start counting for the next step."""
        self.count, self._last = 0, None

    def refuse_inside(self, what: str) -> None:
        """Raise RuntimeError if a block is running: ``what`` needs the mean."""
        if self.inside:
            raise RuntimeError(
                f"{what} inside sampled_params() would see a sample, not the mean: leave the block first"
            )
