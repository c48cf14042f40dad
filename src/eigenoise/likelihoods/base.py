"""What every likelihood is: the link between a network's output ``f`` and a target ``y``."""

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

Observer = Callable[[Tensor, Tensor, Callable[[], None]], None]  # output, loss, and how the likelihood learns from it


def along_axes(root: Tensor) -> Tensor:
    """The vectors ``root_i·e_i`` of a diagonal Fisher with square root ``root (..., d)``: ``(d, ..., d)``."""
    d = root.shape[-1]
    eye = torch.eye(d, dtype=root.dtype, device=root.device)
    return root * eye.reshape(d, *(1,) * (root.ndim - 1), d)


def at_least_float32(f: Tensor) -> Tensor:
    """An output of mixed-precision arithmetic in float32; any other as it is."""
    return f.float() if f.dtype in (torch.float16, torch.bfloat16) else f


class Likelihood(ABC):
    """p(y | f) for outputs ``f`` whose last axis holds one target's parameters.

    Every index before the last axis is one likelihood term, and ``num_data`` counts terms. With ``stack=s`` the outputs
    are those of s models at once, ``(..., s, b, ·)``, each with a likelihood of its own.

    Args:
        stack: the number of models that share one forward pass, or None for an ordinary model.
    """

    target_axes = 1  # axes of one target: its last, or none where a target is a single class index

    def __init__(self, stack: int | None = None):
        self.stack = None if stack is None else checks.integer("stack", stack)
        self._observer: Observer | None = None

    # What a subclass says.

    @abstractmethod
    def check(self, f: Tensor, y: Tensor) -> None:
        """Raise ValueError or TypeError unless ``y`` can be a target for the output ``f``."""

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log p(y | f) for each term, shape ``f.shape[:-1]``; the mean over q where the likelihood has a posterior."""

    @abstractmethod
    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Targets drawn from the model's own predictive, for the sampled Fisher."""

    @abstractmethod
    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """∂ log p(y | f)/∂f, shape of ``f``."""

    @abstractmethod
    def fisher_vectors(self, f: Tensor) -> Tensor:
        """Vectors u ``(v, *f.shape)`` with Σᵥ u·uᵀ the Fisher of f exactly, for each term."""

    @abstractmethod
    def predictive(self, f: Tensor, generator: torch.Generator | None = None) -> Predictive:
        """The mixture over weight samples whose outputs are ``f`` ``(k, ..., b, ·)``."""

    # What a likelihood with a posterior of its own replaces.

    def kl(self) -> Tensor:
        """KL from the likelihood's own posterior to its prior; 0 if it has none."""
        return torch.zeros(() if self.stack is None else (self.stack,))

    def observe(self, f: Tensor, y: Tensor) -> None:  # noqa: B027
        """See one training batch; used by likelihoods that learn."""

    def update(self, num_data: int, samples: int = 1) -> None:  # noqa: B027
        """Learn from what was observed since the last call, when each example was seen ``samples`` times."""

    def discard(self) -> None:  # noqa: B027
        """Forget what was observed since the last ``update``."""

    def averages(self) -> list[Averaged]:
        """What it learns from, with what was observed since the last ``update``."""
        return []

    def config(self) -> dict[str, Any]:
        """Constructor arguments, as JSON knows them."""
        return {"stack": self.stack}

    def state_dict(self) -> dict[str, Any]:
        """What was learned, as tensors and plain dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, but the state holds {sorted(state)}")

    # What follows from it.

    def nll(self, f: Tensor, y: Tensor) -> Tensor:
        """−log p(y | f), the mean over the batch (with ``stack``, the sum of the models' means): what to minimise.

        With a stack, weight samples may stand in front: f ``(k, s, b, ·)`` with y ``(s, b, ·)``.
        """
        f, y = self.fit(f, y)
        loss, learn = self._loss(f, y)
        if self._observer is not None and loss.requires_grad:
            self._observer(f, loss, learn)
        return loss

    def _loss(self, f: Tensor, y: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """The loss, and what to call if it is backpropagated, which must not hold its graph."""
        log_prob, output = self.log_prob(f, y), f.detach()
        loss = -log_prob.mean() if self.stack is None else log_prob.mean() * -self.stack
        return loss, lambda: self.observe(output, y)

    def fit(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Output and targets made to fit: at least float32, of one dtype, targets repeated for each weight sample.

        Raises:
            ValueError, TypeError: if they cannot belong together.
        """
        checks.floating("the model's output", f)
        if f.ndim < 2:
            raise ValueError(
                f"the model's output must have the shape (b, d), a batch axis and a target axis, but {tuple(f.shape)} "
                "came; use f.unsqueeze(-1) for a single target"
            )
        if self.stack is not None and (f.ndim < 3 or f.shape[-3] != self.stack):
            raise ValueError(
                f"the model's output must have the shape (..., {self.stack}, b, d) with stack={self.stack}, "
                f"but {tuple(f.shape)} came"
            )
        f = at_least_float32(f)
        if isinstance(y, Tensor):
            if self.stack is not None and y.ndim == f.ndim - 2 + self.target_axes:
                y = y.expand(f.shape[0], *y.shape)
            y = y.to(f.dtype) if y.is_floating_point() else y
        self.check(f, y)
        return f, y

    def terms(self, f: Tensor) -> int:
        """How many likelihood terms ``nll`` took the mean over."""
        return f.shape[:-1].numel() // (self.stack or 1)

    @contextmanager
    def observed_by(self, observer: Observer) -> Iterator[None]:
        """Within the block, show ``observer`` every loss of ``nll``.

        Raises:
            RuntimeError: if another observer is looking: one likelihood serves one optimiser at a time.
        """
        if self._observer is not None:
            raise RuntimeError("this likelihood is already watched by another optimiser's sampled_params() block")
        self._observer = observer
        try:
            yield
        finally:
            self._observer = None
