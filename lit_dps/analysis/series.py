"""How a series is named: in columns of a table, in words, and in a figure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from lit_dps.space import short_names
from lit_dps.trial import Cell, Series, Value


def cell_of(series: Series, batch_size: int) -> Cell:
    """The cell of a series at a batch size."""
    return Cell(batch_size, series.sparsity, series.others)


def columns_of(series: Series) -> dict[str, Value]:
    """The columns of a table that name a series: sparsity, then each further axis by its short key."""
    names = short_names([key for key, _ in series.others])
    return {"sparsity": series.sparsity, **{names[key]: value for key, value in series.others}}


def rows_of(series: Series, rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of a series, in a table with its columns."""
    return rows[np.logical_and.reduce([rows[name] == value for name, value in columns_of(series).items()])]


def cell_columns(rows: pd.DataFrame) -> list[str]:
    """The columns that name a cell, in a table that has them first: those of its series, then batch_size."""
    return list(rows.columns[: rows.columns.get_loc("batch_size") + 1])


def short_columns(series: Series) -> dict[str, str]:
    """The columns that name a series in a table to read: S, then each further axis."""
    sparsity, *further = columns_of(series).items()
    return {name: _text(value) for name, value in (("S", sparsity[1]), *further)}


def legend(series: Series) -> str:
    """S = 0.9, method = snip."""
    return ", ".join(f"{name} = {text}" for name, text in short_columns(series).items())


def title(series: Series) -> str:
    """Sparsity 0.9, method snip, as a panel has it."""
    return ", ".join(f"{name} {_text(value)}" for name, value in columns_of(series).items())


def listed(every: Iterable[Series]) -> str:
    """Several series in words: S = 0, 0.5, or S = 0, method = snip; S = 0.5, method = snip."""
    every = list(every)
    if any(series.others for series in every):
        return "; ".join(map(legend, every))
    return f"S = {', '.join(_text(series.sparsity) for series in every)}"


def base_of(series: Series, every: Iterable[Series]) -> Series:
    """What a series is compared with: of those that differ from it in sparsity alone, the one of least sparsity."""
    return min(other for other in every if other.others == series.others)


def _text(value: Value) -> str:
    return value.rpartition(".")[2] if isinstance(value, str) else f"{value:g}"
