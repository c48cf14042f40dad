"""Noisy K-FAC (Algorithm 2) and K-FAC."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import nn

from eigenoise.fisher import BasisOptions, Kronecker
from eigenoise.fisher.kronecker_factors import MAX_SIDE
from eigenoise.likelihoods import Likelihood
from eigenoise.optim.blocks import NOISE_RAMP, Sampling
from eigenoise.optim.natural_gradient import NaturalGradient
from eigenoise.optim.statistics import Schedule
from eigenoise.optim.step_size import MAX_MOVE
from eigenoise.optim.structures import kronecker_fishers


@final
class NoisyKFAC(NaturalGradient):
    """A matrix Gaussian posterior (MVG) by natural gradient: Algorithm 2.

    Args:
        model: any ``nn.Module``. Wrapped in ``DistributedDataParallel``, each process draws noise of its own, and all
            make the same step from what all have seen.
        num_data: N, the number of likelihood terms in the training set, of all processes together.
        likelihood: what the model's output means: a likelihood, whose ``nll`` is the loss, or ``"regression"`` or
            ``"classification"``.
        lr: α, the largest step size.
        kl_weight: λ, the weight of the KL term; 1 is Bayes, less is a colder posterior. ``"auto"`` is 0.1, or 0.3 where
            the likelihood learns the level of the noise; 0.3·√(N/weights) if a classifier has more than nine for each.
        prior_var: η, the variance of the prior N(0, ηI): a number, ``"fan-in"``, which is 2/n for a layer with n inputs
            and 0.01 for parameters without, or numbers by the names of modules, with ``"fan-in"`` for those not named.
        memory: the share of all examples seen so far that a step remembers: α falls from ``lr`` as 1/(memory·k) at
            step k, so that training longer is never worse. None leaves α to ``lr`` and to your schedule of it.
        max_move: κ, how far a step moves a weight at most, about, in standard deviations of its prior: γ_ex is
            α/(κ√η)·√v in each direction, v the moving average of its squared gradient. None for no such bound.
        damping: a constant part of γ_ex, added to the Fisher in the step but not in the posterior.
        momentum: of the gradient before preconditioning, bias-corrected.
        ema_factors: β̃, rate of the moving averages of A and S at each update; update k has at least the weight 1/(k +
            2).
        stats_every: T_stats, steps between updates of A and S.
        refresh_every: T_inv, steps between eigendecompositions of the factors.
        damping_form: ``"exact"`` adds γ to each product of eigenvalues, ``"factored"`` splits √γ between the factors
            (eq. 11, second line).
        stats_fraction: the part of a batch's examples, its first ones, that statistics use. ``"auto"``: an eighth, but
            at least 16, and as many as give 512 rows of activations.
        fisher: ``"sampled"`` draws targets from the model, ``"exact"`` sums over all outputs or classes,
            ``"empirical"`` uses the training targets; each takes one more backward pass at steps with statistics.
        layer_clip: a layer's step is scaled down so that α²·gᵀF⁻¹g stays below this, or None.
        kl_clip: the same for all layers together, or None.
        guard: before a step, raise the Fisher where this step's gradient is far larger than it allows for. Without it,
            as in the paper, a direction that was flat for long and suddenly matters can throw the mean away.
        init: None: the Fisher starts from the first statistics. A number: it starts as that times the identity, which
            the moving averages forget at their own rates, as in the authors' code.
        noise_ramp: steps over which the noise's standard deviation grows from 0 to the posterior's. Predictions and the
            ELBO always use the posterior itself.
        reuse_noise: draw and rotate noise once for two steps, +E then −E, unless the posterior's covariance has changed
            in between: cheaper steps whose weights still have q's distribution. None: where one process draws one
            sample a step.
        precision: of rotations in the step: ``"float32"`` keeps the weights' dtype, ``"bfloat16"`` lowers it,
            ``"auto"`` lowers it for large layers where the hardware multiplies bfloat16 faster.
        basis_rank: the share of a side's eigenvectors that its basis has, the leading ones; the rest is an arbitrary
            basis of their complement, which makes rotations cheap. 1 has all of them, as the paper does; ``"auto"`` a
            sixteenth, but at least 32, of sides from 256 on, and all of smaller ones.
        max_side: sides with more rows than this, such as a vocabulary, keep the identity as their basis.
        samples: weight samples in one step: so many ``sampled_params()`` blocks come before each ``step()``, each with
            the loss of the whole batch, and ``step()`` uses their mean.
        parallel: draw all samples of a step in one block, as one more leading axis in front of the stack; for models of
            ``StackedLinear`` layers alone.
        antithetic: every second sample of a step mirrors the one before.
        others: what parameters outside Linear and convolution layers get: ``"diagonal"``, a diagonal posterior, or
            ``"point"``, a point estimate.
        overrides: the same choice for a module's or parameter's name and everything below it.
        batch_dim: the axis that counts examples in outputs ``(t, b, c)`` of sequence-first models: 1.
        generator: source of all noise; by default one seeded from torch's global generator. With several processes it
            is seeded at every step, from the first one's seed and for each process differently.
        not_finite: what ``step`` does when the loss, a gradient or a statistic is NaN or infinite: ``"raise"``, or
            ``"skip"`` the step, warn once and count it in ``skipped``; 20 in a row are an error all the same.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_data: int,
        likelihood: Likelihood | str,
        lr: float = 0.1,
        kl_weight: float | str = "auto",
        prior_var: float | str | Mapping[str, float] = "fan-in",
        memory: float | None = 0.2,
        max_move: float | None = MAX_MOVE,
        damping: float = 0.0,
        momentum: float = 0.9,
        ema_factors: float = 0.03,
        stats_every: int = 10,
        refresh_every: int = 100,
        damping_form: str = "exact",
        stats_fraction: float | str = "auto",
        fisher: str = "sampled",
        layer_clip: float | None = None,
        kl_clip: float | None = None,
        guard: bool = True,
        init: float | None = None,
        noise_ramp: int = NOISE_RAMP,
        reuse_noise: bool | None = None,
        precision: str = "auto",
        basis_rank: float | str = "auto",
        max_side: int = MAX_SIDE,
        samples: int = 1,
        parallel: bool = False,
        antithetic: bool = False,
        others: str = "diagonal",
        overrides: Mapping[str, str] | None = None,
        batch_dim: int = 0,
        generator: torch.Generator | None = None,
        not_finite: str = "raise",
    ):
        basis = BasisOptions(precision, basis_rank, max_side)
        super().__init__(
            model,
            likelihood=likelihood,
            hyper={
                "num_data": num_data,
                "lr": lr,
                "kl_weight": kl_weight,
                "prior_var": prior_var,
                "memory": memory,
                "max_move": max_move,
                "damping": damping,
                "momentum": momentum,
                "ema_factors": ema_factors,
                "ema_scale": ema_factors,
                "layer_clip": layer_clip,
                "kl_clip": kl_clip,
            },
            make_fisher=kronecker_fishers(Kronecker, damping_form, init, basis),
            schedule=Schedule(stats_every, stats_every, refresh_every),
            sampling=Sampling(samples, parallel, antithetic, noise_ramp, generator),
            noisy=True,
            reuse_noise=reuse_noise,
            prior=None,
            fisher=fisher,
            stats_fraction=stats_fraction,
            guard=guard,
            others=others,
            overrides=overrides,
            batch_dim=batch_dim,
            not_finite=not_finite,
        )


@final
class KFAC(NaturalGradient):
    """K-FAC: Algorithm 2 without noise.

    The mean itself is trained; ``posterior`` is then a Laplace approximation around it.

    Args:
        model: any ``nn.Module``. Wrapped in ``DistributedDataParallel``, each process draws noise of its own, and all
            make the same step from what all have seen.
        num_data: N, the number of likelihood terms in the training set, of all processes together.
        likelihood: what the model's output means: a likelihood, whose ``nll`` is the loss, or ``"regression"`` or
            ``"classification"``.
        lr: α, the largest step size.
        kl_weight: λ, the weight of the KL term; 1 is Bayes, less is a colder posterior. ``"auto"`` is 0.1, or 0.3 where
            the likelihood learns the level of the noise; 0.3·√(N/weights) if a classifier has more than nine for each.
        prior_var: η, the variance of the prior N(0, ηI): a number, ``"fan-in"``, which is 2/n for a layer with n inputs
            and 0.01 for parameters without, or numbers by the names of modules, with ``"fan-in"`` for those not named.
        memory: the share of all examples seen so far that a step remembers: α falls from ``lr`` as 1/(memory·k) at
            step k, so that training longer is never worse. None leaves α to ``lr`` and to your schedule of it.
        max_move: κ, how far a step moves a weight at most, about, in standard deviations of its prior: γ_ex is
            α/(κ√η)·√v in each direction, v the moving average of its squared gradient. None for no such bound.
        damping: a constant part of γ_ex, added to the Fisher in the step but not in the posterior.
        momentum: of the gradient before preconditioning, bias-corrected.
        ema_factors: β̃, rate of the moving averages of A and S at each update; update k has at least the weight 1/(k +
            2).
        stats_every: T_stats, steps between updates of A and S.
        refresh_every: T_inv, steps between eigendecompositions of the factors.
        damping_form: ``"exact"`` adds γ to each product of eigenvalues, ``"factored"`` splits √γ between the factors
            (eq. 11, second line).
        stats_fraction: the part of a batch's examples, its first ones, that statistics use. ``"auto"``: an eighth, but
            at least 16, and as many as give 512 rows of activations.
        fisher: ``"sampled"`` draws targets from the model, ``"exact"`` sums over all outputs or classes,
            ``"empirical"`` uses the training targets; each takes one more backward pass at steps with statistics.
        layer_clip: a layer's step is scaled down so that α²·gᵀF⁻¹g stays below this, or None.
        kl_clip: the same for all layers together, or None.
        guard: before a step, raise the Fisher where this step's gradient is far larger than it allows for. Without it,
            as in the paper, a direction that was flat for long and suddenly matters can throw the mean away.
        init: None: the Fisher starts from the first statistics. A number: it starts as that times the identity, which
            the moving averages forget at their own rates, as in the authors' code.
        precision: of rotations in the step: ``"float32"`` keeps the weights' dtype, ``"bfloat16"`` lowers it,
            ``"auto"`` lowers it for large layers where the hardware multiplies bfloat16 faster.
        basis_rank: the share of a side's eigenvectors that its basis has, the leading ones; the rest is an arbitrary
            basis of their complement, which makes rotations cheap. 1 has all of them, as the paper does; ``"auto"`` a
            sixteenth, but at least 32, of sides from 256 on, and all of smaller ones.
        max_side: sides with more rows than this, such as a vocabulary, keep the identity as their basis.
        others: what parameters outside Linear and convolution layers get: ``"diagonal"``, a diagonal posterior, or
            ``"point"``, a point estimate.
        overrides: the same choice for a module's or parameter's name and everything below it.
        batch_dim: the axis that counts examples in outputs ``(t, b, c)`` of sequence-first models: 1.
        generator: source of all noise; by default one seeded from torch's global generator. With several processes it
            is seeded at every step, from the first one's seed and for each process differently.
        not_finite: what ``step`` does when the loss, a gradient or a statistic is NaN or infinite: ``"raise"``, or
            ``"skip"`` the step, warn once and count it in ``skipped``; 20 in a row are an error all the same.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_data: int,
        likelihood: Likelihood | str,
        lr: float = 0.1,
        kl_weight: float | str = "auto",
        prior_var: float | str | Mapping[str, float] = "fan-in",
        memory: float | None = 0.2,
        max_move: float | None = MAX_MOVE,
        damping: float = 0.0,
        momentum: float = 0.9,
        ema_factors: float = 0.03,
        stats_every: int = 10,
        refresh_every: int = 100,
        damping_form: str = "exact",
        stats_fraction: float | str = "auto",
        fisher: str = "sampled",
        layer_clip: float | None = None,
        kl_clip: float | None = None,
        guard: bool = True,
        init: float | None = None,
        precision: str = "auto",
        basis_rank: float | str = "auto",
        max_side: int = MAX_SIDE,
        others: str = "diagonal",
        overrides: Mapping[str, str] | None = None,
        batch_dim: int = 0,
        generator: torch.Generator | None = None,
        not_finite: str = "raise",
    ):
        basis = BasisOptions(precision, basis_rank, max_side)
        super().__init__(
            model,
            likelihood=likelihood,
            hyper={
                "num_data": num_data,
                "lr": lr,
                "kl_weight": kl_weight,
                "prior_var": prior_var,
                "memory": memory,
                "max_move": max_move,
                "damping": damping,
                "momentum": momentum,
                "ema_factors": ema_factors,
                "ema_scale": ema_factors,
                "layer_clip": layer_clip,
                "kl_clip": kl_clip,
            },
            make_fisher=kronecker_fishers(Kronecker, damping_form, init, basis),
            schedule=Schedule(stats_every, stats_every, refresh_every),
            sampling=Sampling(generator=generator),
            noisy=False,
            reuse_noise=False,
            prior=None,
            fisher=fisher,
            stats_fraction=stats_fraction,
            guard=guard,
            others=others,
            overrides=overrides,
            batch_dim=batch_dim,
            not_finite=not_finite,
        )
