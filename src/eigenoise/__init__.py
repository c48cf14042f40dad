"""eigenoise: Bayesian neural networks by noisy natural gradient.

Names are loaded when the first of them is asked for, so that the command line answers before torch is there.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from eigenoise.version import __version__

if TYPE_CHECKING:
    from eigenoise.public import *  # noqa: F403

__all__ = [  # noqa: F405
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


if not TYPE_CHECKING:  # a type checker would take every name for one that exists

    def __getattr__(name: str) -> Any:
        if not name.startswith("_"):
            if find_spec(f"eigenoise.{name}") is not None:  # without the others, which may be what asks for it
                return import_module(f"eigenoise.{name}")
            if name in __all__:
                return getattr(import_module("eigenoise.public"), name)
        raise AttributeError(f"module 'eigenoise' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
