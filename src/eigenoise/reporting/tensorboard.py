"""TensorBoard: scalars, and histograms of each layer's means, standard deviations and R."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from eigenoise.fisher import Eigen
from eigenoise.optim.base import BayesianOptimizer


class Board:
    """Writes what TensorBoard reads; ``tensorboard --logdir FOLDER`` shows it.

    Args:
        folder: of one run.

    Raises:
        ImportError: without the package.
    """

    def __init__(self, folder: str | os.PathLike):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard is not installed: pip install 'eigenoise[tensorboard]'") from error
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def scalars(self, step: int, **values: float) -> None:
        """Adds a point to the curve of each name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def histograms(self, step: int, optimizer: Optimizer) -> None:
        """Adds histograms of each layer's means and standard deviations, and of log10 of R where there is one.

        No-op for an optimiser without a posterior, or while λ is 0.
        """
        if not isinstance(optimizer, BayesianOptimizer) or optimizer.param_groups[0]["kl_weight"] == 0:
            return
        for name, q in optimizer.posterior.items():
            self._add(f"mean/{name}", q.mean, step)
            self._add(f"stddev/{name}", q.stddev, step)
        for slot in optimizer.slots:
            fisher = getattr(slot, "fisher", None)
            if isinstance(fisher, Eigen):
                self._add(f"log10 R/{slot.name}", fisher.R.clamp_min(1e-30).log10(), step)

    def _add(self, name: str, values: Tensor, step: int) -> None:
        self._writer.add_histogram(name, values.detach().float().cpu().numpy(), step)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()
