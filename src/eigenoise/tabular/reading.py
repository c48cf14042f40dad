"""CSV and Parquet files as pandas tables, with a plain word for everything that can be wrong with them."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eigenoise import storage

if TYPE_CHECKING:
    import pandas as pd

SAMPLE = 1 << 16  # characters that are looked at to see how a file is written
PARQUET = (".parquet", ".pq")
MISSING = ("", "?", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "none", "-")


def read_table(path: Path, encoding: str = "utf-8", texts: Sequence[str] = ()) -> pd.DataFrame:
    """The table in a CSV or Parquet file; columns of CSV are text where they are not numbers.

    Args:
        path: of the file.
        encoding: of a CSV file.
        texts: columns that are text in any case: 01 is not 1 then.

    Raises:
        OSError: if there is no such file.
        ValueError: if it holds no table, or one with two columns of one name.
        ImportError: if Parquet cannot be read here.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    frame = _parquet(path) if path.suffix.lower() in PARQUET else _csv(path, encoding, texts)
    frame.columns = [str(name) for name in frame.columns]
    if not len(frame.columns):
        raise ValueError(f"{path} has no columns")
    if not len(frame):
        raise ValueError(f"{path} has a header and no rows")
    return frame


def _csv(path: Path, encoding: str, texts: Sequence[str]) -> pd.DataFrame:
    import pandas as pd

    if not path.stat().st_size:
        raise ValueError(f"{path} is empty")
    try:
        with path.open(encoding=encoding, newline="") as file:
            sample = file.read(SAMPLE)
            separator = _separator(sample)
            lines = list(csv.reader(io.StringIO(sample), delimiter=separator))
        lines = [line for line in lines if line][: -1 if len(sample) == SAMPLE else None]  # the last may have been cut
        header = lines[0] if lines else []
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise ValueError(f"{path} has two columns of the name {twice[0]!r}: give one of them another name")
        if any(any(field.strip() for field in line[len(header) :]) for line in lines):
            raise ValueError(f"{path} cannot be read as CSV: a row has more fields than the header has names")
        return pd.read_csv(
            path,
            sep=separator,
            encoding=encoding,
            decimal="," if _decimal_commas(lines[1:], separator) else ".",
            index_col=False,
            dtype={name: str for name in texts if name in header},
            keep_default_na=False,
            na_values=list(MISSING),
            low_memory=False,
        )
    except UnicodeError as error:
        raise ValueError(f"{path} is not {encoding} text ({error}): try --encoding latin-1") from error
    except LookupError as error:
        raise ValueError(f"there is no encoding {encoding!r}") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error


def _decimal_commas(rows: list[list[str]], separator: str) -> bool:
    """Whether numbers are written as 3,5: some are, and none as 3.5."""
    fields = [field.strip() for row in rows for field in row]
    commas = any(re.fullmatch(r"-?\d+,\d+", field) for field in fields)
    return separator != "," and commas and not any(re.fullmatch(r"-?\d+\.\d+", field) for field in fields)


def _separator(sample: str) -> str:
    """The one of comma, semicolon and tab that the first line has most of."""
    first = next((line for line in sample.splitlines() if line.strip()), "")
    return max(",;\t", key=first.count)


def _parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install 'eigenoise[parquet]'") from error
    except Exception as error:  # whatever the reader makes of damaged bytes
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """As CSV or Parquet, by the name's ending; the file appears when it is complete."""
    if path.suffix.lower() in PARQUET:
        storage.write(path, lambda temporary: frame.to_parquet(temporary, index=False))
    else:
        storage.write(path, lambda temporary: frame.to_csv(temporary, index=False))
