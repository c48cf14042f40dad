"""Fisher structures: each is a preconditioner and a posterior at once."""

from eigenoise.fisher.base import Fisher
from eigenoise.fisher.diagonal import Diagonal
from eigenoise.fisher.eigen import Eigen
from eigenoise.fisher.kronecker import Kronecker
from eigenoise.fisher.kronecker_factors import BasisOptions

__all__ = ["BasisOptions", "Diagonal", "Eigen", "Fisher", "Kronecker"]
