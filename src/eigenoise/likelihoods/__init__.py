"""Likelihoods: what the network's output says about a target."""

from eigenoise.likelihoods.base import Likelihood
from eigenoise.likelihoods.classification import BernoulliLikelihood, CategoricalLikelihood
from eigenoise.likelihoods.gaussian import GaussianLikelihood, HeteroscedasticGaussianLikelihood

__all__ = [
    "BernoulliLikelihood",
    "CategoricalLikelihood",
    "GaussianLikelihood",
    "HeteroscedasticGaussianLikelihood",
    "Likelihood",
]
