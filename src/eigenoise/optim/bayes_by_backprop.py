"""Bayes by Backprop: a factorised Gaussian posterior by gradients through the samples (Blundell et al. 2015)."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from torch.nn import functional

from eigenoise import checks
from eigenoise.layers.matrix_layer import BareParameter, MatrixLayer
from eigenoise.likelihoods import Likelihood
from eigenoise.optim.base import BayesianOptimizer
from eigenoise.optim.blocks import Sampling
from eigenoise.optim.weight_swap import Group, SideBySide, Slot
from eigenoise.parallel.ranks import Ranks


@final
class RhoSlot(Slot):
    """A slot with its standard deviation σ = softplus(ρ), elementwise."""

    def __init__(self, layer: MatrixLayer | BareParameter, has_posterior: bool, init_std: float):
        super().__init__(layer, has_posterior)
        self.rho = self.empty().fill_(math.log(math.expm1(init_std)))

    @property
    def std(self) -> Tensor:
        """σ."""
        return functional.softplus(self.rho)

    def draw(self, generator: torch.Generator, group: Group, ramp: float | None = None) -> None:
        """``sample`` from N(mean, σ²), or the mean itself."""
        if self.has_posterior:
            torch.addcmul(self.mean, self.std, self.white(generator), out=self.sample)
        else:
            self.sample.copy_(self.mean)

    def distribution(self, group: Group) -> Distribution:
        """Independent normals."""
        dims = len(self.layer.shape) if isinstance(self.layer, BareParameter) else 2
        return Independent(Normal(self.mean.clone(), self.std), dims)

    def kl(self, group: Group) -> Tensor:
        """Σ ½·[(σ² + μ²)/η − 1 + log(η/σ²)]."""
        std, prior_var = self.std, self.prior_var(group)
        terms = 0.5 * ((std.square() + self.mean.square()) / prior_var - 1 + math.log(prior_var) - 2 * std.log())
        return terms.sum() if self.layer.stack is None else terms.flatten(1).sum(-1)

    def state(self) -> dict[str, Tensor]:
        """ρ."""
        return {"rho": self.rho}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave."""
        self.rho.copy_(state["rho"])

    def describe(self) -> str:
        """A few words."""
        return "factorised Gaussian" if self.has_posterior else "point estimate"


@final
class BayesByBackprop(BayesianOptimizer):
    """Fits N(μ, diag(σ²)) by Adam on (μ, ρ), the same calling convention as the natural-gradient methods.

    The gradient by μ is that of the sampled weights, the gradient by σ that times the noise; both get the KL term's
    own. It needs no Fisher.

    Args:
        model: any ``nn.Module``. Wrapped in ``DistributedDataParallel``, each process draws noise of its own.
        num_data: N, the number of likelihood terms in the training set, of all processes together.
        likelihood: what the model's output means: a likelihood, ``"regression"`` or ``"classification"``.
        lr: Adam's step size, for μ and ρ alike.
        kl_weight: λ, the weight of the KL term.
        prior_var: η, the variance of the prior N(0, ηI): a number, ``"fan-in"``, which is 2/n for a layer with n inputs
            and 0.01 for parameters without, or numbers by the names of modules, with ``"fan-in"`` for those not named.
        betas: Adam's decay rates.
        eps: Adam's.
        init_std: σ at the start.
        samples: weight samples in one step: so many ``sampled_params()`` blocks come before each ``step()``.
        parallel: draw all samples of a step in one block; for models of ``StackedLinear`` layers alone.
        antithetic: every second sample of a step mirrors the one before.
        others: what parameters outside Linear and convolution layers get: ``"diagonal"``, a posterior, or ``"point"``.
        overrides: the same choice for a module's or parameter's name and everything below it.
        batch_dim: the axis that counts examples in sequences, 1 for sequence-first models.
        generator: source of all noise; by default one seeded from torch's global generator.
        not_finite: what ``step`` does when a number is NaN or infinite: ``"raise"``, or ``"skip"`` the step.
    """

    extra_state = ("adam",)

    def __init__(
        self,
        model: nn.Module,
        *,
        num_data: int,
        likelihood: Likelihood | str,
        lr: float = 0.01,
        kl_weight: float | str = "auto",
        prior_var: float | str | Mapping[str, float] = "fan-in",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        init_std: float = 0.05,
        samples: int = 1,
        parallel: bool = False,
        antithetic: bool = False,
        others: str = "diagonal",
        overrides: Mapping[str, str] | None = None,
        batch_dim: int = 0,
        generator: torch.Generator | None = None,
        not_finite: str = "raise",
    ):
        init_std = checks.number("init_std", init_std, open_low=True)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TypeError(f"betas must be a pair of numbers, got {betas!r}")
        betas = tuple(checks.number(f"betas[{i}]", beta, high=0.999999) for i, beta in enumerate(betas))  # type: ignore[assignment]
        super().__init__(
            model,
            likelihood=likelihood,
            hyper={
                "num_data": num_data,
                "lr": lr,
                "kl_weight": kl_weight,
                "prior_var": prior_var,
                "betas": betas,
                "eps": eps,
            },
            make_slot=lambda assignment: RhoSlot(assignment.layer, assignment.has_posterior, init_std),
            sampling=Sampling(samples, parallel, antithetic, generator=generator),
            noisy=True,
            others=others,
            overrides=overrides,
            batch_dim=batch_dim,
            not_finite=not_finite,
        )
        self._adam = torch.optim.Adam(self.group["params"], lr=lr, betas=betas, eps=eps, fused=True)
        if isinstance(self.blocks.swap, SideBySide):
            self.blocks.swap.keeps_gradients = True  # a sample's gradient belongs to its own noise
        self._caught: list[Tensor | None] = []
        self._handles: list[Any] = []

    def _group_params(self) -> list[Tensor]:
        return [*self.params, *(slot.rho for slot in self.slots if slot.has_posterior)]

    def _begin_block(self, generator: torch.Generator) -> AbstractContextManager:
        """Catch this block's own gradients: only they belong to this block's noise."""
        if self.parallel is None and torch.is_grad_enabled():
            self._caught = [None] * len(self.params)
            self._handles = [p.register_hook(functools.partial(self._catch, i)) for i, p in enumerate(self.params)]
        return nullcontext()

    def _catch(self, index: int, gradient: Tensor) -> None:
        caught = self._caught[index]
        self._caught[index] = gradient.detach().clone() if caught is None else caught + gradient.detach()

    def _end_block(self, trained: bool) -> None:
        """Add gradient × noise of this block to the gradient by σ, kept in ``rho.grad``."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if not trained:
            return
        swap, caught = self.blocks.swap, iter(self._caught)
        for i, slot in enumerate(self.slots):  # by_std is σ·ε times the gradient; the division by σ waits for the step
            if isinstance(swap, SideBySide):
                gradient = swap.gradients[i]
                by_std = (swap.samples[i] - slot.mean).mul_(0.0 if gradient is None else gradient).sum(0)
            else:
                by_std = slot.sample - slot.mean
                for view in slot.layer.views(by_std):
                    gradient = next(caught)
                    view.mul_(0.0 if gradient is None else gradient)
            if slot.has_posterior:
                slot.rho.grad = by_std if slot.rho.grad is None else slot.rho.grad.add_(by_std)

    def _discard(self) -> None:
        for slot in self.slots:
            slot.rho.grad = None

    def _shared(self, ranks: Ranks) -> list[Tensor]:
        """Gradients by σ, which belong to this rank's noise."""
        return [slot.rho.grad for slot in self.slots if slot.rho.grad is not None]

    def _update(self, loss: Tensor, terms: float) -> None:
        if not checks.all_finite([loss, *(p.grad for p in self.params if p.grad is not None)]):
            self._stop_at_nan(loss)
        group = self.group
        weight = group["kl_weight"] / group["num_data"]
        for slot in self.slots:
            prior_var = slot.prior_var(group)
            for view, param in zip(slot.layer.views(slot.mean), slot.layer.params, strict=True):
                if param.grad is not None:
                    if self.blocks_per_step > 1:
                        param.grad.div_(self.blocks_per_step)
                    param.grad.add_(view, alpha=weight / prior_var)
            if slot.has_posterior and slot.rho.grad is not None:
                std = slot.std
                by_std = (slot.rho.grad / self.blocks_per_step - weight) / std + (weight / prior_var) * std
                slot.rho.grad = by_std * torch.sigmoid(slot.rho)  # dσ/dρ
        self._adam.param_groups[0].update({k: group[k] for k in ("lr", "betas", "eps")})
        self._adam.step()
        self.blocks.swap.read()

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, Adam's moments included."""
        state = super().state_dict()
        state["eigenoise"]["adam"] = self._adam.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        self._adam.load_state_dict(copy.deepcopy(state_dict["eigenoise"]["adam"]))
