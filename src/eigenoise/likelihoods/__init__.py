"""Likelihoods: what the network's output says about a target."""

from eigenoise.likelihoods.base import Likelihood
from eigenoise.likelihoods.classification import BernoulliLikelihood, CategoricalLikelihood
from eigenoise.likelihoods.gaussian import GaussianLikelihood, HeteroscedasticGaussianLikelihood


def as_likelihood(likelihood: Likelihood | str) -> Likelihood:
    """The likelihood itself, or the one that ``"regression"`` or ``"classification"`` stands for.

    Raises:
        TypeError, ValueError: if it is something else.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    kinds = {"regression": GaussianLikelihood, "classification": CategoricalLikelihood}
    if isinstance(likelihood, str) and likelihood in kinds:
        return kinds[likelihood]()
    raise TypeError(
        f"likelihood must be one of eigenoise's likelihoods, 'regression' or 'classification', got {likelihood!r}"
    )


__all__ = [
    "BernoulliLikelihood",
    "CategoricalLikelihood",
    "GaussianLikelihood",
    "HeteroscedasticGaussianLikelihood",
    "Likelihood",
    "as_likelihood",
]
