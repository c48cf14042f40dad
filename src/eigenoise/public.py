"""Where the names of ``eigenoise`` come from."""

from eigenoise import distributions as distributions
from eigenoise import fisher as fisher
from eigenoise import models as models
from eigenoise.bbb import BayesByBackprop as BayesByBackprop
from eigenoise.distributions import EigenMatrixNormal as EigenMatrixNormal
from eigenoise.distributions import MatrixNormal as MatrixNormal
from eigenoise.likelihoods import BernoulliLikelihood as BernoulliLikelihood
from eigenoise.likelihoods import CategoricalLikelihood as CategoricalLikelihood
from eigenoise.likelihoods import GaussianLikelihood as GaussianLikelihood
from eigenoise.likelihoods import HeteroscedasticGaussianLikelihood as HeteroscedasticGaussianLikelihood
from eigenoise.monte_carlo import predict as predict
from eigenoise.norms import settle_batch_norm as settle_batch_norm
from eigenoise.optim import EKFAC as EKFAC
from eigenoise.optim import KFAC as KFAC
from eigenoise.optim import NoisyAdam as NoisyAdam
from eigenoise.optim import NoisyEKFAC as NoisyEKFAC
from eigenoise.optim import NoisyKFAC as NoisyKFAC
from eigenoise.posterior import Posterior as Posterior
