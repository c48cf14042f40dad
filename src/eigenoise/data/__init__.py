"""Data: tables bundled with packages, the UCI sets, splits, standardising on the training part only."""

from eigenoise.data import uci
from eigenoise.data.files import DataFileError
from eigenoise.data.tables import Splits, Table, boston, split, standardised

__all__ = ["DataFileError", "Splits", "Table", "boston", "split", "standardised", "uci"]
