"""Data: tables bundled with packages, random splits, standardising on the training part only."""

from eigenoise.data.tables import Splits, Table, boston, split

__all__ = ["Splits", "Table", "boston", "split"]
