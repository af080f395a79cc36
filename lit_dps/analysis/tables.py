"""Tables as data frames, CSV files and text; series and numbers as they are written in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lit_dps.core.atomic_write import replacing
from lit_dps.core.search_space import Box, Choices, short_names
from lit_dps.core.statistic import Statistic
from lit_dps.core.text import wrap
from lit_dps.core.trial import Cell, Series, Value, text_of
from lit_dps.core.unit import STEPS, Cost, Unit, cost_text

# A row of a table by column; None where a value is missing.
Row = Mapping[str, Any]

# pandas types by kind of values. With Int64, integers stay integers beside missing ones.
_DTYPES = {"integer": "Int64", "floating": float, "boolean": bool}

# Data frames


def frame(rows: Iterable[Row], columns: Sequence[str] | None = None) -> pd.DataFrame:
    """Return rows as a data frame.

    Columns of integers, floats or booleans get their type; mixed columns keep their values.

    Args:
        rows: They all have the same columns.
        columns: Their names, for a table that may have no rows.
    """
    names: Any = columns
    table = pd.DataFrame(list(rows), columns=names, dtype=object)
    dtypes = {}
    for name in table:
        kind = pd.api.types.infer_dtype(table[name], skipna=True)
        dtypes[name] = _DTYPES.get(kind, object)
    return table.astype(dtypes)


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a data frame, with None where a value is missing."""
    # Four times as fast as pandas' `to_dict`.
    names = list(table.columns)
    columns = []
    for name in names:
        values = table[name].tolist()
        missing = table[name].isna().to_numpy()
        for i in np.flatnonzero(missing):
            values[i] = None
        columns.append(values)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def numbers(column: Any) -> np.ndarray:
    """Return a column (n,) of a data frame as floats, nan where a value is missing."""
    return column.to_numpy(float, na_value=np.nan)


def where(rows: pd.DataFrame, /, **values: object) -> pd.DataFrame:
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


def columns_before(rows: pd.DataFrame, column: str) -> list[str]:
    """Return the columns of a table before a column, such as those that name a series."""
    columns = list(rows.columns)
    return columns[: columns.index(column)]


def cell_columns(rows: pd.DataFrame) -> list[str]:
    """Return the columns that name a cell, the first of a table: its series, then batch_size."""
    return [*columns_before(rows, "batch_size"), "batch_size"]


# Files and text


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write a table to a file atomically; missing values are empty, numbers keep all digits."""
    with replacing(path) as temporary:
        table.to_csv(temporary, index=False, lineterminator="\n")


def aligned(rows: Iterable[Mapping[str, str]], words: bool = False) -> list[str]:
    """Return the lines of a right-aligned text table: a header, then the rows.

    Args:
        rows: At least one; they all have the same columns.
        words: Whether the last column has words, which begin at its left edge.
    """
    rows = list(rows)
    table = [list(rows[0])]
    for row in rows:
        table.append(list(row.values()))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if words:
        widths[-1] = 0
    lines = []
    for texts in table:
        padded = [text.rjust(width) for text, width in zip(texts, widths, strict=True)]
        lines.append("  ".join(padded))
    return lines


def without_column(rows: Iterable[Mapping[str, str]], name: str) -> list[dict[str, str]]:
    """Return the rows of a text table without a column."""
    kept = []
    for row in rows:
        kept.append({column: text for column, text in row.items() if column != name})
    return kept


def fitted(
    rows: Sequence[Mapping[str, str]], less_needed: Iterable[str], width: int, words: bool = False
) -> list[str]:
    """Return the lines of a text table without columns that do not fit, and their names in a line.

    Args:
        rows, words: As of `aligned`.
        less_needed: Columns that are left out, in this order, until the table fits.
        width: Columns of the terminal.
    """
    lines = _stripped(aligned(rows, words))
    omitted = []
    for name in less_needed:
        if name in rows[0] and max(map(len, lines)) > width:
            rows = without_column(rows, name)
            lines = _stripped(aligned(rows, words))
            omitted.append(name)
    if omitted:
        lines += wrap(f"Not shown at this width: {', '.join(omitted)}.", width)
    return lines


def in_parts(
    rows: Iterable[Mapping[str, str]], keys: int, width: int | None, words: bool = False
) -> list[str]:
    """Return the lines of a text table; columns that do not fit follow in further tables.

    Args:
        rows, words: As of `aligned`.
        keys: The number of the first columns, which name a row. Each table begins with them.
        width: Columns of the terminal; None for a single table.
    """
    rows = list(rows)
    columns = list(rows[0])
    if width is None or len(columns) <= keys:
        return aligned(rows, words)
    names = columns[:keys]
    lines: list[str] = []
    part: list[str] = []
    for column in columns[keys:]:
        wider = _part(rows, [*names, *part, column], words and column == columns[-1])
        if part and max(map(len, wider)) > width:
            lines += [*_part(rows, [*names, *part], words=False), ""]
            part = []
        part.append(column)
    return lines + _part(rows, [*names, *part], words)


def _part(rows: Iterable[Mapping[str, str]], columns: Sequence[str], words: bool) -> list[str]:
    """Return the lines of a text table with these columns only."""
    selected = []
    for row in rows:
        selected.append({column: row[column] for column in columns})
    return _stripped(aligned(selected, words))


def _stripped(lines: Iterable[str]) -> list[str]:
    return [line.rstrip() for line in lines]


def significant(x: float | None) -> str:
    """Return a number with 3 significant digits, zeros kept: 1.00, 0.540, 123; "-" for None."""
    if x is None:
        return "-"
    return f"{x:#.3g}".rstrip(".")


def reading_text(x: float | None) -> str:
    """Return a whole number below 1e7, such as a count, in full; others as `significant`."""
    if x is not None and abs(x) < 1e7 and float(x).is_integer():
        return f"{x:.0f}"
    return significant(x)


def three_digits(x: float | None) -> str:
    """Return a number with up to 3 significant digits: 42400, 0.123, 4.24e+09; "-" for None."""
    if x is None:
        return "-"
    rounded = f"{x:.3g}"
    if 100 <= abs(float(rounded)) < 1e7:
        return f"{float(rounded):.0f}"
    return rounded


def listed_numbers(values: Iterable[float]) -> str:
    """Return numbers as a list: 4, 8, 16."""
    return ", ".join(f"{value:g}" for value in values)


def times(x: float | None) -> str:
    """Return a ratio as text: x1.67; "-" for None."""
    if x is None:
        return "-"
    return f"x{significant(x)}"


def k_star_text(k_star: Cost | None, is_upper_bound: bool) -> str:
    """Return K* as text: 112, "<= 16" for an upper bound, "-" for None."""
    if k_star is None:
        return "-"
    text = cost_text(k_star)
    if is_upper_bound:
        return f"<= {text}"
    return text


def k_star_axis(statistic: Statistic, unit: Unit = STEPS) -> str:
    """Return the label of an axis of K*."""
    if statistic.is_minimum:
        return f"{unit.name} to result K* [{unit.axis}]"
    return f"K*: {statistic.label} [{unit.axis}]"


def value_text(value: Value | None, box: Box) -> str:
    """Return a metaparameter as text, with 3 significant digits; "-" for None.

    On a reverse_log scale these are digits of 1 - value, so that 0.9990 and 0.9999 differ.
    """
    if value is None:
        return "-"
    if isinstance(box, Choices):
        return text_of(value)
    if box.integer:
        return str(value)
    assert not isinstance(value, str)
    if box.scale != "reverse_log":
        return significant(value)
    exponent = int(f"{1 - value:.2e}".partition("e")[2])
    return f"{value:.{max(2 - exponent, 0)}f}"


# Series


def cell_of(series: Series, batch_size: int) -> Cell:
    """Return the cell of a series at a batch size."""
    return Cell(batch_size, series.sparsity, series.axes)


def base_of(series: Series, all_series: Iterable[Series]) -> Series:
    """Return the series of least sparsity among those with the same further axes."""
    return min(other for other in all_series if other.axes == series.axes)


def columns_of(series: Series) -> dict[str, Value]:
    """Return the columns that name a series: sparsity, then each further axis by its short key."""
    names = short_names([key for key, _ in series.axes])
    columns: dict[str, Value] = {"sparsity": series.sparsity}
    for key, value in series.axes:
        columns[names[key]] = value
    return columns


def rows_of(series: Series, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of a series from a table that has its columns."""
    return where(rows, **columns_of(series))


def short_columns(series: Series) -> dict[str, str]:
    """Return the columns that name a series in a text table: S, then each further axis."""
    columns = {}
    for name, value in columns_of(series).items():
        if name == "sparsity":
            name = "S"
        columns[name] = text_of(value)
    return columns


def cell_texts(cell: Cell) -> dict[str, str]:
    """Return the columns that name a cell in a text table: B, then those of its series."""
    return {"B": str(cell.batch_size), **short_columns(cell.series)}


def legend(series: Series) -> str:
    """Return a series as a legend names it: S = 0.9, method = snip."""
    return ", ".join(f"{name} = {text}" for name, text in short_columns(series).items())


def title(series: Series) -> str:
    """Return a series as the title of a panel: sparsity 0.9, method snip."""
    return ", ".join(f"{name} {text_of(value)}" for name, value in columns_of(series).items())


def listed(all_series: Sequence[Series]) -> str:
    """Return several series in words: S = 0, 0.5, or S = 0, method = snip; S = 0.5, ..."""
    if any(series.axes for series in all_series):
        return "; ".join(map(legend, all_series))
    return f"S = {', '.join(text_of(series.sparsity) for series in all_series)}"
