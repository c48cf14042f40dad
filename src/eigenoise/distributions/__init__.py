"""Matrix Gaussians over weights, and predictive mixtures over weight samples."""

from eigenoise.distributions.matrix_normal import EigenMatrixNormal, MatrixNormal
from eigenoise.distributions.mixtures import BernoulliMixture, CategoricalMixture, GaussianMixture, Predictive

__all__ = [
    "BernoulliMixture",
    "CategoricalMixture",
    "EigenMatrixNormal",
    "GaussianMixture",
    "MatrixNormal",
    "Predictive",
]
