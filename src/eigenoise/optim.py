"""The methods by name: NoisyAdam, NoisyKFAC, NoisyEKFAC (Algorithms 1 and 2), and KFAC, EKFAC without noise.

A method is a Fisher structure; everything else is ``NaturalGradient``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from eigenoise import checks
from eigenoise.fisher import Diagonal, Eigen, Fisher, Kronecker
from eigenoise.likelihoods import Likelihood
from eigenoise.natural import NaturalGradient


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
