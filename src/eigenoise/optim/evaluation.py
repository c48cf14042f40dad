"""What can be asked of a posterior while it is trained: distributions, predictions, the KL, the ELBO."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from eigenoise import checks
from eigenoise.distributions.mixtures import Predictive
from eigenoise.inference.elbo import ElboTerms, expected_log_likelihood
from eigenoise.inference.posterior import Entry, Posterior, total_kl
from eigenoise.inference.predict import predict
from eigenoise.inference.turns import PATIENCE, exclusive
from eigenoise.likelihoods import Likelihood
from eigenoise.linalg import full_precision
from eigenoise.optim.blocks import Blocks
from eigenoise.optim.monitoring import RunningLoss


class PosteriorAccess(ABC):
    """The part of an optimiser that shows its posterior and changes nothing."""

    model: nn.Module
    likelihood: Likelihood
    noisy: bool
    batch_dim: int
    parallel: int | None
    params: list[Tensor]
    slots: list[Any]
    blocks: Blocks
    losses: RunningLoss

    @property
    @abstractmethod
    def group(self) -> dict[str, Any]:
        """The hyperparameters."""

    @abstractmethod
    def sampled_params(self, generator: torch.Generator | None = None) -> AbstractContextManager[None]:
        """A block within which the model holds weights W ~ q."""

    @property
    @torch.no_grad()
    def posterior(self) -> Posterior:
        """The current posterior, detached from training: ``posterior["layer.name"]`` is a distribution."""
        with exclusive(self.model, PATIENCE), full_precision(self.params[0].device):
            self.blocks.refuse_inside("posterior")
            self.blocks.read_means()
            entries = {
                slot.name: Entry.of(slot.distribution(self.group), slot.layer)
                for slot in self.slots
                if slot.has_posterior
            }
            return Posterior.of(self.model, entries, copy.deepcopy(self.likelihood))

    def predict(
        self,
        x: Any,
        *,
        samples: int = 32,
        chunk_size: int = 1024,
        batch_norm: Any = None,
        generator: torch.Generator | None = None,
    ) -> Predictive:
        """``eigenoise.predict`` of this optimiser's model: p(y | x, D) as a mixture over weight samples.

        Args:
            x: inputs ``(b, ...)``, or an iterable of batches, such as a DataLoader.
            samples: weight samples.
            chunk_size: inputs that go through the model at once.
            batch_norm: training batches to recompute batch norm's averages from, as for ``eigenoise.predict``.
            generator: of the samples; by default a fresh one with a fixed seed, so that equal calls give equal results.
        """
        return predict(
            self.model,
            self,
            x,
            samples=samples,
            chunk_size=chunk_size,
            batch_norm=batch_norm,
            generator=generator,
        )

    @torch.no_grad()
    def kl(self) -> Tensor:
        """KL(q(w) ‖ p(w)) to the prior, all layers together; ``(s,)`` for a stack of models."""
        with exclusive(self.model, PATIENCE), full_precision(self.params[0].device):
            self.blocks.refuse_inside("kl()")
            self.blocks.read_means()
            kls = [(slot.layer.stack, slot.kl(self.group)) for slot in self.slots if slot.has_posterior]
        return total_kl(kls, self.likelihood.stack or 1, self.params[0].device)

    def elbo(
        self,
        x: Tensor,
        y: Tensor,
        samples: int = 10,
        chunk_size: int = 1024,
        batch_norm: Any = None,
        generator: torch.Generator | None = None,
    ) -> ElboTerms:
        """The evidence lower bound (eq. 8), the expected log-likelihood measured on ``x, y`` and scaled to N.

        Args:
            x: inputs, a batch or the whole training set.
            y: their targets.
            samples: weight samples for the expectation.
            chunk_size: inputs that go through the model at once.
            batch_norm: training batches to recompute batch norm's averages from, as for ``eigenoise.predict``.
            generator: of those samples; by default a fresh one, so that equal calls give equal results.
        """
        posterior = None if self.noisy else self.posterior  # trained without noise, q is a Laplace approximation
        generator = generator or torch.Generator(self.params[0].device).manual_seed(0)

        def block() -> AbstractContextManager:
            if posterior is None:
                return self.sampled_params(generator)
            return posterior.sampled_params(self.model, generator)

        blocks = -(-checks.integer("samples", samples) // (self.parallel or 1))
        expected = expected_log_likelihood(self.model, self.likelihood, block, x, y, blocks, chunk_size, batch_norm)
        return self._terms(expected)

    def elbo_terms(self) -> ElboTerms:
        """The evidence lower bound (eq. 8) with the expected log-likelihood averaged over about the last 100 steps.

        It costs no forward pass. For a stack of models the log-likelihood is the mean over models.

        Raises:
            RuntimeError: before the first step.
        """
        if not self.noisy:
            raise RuntimeError(
                "elbo_terms() averages losses of sampled weights, and there are none here; use elbo(x, y)"
            )
        if self.losses.mean is None:
            raise RuntimeError("elbo_terms() averages training losses, and there was no step yet; use elbo(x, y)")
        return self._terms(-self.losses.mean / (self.likelihood.stack or 1))

    def _terms(self, log_likelihood: Tensor) -> ElboTerms:
        n = self.group["num_data"]
        kl_noise = self.likelihood.kl().to(log_likelihood.device)
        return ElboTerms(n * log_likelihood, self.kl(), kl_noise, self.group["kl_weight"], n)
