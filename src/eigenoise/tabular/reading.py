"""Read and write tables as CSV and Parquet files."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eigenoise import storage

if TYPE_CHECKING:
    import pandas as pd

SNIFF_CHARACTERS = 1 << 16  # read to detect separator, header and decimal comma
PARQUET_SUFFIXES = (".parquet", ".pq")
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # of texts that a spreadsheet runs
MISSING_MARKS = ("", "?", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "none", "-")


def read_table(path: Path, encoding: str = "utf-8", texts: Sequence[str] = ()) -> pd.DataFrame:
    """Read a CSV or Parquet file; CSV columns that are not numbers are text.

    Args:
        path: the file.
        encoding: encoding of a CSV file.
        texts: columns to read as text, so that 01 does not become 1.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is not a table, or has duplicate column names.
        ImportError: if it is a Parquet file and pyarrow is not installed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    frame = _parquet(path) if path.suffix.lower() in PARQUET_SUFFIXES else _csv(path, encoding, texts)
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
            sample = file.read(SNIFF_CHARACTERS)
            separator = _separator(sample)
            lines = list(csv.reader(io.StringIO(sample), delimiter=separator))
        lines = [line for line in lines if line][
            : -1 if len(sample) == SNIFF_CHARACTERS else None
        ]  # the last may be incomplete
        header = lines[0] if lines else []
        duplicates = sorted({name for name in header if header.count(name) > 1})
        if duplicates:
            raise ValueError(f"{path} has two columns of the name {duplicates[0]!r}: rename one of them")
        if any(any(field.strip() for field in line[len(header) :]) for line in lines):
            raise ValueError(f"{path} cannot be read as CSV: a row has more fields than the header")
        return pd.read_csv(
            path,
            sep=separator,
            encoding=encoding,
            decimal="," if _decimal_commas(lines[1:], separator) else ".",
            index_col=False,
            dtype={name: str for name in texts if name in header},
            keep_default_na=False,
            na_values=list(MISSING_MARKS),
            low_memory=False,
        )
    except UnicodeError as error:
        raise ValueError(f"{path} is not {encoding} text ({error}): try --encoding latin-1") from error
    except LookupError as error:
        raise ValueError(f"there is no encoding {encoding!r}") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read as CSV: {error}") from error


def _decimal_commas(rows: list[list[str]], separator: str) -> bool:
    """Return whether some numbers are written as 3,5 and none as 3.5."""
    fields = [field.strip() for row in rows for field in row]
    commas = any(re.fullmatch(r"-?\d+,\d+", field) for field in fields)
    return separator != "," and commas and not any(re.fullmatch(r"-?\d+\.\d+", field) for field in fields)


def _separator(sample: str) -> str:
    """Return the most frequent of comma, semicolon and tab in the first line."""
    first = next((line for line in sample.splitlines() if line.strip()), "")
    return max(",;\t", key=first.count)


def _parquet(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        return pd.read_parquet(path)
    except ImportError as error:
        raise ImportError("Parquet files need pyarrow: pip install 'eigenoise[parquet]'") from error
    except Exception as error:  # readers raise anything for damaged bytes
        raise ValueError(f"{path} cannot be read as Parquet: {error}") from error


def write_table(frame: pd.DataFrame, path: Path, own: Sequence[str] = ()) -> None:
    """Write a Parquet or CSV file, by its suffix, atomically.

    Args:
        frame: the table.
        path: the file.
        own: columns that were added; in CSV their texts that a spreadsheet would run get an apostrophe.
    """
    if path.suffix.lower() in PARQUET_SUFFIXES:
        storage.write(path, lambda temporary: frame.to_parquet(temporary, index=False))
        return
    from pandas.api.types import is_numeric_dtype

    frame = frame.assign(**{name: frame[name].map(_harmless) for name in own if not is_numeric_dtype(frame[name])})
    frame = frame.rename(columns={name: _harmless(name) for name in own})
    storage.write(path, lambda temporary: frame.to_csv(temporary, index=False))


def _harmless(value: Any) -> Any:
    """A text that no spreadsheet takes for a formula; other values as they are."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value
