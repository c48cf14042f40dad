"""Optimisers of several processes in lockstep: one mean, one step's number, and for each process noise of its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from eigenoise.parallel.ranks import Ranks

OFTEN = 100  # steps after which it is seen again that all processes have the same gradients and weights


class Lockstep:
    """What one process's optimiser does to stay with the others; if it is alone, nothing.

    Args:
        ranks: the processes, or None if there is only this one.
        generator: source of this process's noise, reseeded at every step if there are others.

    Attributes:
        seed: the first process's, from which all noise follows.
    """

    def __init__(self, ranks: Ranks | None, generator: torch.Generator):
        self.ranks, self.generator = ranks, generator
        self.seed = generator.initial_seed() % 2**63
        if ranks is not None:
            self.seed = ranks.of_first(self.seed)
        self._checked = False  # whether it was seen that all have the same weights
        self.reseed(0)

    def reseed(self, step: int) -> None:
        """Give each of several processes noise of its own, which the step's number and one seed decide."""
        if self.ranks is not None:
            self.generator.manual_seed(self.ranks.seed(self.seed, step))

    def resume(self, seed: int, step: int) -> None:
        """Go on as a run with ``seed`` would from ``step``; it will be seen that all have loaded the same."""
        self.seed, self._checked = seed, False
        self.reseed(step)

    def synchronise(self, loss: Tensor, step: int, gradients: Iterable[Tensor], means: Iterable[Tensor]) -> Tensor:
        """The mean of all processes' ``loss``, at a step that all are to make from the same gradients.

        Raises:
            RuntimeError: on all of them, if they are not all at ``step``, or if gradients or means of the weights
                differ, which is looked at now and then.
        """
        if self.ranks is None:
            return loss
        place = [float(step), float(step) ** 2]  # means of both are these only if all are at the same step
        found = torch.cat([loss.double().reshape(1), torch.tensor(place, dtype=torch.float64, device=loss.device)])
        self.ranks.average_([found])
        if found[1:].tolist() != place:
            raise RuntimeError(
                f"expected all processes at the same step, got {step} in this one: load the same state dict in all of "
                "them, or in none"
            )
        if step % OFTEN == 0 or not self._checked:
            self.ranks.refuse_different(
                gradients,
                "gradients differ between processes: call the model that is wrapped in DistributedDataParallel, not "
                "the one inside, and leave no_sync() for the last backward pass before step()",
            )
            self.ranks.refuse_different(
                means,
                "weights differ between processes: all must load the same state dicts, of the model and of the "
                "optimiser, or none",
            )
            self._checked = True
        return found[0].to(loss.dtype)
