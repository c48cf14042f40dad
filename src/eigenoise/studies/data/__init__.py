"""Data: tables bundled with packages, the UCI sets, splits, standardising on the training part only; small images."""

from eigenoise.studies.data import images, transforms, uci
from eigenoise.studies.data.files import DataFileError
from eigenoise.studies.data.images import Images
from eigenoise.studies.data.tables import Splits, Table, boston, split, standardised

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
