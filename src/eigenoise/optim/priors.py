"""An earlier posterior as the prior, layer by layer: what was learned before is kept where it was certain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal

from eigenoise import linalg
from eigenoise.distributions.matrix_normal import EigenMatrixNormal, MatrixNormal
from eigenoise.fisher import Fisher
from eigenoise.inference.posterior import Posterior

Basis = tuple[Tensor, Tensor]  # Q_S and Q_A
POWER_ITERATIONS = 20


class LayerPrior:
    """N(M₀, Λ₀⁻¹) over a layer's matrix ``(..., p, n)``, Λ₀ diagonal in a basis Q_S⊗Q_A or in that of the weights.

    Args:
        earlier: the distribution.
        dtype: of all tensors.
        device: of all tensors.

    Attributes:
        max_rate: the step size up to which a step cannot overshoot the prior, in the basis of ``set_basis``.

    Raises:
        TypeError: if it is no Gaussian of a posterior.
    """

    def __init__(self, earlier: Distribution, dtype: torch.dtype, device: torch.device | str | None):
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.mean = earlier.mean.to(**options)
        self.basis: Basis | None = None
        if isinstance(earlier, EigenMatrixNormal):
            self.basis, variance = (earlier.q_out.to(**options), earlier.q_in.to(**options)), earlier.eigen_variance
        elif isinstance(earlier, MatrixNormal):
            (out, q_out), (inputs, q_in) = (_eigh(side) for side in (earlier.cov_out, earlier.cov_in))
            self.basis, variance = (q_out.to(**options), q_in.to(**options)), linalg.outer(out, inputs)
        elif isinstance(earlier, Independent) and isinstance(earlier.base_dist, Normal):
            variance = earlier.variance
        else:
            raise TypeError(f"prior must hold Gaussians of a Posterior, got a {type(earlier).__name__}")
        self.precision = variance.to(**options).reciprocal()
        self.max_rate = 1.0

    def set_basis(self, fisher: Fisher) -> None:
        """Follow a Fisher whose basis is new."""
        self.max_rate = 1 / self.stretch(fisher, self.diagonal(fisher))

    def pull(self, W: Tensor) -> Tensor:
        """Λ₀·(W − M₀), the gradient of −log p(W)."""
        V = W - self.mean
        if self.basis is None:
            return self.precision * V
        q_out, q_in = self.basis
        return linalg.unrotate(q_out, self.precision * linalg.rotate(q_out, V, q_in), q_in)

    def diagonal(self, fisher: Fisher) -> Tensor:
        """The diagonal ``(..., p, n)`` of Λ₀ in the basis of ``fisher``: all that a trace with F needs."""
        own = None if fisher.factors is None else (fisher.factors.q_out, fisher.factors.q_in)
        if self.basis is None and own is None:
            return self.precision
        if own is None:
            changes: tuple[Tensor, ...] = self.basis or ()
        elif self.basis is None:
            changes = tuple(q.mT for q in own)
        else:
            changes = tuple(new.mT @ old for new, old in zip(own, self.basis, strict=True))
        out, inputs = (change.square() for change in changes)
        return out @ self.precision @ inputs.mT

    def stretch(self, fisher: Fisher, diagonal: Tensor) -> float:
        """How much more Λ₀ is than its ``diagonal`` D in the basis of ``fisher``, where it is most: at least 1.

        The largest eigenvalue of D^-½·Λ₀·D^-½, by power iteration: so much too far goes a step that is scaled by D⁻¹.
        """
        white = diagonal.rsqrt()
        v, size = white.clone(), torch.ones((), dtype=white.dtype)
        for _ in range(POWER_ITERATIONS):
            v = v / v.norm()
            v = white * fisher.rotate(self.pull(fisher.unrotate(white * v) + self.mean))
            size = v.norm()
        return max(1.0, float(size))

    def fingerprint(self) -> Tensor:
        """Two numbers that tell it from another."""
        return torch.stack([self.mean.double().sum(), self.precision.double().log().sum()])

    def kl(self, mean: Tensor, variance: Tensor, fisher: Fisher) -> Tensor:
        """KL of N(M, Σ) to it, Σ having ``variance (..., p, n)`` in the basis of ``fisher``, for each leading index.

        ½·[tr Λ₀Σ + (M − M₀)ᵀΛ₀(M − M₀) − d − log det Λ₀Σ].
        """
        squares = self.diagonal(fisher) * variance + self.pull(mean) * (mean - self.mean)
        each = squares - 1 - self.precision.log() - variance.log()
        return 0.5 * (each.flatten(-fisher.event_dims).sum(-1) if fisher.event_dims else each)


def layer_priors(prior: Posterior, fishers: Mapping[str, Fisher]) -> dict[str, LayerPrior]:
    """What ``prior`` holds of these layers.

    Raises:
        TypeError, ValueError: if it is no posterior, holds none of them, or does not fit one of them.
    """
    if not isinstance(prior, Posterior):
        raise TypeError(f"prior must be a Posterior, got a {type(prior).__name__}")
    unknown = [name for name in prior if name not in fishers]
    if unknown:
        raise ValueError(
            f"prior holds {unknown[0]!r}, which is no layer of the model or is treated otherwise here; the model has "
            f"{', '.join(map(repr, fishers))}: leave out what is not to be remembered"
        )
    priors = {}
    for name in prior:
        fisher, earlier = fishers[name], prior[name]
        if earlier.mean.shape != fisher.shape:
            raise ValueError(
                f"prior[{name!r}] must have the layer's shape {tuple(fisher.shape)}, got {tuple(earlier.mean.shape)}"
            )
        priors[name] = LayerPrior(earlier, fisher.options["dtype"], fisher.options["device"])
    return priors


def check_fingerprint(name: str, prior: LayerPrior, state: Mapping[str, Tensor]) -> None:
    """Check that a slot's state is of a run with the same prior.

    Raises:
        ValueError: if it is not.
    """
    saved = state.get("prior")
    if saved is None or not torch.allclose(saved.to(prior.fingerprint()), prior.fingerprint()):
        raise ValueError(f"the state is of a run with another prior for {name!r}, or without one")


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues above zero and eigenvectors, in double precision."""
    values, vectors = torch.linalg.eigh(matrix.double())
    return values.clamp_min(torch.finfo(matrix.dtype).eps * values.amax(-1, keepdim=True)), vectors
