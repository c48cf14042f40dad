"""Watching a run: steps that cannot be made because a number is not finite, and losses that give no hope."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from eigenoise import checks

POLICIES = ("raise", "skip")
MAX_SKIPPED_IN_A_ROW = 20
SPAN = 100  # steps that the running loss averages over
HOPELESS = 5.0  # nats above the first loss
LOSS_NAMES = ("mean", "first", "last")


class RunningLoss:
    """Losses of training steps.

    Args:
        models: that each loss is the sum of.

    Attributes:
        mean: the average over about the last 100 steps, ``()``; None before the first.
        first: the first loss, of untrained weights.
        last: the last loss.
    """

    def __init__(self, models: int = 1):
        self.models = models
        self.mean: Tensor | None = None
        self.first: Tensor | None = None
        self.last: Tensor | None = None
        self._warned = False

    def add(self, loss: Tensor, step: int) -> None:
        """Record the loss of ``step``, counted from 0; every 100 steps it is checked, and one warning given."""
        if self.mean is None or self.first is None:
            self.mean = self.first = loss
        self.mean, self.last = torch.lerp(self.mean, loss, 1 / min(step + 1, SPAN)), loss
        if (step + 1) % SPAN == 0 and not self._warned:
            diagnosis = self.diagnosis()
            if diagnosis:
                self._warned = True
                warnings.warn(f"step {step}: {diagnosis}", RuntimeWarning, stacklevel=4)

    def diagnosis(self) -> str:
        """What is wrong and what to do about it, or nothing; one host synchronisation."""
        if self.mean is None or self.first is None or self.last is None:
            return ""
        mean, first, last = (torch.stack([self.mean, self.first, self.last]) / self.models).tolist()
        if not min(mean, last) > max(first + HOPELESS, 3 * first):  # a single large loss may be forgotten soon
            return ""
        return (
            f"the loss averaged over the last {SPAN} steps is {mean:.3g}, far above its initial value {first:.3g}: "
            "lower lr, or kl_weight or prior_var if the noise is too much"
        )

    def state(self) -> dict[str, Tensor | None]:
        """What a resume needs."""
        return dict(zip(LOSS_NAMES, (self.mean, self.first, self.last), strict=True))

    def load(self, state: dict[str, Tensor | None], device: torch.device) -> None:
        """Take over what ``state`` gave, for losses on ``device``."""
        values = (state[name] for name in LOSS_NAMES)
        self.mean, self.first, self.last = (None if v is None else v.to(device, copy=True) for v in values)


def nonfinite_error(step: int, loss: Tensor, gradients: Sequence[Tensor], diagnosis: str) -> checks.NotFiniteError:
    """An error that names what is not finite at ``step`` and what to do about it.

    Args:
        step: counted from 0.
        loss: of the step.
        gradients: of the step.
        diagnosis: of the running loss, if it explains what happened.
    """
    if not checks.all_finite([loss]):
        culprit, remedy = "the loss", "check this batch's inputs and targets, or lower lr"
    elif not checks.all_finite(list(gradients)):
        culprit, remedy = "a gradient", "check this batch's inputs and targets, or lower lr"
    else:
        culprit, remedy = "a statistic or the step", "check this batch's inputs, or raise damping or kl_weight"
    return checks.NotFiniteError(
        f"{culprit} is NaN or infinite at step {step}: the mean weights are unchanged; {diagnosis or remedy}"
    )


class NonFinitePolicy:
    """What happens to steps that cannot be made.

    Args:
        policy: ``"raise"``, or ``"skip"`` to warn once and count.

    Attributes:
        skipped: steps that were skipped.
    """

    def __init__(self, policy: str):
        self.policy = checks.choice("not_finite", policy, POLICIES)
        self.skipped = self._in_a_row = 0
        self._warned = False

    def record_step(self) -> None:
        """A step was made."""
        self._in_a_row = 0

    def record_error(self, error: checks.NotFiniteError) -> None:
        """Count a step that cannot be made, or raise ``error``; too many in a row are raised too."""
        if self.policy == "raise":
            raise error
        self.skipped += 1
        self._in_a_row += 1
        if self._in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise error
        if not self._warned:
            self._warned = True
            warnings.warn(f"{error}; the step is skipped, and so are others like it", RuntimeWarning, stacklevel=4)
