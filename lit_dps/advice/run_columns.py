"""Columns of a table of runs: their names in other programs, and their values.

`find_columns` finds the columns of `COLUMNS` in a table. The other functions read their values, and
refuse a wrong one with row and column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lit_dps.core.errors import ConfigError

MLFLOW = "mlflow:"  # before the name of an experiment, in the name of a table
# Column -> names by which other programs call it, without the folders of a dotted or slashed name.
COLUMNS: dict[str, tuple[str, ...]] = {
    "batch_size": ("global_batch_size", "train_batch_size", "batchsize", "bs", "b"),
    "steps": ("steps_to_goal", "steps_to_result"),
    "learning_rate": ("lr",),
    "censored": ("missed",),
    "seed": ("random_seed",),
    "devices": ("num_devices", "world_size", "n_gpus", "gpus"),
    "step_seconds": ("seconds_per_step", "step_time"),
    "check": ("check_interval",),
    "run": ("run_id", "run_name", "run_uuid"),
    "step": ("global_step", "iteration"),
}
WHOLE = ("batch_size", "devices")
POSITIVE = ("batch_size", "steps", "learning_rate", "devices", "step_seconds", "check", "step")
YES = ("1", "1.0", "true", "yes")
EMPTY = ("", "nan", "none", "<na>")
NO = ("0", "0.0", "false", "no", *EMPTY)
ROWS_BEFORE_FIRST = 2  # of a CSV file: lines count from 1, and the first one has the names


def refuse_repeated_columns(names: Sequence[Any], source: str) -> None:
    """Raise ConfigError if two columns have one name, or if a name has several levels."""
    for i, name in enumerate(names):
        if isinstance(name, tuple):
            allowed = "a text. Give the table columns of one level"
            raise ConfigError(f"columns of {source}", name, allowed)
        # pandas names columns without a name itself.
        if name != "" and name in names[:i]:
            allowed = "a name that occurs once. Rename or drop the other column"
            raise ConfigError(f"columns of {source}", f"twice {name}", allowed)


def find_columns(
    table: pd.DataFrame, source: str, names: Mapping[str, str], notes: list[str]
) -> dict[str, str]:
    """Return the name in the table of each column that it has."""
    columns = {}
    for ours, theirs in names.items():
        if ours not in COLUMNS:
            raise ConfigError("--columns", ours, f"one of {', '.join(COLUMNS)}")
        if theirs not in table:
            raise ConfigError(
                "--columns", f"{ours}={theirs}", f"a column of {listed_columns(table)}"
            )
        columns[ours] = theirs
    for ours, aliases in COLUMNS.items():
        if ours in columns:
            continue
        if ours in table and ours not in columns.values():
            columns[ours] = ours
            continue
        candidates = []
        for name in table.columns:
            if name not in columns.values() and plain_name(str(name)) in (ours, *aliases):
                candidates.append(str(name))
        if len(candidates) > 1:
            raise ConfigError(
                f"{ours} of {source}",
                ", ".join(candidates),
                f"one column. Choose it with --columns {ours}={candidates[0]}",
            )
        if candidates:
            columns[ours] = candidates[0]
            notes.append(f"{ours} is read from the column {candidates[0]}.")
    return columns


def without_results(table: pd.DataFrame, names: Mapping[str, str]) -> pd.DataFrame:
    """Return a table without the columns that would be read as steps to the goal or censored.

    A parameter of such a name that a run has logged is not a result, but a setting.

    Args:
        table: The table.
        names: Names of columns that the user has chosen, by column here; they are kept.
    """
    results = []
    for ours in ("steps", "censored"):
        for name in table.columns:
            is_result = plain_name(str(name)) in (ours, *COLUMNS[ours])
            if is_result and name not in names.values():
                results.append(name)
    return table.drop(columns=results)


def plain_name(name: str) -> str:
    """Return the last part of a dotted or slashed name, in small letters with underscores."""
    last = re.split(r"[./]", name)[-1]
    return re.sub(r"[^a-z0-9]+", "_", last.lower()).strip("_")


def is_sparsity(name: Any) -> bool:
    return plain_name(str(name)) == "sparsity"


def listed_columns(table: pd.DataFrame) -> str:
    return ", ".join(map(str, table.columns))


def positive_numbers(values: pd.Series, column: str, source: str, may_be_zero: bool) -> pd.Series:
    """Return a column as numbers, nan where it is empty."""
    numbers = as_numbers(values)
    for row, (number, written) in enumerate(zip(numbers, values, strict=True)):
        is_empty = pd.isna(written) or str(written).strip().lower() in EMPTY
        is_allowed_zero = may_be_zero and number == 0
        if is_empty or is_allowed_zero:
            continue
        if not 0 < number < math.inf:
            raise ConfigError(place_of(column, row, source), written, "a finite number above 0")
        if column in WHOLE and number % 1:
            raise ConfigError(place_of(column, row, source), written, "a whole number")
    return numbers


def as_numbers(values: Any) -> Any:
    """Return a column as floats, nan where it has no number; for nullable types too."""
    # pandas' types are unions that no checker follows.
    numbers: Any = pd.to_numeric(values, errors="coerce")
    return numbers.astype(float)


def as_flags(values: pd.Series, source: str) -> pd.Series:
    """Return the column censored as booleans."""
    flags = []
    for row, value in enumerate(values):
        text = str(value).strip().lower()
        if text not in YES and text not in NO:
            allowed = "1 for a run that missed the goal, else 0"
            raise ConfigError(place_of("censored", row, source), value, allowed)
        flags.append(text in YES)
    return pd.Series(flags, index=values.index)


def place_of(column: str, row: int, source: str) -> str:
    return f"{column} in line {row + ROWS_BEFORE_FIRST} of {source}"


def cell_text(value: object) -> str:
    return f"{value:.12g}" if isinstance(value, (float, np.floating)) else str(value)


def as_comparable(values: Any) -> Any:
    """Return a column as numbers where they are numbers, else as texts: 0 equals 0.0."""
    if pd.api.types.is_numeric_dtype(values):
        return values.astype(float)
    texts = values.astype(object).map(str, na_action="ignore").astype(object)
    numbers = as_numbers(texts)
    return texts.where(numbers.isna(), numbers)
