"""Optimisers of several processes in lockstep: one mean, one step's number, and for each process noise of its own."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

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

    def synchronise(
        self,
        loss: Tensor,
        terms: float,
        step: int,
        hyper: Mapping[str, Any],
        gradients: Iterable[Tensor],
        means: Iterable[Tensor],
    ) -> tuple[Tensor, float]:
        """The mean of all processes' ``loss`` and the sum of their ``terms``, at a step that all make alike.

        Args:
            loss: of this process.
            terms: likelihood terms of this process.
            step: the step's number, which must be the same in all.
            hyper: hyperparameters, which must be too.
            gradients: likewise; these and the means are compared now and then.
            means: of the weights.

        Raises:
            RuntimeError: on all of them, if something differs.
        """
        if self.ranks is None:
            return loss, terms
        mark = zlib.crc32(repr(sorted(hyper.items())).encode()) >> 8  # small enough that float64 sums are exact
        place = [float(n) ** k for n in (step, mark) for k in (1, 2)]  # means are these only if all have the same
        numbers = [*place, float(not self._checked), terms]
        found = torch.cat([loss.double().reshape(1), torch.tensor(numbers, dtype=torch.float64, device=loss.device)])
        self.ranks.average_([found])
        everywhere = found[1:].tolist()
        if everywhere[2:4] != place[2:]:
            raise RuntimeError(
                "expected the same hyperparameters in all processes, such as lr and num_data, the number of terms of "
                f"all of them together; got {dict(hyper)} in this one"
            )
        if everywhere[:2] != place[:2]:
            raise RuntimeError(
                f"expected all processes at the same step, got {step} in this one: load the same state dict in all of "
                "them, or in none"
            )
        if step % OFTEN == 0 or everywhere[4]:  # the same decision on all
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
        return found[0].to(loss.dtype), everywhere[5] * self.ranks.size
