"""Noisy natural gradient (eq. 9): one optimiser for every Fisher structure, with or without noise.

    M ← M + α·(F + γI)⁻¹·(∇ log p(y | x, W) − γ_in·W),   W ~ q,   γ = γ_in + γ_ex,   γ_in = λ/(Nη)

The posterior covariance is (λ/N)·(F + γ_in·I)⁻¹ (eq. 10): extrinsic damping γ_ex belongs to the step alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from eigenoise import checks
from eigenoise.fisher import Diagonal, Eigen, Fisher
from eigenoise.inference.posterior import Posterior
from eigenoise.layers.assignment import Treatment
from eigenoise.layers.matrix_layer import BareParameter, ConvLayer, LinearLayer, MatrixLayer
from eigenoise.likelihoods import Likelihood
from eigenoise.optim import state
from eigenoise.optim.clip import clipped, on_host
from eigenoise.optim.decomposition_schedule import Decompositions
from eigenoise.optim.guard import guard
from eigenoise.optim.priors import check_mark, layer_priors
from eigenoise.optim.rotated import worthwhile
from eigenoise.optim.statistics import FisherSlot, Statistics
from eigenoise.optim.variational import VariationalOptimizer
from eigenoise.optim.weight_swap import Slot
from eigenoise.parallel.ranks import Ranks

NOISES = ("auto", "shared", "per-example")
CONV_BASES = ("full", "factored")


class NaturalGradient(VariationalOptimizer):
    """The optimiser behind every natural-gradient method; use one of the named ones in ``optim``.

    Args:
        model: any ``nn.Module``.
        structure: builds the Fisher of a layer from its shape.
        num_data: N, the number of likelihood terms in the training set.
        likelihood: what the model's output means; its ``nll`` is the loss.
        lr: α, the step size.
        kl_weight: λ, the weight of the KL term; 1 is Bayes, less is a colder posterior.
        prior_var: η, variance of the prior N(0, ηI).
        prior: a posterior of earlier data, which takes the place of N(0, ηI) for the layers that it holds; not for
            K-FAC. The gradient feels its whole covariance, the new posterior its diagonal in the new basis.
        damping: γ_ex, added to the Fisher in the step but not in the posterior.
        momentum: of the gradient before preconditioning, bias-corrected.
        ema_factors: β̃, rate of the moving averages of A and S at each statistics update.
        ema_scale: ω̃, rate of the moving average of R (or of the diagonal).
        stats_every: T_stats, steps between updates of A and S.
        scale_every: T_scale, steps between updates of R; by default as ``stats_every``.
        refresh_every: T_eig or T_inv, steps between decompositions.
        reinit_every: steps between re-initialisations of R from the K-FAC eigenvalues, or None for never.
        stats_fraction: the part of a batch's examples, its first ones, that A, S and R are taken from. Convolutions,
            with many positions in each example, can do with an eighth. A and S are taken from more where that would
            leave fewer than 512 rows.
        fisher: ``"sampled"`` draws targets from the model (one more backward pass on statistics steps), ``"exact"``
            sums over all outputs or classes, ``"empirical"`` takes the training gradient itself.
        layer_clip: a layer's step is scaled down so that α²·gᵀF⁻¹g stays below this, or None.
        kl_clip: the same for all layers together, or None.
        init: the Fisher starts as this times the identity.
        warmup: let the first statistics replace that start faster than the moving averages would: update k counts at
            least 1/(k + 1).
        guard: before a step, raise the Fisher where this step's gradient is far larger than it allows for, see
            ``guard``; without it, as in the paper, a direction that was flat for long and suddenly matters can throw
            the mean away.
        eigenbasis: whether layers keep their means in their eigenbasis, see ``rotated``; by default those large enough
            to gain by it. Between a block and its step their ``.grad`` is in that basis.
        noise: ``"shared"``, one weight sample for the whole batch; ``"per-example"``: each row that a Linear layer sees
            gets weights of its own, exactly, by drawing the layer's output, and convolutions draw for every place as
            if weights were independent; ``"auto"``: per example where that costs about as much, in large Linear layers
            that see fewer rows than they have outputs, else shared. Steps with statistics, and predictions, always
            share a sample.
        conv_basis: ``"full"``, the paper's, decomposes a convolution's A as one matrix; ``"factored"`` into a basis for
            the kernel's taps and one for the channels of each mode of them, see ``taps``: cheaper by far, another
            posterior.
        fixed_inputs: EK-FAC only: names of layers whose basis on the side of the input stays as it is, which saves
            that side's statistics, decompositions and rotations. Rotate the data by its principal components
            beforehand, and the first layer's is an eigenbasis all the same.
        **common: ``samples``, ``parallel``, ``antithetic``, ``others``, ``overrides``, ``batch_dim``, ``generator`` and
            ``not_finite`` as for ``SamplingOptimizer``.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Callable[..., Fisher],
        *,
        num_data: int,
        likelihood: Likelihood,
        lr: float = 0.01,
        kl_weight: float = 1.0,
        prior_var: float = 1.0,
        prior: Posterior | None = None,
        damping: float = 0.0,
        momentum: float = 0.9,
        ema_factors: float = 0.03,
        ema_scale: float = 0.03,
        stats_every: int = 10,
        scale_every: int | None = None,
        refresh_every: int = 100,
        reinit_every: int | None = None,
        stats_fraction: float = 1.0,
        fisher: str = "sampled",
        layer_clip: float | None = 1e-3,
        kl_clip: float | None = None,
        init: float = 1.0,
        warmup: bool = True,
        guard: bool = True,
        eigenbasis: bool | None = None,
        noise: str = "auto",
        conv_basis: str = "full",
        fixed_inputs: Sequence[str] = (),
        **common: Any,
    ):
        self.structure, self.fixed_inputs = structure, frozenset(fixed_inputs)
        self.eigenbasis = None if eigenbasis is None else bool(eigenbasis)
        self.noise = checks.choice("noise", noise, NOISES)
        self.conv_basis = checks.choice("conv_basis", conv_basis, CONV_BASES)
        if common.get("parallel") or common.get("antithetic"):
            if noise == "per-example":
                raise ValueError("noise='per-example' draws for every example, not parallel or antithetic samples")
            self.noise = "shared"
        self.init = checks.number("init", init, open_low=True)
        self.warmup, self.guard = bool(warmup), bool(guard)
        self.stats_every = checks.integer("stats_every", stats_every)
        self.scale_every = self.stats_every if scale_every is None else checks.integer("scale_every", scale_every)
        self.refresh_every = checks.integer("refresh_every", refresh_every)
        self.reinit_every = None if reinit_every is None else checks.integer("reinit_every", reinit_every)
        hyper = {
            "lr": lr,
            "kl_weight": kl_weight,
            "prior_var": prior_var,
            "damping": damping,
            "momentum": momentum,
            "ema_factors": ema_factors,
            "ema_scale": ema_scale,
            "layer_clip": layer_clip,
            "kl_clip": kl_clip,
        }
        super().__init__(model, num_data=num_data, likelihood=likelihood, hyper=hyper, **common)
        self.statistics = Statistics(self.slots, likelihood, fisher, stats_fraction)
        unknown = self.fixed_inputs - {name for name, t in self.treatments.items() if t.kind == "structured"}
        if unknown:
            raise ValueError(f"fixed_inputs names {sorted(unknown)}, which are no structured layers of the model")
        if self.fixed_inputs and self.reinit_every is not None:
            raise ValueError("fixed_inputs leaves no K-FAC eigenvalues to reset R to: use reinit_every=None")
        found = {} if prior is None else layer_priors(prior, {slot.name: slot.fisher for slot in self.slots})
        for slot in self.slots:
            slot.prior = found.get(slot.name)
        self._meet_prior(self.slots)
        often = (self.stats_every, self.scale_every)
        self.decompositions = Decompositions(self.slots, self.refresh_every, often, self.ranks)

    def _meet_prior(self, slots: Sequence[FisherSlot]) -> None:
        """To be called when slots have a new basis."""
        self._prior_scale = self.posterior_scale
        for slot in slots:
            slot.meet_prior()
            slot.add_prior_spectrum(self._prior_scale)

    def _recheck_prior(self) -> None:
        """Follow λ or N that a schedule has changed."""
        if self._prior_scale != self.posterior_scale:
            self._prior_scale = self.posterior_scale
            for slot in self.slots:
                slot.add_prior_spectrum(self._prior_scale)

    def _make_slot(self, treatment: Treatment) -> FisherSlot:
        layer = treatment.layer
        param = layer.params[0]
        options: dict[str, Any] = {"init": self.init, "dtype": param.dtype, "device": param.device}
        if treatment.kind == "structured":
            if layer.name in self.fixed_inputs:
                options["fixed_input"] = True
            elif self.conv_basis == "factored" and isinstance(layer, ConvLayer):
                options["kernel"] = (layer.params[0].shape[1], math.prod(layer.module.kernel_size))
            fisher = self.structure(layer.shape, **options)
        else:
            fisher = Diagonal(layer.shape, event_dims=len(layer.shape), **options)
        return FisherSlot(layer, fisher, self.noisy and treatment.noisy, self._keeps(layer, fisher))

    def _keeps(self, layer: MatrixLayer | BareParameter, fisher: Fisher) -> bool:
        """Whether a layer's matrix is kept in its basis and shown only when someone looks."""
        if not isinstance(layer, MatrixLayer) or self.parallel is not None:
            return False
        if self.noise == "per-example" and isinstance(layer, (LinearLayer, ConvLayer)):
            return True
        return fisher.factors is not None and (worthwhile(layer) if self.eigenbasis is None else self.eigenbasis)

    def _check_hyper(self, hyper: Mapping[str, Any]) -> None:
        super()._check_hyper(hyper)
        checks.number("damping", hyper["damping"])
        checks.number("momentum", hyper["momentum"], high=0.9999)
        checks.number("ema_factors", hyper["ema_factors"], open_low=True, high=1.0)
        checks.number("ema_scale", hyper["ema_scale"], open_low=True, high=1.0)
        for name in ("layer_clip", "kl_clip"):
            if hyper[name] is not None:
                checks.number(name, hyper[name], open_low=True)

    @property
    def intrinsic_damping(self) -> float:
        """γ_in = λ/(Nη)."""
        group = self.param_groups[0]
        return group["kl_weight"] / (group["num_data"] * group["prior_var"])

    @property
    def posterior_scale(self) -> float:
        """λ/N."""
        group = self.param_groups[0]
        return group["kl_weight"] / group["num_data"]

    # Sampling (line 5 of the algorithms).

    def _draw(self, generator: torch.Generator, training: bool) -> None:
        spread, damping = self.posterior_scale**0.5, self.intrinsic_damping
        self._recheck_prior()
        # Statistics need a sample that all examples share: with noise of their own the gradient that comes down through
        # a layer leaves out that layer's covariance.
        later = training and self.noise != "shared" and not self._stats_due
        for slot in self.slots:
            if later and slot.noisy and self._draws_outputs(slot):
                slot.draw_later(generator, spread, slot.intrinsic(damping), share=self.noise == "auto")
            else:
                slot.draw(generator, spread, slot.intrinsic(damping))

    def _draws_outputs(self, slot: FisherSlot) -> bool:
        kinds = (LinearLayer,) if self.noise == "auto" else (LinearLayer, ConvLayer)
        return slot.keeper is not None and isinstance(slot.layer, kinds)

    # Statistics (eq. 12).

    def _due(self, every: int | None) -> bool:
        return every is not None and self.steps % every == 0

    @property
    def _stats_due(self) -> bool:
        return self._due(self.stats_every) or self._due(self.scale_every)

    def _begin_block(self, generator: torch.Generator) -> None:
        self.statistics.begin(self._due(self.stats_every), self._due(self.scale_every), generator)

    def _end_block(self, trained: bool) -> None:
        self.statistics.end(trained)

    def _on_loss(self, f: Tensor) -> Callable[[Tensor], None] | None:
        return self.statistics.on_loss(f)

    def _discard(self) -> None:
        self.statistics.discard()

    def _share(self, ranks: Ranks) -> list[Tensor]:
        """Statistics of all ranks on each; the prior's pull is at the mean of all samples."""
        if self._stats_due:
            ranks.add_up(self.statistics.averages())
        return self.blocks.drawn if self.noisy and not self.blocks.cancels else []

    def _update_fishers(self) -> None:
        """Statistics, decompositions and re-initialisations that are due at this step."""
        group = self.param_groups[0]
        if self._stats_due:
            # The first updates weigh all batches alike, the start counting as one, until the moving average takes over.
            factors = max(group["ema_factors"], 1 / (self.steps // self.stats_every + 2) if self.warmup else 0.0)
            scale = max(group["ema_scale"], 1 / (self.steps // self.scale_every + 2) if self.warmup else 0.0)
            for slot in self.slots:
                slot.fisher.commit(factors, scale)
        self._meet_prior(self.decompositions.renew(self.steps))
        if self._due(self.reinit_every):
            for slot in self.slots:
                if isinstance(slot.fisher, Eigen):
                    slot.fisher.reinitialise(slot.intrinsic(self.intrinsic_damping))

    # The step (lines 6 to 16 of the algorithms).

    def _apply(self, loss: Tensor) -> None:
        active = [slot for slot in self.slots if any(p.grad is not None for p in slot.layer.params)]
        if self._stats_due:
            self._check_statistics(active, loss)
        group = self.param_groups[0]
        damping = self.intrinsic_damping
        self._recheck_prior()
        self._gather_gradients(active, damping)
        self._update_fishers()  # it turns gradients that are kept in a basis into the new one
        extra = group["damping"]
        if self.guard:
            guard(active, loss, group["ema_scale"], damping, 0.0 if self.noisy else extra)
        keep = group["momentum"]
        momenta = [slot.gradient for slot in active]
        torch._foreach_lerp_(momenta, [slot.momentum for slot in active], keep)
        solved = (slot.solve(m, slot.intrinsic(damping) + extra) for slot, m in zip(active, momenta, strict=True))
        directions, sizes = zip(*solved, strict=True)
        table = on_host([*sizes, loss])
        if not math.isfinite(table.sum()):
            self._stop_at_nan(loss)
        rates = np.array([min(group["lr"], slot.largest_rate) / (1 - keep ** (slot.updates + 1)) for slot in active])
        rates = clipped(rates.reshape(-1, *(1,) * (table.ndim - 1)), table[:-1], group["layer_clip"], group["kl_clip"])
        for slot, direction, rate in zip(active, directions, rates, strict=True):
            if slot.layer.stack is None:  # what all models of a stack share takes the most careful one's
                slot.move(direction, float(rate.min() if rate.ndim else rate))
            else:
                each = torch.from_numpy(rate).to(direction)
                slot.move(direction.mul_(each[:, None, None]), 1.0)
            slot.keep_momentum()

    def _check_statistics(self, active: list[FisherSlot], loss: Tensor) -> None:
        self.statistics.refuse_unseen(active)
        grads = [p.grad for p in self.params if p.grad is not None]
        if not checks.all_finite([loss, *grads, *self.statistics.pending()]):
            self._stop_at_nan(loss)

    def _gather_gradients(self, active: list[FisherSlot], damping: float) -> None:
        """Each slot's gradient of −log p + ½γ_in‖W‖², at the sampled weights, averaged over samples."""
        views, grads = [], []
        for slot in active:
            for view, param in zip(slot.gradient_views, slot.layer.params, strict=True):
                if param.grad is None:
                    view.zero_()
                else:
                    views.append(view)
                    grads.append(param.grad)
        torch._foreach_copy_(views, grads)
        gradients = [slot.gradient for slot in active]
        if self.blocks_per_step > 1:
            torch._foreach_mul_(gradients, 1 / self.blocks_per_step)
        drawn = self.blocks.drawn
        if len(active) < len(self.slots):
            wanted = {id(slot) for slot in active}
            drawn = [total for slot, total in zip(self.slots, drawn, strict=True) if id(slot) in wanted]
        plain = [(g, total) for g, slot, total in zip(gradients, active, drawn, strict=True) if slot.prior is None]
        if plain:
            torch._foreach_add_(*zip(*plain, strict=True), alpha=damping / self.blocks.count)
        for slot, total in zip(active, drawn, strict=True):
            if slot.prior is not None:
                slot.add_prior_gradient(total / self.blocks.count, self.posterior_scale)

    # Looking and keeping.

    def _distribution(self, slot: Slot) -> Distribution:
        assert isinstance(slot, FisherSlot)
        self._check_spread()
        self._recheck_prior()
        damping = slot.intrinsic(self.intrinsic_damping)
        return slot.fisher.posterior(slot.weights(slot.mean), self.posterior_scale, damping)

    def _check_spread(self) -> None:
        if self.posterior_scale == 0:
            raise ValueError("with kl_weight=0 the posterior has no spread, and its KL to the prior is infinite")

    def _slot_kl(self, slot: Slot) -> Tensor:
        """½·[(tr Σ + ‖M‖²)/η − d + d·log η − log det Σ] with Σ = (λ/N)·(F + γ_in·I)⁻¹."""
        assert isinstance(slot, FisherSlot)
        scale, damping, prior_var = self.posterior_scale, self.intrinsic_damping, self.param_groups[0]["prior_var"]
        self._check_spread()
        self._recheck_prior()
        dims = slot.fisher.event_dims
        if slot.prior is not None:
            return slot.prior.kl(slot.weights(slot.mean), scale * slot.fisher.inverse(0.0), slot.fisher)
        mean = slot.mean.flatten(-dims) if dims else slot.mean.unsqueeze(-1)
        d = mean.shape[-1]
        trace = scale * slot.fisher.inv_trace(damping) + mean.square().sum(-1)
        log_ratio = slot.fisher.logdet(damping) + d * math.log(prior_var / scale)
        return 0.5 * (trace / prior_var - d + log_ratio)

    def _slot_state(self, slot: Slot) -> dict[str, Tensor]:
        assert isinstance(slot, FisherSlot)
        mean = {"mean": slot.mean} if slot.rotated else {}  # the parameters' rounding would be another
        if slot.prior is not None:
            mean["prior"] = slot.prior.mark()
        return {**mean, "momentum": slot.momentum, "updates": torch.tensor(slot.updates), **slot.fisher.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave; the model keeps the weights it has."""
        self.blocks.refuse_inside("load_state_dict()")
        self.blocks.swap.show()
        for slot in (slot for slot in self.slots if slot.prior is not None):
            check_mark(slot.name, slot.prior, state_dict.get(state.KEY))
        super().load_state_dict(state_dict)
        for slot in self.slots:
            slot.updates = int(state_dict[state.KEY]["slots"][slot.name]["updates"])
            slot.fisher.forget_cache()
        self._meet_prior(self.slots)

    def _describe(self, slot: Slot) -> str:
        assert isinstance(slot, FisherSlot)
        kind = f"{type(slot.fisher).__name__} Fisher{'' if slot.prior is None else ', earlier posterior as prior'}"
        if not self.treatments[slot.name].noisy:
            return f"{kind}, point estimate"
        return kind if self.noisy else f"{kind}, no noise in training"
