"""Classification: one of c classes, or independent yes/no targets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from eigenoise import checks
from eigenoise.distributions.mixtures import BernoulliMixture, CategoricalMixture
from eigenoise.likelihoods.base import Likelihood, along_axes


class CategoricalLikelihood(Likelihood):
    """y ∈ {0, ..., c−1} with logits ``f (..., b, c)``; the classes are on the last axis."""

    target_axes = 0

    def check(self, f: Tensor, y: Tensor) -> None:
        """Targets are integers in range, one for each row of logits."""
        if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool:
            kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(f"y must be a tensor of class indices (torch.long), but {kind} came")
        checks.shape("y", y, tuple(f.shape[:-1]), "the classes belong on the model's last axis")
        if y.numel():
            low, high = torch.aminmax(y)
            if int(low) < 0 or int(high) >= f.shape[-1]:
                raise ValueError(
                    f"y must hold classes from 0 to {f.shape[-1] - 1}, as the model has {f.shape[-1]} outputs, "
                    f"but it holds {int(low)} to {int(high)}"
                )

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log softmax(f)[y]."""
        flat = functional.cross_entropy(f.flatten(0, -2), y.flatten().long(), reduction="none")
        return -flat.reshape(y.shape)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Classes drawn from softmax(f)."""
        flat = f.softmax(-1).flatten(0, -2)
        return torch.multinomial(flat, 1, generator=generator).reshape(f.shape[:-1])

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """One-hot(y) − softmax(f)."""
        return functional.one_hot(y.long(), f.shape[-1]).to(f.dtype) - f.softmax(-1)

    def fisher_vectors(self, f: Tensor) -> Tensor:
        """√p_c·(e_c − p) for each class c: one backward pass for each."""
        p = f.softmax(-1)
        return (along_axes(torch.ones_like(f)) - p) * p.movedim(-1, 0).unsqueeze(-1).sqrt()

    def predictive(self, f: Tensor, generator: torch.Generator | None = None) -> CategoricalMixture:
        """The mean of the samples' class probabilities."""
        return CategoricalMixture(f)


class BernoulliLikelihood(Likelihood):
    """y ∈ {0, 1}ᵈ with logits ``f (..., b, d)``, the d targets independent given the weights."""

    def check(self, f: Tensor, y: Tensor) -> None:
        """Targets are zeros and ones in the shape of the output."""
        checks.floating("y", y)
        remedy = "use y.unsqueeze(-1)" if y.shape == f.shape[:-1] else ""
        checks.shape("y", y, tuple(f.shape), remedy)
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError("y must hold only 0 and 1")

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Log p(y | f), summed over the d targets."""
        return -functional.binary_cross_entropy_with_logits(f, y.to(f.dtype), reduction="none").sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Zeros and ones drawn with probability sigmoid(f)."""
        return torch.bernoulli(f.sigmoid(), generator=generator)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Y − sigmoid(f)."""
        return y - f.sigmoid()

    def fisher_vectors(self, f: Tensor) -> Tensor:
        """√(p(1 − p)) along each output."""
        p = f.sigmoid()
        return along_axes((p * (1 - p)).sqrt())

    def predictive(self, f: Tensor, generator: torch.Generator | None = None) -> BernoulliMixture:
        """The mean of the samples' probabilities."""
        return BernoulliMixture(f)
