"""The methods by name: NoisyAdam, NoisyKFAC, NoisyEKFAC (Algorithms 1 and 2), and KFAC, EKFAC without noise.

A method is a Fisher structure, with or without noise; everything else is ``NaturalGradient``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, final

from torch import nn

from eigenoise import checks
from eigenoise.fisher import Diagonal, Eigen, Kronecker
from eigenoise.fisher.base import DAMPINGS
from eigenoise.fisher.eigen import STARTS
from eigenoise.likelihoods import Likelihood
from eigenoise.optim.bayes_by_backprop import BayesByBackprop
from eigenoise.optim.natural_gradient import NaturalGradient


@final
class NoisyAdam(NaturalGradient):
    """A fully factorised Gaussian posterior by natural gradient: the diagonal Fisher of every layer.

    Adam's second moment without the square root; squares are of per-example gradients. Arguments as for
    ``NaturalGradient``.
    """

    noisy = True

    def __init__(self, model: nn.Module, *, num_data: int, likelihood: Likelihood, **options: Any):
        for name in ("conv_basis", "fixed_inputs", "refresh_every", "reinit_every"):
            if options.get(name, "full") not in ("full", None, False, ()):
                raise ValueError(f"{name} is for K-FAC and EK-FAC: noisy Adam has no basis but that of the weights")
        super().__init__(model, Diagonal, num_data=num_data, likelihood=likelihood, **options)


class _KroneckerGradient(NaturalGradient):
    """K-FAC, with noise or without; arguments as for ``NoisyKFAC``."""

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
        structure = functools.partial(Kronecker, damping_form=checks.choice("damping_form", damping_form, DAMPINGS))
        if options.get("fixed_inputs"):
            raise ValueError("fixed_inputs is for EK-FAC alone: K-FAC has no spectrum of its own in a fixed basis")
        if options.get("reinit_every") is not None:
            raise ValueError("reinit_every is for EK-FAC alone: K-FAC has no R that could be reset")
        every = checks.integer("inv_every", inv_every)
        super().__init__(model, structure, num_data=num_data, likelihood=likelihood, refresh_every=every, **options)


@final
class NoisyKFAC(_KroneckerGradient):
    """A matrix Gaussian posterior by natural gradient: Algorithm 2.

    Args:
        model: any ``nn.Module``.
        num_data: N.
        likelihood: what the model's output means.
        damping_form: ``"exact"`` or ``"factored"``, see ``fisher.Kronecker``.
        inv_every: T_inv, steps between decompositions of the factors.
        **options: as for ``NaturalGradient``.
    """

    noisy = True


@final
class KFAC(_KroneckerGradient):
    """K-FAC: Algorithm 2 without noise; arguments as for ``NoisyKFAC``.

    The mean itself is trained; ``posterior`` is then a Laplace approximation around it.
    """

    noisy = False


class _EigenGradient(NaturalGradient):
    """EK-FAC, with noise or without; arguments as for ``NoisyEKFAC``."""

    def __init__(
        self,
        model: nn.Module,
        *,
        num_data: int,
        likelihood: Likelihood,
        damping_form: str = "exact",
        start: str = "kfac",
        eig_every: int = 100,
        **options: Any,
    ):
        form = checks.choice("damping_form", damping_form, DAMPINGS)
        structure = functools.partial(Eigen, damping_form=form, start=checks.choice("start", start, STARTS))
        if damping_form != "exact" and options.get("reinit_every") is None:
            raise ValueError(
                f"damping_form={damping_form!r} says what R is reset to: give reinit_every as well, for instance 50"
            )
        every = checks.integer("eig_every", eig_every)
        super().__init__(model, structure, num_data=num_data, likelihood=likelihood, refresh_every=every, **options)


@final
class NoisyEKFAC(_EigenGradient):
    """An eigenvalue-corrected matrix Gaussian posterior (EMVG) by natural gradient: Algorithm 1.

    Args:
        model: any ``nn.Module``.
        num_data: N.
        likelihood: what the model's output means.
        damping_form: what R is set to at re-initialisations, see ``fisher.Eigen``.
        start: ``"kfac"``: R becomes the K-FAC eigenvalues in the first basis; ``"init"``: it only ever averages what it
            sees, which takes long in a large network.
        eig_every: T_eig, steps between eigendecompositions.
        **options: as for ``NaturalGradient``; ``reinit_every=50`` is the paper's re-initialisation.
    """

    noisy = True


@final
class EKFAC(_EigenGradient):
    """EK-FAC: Algorithm 1 without noise; arguments as for ``NoisyEKFAC``.

    The mean itself is trained; ``posterior`` is then a Laplace approximation around it.
    """

    noisy = False


# By the names that the command line, the studies and the estimators use.
BAYESIAN: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"bbb": BayesByBackprop, "noisy-adam": NoisyAdam, "noisy-kfac": NoisyKFAC, "noisy-ekfac": NoisyEKFAC}
)
POINT: Mapping[str, Callable[..., Any]] = MappingProxyType({"kfac": KFAC, "ekfac": EKFAC})
