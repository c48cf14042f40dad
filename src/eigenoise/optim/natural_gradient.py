"""Noisy natural gradient (eq. 9): one optimiser for every Fisher structure, with or without noise.

    M ← M + α·(F + γI)⁻¹·(∇ log p(y | x, W) − γ_in·W),   W ~ q,   γ = γ_in + γ_ex,   γ_in = λ/(Nη)

The posterior covariance is (λ/N)·(F + γ_in·I)⁻¹ (eq. 10): extrinsic damping γ_ex belongs to the step alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from eigenoise import checks
from eigenoise.fisher import Eigen, Fisher
from eigenoise.inference.posterior import Posterior
from eigenoise.layers.assignment import Assignment
from eigenoise.likelihoods import Likelihood
from eigenoise.optim.base import BayesianOptimizer
from eigenoise.optim.blocks import Sampling
from eigenoise.optim.decomposition_schedule import DecompositionSchedule
from eigenoise.optim.examples import ExampleMatcher
from eigenoise.optim.fisher_slot import FisherSlot, posterior_scale
from eigenoise.optim.priors import check_fingerprint, layer_priors
from eigenoise.optim.statistics import Schedule, Statistics
from eigenoise.optim.step_control import clip_rates, raise_fishers, to_host
from eigenoise.optim.step_size import check_step_size, step_size
from eigenoise.parallel.ddp import original_module
from eigenoise.parallel.ranks import Ranks

SECONDS_PER_CUBE = 9e-11  # of an eigendecomposition in float32, one CPU core


class NaturalGradient(BayesianOptimizer):
    """The optimiser behind every natural-gradient method; use one of the named ones.

    Args:
        model: any ``nn.Module``.
        likelihood: what the model's output means.
        hyper: ``num_data``, ``lr``, ``kl_weight``, ``prior_var``, ``memory``, ``max_move``, ``damping``, ``momentum``,
            ``ema_factors``, ``ema_scale``, ``layer_clip`` and ``kl_clip``, as the named methods have them.
        make_fisher: builds the Fisher of a layer or a bare parameter.
        schedule: steps between statistics, decompositions and re-initialisations.
        sampling: how weights are sampled in training.
        noisy: whether they are sampled in training at all.
        reuse_noise: whether noise is used twice, with both signs; None: if one process draws one sample a step.
        prior: a posterior of earlier data in the place of N(0, ηI), or None.
        fisher: ``"sampled"``, ``"exact"`` or ``"empirical"``.
        stats_fraction: the part of a batch that statistics use.
        guard: whether a Fisher that does not allow for a gradient is raised before the step.
        others: as for ``BayesianOptimizer``.
        overrides: likewise.
        batch_dim: likewise.
        not_finite: likewise.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        likelihood: Likelihood | str,
        hyper: Mapping[str, Any],
        make_fisher: Callable[[Assignment], Fisher],
        schedule: Schedule,
        sampling: Sampling,
        noisy: bool,
        reuse_noise: bool | None,
        prior: Posterior | None,
        fisher: str,
        stats_fraction: float | str,
        guard: bool,
        others: str,
        overrides: Mapping[str, str] | None,
        batch_dim: int,
        not_finite: str,
    ):
        self.guard, self.schedule = bool(guard), schedule
        mirrored = _reuses_noise(reuse_noise, sampling, model)

        def make_slot(assignment: Assignment) -> FisherSlot:
            structure = make_fisher(assignment)
            return FisherSlot(assignment.layer, structure, assignment.has_posterior, noisy=noisy, mirrored=mirrored)

        super().__init__(
            model,
            likelihood=likelihood,
            hyper=hyper,
            make_slot=make_slot,
            sampling=sampling,
            noisy=noisy,
            others=others,
            overrides=overrides,
            batch_dim=batch_dim,
            not_finite=not_finite,
        )
        matcher = ExampleMatcher(self.model, self.likelihood.stack, batch_dim)
        self.statistics = Statistics(self.slots, matcher, self.likelihood, fisher, stats_fraction)
        self.decompositions = DecompositionSchedule(self.slots, self.schedule, self.ranks)
        if prior is not None:
            priors = layer_priors(prior, {slot.name: slot.fisher for slot in self.slots})
            for slot in self.slots:
                slot.set_prior(priors.get(slot.name))

    # The step (lines 6 to 16 of Algorithms 1 and 2).

    def _update(self, loss: Tensor, terms: float) -> None:
        slots = [slot for slot in self.slots if any(p.grad is not None for p in slot.layer.params)]
        self._check_statistics(slots, loss)
        self._gather_gradients(slots)
        self._update_fishers()
        self.decompositions.refresh(self.steps)
        self._reinitialise()
        self._rotate_gradients(slots)
        rate = step_size(self.group, terms, self.seen + terms)
        self._guard(slots, loss)
        self._update_momenta(slots)
        directions, sizes = self._precondition(slots, rate)
        rates = self._clip(slots, rate, sizes, loss)
        self._move(slots, directions, rates)

    def _check_statistics(self, slots: list[FisherSlot], loss: Tensor) -> None:
        """Stop before anything changes if a statistic is missing or not finite."""
        if self.schedule.stats_due(self.steps):
            self.statistics.refuse_unseen(slots)
            grads = [p.grad for p in self.params if p.grad is not None]
            if not checks.all_finite([loss, *grads, *self.statistics.pending()]):
                self._stop_at_nan(loss)

    def _gather_gradients(self, slots: list[FisherSlot]) -> None:
        """V: each layer's gradient of −log p + ½γ_in‖W‖² at the sampled weights, averaged over samples."""
        views, grads = [], []
        for slot in slots:
            for view, param in zip(slot.gradient_views, slot.layer.params, strict=True):
                if param.grad is None:
                    view.zero_()
                else:
                    views.append(view)
                    grads.append(param.grad)
        torch._foreach_copy_(views, grads)
        if self.blocks_per_step > 1:
            torch._foreach_mul_([slot.gradient for slot in slots], 1 / self.blocks_per_step)
        count, active = self.blocks.count, set(slots)
        for slot, drawn in zip(self.slots, self.blocks.drawn, strict=True):
            if slot in active:
                slot.add_prior_gradient(drawn if count == 1 else drawn / count, self.group)

    def _update_fishers(self) -> None:
        """A, S and R by moving averages of this step's statistics (eq. 12)."""
        if self.schedule.stats_due(self.steps):
            for slot in self.slots:
                slot.fisher.commit(self.group["ema_factors"], self.group["ema_scale"])

    def _reinitialise(self) -> None:
        """R from the K-FAC eigenvalues, when that is due (section 6.1)."""
        if self.schedule.reinit_due(self.steps):
            for slot in self.slots:
                if isinstance(slot.fisher, Eigen):
                    damping = slot.damping(self.group)
                    slot.fisher.reinitialise(0.0 if isinstance(damping, Tensor) else damping)

    def _rotate_gradients(self, slots: list[FisherSlot]) -> None:
        """V̄ = Q_SᵀVQ_A."""
        for slot in slots:
            slot.rotate_gradient()

    def _guard(self, slots: list[FisherSlot], loss: Tensor) -> None:
        """Raise Fishers that do not allow for this gradient, as the noise that they give would not."""
        if self.guard:
            dampings = [slot.damping(self.group) for slot in slots]
            if not self.noisy:
                dampings = [damping + self.group["damping"] for damping in dampings]
            raise_fishers(slots, dampings, self.group["ema_scale"], loss)

    def _update_momenta(self, slots: list[FisherSlot]) -> None:
        """Moving averages of gradients and of their squares; they replace the old ones only when the step is made."""
        for slot in slots:
            slot.update_momentum(self.group)

    def _precondition(self, slots: list[FisherSlot], rate: float) -> tuple[list[Tensor], list[Tensor]]:
        """(F + γI)⁻¹ on each momentum, as coordinates (eq. 21), and its size in that metric; γ = γ_in + γ_ex."""
        preconditioned = [slot.precondition(self.group, rate) for slot in slots]
        return [direction for direction, _ in preconditioned], [size for _, size in preconditioned]

    def _clip(self, slots: list[FisherSlot], rate: float, sizes: list[Tensor], loss: Tensor) -> list[tuple[float, ...]]:
        """Step sizes α of the layers, one for each model, within the clips and corrected for the momentum's start."""
        # A step is finite even where v is not, but it would be the last one there.
        overflows = [slot.new_squares.sum() for slot in slots if slot.new_squares is not None]
        models = to_host([*sizes, *overflows, loss])
        if not math.isfinite(sum(map(sum, models))):
            self._stop_at_nan(loss)
        momentum, clips = self.group["momentum"], (self.group["layer_clip"], self.group["kl_clip"])
        rates = [min(rate, slot.max_rate) / (1 - momentum ** (slot.updates + 1)) for slot in slots]
        return list(zip(*(clip_rates(rates, numbers[: len(slots)], *clips) for numbers in models), strict=True))

    def _move(self, slots: list[FisherSlot], directions: list[Tensor], rates: list[tuple[float, ...]]) -> None:
        """M ← M − α·Q_S·direction·Q_Aᵀ; what all models of a stack share takes the most careful one's rate."""
        for slot, direction, rate in zip(slots, directions, rates, strict=True):
            if slot.layer.stack is None:
                slot.move(direction, min(rate))
            else:
                slot.move(direction, direction.new_tensor(rate)[:, None, None])

    @property
    def posterior_scale(self) -> float:
        """λ/N."""
        return posterior_scale(self.group)

    # Statistics.

    def _begin_block(self, generator: torch.Generator) -> AbstractContextManager:
        factors, scale = self.schedule.factors_due(self.steps), self.schedule.scale_due(self.steps)
        return self.statistics.begin(factors, scale, generator)

    def _end_block(self, trained: bool) -> None:
        self.statistics.end()

    def _on_loss(self, f: Tensor, loss: Tensor) -> Callable[[], None] | None:
        return self.statistics.on_loss(f, loss)

    def _discard(self) -> None:
        self.statistics.discard()

    def _shared(self, ranks: Ranks) -> list[Tensor]:
        """Statistics of all ranks on each; the prior's pull is at the mean of all samples."""
        if self.schedule.stats_due(self.steps):
            ranks.add_up(self.statistics.averages())
        return self.blocks.drawn if self.noisy and not self.blocks.cancels else []

    # Keeping and showing.

    def _check_hyper(self, hyper: Mapping[str, Any]) -> None:
        super()._check_hyper(hyper)
        check_step_size(hyper)
        checks.number("momentum", hyper["momentum"], high=0.9999)
        checks.number("ema_factors", hyper["ema_factors"], open_low=True, high=1.0)
        checks.number("ema_scale", hyper["ema_scale"], open_low=True, high=1.0)
        for name in ("layer_clip", "kl_clip"):
            if hyper[name] is not None:
                checks.number(name, hyper[name], open_low=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave; the model keeps the weights it has."""
        slots = (state_dict.get("eigenoise") or {}).get("slots", {})
        for slot in self.slots:
            if slot.prior is not None and slot.name in slots:
                check_fingerprint(slot.name, slot.prior, slots[slot.name])
        super().load_state_dict(state_dict)
        for slot in self.slots:
            slot.resume(self.group)

    def _notes(self) -> list[str]:
        """What the Fishers take: memory, and time at the steps that decompose."""
        numbers = sum(tensor.numel() * tensor.element_size() for slot in self.slots for tensor in slot.state().values())
        costs = [slot.fisher.factors.decomposition_cost for slot in self.slots if slot.fisher.factors is not None]
        line = f"  state: {numbers / 2**20:.1f} MB"
        if sum(costs):
            total, largest = (SECONDS_PER_CUBE * cost for cost in (sum(costs), max(costs)))
            line += f"; new eigenbases every {self.schedule.refresh_every} steps: about {total:.2g} s on one CPU core"
            line += f", {largest:.2g} s for the largest layer"
        return [line]


def _reuses_noise(reuse_noise: bool | None, sampling: Sampling, model: nn.Module) -> bool:
    """Whether noise is used twice.

    Raises:
        ValueError: if it is asked for but cannot be.
    """
    single = not (sampling.parallel or sampling.antithetic or sampling.samples > 1)
    alone = not isinstance(original_module(model), DistributedDataParallel)
    if reuse_noise and not single:
        raise ValueError("reuse_noise=True needs one sample a step: leave out samples, parallel and antithetic")
    if reuse_noise and not alone:
        raise ValueError("reuse_noise=True is for one process: several draw noise that the step alone decides")
    return single and alone if reuse_noise is None else bool(reuse_noise)
