"""Bayes by Backprop: a factorised Gaussian posterior by gradients through the samples (Blundell et al. 2015)."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal
from torch.nn import functional

from eigenoise import checks
from eigenoise.layers.assignment import Treatment
from eigenoise.layers.matrix_layer import BareParameter, MatrixLayer
from eigenoise.likelihoods import Likelihood
from eigenoise.optim.variational import VariationalOptimizer
from eigenoise.optim.weight_swap import SideBySide, Slot
from eigenoise.parallel.ranks import Ranks


class RhoSlot(Slot):
    """A slot with its spread σ = softplus(ρ), elementwise."""

    def __init__(self, layer: MatrixLayer | BareParameter, init_std: float, noisy: bool):
        super().__init__(layer)
        self.noisy = noisy
        self.rho = self.empty().fill_(math.log(math.expm1(init_std)))

    @property
    def std(self) -> Tensor:
        """σ."""
        return functional.softplus(self.rho)


class BayesByBackprop(VariationalOptimizer):
    """Fits N(μ, diag(σ²)) by Adam on (μ, ρ), the same calling convention as the natural-gradient methods.

    The gradient by μ is that of the sampled weights, the gradient by σ that times the noise; both get the KL term's
    own. It needs no Fisher.

    Args:
        model: any ``nn.Module``.
        num_data: N.
        likelihood: what the model's output means.
        lr: Adam's step size, for μ and ρ alike.
        kl_weight: λ.
        prior_var: η.
        betas: Adam's decay rates.
        eps: Adam's.
        init_std: σ at the start.
        **common: ``samples``, ``parallel``, ``antithetic``, ``others``, ``overrides``, ``batch_dim``, ``generator`` and
            ``not_finite`` as for ``SamplingOptimizer``.
    """

    noisy = True
    _more_state = ("adam",)

    def __init__(
        self,
        model: nn.Module,
        *,
        num_data: int,
        likelihood: Likelihood,
        lr: float = 0.01,
        kl_weight: float = 1.0,
        prior_var: float = 1.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        init_std: float = 0.05,
        **common: Any,
    ):
        self.init_std = checks.number("init_std", init_std, open_low=True)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise TypeError(f"betas must be a pair of numbers, but {betas!r} came")
        betas = tuple(checks.number(f"betas[{i}]", beta, high=0.999999) for i, beta in enumerate(betas))  # type: ignore[assignment]
        hyper = {"lr": lr, "kl_weight": kl_weight, "prior_var": prior_var, "betas": betas, "eps": eps}
        super().__init__(model, num_data=num_data, likelihood=likelihood, hyper=hyper, **common)
        self._adam = torch.optim.Adam(self.param_groups[0]["params"], lr=lr, betas=betas, eps=eps, fused=True)
        if isinstance(self.blocks.swap, SideBySide):
            self.blocks.swap.each = True  # a sample's gradient belongs to its own noise
        self._caught: list[Tensor | None] = []
        self._handles: list[Any] = []

    def _make_slot(self, treatment: Treatment) -> RhoSlot:
        return RhoSlot(treatment.layer, self.init_std, treatment.noisy)

    def _group_params(self) -> list[Tensor]:
        return [*self.params, *(slot.rho for slot in self.slots if slot.noisy)]

    def _draw(self, generator: torch.Generator, training: bool) -> None:
        for slot in self.slots:
            if slot.noisy:
                torch.addcmul(slot.mean, slot.std, slot.white(generator), out=slot.sample)
            else:
                slot.sample.copy_(slot.mean)

    def _begin_block(self, generator: torch.Generator) -> None:
        """Catch this block's own gradients: only they belong to this block's noise."""
        if self.parallel is None and torch.is_grad_enabled():
            self._caught = [None] * len(self.params)
            self._handles = [p.register_hook(functools.partial(self._catch, i)) for i, p in enumerate(self.params)]

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
                own = swap.gradients[i]
                by_std = (swap.samples[i] - slot.mean).mul_(0.0 if own is None else own).sum(0)
            else:
                by_std = slot.sample - slot.mean
                for view in slot.layer.views(by_std):
                    own = next(caught)
                    view.mul_(0.0 if own is None else own)
            if slot.noisy:
                slot.rho.grad = by_std if slot.rho.grad is None else slot.rho.grad.add_(by_std)

    def _discard(self) -> None:
        for slot in self.slots:
            slot.rho.grad = None

    def _share(self, ranks: Ranks) -> list[Tensor]:
        """Gradients by σ, which belong to this rank's noise."""
        return [slot.rho.grad for slot in self.slots if slot.rho.grad is not None]

    def _apply(self, loss: Tensor) -> None:
        if not checks.all_finite([loss, *(p.grad for p in self.params if p.grad is not None)]):
            self._stop_at_nan(loss)
        group = self.param_groups[0]
        weight, prior_var = group["kl_weight"] / group["num_data"], group["prior_var"]
        for slot in self.slots:
            for view, param in zip(slot.layer.views(slot.mean), slot.layer.params, strict=True):
                if param.grad is not None:
                    if self.blocks_per_step > 1:
                        param.grad.div_(self.blocks_per_step)
                    param.grad.add_(view, alpha=weight / prior_var)
            if slot.noisy and slot.rho.grad is not None:
                std = slot.std
                by_std = (slot.rho.grad / self.blocks_per_step - weight) / std + (weight / prior_var) * std
                slot.rho.grad = by_std * torch.sigmoid(slot.rho)  # dσ/dρ
        self._adam.param_groups[0].update({k: group[k] for k in ("lr", "betas", "eps")})
        self._adam.step()
        self.blocks.swap.read()

    def _distribution(self, slot: Slot) -> Distribution:
        assert isinstance(slot, RhoSlot)
        dims = len(slot.layer.shape) if isinstance(slot.layer, BareParameter) else 2
        return Independent(Normal(slot.mean.clone(), slot.std), dims)

    def _slot_kl(self, slot: Slot) -> Tensor:
        """Σ ½·[(σ² + μ²)/η − 1 + log(η/σ²)]."""
        assert isinstance(slot, RhoSlot)
        prior_var = self.param_groups[0]["prior_var"]
        std = slot.std
        each = 0.5 * ((std.square() + slot.mean.square()) / prior_var - 1 + math.log(prior_var) - 2 * std.log())
        return each.sum() if slot.layer.stack is None else each.flatten(1).sum(-1)

    def _slot_state(self, slot: Slot) -> dict[str, Tensor]:
        assert isinstance(slot, RhoSlot)
        return {"rho": slot.rho}

    def state_dict(self) -> dict[str, Any]:
        """All that a bit-exact resume needs, Adam's moments included."""
        state = super().state_dict()
        state["eigenoise"]["adam"] = self._adam.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        self._adam.load_state_dict(copy.deepcopy(state_dict["eigenoise"]["adam"]))

    def _describe(self, slot: Slot) -> str:
        assert isinstance(slot, RhoSlot)
        return "factorised Gaussian" if slot.noisy else "point estimate"
