"""Tables as data frames, as CSV files, and as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from lit_dps.files import replacing

Row = Mapping[str, object]  # of a table, by column; None where a value is missing
_DTYPES = {"integer": "Int64", "floating": float, "boolean": bool}  # Int64: integers stay integers beside missing ones


def frame(rows: Iterable[Row], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Rows as a data frame; a column of integers, numbers or truth values has their type, a mixed one keeps its values.

    Args:
        rows: All with the same columns.
        columns: Their names, for a table that may have no rows.
    """
    table = pd.DataFrame(list(rows), columns=columns, dtype=object)
    return table.astype({c: _DTYPES.get(pd.api.types.infer_dtype(table[c], skipna=True), object) for c in table})


def records(table: pd.DataFrame) -> list[dict[str, object]]:
    """The rows of a data frame, None where a value is missing."""
    return table.astype(object).where(table.notna(), None).to_dict("records")


def numbers(column: pd.Series) -> np.ndarray:
    """A column (n,) as numbers, nan where a value is missing."""
    return column.to_numpy(float, na_value=np.nan)


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Writes a table, missing values as empty fields, numbers in full, replacing `path` in one go."""
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False, lineterminator="\n")


def significant(x: float | None) -> str:
    """A number to 3 significant digits, trailing zeros kept: 1.00, 0.540, 123; "-" for None."""
    return "-" if x is None else f"{x:#.3g}".rstrip(".")


def three_digits(x: float | None) -> str:
    """A number to 3 significant digits, written out where that is readable: 42400, 0.123, 4.24e+09; "-" for None."""
    if x is None:
        return "-"
    rounded = f"{x:.3g}"
    return f"{float(rounded):.0f}" if 100 <= abs(float(rounded)) < 1e7 else rounded


def times(x: float | None) -> str:
    """A ratio: x1.67; "-" for None."""
    return "-" if x is None else f"x{significant(x)}"


def k_star_text(row: Row) -> str:
    """K* of a row with the columns k_star and floor: 112, "<= 16" where it is an upper bound, "-" for None."""
    bound = "<= " if row["floor"] else ""
    return "-" if row["k_star"] is None else f"{bound}{row['k_star']}"


def aligned(rows: Iterable[Mapping[str, str]], words: bool = False) -> list[str]:
    """Rows, at least one and all with the same columns, as lines below their header, right-aligned.

    Args:
        rows: By column.
        words: Whether the last column holds words, which start where it starts.
    """
    rows = list(rows)
    table = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    numbers = len(widths) - words
    return [
        "  ".join(x.rjust(w) if i < numbers else x for i, (x, w) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]
