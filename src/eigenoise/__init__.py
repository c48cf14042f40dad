"""eigenoise: Bayesian neural networks by noisy natural gradient.

Names are imported when they are first used, so that ``eigenoise --help`` answers without loading torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from eigenoise.version import __version__

if TYPE_CHECKING:
    from eigenoise import distributions, fisher, models
    from eigenoise.distributions import EigenMatrixNormal, MatrixNormal
    from eigenoise.inference.batch_norm import settle_batch_norm
    from eigenoise.inference.posterior import Posterior
    from eigenoise.inference.predict import predict
    from eigenoise.likelihoods import (
        BernoulliLikelihood,
        CategoricalLikelihood,
        GaussianLikelihood,
        HeteroscedasticGaussianLikelihood,
    )
    from eigenoise.optim import EKFAC, KFAC, BayesByBackprop, NoisyAdam, NoisyEKFAC, NoisyKFAC

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

_HOMES = {
    "Posterior": "inference.posterior",
    "predict": "inference.predict",
    "settle_batch_norm": "inference.batch_norm",
    **dict.fromkeys(("EigenMatrixNormal", "MatrixNormal"), "distributions"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Likelihood")), "likelihoods"),
    **dict.fromkeys(("EKFAC", "KFAC", "BayesByBackprop", "NoisyAdam", "NoisyEKFAC", "NoisyKFAC"), "optim"),
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"eigenoise.{_HOMES[name]}"), name)
    if not name.startswith("_") and find_spec(f"eigenoise.{name}") is not None:
        return import_module(f"eigenoise.{name}")
    raise AttributeError(f"module 'eigenoise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
