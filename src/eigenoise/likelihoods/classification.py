"""Classification: one of c classes, or independent binary targets."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from eigenoise import checks
from eigenoise.distributions.mixtures import BernoulliMixture, CategoricalMixture
from eigenoise.likelihoods.base import Likelihood, check_real_targets, scaled_unit_vectors

MIN_TARGETS_PER_CLASS = 20  # for an entropy of frequencies


class CategoricalLikelihood(Likelihood):
    """y ∈ {0, ..., c−1} with logits ``f (..., b, c)``."""

    target_axes = 0

    def check(self, f: Tensor, y: Tensor) -> None:
        """Require class indices ``(..., b)`` between 0 and c − 1."""
        if not isinstance(y, Tensor) or y.is_floating_point() or y.dtype == torch.bool:
            kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise TypeError(f"y must be a tensor of class indices (torch.long), got {kind}")
        checks.shape("y", y, tuple(f.shape[:-1]), "the model's last axis must hold the classes")
        low, high = (int(bound) for bound in torch.aminmax(y))
        if low < 0 or high >= f.shape[-1]:
            raise ValueError(
                f"y must hold classes from 0 to {f.shape[-1] - 1}, as the model has {f.shape[-1]} outputs, "
                f"got {low} to {high}"
            )

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return log softmax(f)[y], ``(..., b)``."""
        flat = functional.cross_entropy(f.flatten(0, -2), y.flatten().long(), reduction="none")
        return -flat.reshape(y.shape)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sample classes ``(..., b)`` from softmax(f)."""
        flat = f.softmax(-1).flatten(0, -2)
        return torch.multinomial(flat, 1, generator=generator).reshape(f.shape[:-1])

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Return onehot(y) − softmax(f), ``(..., b, c)``."""
        return functional.one_hot(y.long(), f.shape[-1]).to(f.dtype) - f.softmax(-1)

    def fisher_vectors(self, f: Tensor) -> Tensor:
        """Return √p_c·(e_c − p) for each class c, ``(c, ..., b, c)``."""
        p = f.softmax(-1)
        return (scaled_unit_vectors(torch.ones_like(f)) - p) * p.movedim(-1, 0).unsqueeze(-1).sqrt()

    def constant_loss(self, f: Tensor, y: Tensor) -> float | None:
        """Return the entropy of the classes' frequencies; None if there are too few targets to tell."""
        if len(y) < MIN_TARGETS_PER_CLASS * f.shape[-1]:
            return None
        return float(torch.special.entr(torch.bincount(y.long()) / len(y)).sum())

    def predictive(self, f: Tensor, generator: torch.Generator | None = None) -> CategoricalMixture:
        """Return the mixture of the weight samples' class probabilities."""
        return CategoricalMixture(f)


class BernoulliLikelihood(Likelihood):
    """y ∈ {0, 1}ᵈ with logits ``f (..., b, d)``; the d targets are independent given the weights."""

    def check(self, f: Tensor, y: Tensor) -> None:
        """Require zeros and ones of the shape of ``f``."""
        check_real_targets(y, f.shape)
        if not bool(((y == 0) | (y == 1)).all()):
            raise ValueError("y must hold only 0 and 1")

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """Return log p(y | f), summed over the d targets, ``(..., b)``."""
        return -functional.binary_cross_entropy_with_logits(f, y.to(f.dtype), reduction="none").sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sample zeros and ones ``(..., b, d)`` with probabilities sigmoid(f)."""
        return torch.bernoulli(f.sigmoid(), generator=generator)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """Return y − sigmoid(f), ``(..., b, d)``."""
        return y - f.sigmoid()

    def fisher_vectors(self, f: Tensor) -> Tensor:
        """Return √(p(1 − p)) along each output, ``(d, ..., b, d)``."""
        p = f.sigmoid()
        return scaled_unit_vectors((p * (1 - p)).sqrt())

    def constant_loss(self, f: Tensor, y: Tensor) -> float:
        """Return the entropies of the targets' frequencies, added up."""
        p = y.mean(0)
        return float((torch.special.entr(p) + torch.special.entr(1 - p)).sum())

    def predictive(self, f: Tensor, generator: torch.Generator | None = None) -> BernoulliMixture:
        """Return the mixture of the weight samples' probabilities."""
        return BernoulliMixture(f)
