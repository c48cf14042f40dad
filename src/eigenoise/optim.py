"""Noisy natural gradient: NoisyAdam, NoisyKFAC, NoisyEKFAC (Algorithms 1 and 2), and KFAC, EKFAC without noise.

One optimiser serves them all; a method is a Fisher structure. The mean moves along the preconditioned gradient (eq. 9)

    M ← M + α·(F + γI)⁻¹·(∇ log p(y | x, W) − γ_in·W),   W ~ q,   γ = γ_in + γ_ex,   γ_in = λ/(Nη)

and the posterior covariance is (λ/N)·(F + γ_in·I)⁻¹ (eq. 10): extrinsic damping γ_ex belongs to the step alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from eigenoise import checks
from eigenoise.capture import Capture
from eigenoise.fisher import Diagonal, Eigen, Fisher, Kronecker
from eigenoise.fisher.base import FLOOR
from eigenoise.layers import BareParameter, MatrixLayer
from eigenoise.likelihoods import Likelihood
from eigenoise.swap import Slot
from eigenoise.treatment import Treatment
from eigenoise.variational import VariationalOptimizer

FISHERS = ("sampled", "exact", "empirical")


class FisherSlot(Slot):
    """A slot with its Fisher, its gradient and its momentum, all ``(..., p, n)``."""

    def __init__(self, layer: MatrixLayer | BareParameter, fisher: Fisher, noisy: bool):
        super().__init__(layer)
        self.fisher, self.noisy = fisher, noisy
        self.gradient, self.momentum = self.empty(), self.empty()
        self.gradient_views = layer.views(self.gradient)


class NaturalGradient(VariationalOptimizer):
    """The optimiser behind every method of this file; use one of the named ones.

    Args:
        model: any ``nn.Module``.
        structure: builds the Fisher of a layer from its shape.
        noise: whether weights are sampled; without, the mean itself is trained (K-FAC, EK-FAC).
        num_data: N, the number of likelihood terms in the training set.
        likelihood: what the model's output means; its ``nll`` is the loss.
        lr: α, the step size.
        kl_weight: λ, the weight of the KL term; 1 is Bayes, less is a colder posterior.
        prior_var: η, variance of the prior N(0, ηI).
        damping: γ_ex, added to the Fisher in the step but not in the posterior.
        momentum: of the gradient before preconditioning, bias-corrected.
        ema_factors: β̃, rate of the moving averages of A and S at each statistics update.
        ema_scale: ω̃, rate of the moving average of R (or of the diagonal).
        stats_every: T_stats, steps between updates of A and S.
        scale_every: T_scale, steps between updates of R; by default as ``stats_every``.
        refresh_every: T_eig or T_inv, steps between decompositions.
        reinit_every: steps between re-initialisations of R from the K-FAC eigenvalues, or None for never.
        fisher: ``"sampled"`` draws targets from the model (one more backward pass on statistics steps), ``"exact"``
            sums over all outputs or classes, ``"empirical"`` takes the training gradient itself.
        layer_clip: a layer's step is scaled down so that α²·gᵀF⁻¹g stays below this, or None.
        kl_clip: the same for all layers together, or None.
        init: the Fisher starts as this times the identity.
        warmup: let the first statistics replace that start faster than the moving averages would: update k counts at
            least 1/(k + 1).
        samples, antithetic, others, overrides, batch_dim, generator: as for ``VariationalOptimizer``.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: Callable[..., Fisher],
        noise: bool,
        *,
        num_data: int,
        likelihood: Likelihood,
        lr: float = 0.01,
        kl_weight: float = 1.0,
        prior_var: float = 1.0,
        damping: float = 0.0,
        momentum: float = 0.9,
        ema_factors: float = 0.03,
        ema_scale: float = 0.03,
        stats_every: int = 10,
        scale_every: int | None = None,
        refresh_every: int = 100,
        reinit_every: int | None = None,
        fisher: str = "sampled",
        layer_clip: float | None = 1e-3,
        kl_clip: float | None = None,
        init: float = 1.0,
        warmup: bool = True,
        samples: int = 1,
        antithetic: bool = False,
        others: str = "diagonal",
        overrides: Mapping[str, str] | None = None,
        batch_dim: int = 0,
        generator: torch.Generator | None = None,
    ):
        self.noise = noise
        self.structure = structure
        self.fisher = checks.choice("fisher", fisher, FISHERS)
        self.init = checks.number("init", init, open_low=True)
        self.warmup = bool(warmup)
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
        super().__init__(
            model,
            num_data=num_data,
            likelihood=likelihood,
            hyper=hyper,
            samples=samples,
            antithetic=antithetic,
            others=others,
            overrides=overrides,
            batch_dim=batch_dim,
            generator=generator,
        )
        self._slot_of: dict[int, FisherSlot] = {id(slot.layer): slot for slot in self.slots}
        self._bare = [slot for slot in self.slots if isinstance(slot.layer, BareParameter)]
        self.capture = Capture(
            [slot.layer for slot in self.slots if isinstance(slot.layer, MatrixLayer)],
            [slot.layer.params[0] for slot in self._bare],
        )
        self._bare_handles: list = []
        self._deliveries: list[Callable[[], None]] = []  # what the user's backward pass left to take in at block's end
        self._warned = False

    def _make_slot(self, treatment: Treatment) -> FisherSlot:
        layer = treatment.layer
        param = layer.params[0]
        options: dict[str, Any] = {"init": self.init, "dtype": param.dtype, "device": param.device}
        if treatment.kind == "structured":
            fisher = self.structure(layer.shape, **options)
        else:
            fisher = Diagonal(layer.shape, event_dims=len(layer.shape), **options)
        return FisherSlot(layer, fisher, self.noise and treatment.noisy)

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

    def _draw(self, generator: torch.Generator) -> None:
        spread, damping = self.posterior_scale**0.5, self.intrinsic_damping
        for slot in self.slots:
            if slot.noisy:
                mean = slot.mean
                noise = torch.randn(mean.shape, generator=generator, dtype=mean.dtype, device=generator.device)
                torch.add(mean, slot.fisher.root(noise.to(mean.device), damping), alpha=spread, out=slot.sample)
            else:
                slot.sample.copy_(slot.mean)

    # Statistics (eq. 12).

    def _due(self, every: int | None) -> bool:
        return every is not None and self.steps % every == 0

    @property
    def _stats_due(self) -> bool:
        return self._due(self.stats_every) or self._due(self.scale_every)

    def _begin_block(self) -> None:
        if self._stats_due and torch.is_grad_enabled():
            self.capture.open(on_backward=self.fisher == "empirical")

    def _end_block(self, trained: bool) -> None:
        try:
            for deliver in self._deliveries if trained else ():
                deliver()
        finally:
            self._deliveries.clear()
            self.capture.close()

    def _on_loss(self, f: Tensor, loss: Tensor) -> Callable[[Tensor], None] | None:
        if not self._stats_due:
            return None
        terms = self.likelihood.terms(f)
        if self.fisher == "empirical":
            return self._empirical(terms)
        layers, bare = self.capture.backward(f, self._vectors(f.detach()))

        def take_in(scale: Tensor) -> None:
            self._take_in(layers, bare, terms)

        return take_in

    def _vectors(self, f: Tensor) -> Tensor:
        """Vectors ``(v, *f.shape)`` whose outer products have the Fisher of f as their sum, or as its expectation."""
        if self.fisher == "sampled":
            return self.likelihood.score(f, self.likelihood.sample(f, self.generator)).unsqueeze(0)
        if f.ndim - (self.likelihood.stack is not None) > 2:
            raise ValueError(
                f"fisher='exact' needs one target for each example, but the output has the shape {tuple(f.shape)}; "
                "use fisher='sampled'"
            )
        vectors = self.likelihood.fisher_vectors(f)
        if self._bare:  # random signs make the square of a sum over examples an unbiased sum of squares
            signs = torch.randint(2, (*f.shape[:-1], 1), generator=self.generator, device=self.generator.device)
            vectors = vectors * (2 * signs - 1).to(vectors)
        return vectors

    def _empirical(self, terms: int) -> Callable[[Tensor], None]:
        """Use the gradients of the user's own backward pass, freed of the batch mean and of any scaling of the loss."""

        def backward_begins(scale: Tensor) -> None:
            this = object()
            factor = terms / scale
            handles = []
            bare: list[Tensor | None] = [None] * len(self._bare)
            for i, param in enumerate(self.capture.bare):
                handles.append(param.register_hook(lambda g, i=i: bare.__setitem__(i, g.detach().unsqueeze(0))))
            calls = [call for call in self.capture.calls if call.g is None]

            def deliver() -> None:
                for handle in handles:
                    handle.remove()
                for call in calls:
                    if call.g is not None and call.backward is None:
                        call.backward = this
                layers = [(layer, a, g * factor) for layer, a, g in self.capture.received(this)]
                self._take_in(layers, [None if g is None else g * factor for g in bare], terms)

            self._deliveries.append(deliver)

        return backward_begins

    def _take_in(self, layers: list[tuple[MatrixLayer, Tensor, Tensor]], bare: list[Tensor | None], terms: int) -> None:
        factors, scale = self._due(self.stats_every), self._due(self.scale_every)
        for layer, a, g in layers:
            self._slot_of[id(layer)].fisher.update(a, g, terms, factors=factors, scale=scale)
        for slot, total in zip(self._bare, bare, strict=True):
            if total is not None and scale:
                assert isinstance(slot.fisher, Diagonal)
                slot.fisher.update_from_sum(total, terms)

    def _discard(self) -> None:
        for slot in self.slots:
            slot.fisher.discard()

    def _update_fishers(self) -> None:
        """Statistics, decompositions and re-initialisations that are due at this step."""
        group = self.param_groups[0]
        if self._stats_due:
            # The first updates weigh all batches alike, the start counting as one, until the moving average takes over.
            factors = max(group["ema_factors"], 1 / (self.steps // self.stats_every + 2) if self.warmup else 0.0)
            scale = max(group["ema_scale"], 1 / (self.steps // self.scale_every + 2) if self.warmup else 0.0)
            for slot in self.slots:
                slot.fisher.commit(factors, scale)
        if self._due(self.refresh_every):
            failed = [slot.name for slot in self.slots if not slot.fisher.refresh()]
            if failed and not self._warned:
                warnings.warn(
                    f"the eigendecomposition failed for {', '.join(failed)} at step {self.steps}, even in float64: the "
                    "old basis is kept; this is said only once",
                    RuntimeWarning,
                    stacklevel=4,
                )
                self._warned = True
        if self._due(self.reinit_every):
            for slot in self.slots:
                if isinstance(slot.fisher, Eigen):
                    slot.fisher.reinitialise()

    # The step (lines 6 to 16 of the algorithms).

    def _apply(self, loss: Tensor) -> None:
        active = [slot for slot in self.slots if any(p.grad is not None for p in slot.layer.params)]
        if self._stats_due:
            self._check_statistics(active, loss)
        self._update_fishers()
        group = self.param_groups[0]
        damping = self.intrinsic_damping
        self._gather_gradients(active, damping)
        keep = group["momentum"]
        momenta = torch._foreach_lerp([s.momentum for s in active], [s.gradient for s in active], 1 - keep)
        damping += group["damping"]
        directions = [slot.fisher.solve(m, damping) for slot, m in zip(active, momenta, strict=True)]
        sizes = _dots(active, momenta, directions)
        if not math.isfinite((sizes.sum() + 0 * loss).item()):  # sees a NaN in any gradient or in the loss
            self._stop_at_nan(loss)
        rate = group["lr"] / (1 - keep ** (self.steps + 1))
        scales = _clip(rate**2 * sizes, group["layer_clip"], group["kl_clip"])
        for i, (slot, momentum, direction) in enumerate(zip(active, momenta, directions, strict=True)):
            slot.momentum = momentum
            if scales is None:
                slot.mean.sub_(direction, alpha=rate)
            else:
                scale = scales[i] if slot.layer.stack is None else scales[i, :, None, None]
                slot.mean.addcmul_(direction, scale, value=-rate)

    def _check_statistics(self, active: list[FisherSlot], loss: Tensor) -> None:
        for slot in active:
            if not slot.fisher.pending():
                raise RuntimeError(
                    f"layer {slot.name!r} got a gradient but no statistics: its weight is used without calling the "
                    f"layer, or its forward ran outside sampled_params(); overrides={{{slot.name!r}: 'diagonal'}} "
                    "treats it as a bare parameter"
                )
        grads = [p.grad for p in self.swap.params if p.grad is not None]
        pending = [total for slot in self.slots for total in slot.fisher.pending()]
        if not checks.all_finite([loss, *grads, *pending]):
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
        if self.samples > 1:
            torch._foreach_mul_(gradients, 1 / self.samples)
        drawn = [total for slot, total in zip(self.slots, self._drawn, strict=True) if slot in active]
        torch._foreach_add_(gradients, drawn, alpha=damping / self._blocks)

    # Looking and keeping.

    def _distribution(self, slot: Slot) -> Distribution:
        assert isinstance(slot, FisherSlot)
        return slot.fisher.posterior(slot.mean.clone(), self.posterior_scale, self.intrinsic_damping)

    def _slot_kl(self, slot: Slot) -> Tensor:
        """½·[(tr Σ + ‖M‖²)/η − d + d·log η − log det Σ] with Σ = (λ/N)·(F + γ_in·I)⁻¹."""
        assert isinstance(slot, FisherSlot)
        scale, damping, prior_var = self.posterior_scale, self.intrinsic_damping, self.param_groups[0]["prior_var"]
        if scale == 0:
            raise ValueError("with kl_weight=0 the posterior has no spread, and its KL to the prior is infinite")
        dims = slot.fisher.event_dims
        mean = slot.mean.flatten(-dims) if dims else slot.mean.unsqueeze(-1)
        d = mean.shape[-1]
        trace = scale * slot.fisher.inv_trace(damping) + mean.square().sum(-1)
        log_ratio = slot.fisher.logdet(damping) + d * math.log(prior_var / scale)
        return 0.5 * (trace / prior_var - d + log_ratio)

    def _slot_state(self, slot: Slot) -> dict[str, Tensor]:
        assert isinstance(slot, FisherSlot)
        return {"momentum": slot.momentum, **slot.fisher.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        super().load_state_dict(state_dict)
        for slot in self.slots:
            slot.fisher.forget_cache()

    def _describe(self, slot: Slot) -> str:
        assert isinstance(slot, FisherSlot)
        kind = f"{type(slot.fisher).__name__} Fisher"
        return kind if slot.noisy else f"{kind}, point estimate"


def _dots(slots: list[FisherSlot], momenta: Sequence[Tensor], directions: Sequence[Tensor]) -> Tensor:
    """gᵀ(F + γI)⁻¹g of each slot: ``(slots,)``, or ``(slots, s)`` if there is a stack of models."""
    dots = []
    for slot, momentum, direction in zip(slots, momenta, directions, strict=True):
        product = momentum * direction
        dots.append(product.sum() if slot.layer.stack is None else product.flatten(1).sum(-1))
    if any(dot.ndim for dot in dots):
        dots = list(torch.broadcast_tensors(*dots))
    return torch.stack(dots)


def _clip(changes: Tensor, layer_clip: float | None, kl_clip: float | None) -> Tensor | None:
    """Factors that keep each layer's change α²·gᵀF⁻¹g below ``layer_clip`` and their sum below ``kl_clip``."""
    if layer_clip is None and kl_clip is None:
        return None
    changes = changes.clamp_min(FLOOR)
    scales = ((math.inf if layer_clip is None else layer_clip) / changes).sqrt().clamp_max(1.0)
    if kl_clip is not None:
        scales = scales * (kl_clip / (scales.square() * changes).sum(0)).sqrt().clamp_max(1.0)
    return scales


class NoisyAdam(NaturalGradient):
    """A fully factorised Gaussian posterior by natural gradient: the diagonal Fisher of every layer.

    Adam's second moment without the square root; squares are of per-example gradients. Arguments as for
    ``NaturalGradient``.
    """

    def __init__(self, model: nn.Module, *, num_data: int, likelihood: Likelihood, **options: Any):
        super().__init__(model, Diagonal, True, num_data=num_data, likelihood=likelihood, **options)


class NoisyKFAC(NaturalGradient):
    """A matrix Gaussian posterior by natural gradient: Algorithm 2.

    Args:
        model: any ``nn.Module``.
        num_data: N.
        likelihood: what the model's output means.
        damping_form: ``"exact"`` or ``"factored"``, see ``fisher.Kronecker``.
        inv_every: T_inv, steps between decompositions of the factors.
        **options: as for ``NaturalGradient``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_data: int,
        likelihood: Likelihood,
        damping_form: str = "exact",
        inv_every: int = 100,
        **options: Any,
    ):
        super().__init__(
            model,
            _kronecker(damping_form),
            True,
            num_data=num_data,
            likelihood=likelihood,
            refresh_every=checks.integer("inv_every", inv_every),
            **options,
        )


class KFAC(NaturalGradient):
    """K-FAC: Algorithm 2 without noise; arguments as for ``NoisyKFAC``.

    The mean itself is trained; ``posterior`` is then a Laplace approximation around it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_data: int,
        likelihood: Likelihood,
        damping_form: str = "exact",
        inv_every: int = 100,
        **options: Any,
    ):
        super().__init__(
            model,
            _kronecker(damping_form),
            False,
            num_data=num_data,
            likelihood=likelihood,
            refresh_every=checks.integer("inv_every", inv_every),
            **options,
        )


class NoisyEKFAC(NaturalGradient):
    """An eigenvalue-corrected matrix Gaussian posterior (EMVG) by natural gradient: Algorithm 1.

    Args:
        model: any ``nn.Module``.
        num_data: N.
        likelihood: what the model's output means.
        eig_every: T_eig, steps between eigendecompositions.
        **options: as for ``NaturalGradient``; ``reinit_every=50`` is the paper's re-initialisation.
    """

    def __init__(
        self, model: nn.Module, *, num_data: int, likelihood: Likelihood, eig_every: int = 100, **options: Any
    ):
        every = checks.integer("eig_every", eig_every)
        super().__init__(model, Eigen, True, num_data=num_data, likelihood=likelihood, refresh_every=every, **options)


class EKFAC(NaturalGradient):
    """EK-FAC: Algorithm 1 without noise; arguments as for ``NoisyEKFAC``.

    The mean itself is trained; ``posterior`` is then a Laplace approximation around it.
    """

    def __init__(
        self, model: nn.Module, *, num_data: int, likelihood: Likelihood, eig_every: int = 100, **options: Any
    ):
        every = checks.integer("eig_every", eig_every)
        super().__init__(model, Eigen, False, num_data=num_data, likelihood=likelihood, refresh_every=every, **options)


def _kronecker(damping_form: str) -> Callable[..., Fisher]:
    def structure(shape: tuple[int, ...], **options: Any) -> Fisher:
        return Kronecker(shape, damping_form=damping_form, **options)

    checks.choice("damping_form", damping_form, ("exact", "factored"))
    return structure
