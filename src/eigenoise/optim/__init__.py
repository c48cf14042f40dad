"""The optimisers: noisy natural gradient (Algorithms 1 and 2), K-FAC and EK-FAC without noise, Bayes by Backprop."""

from eigenoise.optim.bayes_by_backprop import BayesByBackprop
from eigenoise.optim.methods import EKFAC, KFAC, NoisyAdam, NoisyEKFAC, NoisyKFAC

__all__ = ["EKFAC", "KFAC", "BayesByBackprop", "NoisyAdam", "NoisyEKFAC", "NoisyKFAC"]
