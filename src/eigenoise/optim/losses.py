"""How training goes: the loss averaged over recent steps, and a word if that is hopelessly above where it began."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

SPAN = 100  # steps
HOPELESS = 5.0  # nats above the first loss
PARTS = ("mean", "first", "last")  # of the state


class RunningLoss:
    """Losses of training steps.

    Args:
        models: that each loss is the sum of.

    Attributes:
        mean: their average over about the last 100 steps, ``()``; None before the first.
        first: of them, from weights that nothing has been learned in.
        last: of them.
    """

    def __init__(self, models: int = 1):
        self.models = models
        self.mean: Tensor | None = None
        self.first: Tensor | None = None
        self.last: Tensor | None = None
        self._warned = False

    def add(self, loss: Tensor, step: int) -> None:
        """Take in the loss of ``step``, counted from 0; every 100 steps it is looked at, and a warning given once."""
        if self.mean is None or self.first is None:
            self.mean = self.first = loss
        self.mean, self.last = torch.lerp(self.mean, loss, 1 / min(step + 1, SPAN)), loss
        if (step + 1) % SPAN == 0 and not self._warned:
            found = self.trouble()
            if found:
                self._warned = True
                warnings.warn(f"step {step}: {found}", RuntimeWarning, stacklevel=4)

    def trouble(self) -> str:
        """What is wrong and what to do about it, or nothing; one host synchronisation."""
        if self.mean is None or self.first is None or self.last is None:
            return ""
        mean, first, last = (torch.stack([self.mean, self.first, self.last]) / self.models).tolist()
        if not min(mean, last) > max(first + HOPELESS, 3 * first):  # a single large loss may be forgotten soon
            return ""
        return (
            f"the loss is {mean:.3g} on average over the last {SPAN} steps, and it was {first:.3g} before training: "
            "with these settings it may stay there; lower lr, or kl_weight or prior_var if the noise is too much"
        )

    def state(self) -> dict[str, Tensor | None]:
        """What a resume needs."""
        return dict(zip(PARTS, (self.mean, self.first, self.last), strict=True))

    def load(self, state: dict[str, Tensor | None], device: torch.device) -> None:
        """Take over what ``state`` gave, for losses on ``device``."""
        own = (state[name] for name in PARTS)
        self.mean, self.first, self.last = (None if each is None else each.to(device, copy=True) for each in own)
