"""The likelihood interface: p(y | f) for a network's output ``f`` and a target ``y``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from eigenoise import checks
from eigenoise.distributions.mixtures import Predictive
from eigenoise.linalg.moving_average import Averaged

Observer = Callable[[Tensor, Any, Tensor, Callable[[], None]], None]  # output, targets, loss, a call that records


def scaled_unit_vectors(scale: Tensor) -> Tensor:
    """Return the vectors ``scale_i·e_i``, ``(d, ..., d)`` for ``scale (..., d)``: the root of a diagonal Fisher."""
    d = scale.shape[-1]
    eye = torch.eye(d, dtype=scale.dtype, device=scale.device)
    return scale * eye.reshape(d, *(1,) * (scale.ndim - 1), d)


def at_least_float32(f: Tensor) -> Tensor:
    """Convert half precision to float32; return other dtypes unchanged."""
    return f.float() if f.dtype in (torch.float16, torch.bfloat16) else f


def check_real_targets(y: Tensor, shape: torch.Size) -> None:
    """Raise TypeError or ValueError unless ``y`` is a floating-point tensor of exactly this ``shape``."""
    checks.floating("y", y)
    if y.shape != shape:
        checks.shape("y", y, tuple(shape), "use y.unsqueeze(-1)" if y.shape == shape[:-1] else "")


class Likelihood(ABC):
    """p(y | f) for outputs ``f`` whose last axis holds the parameters of one target.

    Every index before the last axis is one likelihood term, and ``num_data`` counts terms. With ``stack=s`` the outputs
    are those of s models, ``(..., s, b, ·)``, and each model has its own likelihood parameters.

    Args:
        stack: the number of models that share one forward pass, or None for a single model.
    """

    target_axes = 1  # axes of one target: 1, or 0 if a target is a class index
    learns_noise = False  # whether the level of the noise is learned beside the weights

    def __init__(self, stack: int | None = None):
        self.stack = None if stack is None else checks.integer("stack", stack)
        self._observer: Observer | None = None

    @abstractmethod
    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise ValueError or TypeError unless ``y`` is a valid target for the output ``f``."""

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return log p(y | f) of each term, ``f.shape[:-1]``; its mean over q if the likelihood has a posterior."""

    @abstractmethod
    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sample targets from p(y | f), for the Fisher by sampling."""

    @abstractmethod
    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Return ∂ log p(y | f)/∂f, of the shape of ``f``."""

    @abstractmethod
    def fisher_vectors(self, f: Tensor) -> Tensor:
        """Return vectors u ``(v, *f.shape)`` whose sum Σᵥ u·uᵀ is the exact Fisher of f for each term."""

    @abstractmethod
    def predictive(self, f: Tensor, generator: torch.Generator | None = None) -> Predictive:
        """Return the mixture over weight samples with outputs ``f (k, ..., b, ·)``."""

    # Likelihoods with a posterior of their own override these.

    def kl(self) -> Tensor:
        """Return the KL divergence from the likelihood's posterior to its prior, ``()`` or ``(s,)``; 0 without one."""
        return torch.zeros(() if self.stack is None else (self.stack,))

    def constant_loss(self, f: Tensor, y: Tensor) -> float | None:
        """Return the mean loss of the best guess that is the same for all inputs, or None if that is not known.

        Args:
            f: an output, which tells how many targets there are.
            y: targets without the axes of a stack or of a batch's positions, ``(n, ...)``.
        """
        return None

    def observe(self, f: Tensor, y: Tensor) -> None:  # noqa: B027
        """Record the statistics of a training batch."""

    def update(self, num_data: int, samples: int = 1) -> None:  # noqa: B027
        """Update the posterior from the batches recorded since the last call, with ``samples`` weight samples each."""

    def discard(self) -> None:  # noqa: B027
        """Discard the batches recorded since the last ``update``."""

    def averages(self) -> list[Averaged]:
        """Return the moving averages, each with the statistics recorded since the last ``update``."""
        return []

    def config(self) -> dict[str, Any]:
        """Return the constructor arguments as JSON values."""
        return {"stack": self.stack}

    def state_dict(self) -> dict[str, Any]:
        """Return the learned state as tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, got one that holds {sorted(state)}")

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """Return the training loss: the mean of −log p(y | f) over the batch; with ``stack``, the sum of these means.

        With a stack, weight samples may be a leading axis: f ``(k, s, b, ·)`` with y ``(s, b, ·)``.

        Raises:
            ValueError, TypeError: if the batch is empty, or ``f`` and ``y`` do not fit together.
        """
        f, y = self.fit(f, y)
        loss, record = self._loss(f, y)
        if self._observer is not None and loss.requires_grad:
            self._observer(f, y, loss, record)
        return loss

    def _loss(self, f: Tensor, y: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Return the loss and a call that records the batch; the call holds no reference to the autograd graph."""
        log_prob, output = self.log_prob(f, y), f.detach()
        loss = -log_prob.mean() if self.stack is None else log_prob.mean() * -self.stack
        return loss, lambda: self.observe(output, y)

    def fit(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return output and targets in one dtype, at least float32, with targets repeated for each weight sample.

        Raises:
            ValueError, TypeError: if the batch is empty, or ``f`` and ``y`` do not fit together.
        """
        checks.floating("the model's output", f)
        if f.ndim < 2:
            raise ValueError(
                "the model's output must have the shape (b, d), a batch axis and a target axis, got "
                f"{tuple(f.shape)}; use f.unsqueeze(-1) for a single target"
            )
        if self.stack is not None and (f.ndim < 3 or f.shape[-3] != self.stack):
            raise ValueError(
                f"the model's output must have the shape (..., {self.stack}, b, d) with stack={self.stack}, "
                f"got {tuple(f.shape)}"
            )
        if not self.terms(f):
            raise ValueError(
                f"the batch is empty: the model's output has the shape {tuple(f.shape)}; skip this batch, in all "
                "processes if there are several"
            )
        f = at_least_float32(f)
        if isinstance(y, Tensor):
            if self.stack is not None and y.ndim == f.ndim - 2 + self.target_axes:
                y = y.expand(f.shape[0], *y.shape)
            y = y.to(f.dtype) if y.dtype != f.dtype and y.is_floating_point() else y
        self.check(f, y)
        return f, y

    def terms(self, f: Tensor) -> int:
        """Return the number of likelihood terms that ``nll`` averages over, for each model."""
        return f.shape[:-1].numel() // (self.stack or 1)

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Within the block, call ``observer`` with every loss of ``nll``.

        Raises:
            RuntimeError: if there is another observer: one likelihood serves one optimiser at a time.
        """
        if self._observer is not None:
            raise RuntimeError("this likelihood is already watched by another optimiser's sampled_params() block")
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None
