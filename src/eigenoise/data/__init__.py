"""Data: tables bundled with packages, the UCI sets, splits, standardising on the training part only; small images."""

from eigenoise.data import images, transforms, uci
from eigenoise.data.files import DataFileError
from eigenoise.data.images import Images
from eigenoise.data.tables import Splits, Table, boston, split, standardised

__all__ = [
    "DataFileError",
    "Images",
    "Splits",
    "Table",
    "boston",
    "images",
    "split",
    "standardised",
    "transforms",
    "uci",
]
