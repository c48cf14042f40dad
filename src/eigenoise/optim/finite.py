"""Steps that cannot be made because a number is NaN or infinite: said with a remedy, or skipped and counted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from eigenoise import checks

POLICIES = ("raise", "skip")
MOST = 20  # steps in a row that are skipped


def what_is_not(step: int, loss: Tensor, gradients: Sequence[Tensor], before: str) -> checks.NotFiniteError:
    """An error that names what is not finite at ``step``, and what to do about it; ``before``, what led to it."""
    if not checks.all_finite([loss]):
        culprit, remedy = "the loss", "check this batch's inputs and targets, or lower lr"
    elif not checks.all_finite(list(gradients)):
        culprit, remedy = "a gradient", "check this batch's inputs and targets, or lower lr"
    else:
        culprit, remedy = "a statistic or the step", "check this batch's inputs, or raise damping or kl_weight"
    return checks.NotFiniteError(
        f"{culprit} is NaN or infinite at step {step}: the mean weights are unchanged; {before or remedy}"
    )


class Skips:
    """What becomes of such steps.

    Args:
        policy: ``"raise"``, or ``"skip"`` to warn once and count.

    Attributes:
        count: of steps that were skipped.
    """

    def __init__(self, policy: str):
        self.policy = checks.choice("not_finite", policy, POLICIES)
        self.count = self._in_a_row = 0
        self._warned = False

    def made(self) -> None:
        """A step was made."""
        self._in_a_row = 0

    def meet(self, error: checks.NotFiniteError) -> None:
        """Count a step that cannot be made, or raise ``error``; too many in a row are raised too."""
        if self.policy == "raise":
            raise error
        self.count += 1
        self._in_a_row += 1
        if self._in_a_row >= MOST:
            raise error
        if not self._warned:
            self._warned = True
            warnings.warn(f"{error}; the step is skipped, and so are others like it", RuntimeWarning, stacklevel=4)
