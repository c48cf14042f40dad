"""What all Bayesian optimisers know of their posterior and keep over a restart."""

from __future__ import annotations

import copy
from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from eigenoise import checks
from eigenoise.inference.elbo import ElboTerms, expected_log_likelihood
from eigenoise.inference.posterior import Entry, Posterior, total_kl
from eigenoise.layers.assignment import describe
from eigenoise.linalg.kronecker import full_precision
from eigenoise.optim import state
from eigenoise.optim.sampling import SamplingOptimizer
from eigenoise.optim.weight_swap import Slot


class VariationalOptimizer(SamplingOptimizer):
    """A ``torch.optim.Optimizer`` that fits a posterior: look at it, measure it, save it; arguments as below it."""

    # What a subclass says.

    @abstractmethod
    def _distribution(self, slot: Slot) -> Distribution:
        """The slot's current posterior."""

    @abstractmethod
    def _slot_kl(self, slot: Slot) -> Tensor:
        """KL of the slot's posterior to the prior."""

    @abstractmethod
    def _slot_state(self, slot: Slot) -> dict[str, Tensor]:
        """The slot's tensors that survive a restart."""

    _more_state: tuple[str, ...] = ()  # names of what ``state_dict`` has beside the usual

    # Looking.

    @property
    @torch.no_grad()
    def posterior(self) -> Posterior:
        """The current posterior, detached from training: ``posterior["layer.name"]`` is a distribution."""
        self.blocks.refuse_inside("posterior")
        self.blocks.swap.read()
        with full_precision(self.params[0].device):
            entries = {
                slot.name: Entry.of(self._distribution(slot), slot.layer)
                for slot in self.slots
                if self.treatments[slot.name].noisy
            }
        return Posterior.of(self.model, entries, copy.deepcopy(self.likelihood))

    @torch.no_grad()
    def kl(self) -> Tensor:
        """KL(q(w) ‖ p(w)) to the prior, all layers together; ``(s,)`` for a stack of models."""
        self.blocks.refuse_inside("kl()")
        self.blocks.swap.read()
        with full_precision(self.params[0].device):
            kls = [(slot.layer.stack, self._slot_kl(slot)) for slot in self.slots if self.treatments[slot.name].noisy]
        return total_kl(kls, self.likelihood.stack or 1, self.params[0].device)

    def elbo(
        self,
        x: Tensor,
        y: Tensor,
        samples: int = 10,
        chunk_size: int = 1024,
        generator: torch.Generator | None = None,
    ) -> ElboTerms:
        """The evidence lower bound (eq. 8), the expected log-likelihood measured on ``x, y`` and scaled to N.

        Args:
            x: inputs, a batch or the whole training set.
            y: their targets.
            samples: weight samples for the expectation.
            chunk_size: inputs that go through the model at once.
            generator: of those samples; by default a fresh one, so that equal calls give equal results.
        """
        checks.integer("samples", samples)
        generator = generator or torch.Generator(self.params[0].device).manual_seed(0)
        checks.integer("chunk_size", chunk_size)
        posterior = None if self.noisy else self.posterior  # trained without noise, q is a Laplace approximation

        def block() -> AbstractContextManager:
            return (
                self.sampled_params(generator) if posterior is None else posterior.sampled_params(self.model, generator)
            )

        blocks = -(-samples // (self.parallel or 1))
        mean = expected_log_likelihood(self.model, self.likelihood, block, x, y, blocks, chunk_size)
        return self._terms(mean)

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
        group = self.param_groups[0]
        n = group["num_data"]
        return ElboTerms(n * log_likelihood, self.kl(), self.likelihood.kl(), group["kl_weight"], n)

    def __repr__(self) -> str:
        """The hyperparameters and which parameter got which treatment."""
        about = ", ".join(f"{k}={v}" for k, v in self.param_groups[0].items() if k != "params" and v is not None)
        kinds = {slot.name: (slot.layer, self._describe(slot)) for slot in self.slots}
        return "\n".join([f"{type(self).__name__}({about})", *describe(self.model, kinds)])

    @abstractmethod
    def _describe(self, slot: Slot) -> str:
        """A few words on the slot's treatment."""

    # Keeping.

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs beside the model's own state dict; plain tensors, numbers and dicts."""
        self.blocks.refuse_inside("state_dict()")
        with torch.no_grad():
            self.blocks.swap.read()
        own = {
            "method": type(self).__name__,
            "steps": self.steps,
            "losses": self.losses.state(),
            "generator": self.generator.get_state(),
            "seed": self.lockstep.seed,
            "skipped": self.skipped,
            "likelihood": self.likelihood.state_dict(),
            "slots": self._tensors(),
        }
        return {**super().state_dict(), state.KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave; the dict is left as it is.

        Raises:
            ValueError: if it is another method's or another model's, before anything changes.
        """
        self.blocks.refuse_inside("load_state_dict()")
        tensors = self._tensors()
        device = self.generator.device
        own = state.checked(state_dict, type(self).__name__, tensors, self.param_groups[0], device, self._more_state)
        self._check_hyper(state_dict["param_groups"][0])
        self.likelihood.load_state_dict(own["likelihood"])
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        for slot, parts in tensors.items():
            for name, tensor in parts.items():
                tensor.copy_(own["slots"][slot][name])
        self.steps = own["steps"]
        self.losses.load(own["losses"], self.params[0].device)
        self.generator.set_state(own["generator"].cpu())
        self.skips.count = own["skipped"]
        self.lockstep.resume(own["seed"], self.steps + self.skipped)
        self._forget()

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        return {slot.name: self._slot_state(slot) for slot in self.slots}
