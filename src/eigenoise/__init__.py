"""eigenoise: Bayesian neural networks by noisy natural gradient."""

from eigenoise import distributions, fisher, models
from eigenoise.bbb import BayesByBackprop
from eigenoise.distributions import EigenMatrixNormal, MatrixNormal
from eigenoise.likelihoods import (
    BernoulliLikelihood,
    CategoricalLikelihood,
    GaussianLikelihood,
    HeteroscedasticGaussianLikelihood,
)
from eigenoise.norms import settle_batch_norm
from eigenoise.optim import EKFAC, KFAC, NoisyAdam, NoisyEKFAC, NoisyKFAC
from eigenoise.posterior import Posterior
from eigenoise.predict import predict
from eigenoise.version import __version__

__all__ = [
    "EKFAC",
    "KFAC",
    "BayesByBackprop",
    "BernoulliLikelihood",
    "CategoricalLikelihood",
    "EigenMatrixNormal",
    "GaussianLikelihood",
    "HeteroscedasticGaussianLikelihood",
    "MatrixNormal",
    "NoisyAdam",
    "NoisyEKFAC",
    "NoisyKFAC",
    "Posterior",
    "__version__",
    "distributions",
    "fisher",
    "models",
    "predict",
    "settle_batch_norm",
]
