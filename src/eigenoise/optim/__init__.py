"""The optimisers: noisy natural gradient (Algorithms 1 and 2), K-FAC and EK-FAC without noise, Bayes by Backprop."""

from eigenoise.optim.bayes_by_backprop import BayesByBackprop
from eigenoise.optim.noisy_adam import NoisyAdam
from eigenoise.optim.noisy_ekfac import EKFAC, NoisyEKFAC
from eigenoise.optim.noisy_kfac import KFAC, NoisyKFAC

__all__ = ["EKFAC", "KFAC", "BayesByBackprop", "NoisyAdam", "NoisyEKFAC", "NoisyKFAC"]
