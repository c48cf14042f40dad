"""Watching a run: steps that cannot be made because a number is not finite, and losses that give no hope."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eigenoise import checks
from eigenoise.likelihoods import Likelihood

POLICIES = ("raise", "skip")
MAX_SKIPPED_IN_A_ROW = 20
SPAN = 100  # steps that the running loss averages over
HOPELESS = 5.0  # nats above the first loss
MARGIN = 0.01  # nats below a constant guess
LOSS_NAMES = ("mean", "first", "last")
FIRST_STEPS = 300  # in which a loss may still be that of a constant guess
BATCHES, EVERY, MAX_NUMBERS = 20, 10, 1 << 16  # whose targets are kept; steps between them; numbers in each


class ConstantGuess:
    """Some of the last targets, to tell whether a model does better than the best guess that is the same for all.

    Args:
        likelihood: whose loss is compared.
    """

    def __init__(self, likelihood: Likelihood):
        self.likelihood = likelihood
        self._batches: deque[Tensor] = deque(maxlen=BATCHES)
        self._output: Tensor | None = None

    def record(self, f: Tensor, y: Any, step: int) -> None:
        """Keep the targets of a batch, now and then."""
        if step % EVERY == 0 and isinstance(y, Tensor) and y.numel() <= MAX_NUMBERS:
            self._batches.append(y.detach().flatten(0, f.ndim - 2))
            self._output = f.detach()[..., :1, :]

    def loss(self) -> float | None:
        """The loss of that guess, or None if that is not known."""
        if self._output is None or len(self._batches) < BATCHES:
            return None
        return self.likelihood.constant_loss(self._output, torch.cat([*self._batches]))


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

    def add(self, loss: Tensor, step: int, guess: ConstantGuess | None = None) -> None:
        """Record the loss of ``step``, counted from 0; every 100 steps it is checked, and one warning given."""
        if self.mean is None or self.first is None:
            self.mean = self.first = loss
        self.mean, self.last = torch.lerp(self.mean, loss, 1 / min(step + 1, SPAN)), loss
        if (step + 1) % SPAN == 0 and not self._warned:
            diagnosis = self.diagnosis()
            if not diagnosis and guess is not None and step + 1 >= FIRST_STEPS:
                diagnosis = self._stuck(guess.loss())
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

    def _stuck(self, constant: float | None) -> str:
        """What to do if the loss is no better than the best constant guess's, or nothing."""
        if constant is None or self.mean is None or float(self.mean) / self.models < constant - MARGIN:
            return ""
        return (
            f"the loss averaged over the last {SPAN} steps is {float(self.mean) / self.models:.3g}, no better than "
            f"guessing the same for every input, {constant:.3g}: lower kl_weight or prior_var if the noise is too "
            "much, change lr, and check that inputs and targets belong together"
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
