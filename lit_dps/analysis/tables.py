"""Tables as data frames, as CSV files and as text; how a series and a number are written in them,
and in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lit_dps.core.atomic_write import replacing
from lit_dps.core.search_space import Box, Choices, short_names
from lit_dps.core.trial import Cell, Series, Value, text_of

# A row of a table by column; None where a value is missing.
Row = Mapping[str, Any]
_DTYPES = {
    "integer": "Int64",
    "floating": float,
    "boolean": bool,
}  # Int64: integers stay integers beside missing ones


def frame(rows: Iterable[Row], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Rows, all with the same columns, as a data frame; `columns` names these for a table that may
    have no rows.

    A column of integers, numbers or truth values has their type, a mixed one keeps its values.
    """
    names: Any = columns
    table = pd.DataFrame(list(rows), columns=names, dtype=object)
    return table.astype(
        {c: _DTYPES.get(pd.api.types.infer_dtype(table[c], skipna=True), object) for c in table}
    )


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a data frame, None where a value is missing."""
    # Four times as fast as pandas' `to_dict`.
    names, columns = list(table.columns), []
    for name in names:
        values = table[name].tolist()
        missing = table[name].isna().to_numpy()
        for i in np.flatnonzero(missing):
            values[i] = None
        columns.append(values)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def numbers(column: Any) -> np.ndarray:
    """Return a column (n,) of a data frame as numbers, nan where a value is missing."""
    return column.to_numpy(float, na_value=np.nan)


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Writes a table, missing values as empty fields, numbers in full, replacing `path` in one
    go."""
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False, lineterminator="\n")


def aligned(rows: Iterable[Mapping[str, str]], words: bool = False) -> list[str]:
    """Rows, at least one and all with the same columns, as right-aligned lines below their header.

    Where the last column holds `words`, these start where it starts.
    """
    rows = list(rows)
    table = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    right = len(widths) - words
    return [
        "  ".join(
            x.rjust(w) if i < right else x
            for i, (x, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]


def significant(x: float | None) -> str:
    """A number to 3 significant digits, trailing zeros kept: 1.00, 0.540, 123; "-" for None."""
    return "-" if x is None else f"{x:#.3g}".rstrip(".")


def three_digits(x: float | None) -> str:
    """A number to 3 significant digits, written out where that is readable: 42400, 0.123, 4.24e+09;
    "-" for None."""
    if x is None:
        return "-"
    rounded = f"{x:.3g}"
    return f"{float(rounded):.0f}" if 100 <= abs(float(rounded)) < 1e7 else rounded


def listed_numbers(values: Iterable[float]) -> str:
    """4, 8, 16."""
    return ", ".join(f"{value:g}" for value in values)


def times(x: float | None) -> str:
    """A ratio: x1.67; "-" for None."""
    return "-" if x is None else f"x{significant(x)}"


def k_star_text(row: Row) -> str:
    """K* of a row with the columns k_star and floor: 112, "<= 16" where it is an upper bound, "-"
    for None."""
    bound = "<= " if row["floor"] else ""
    return "-" if row["k_star"] is None else f"{bound}{row['k_star']}"


def value_text(value: Value | None, box: Box) -> str:
    """Return a metaparameter as text, with 3 significant digits.

    On a reverse_log scale these are of 1 - value: 0.9990 is not 0.9999.
    """
    if isinstance(box, Choices):
        return "-" if value is None else text_of(value)
    if value is None:
        return significant(None)
    if box.integer:
        return str(value)
    assert not isinstance(value, str)
    if box.scale != "reverse_log":
        return significant(value)
    exponent = int(f"{1 - value:.2e}".partition("e")[2])
    return f"{value:.{max(2 - exponent, 0)}f}"


def cell_of(series: Series, batch_size: int) -> Cell:
    """The cell of a series at a batch size."""
    return Cell(batch_size, series.sparsity, series.axes)


def base_of(series: Series, every: Iterable[Series]) -> Series:
    """What a series is compared with: of those that differ from it in sparsity alone, the one of
    least sparsity."""
    return min(other for other in every if other.axes == series.axes)


def columns_of(series: Series) -> dict[str, Value]:
    """The columns of a table that name a series: sparsity, then each further axis by its short
    key."""
    names = short_names([key for key, _ in series.axes])
    return {"sparsity": series.sparsity, **{names[key]: value for key, value in series.axes}}


def rows_of(series: Series, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a series, of a table with its columns."""
    is_of_series = [rows[name] == value for name, value in columns_of(series).items()]
    selected: Any = rows[np.logical_and.reduce(is_of_series)]
    return selected


def where(rows: pd.DataFrame, **values: object) -> pd.DataFrame:
    """Return the rows whose columns have some values, such as `where(rows, batch_size=8)`."""
    selected: Any = rows
    for column, value in values.items():
        selected = selected[selected[column] == value]
    return selected


def count(condition: Any) -> int:
    """Return how many values of a condition (n,) are true."""
    return int(condition.sum())


def has_values(rows: pd.DataFrame, column: str) -> bool:
    """Return True if any row has a value in a column."""
    return bool(rows[column].notna().any())


def cell_columns(rows: pd.DataFrame) -> list[str]:
    """Return the columns that name a cell, the first of a table: its series, then batch_size."""
    columns = list(rows.columns)
    return columns[: columns.index("batch_size") + 1]


def short_columns(series: Series) -> dict[str, str]:
    """The columns that name a series in a table to read: S, then each further axis."""
    return {
        "S" if name == "sparsity" else name: text_of(value)
        for name, value in columns_of(series).items()
    }


def legend(series: Series) -> str:
    """S = 0.9, method = snip."""
    return ", ".join(f"{name} = {text}" for name, text in short_columns(series).items())


def title(series: Series) -> str:
    """Sparsity 0.9, method snip, as a panel has it."""
    return ", ".join(f"{name} {text_of(value)}" for name, value in columns_of(series).items())


def listed(every: Sequence[Series]) -> str:
    """Several series in words: S = 0, 0.5, or S = 0, method = snip; S = 0.5, method = snip."""
    if any(series.axes for series in every):
        return "; ".join(map(legend, every))
    return f"S = {', '.join(text_of(series.sparsity) for series in every)}"
