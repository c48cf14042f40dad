"""Likelihoods: how a network's output predicts a target."""

from typing import Any

from eigenoise.likelihoods.base import Likelihood
from eigenoise.likelihoods.classification import BernoulliLikelihood, CategoricalLikelihood
from eigenoise.likelihoods.gaussian import GaussianLikelihood
from eigenoise.likelihoods.heteroscedastic import HeteroscedasticGaussianLikelihood

__all__ = [
    "BernoulliLikelihood",
    "CategoricalLikelihood",
    "GaussianLikelihood",
    "HeteroscedasticGaussianLikelihood",
    "Likelihood",
    "as_likelihood",
]


def as_likelihood(likelihood: Any) -> Likelihood:
    """Return a likelihood as it is, a new one for ``"regression"`` or ``"classification"``.

    Args:
        likelihood: a ``Likelihood``, ``"regression"`` for ``GaussianLikelihood()`` or ``"classification"`` for
            ``CategoricalLikelihood()``.

    Raises:
        ValueError: if it is another string.
        TypeError: if it is anything else.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    tasks: dict[str, type[Likelihood]] = {"regression": GaussianLikelihood, "classification": CategoricalLikelihood}
    if isinstance(likelihood, str) and likelihood in tasks:
        return tasks[likelihood]()
    error = ValueError if isinstance(likelihood, str) else TypeError
    got = repr(likelihood) if isinstance(likelihood, (str, type)) else type(likelihood).__name__
    raise error(
        "likelihood must be one of eigenoise's likelihoods, such as eigenoise.GaussianLikelihood(), or "
        f"'regression' or 'classification', got {got}"
    )
