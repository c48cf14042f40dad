"""Distributions over matrices of weights, and the mixtures that predictions are."""

from eigenoise.distributions.matrix_normal import EigenMatrixNormal, MatrixNormal
from eigenoise.distributions.mixtures import (
    BernoulliMixture,
    CategoricalMixture,
    GaussianMixture,
    Predictive,
)

__all__ = [
    "BernoulliMixture",
    "CategoricalMixture",
    "EigenMatrixNormal",
    "GaussianMixture",
    "MatrixNormal",
    "Predictive",
]
