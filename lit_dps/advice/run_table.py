"""Reads a table of finished runs: one row per run, or one row per run and logged step.

`read_runs` returns one row per run, with the columns of `COLUMNS`. It refuses what it cannot read,
in one line with row and column.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_dps.advice.curve_goal import CurveGoal
from lit_dps.advice.run_columns import (
    COLUMNS,
    MLFLOW,
    POSITIVE,
    as_comparable,
    as_flags,
    as_numbers,
    cell_text,
    find_columns,
    is_sparsity,
    listed_columns,
    place_of,
    positive_numbers,
    refuse_repeated_columns,
)
from lit_dps.core.errors import ConfigError

# Columns that distinguish the runs of a table of loss curves without a column run.
RUN_KEYS = ("batch_size", "learning_rate", "seed", "devices")
SETTINGS = ("batch_size", "seed", "devices")  # one value in all rows of a run
LOGGED_NAN = ("nan", "-nan")  # texts of a metric that was logged as NaN
INDEX_NAME = "Unnamed:"  # of a column that pandas wrote without a name
MAX_LISTED = 6  # names of columns in a note


class RunTable(NamedTuple):
    """One row per run, and how the table was read.

    Attributes:
        runs: One row per run, with the columns of `COLUMNS`.
        notes: What a reader should know about the reading, a sentence each.
        goal: The goal that decided the steps; None if the table had them.
        times_include_checks: Whether step_seconds include validation.
    """

    runs: pd.DataFrame
    notes: list[str]
    goal: CurveGoal | None = None
    times_include_checks: bool = False


def read_runs(
    table: pd.DataFrame,
    source: str = "runs",
    names: Mapping[str, str] | None = None,
    goal: CurveGoal | None = None,
) -> RunTable:
    """Return one row per run with its steps to the goal.

    Args:
        table: Columns batch_size [examples of an optimizer step] and either steps [to the goal], or
            step and the metric of `goal` (one row per validation). Optional: learning_rate;
            censored, 1 for a run that missed the goal (steps is then its last step, or missing if
            it diverged); seed; devices; step_seconds; check [steps between validations]; run.
        source: The name of the table in errors.
        names: Names of columns in the table, by column here.
        goal: The goal of loss curves; None for a table with steps.

    Raises:
        ConfigError: for a missing column, a wrong value, a run that occurs twice, and runs of
            several sparsities.
    """
    if not len(table):
        raise ConfigError(source, "empty", "a table with at least one run")
    refuse_repeated_columns(list(table.columns), source)
    notes: list[str] = []
    columns = find_columns(table, source, names or {}, notes)
    # A column of our name that the user replaced by another one.
    unused = [name for name in columns if name in table and name not in columns.values()]
    # pandas' types are unions that no checker follows.
    renamed: Any = table.drop(columns=unused)
    renamed = renamed.rename(columns={theirs: ours for ours, theirs in columns.items()})
    renamed = renamed.reset_index(drop=True)
    if "batch_size" not in renamed:
        raise ConfigError(
            f"batch_size of {source}",
            None,
            f"a column; there are {listed_columns(table)}",
            "Name it with --columns batch_size=NAME.",
        )
    for column in POSITIVE:
        if column in renamed:
            may_be_zero = column == "step" or (column == "learning_rate" and "steps" not in renamed)
            renamed[column] = positive_numbers(renamed[column], column, source, may_be_zero)
    if "censored" in renamed:
        renamed["censored"] = as_flags(renamed["censored"], source)
    used_goal = None
    if "steps" in renamed:
        if goal is not None:
            notes.append(f"The goal {goal} is ignored: {source} has steps to a goal.")
        runs: Any = renamed
    else:
        runs = _runs_of_curves(renamed, table, source, goal, notes)
        used_goal = goal
    if "censored" not in runs:
        runs["censored"] = False
    _refuse_missing_values(runs, source)
    _refuse_repeated_runs(runs, source)
    _refuse_several_sparsities(runs, source)
    _check_other_columns(runs, source, notes)
    kept = [column for column in COLUMNS if column in runs and column != "step"]
    return RunTable(runs[kept].copy(), notes, used_goal)


def has_steps(table: pd.DataFrame, source: str, names: Mapping[str, str]) -> bool:
    """Return True if a table has a column of steps to the goal; arguments as of `read_runs`."""
    return "steps" in find_columns(table, source, names, [])


def _refuse_missing_values(runs: pd.DataFrame, source: str) -> None:
    """Raise ConfigError for a run without a batch size, or without steps although it met its goal.

    A censored run without steps has diverged.
    """
    for row, run in enumerate(runs.to_dict("records")):
        if math.isnan(run["batch_size"]):
            raise ConfigError(place_of("batch_size", row, source), None, "a number of examples")
        if math.isnan(run["steps"]) and not run["censored"]:
            raise ConfigError(
                place_of("steps", row, source),
                None,
                "a number of steps",
                "If a run missed the goal, give its last step, and censored 1.",
            )


def _refuse_repeated_runs(runs: pd.DataFrame, source: str) -> None:
    """Raise ConfigError for a run that occurs twice: intervals would be too narrow."""
    if "seed" not in runs and "run" not in runs:
        return
    keys = [column for column in (*RUN_KEYS, "run") if column in runs]
    is_repeated = runs.duplicated(keys)
    if is_repeated.any():
        first = runs[is_repeated].iloc[0]
        same = ", ".join(f"{key} {cell_text(first[key])}" for key in keys)
        hint = "Give each run another name in a column run."
        if "run" in runs:
            hint += " If a row is a validation, choose its column with --columns step=NAME."
        raise ConfigError(
            source, f"a table with two runs of {same}", "a table with each run once", hint
        )


# ---- Columns that are not read ----


def _check_other_columns(runs: Any, source: str, notes: list[str]) -> None:
    """Add a note on columns that are not read, if runs of one batch size differ in them."""
    different = []
    for column in runs.columns:
        if column in COLUMNS or str(column).startswith(INDEX_NAME):
            continue
        values = as_comparable(runs[column])
        if values.groupby(runs["batch_size"]).nunique(dropna=False).max() > 1:
            different.append(str(column))
    if different:
        listed = ", ".join(different[:MAX_LISTED])
        if len(different) > MAX_LISTED:
            listed += f" and {len(different) - MAX_LISTED} more"
        notes.append(
            f"Runs of one batch size differ in {listed}. Advice does not read these columns. "
            "Filter the table if K depends on one of them."
        )


def _refuse_several_sparsities(runs: Any, source: str) -> None:
    """Raise ConfigError if rows have several sparsities, because K depends on the sparsity."""
    for column in runs.columns:
        if not is_sparsity(column):
            continue
        sparsities = as_comparable(runs[column]).unique()
        if len(sparsities) > 1:
            hint = "Give only the runs of one sparsity"
            if source.startswith(MLFLOW):
                written = runs[column].dropna().iloc[0]
                hint += f""", such as --filter 'params."{column}" = "{written}"'"""
            raise ConfigError(
                f"{column} of {source}",
                ", ".join(map(cell_text, sparsities)),
                "one value in all runs, because K depends on the sparsity",
                f"{hint}.",
            )


# ---- Loss curves ----


def _runs_of_curves(
    rows: Any, table: pd.DataFrame, source: str, goal: CurveGoal | None, notes: list[str]
) -> pd.DataFrame:
    """Return one row per run of a table with one row per validation.

    The step time of a run is the median over its rows. Its learning rate is the largest one,
    because a schedule may change it.
    """
    if "step" not in rows:
        raise ConfigError(
            f"steps of {source}",
            None,
            f"a column of steps to the goal, or a column step with a metric; there are "
            f"{listed_columns(table)}",
            "Name it with --columns steps=NAME.",
        )
    if goal is None:
        raise ConfigError(
            "goal.metric",
            None,
            "the column of the metric of the goal. Set goal.at_most or goal.at_least too",
        )
    if goal.metric not in rows:
        raise ConfigError("goal.metric", goal.metric, f"a column of {listed_columns(table)}")
    keys = ["run"]
    if "run" not in rows:
        keys = [column for column in RUN_KEYS if column in rows]
        # Without names, two runs could be read as one.
        _refuse_several_sparsities(rows[rows[goal.metric].notna()], source)
        _refuse_rates_of_schedules(rows, keys, source)
    rows, other_settings = _with_settings(rows, keys, goal)
    settings_of_runs = [*SETTINGS, *other_settings]
    unused = [name for name in rows.columns if name not in (*COLUMNS, *settings_of_runs)]
    runs = []
    has_schedule = False
    without_values = 0
    for _, curve in rows.groupby(keys, dropna=False, sort=False):
        values = _metric_values(curve[goal.metric], source)
        is_logged = ~np.isnan(values) & ~np.isnan(curve["step"].to_numpy(float))
        without_values += not is_logged.any()
        if is_logged.any():
            logged: Any = curve[is_logged]
            _refuse_repeated_steps(logged, source)
            if "run" not in rows:
                _refuse_falling_steps(logged, source)
            _refuse_several_runs(curve, source)
            settings = logged.iloc[0].to_dict() | _settings_of_run(curve, settings_of_runs)
            # Loggers write these into other rows than the metric.
            if "step_seconds" in curve:
                settings["step_seconds"] = curve["step_seconds"].median()
            if "learning_rate" in curve:
                settings["learning_rate"] = curve["learning_rate"].max() or math.nan
                has_schedule |= curve["learning_rate"].nunique() > 1
            runs.append(settings | _result_of_curve(logged, values[is_logged], goal))
    if has_schedule:
        notes.append("Where learning_rate changes within a run, its largest value counts.")
    if not runs:
        raise ConfigError("goal.metric", goal.metric, "a column with values")
    if without_values:
        notes.append(
            f"{_count(without_values)} without a value of {goal.metric} left out. Write inf for a "
            "run that diverged."
        )
    result = pd.DataFrame(runs).drop(columns=unused)
    diverged = sum(math.isnan(run["steps"]) for run in runs)
    if diverged:
        notes.append(
            f"{_count(diverged)} read as diverged, because the last {goal.metric} is not finite."
        )
    if all(run["censored"] for run in runs):
        raise _no_run_meets(goal, rows[goal.metric], source)
    return result


def _count(runs: int) -> str:
    return "1 run is" if runs == 1 else f"{runs} runs are"


def _with_settings(rows: Any, keys: list[str], goal: CurveGoal) -> tuple[Any, list[Any]]:
    """Return rows with the settings of their runs, and the names of these columns.

    Only columns that are not read can be settings. The sparsity of a run is its last one, because
    pruning may be a schedule. Another column that changes along a run is no setting of that run.
    """
    run_of_row = rows.groupby(keys, dropna=False).ngroup()
    rows_of_run = run_of_row.groupby(run_of_row).transform("size")
    by_step = rows.sort_values("step", kind="stable", na_position="first")
    settings = {}
    for column in rows.columns:
        if column in COLUMNS or column == goal.metric:
            continue
        if is_sparsity(column):
            settings[column] = by_step.groupby(run_of_row)[column].transform("last")
            continue
        counts = as_comparable(rows[column]).groupby(run_of_row).transform("nunique")
        values = rows[column]
        if counts.max() > 1:
            # One row does not show whether a value would have changed, as a metric does.
            values = values.where((counts <= 1) & (rows_of_run > 1))
        if values.notna().any():
            settings[column] = values
    return rows.assign(**settings), list(settings)


def _settings_of_run(curve: Any, columns: Sequence[Any]) -> dict[Any, object]:
    """Return the settings of a run that any of its rows has."""
    settings = {}
    for column in columns:
        if column in curve and curve[column].notna().any():
            settings[column] = curve[column].dropna().iloc[0]
    return settings


def _refuse_several_runs(curve: Any, source: str) -> None:
    """Raise ConfigError for a curve with two batch sizes, seeds or numbers of devices."""
    for column in SETTINGS:
        if column not in curve:
            continue
        values = curve[column].dropna()
        if values.nunique() <= 1:
            continue
        for row, value in values.items():
            if value != values.iloc[0]:
                raise ConfigError(
                    place_of(column, int(str(row)), source),
                    cell_text(value),
                    f"{cell_text(values.iloc[0])}, as in the rows before of this run",
                    "Give each run another name in the column run.",
                )


def _refuse_rates_of_schedules(rows: Any, keys: list[str], source: str) -> None:
    """Raise ConfigError if runs would be told apart by a rate that a schedule may have changed.

    The rows of two rates may be of one run if they have no step in common.
    """
    if "learning_rate" not in keys:
        return
    others = [key for key in keys if key != "learning_rate"]
    for _, group in rows.groupby(others, dropna=False):
        steps = [{*part["step"].dropna()} for _, part in group.groupby("learning_rate")]
        if any(one.isdisjoint(other) for one, other in combinations(steps, 2)):
            raise ConfigError(
                f"learning_rate of {source}",
                "another value at each step",
                "one value for all rows of a run, or a column run",
                "Add a column run with a name for each run.",
            )


def _metric_values(values: Any, source: str) -> np.ndarray:
    """Return a metric as numbers (n,); nan where it was not logged, infinite for the text "nan".

    A file distinguishes a NaN that was logged from an empty field.
    """
    numbers = as_numbers(values).to_numpy(copy=True)
    for i, (row, written) in enumerate(values.items()):
        if not np.isnan(numbers[i]) or not isinstance(written, str) or not written.strip():
            continue
        if written.strip().lower() not in LOGGED_NAN:
            raise ConfigError(
                place_of(str(values.name), int(str(row)), source), written, "a number"
            )
        numbers[i] = math.inf
    return numbers


def _refuse_repeated_steps(curve: Any, source: str) -> None:
    """Raise ConfigError if a curve has two values at one step: it is of several runs."""
    is_repeated = curve["step"].duplicated()
    if is_repeated.any():
        row = int(str(curve.index[is_repeated.to_numpy()][0]))
        raise ConfigError(
            place_of("step", row, source),
            cell_text(float(curve["step"].loc[row])),
            "a step that its run has only once",
            "Add a column run or seed with a name for each run.",
        )


def _refuse_falling_steps(curve: Any, source: str) -> None:
    """Raise ConfigError if a step is below the one before: another run may begin there."""
    is_lower = (curve["step"].diff() < 0).to_numpy()
    if is_lower.any():
        row = int(str(curve.index[is_lower][0]))
        raise ConfigError(
            place_of("step", row, source),
            cell_text(float(curve["step"].loc[row])),
            "a step above the one before in its run",
            "Add a column run with a name for each run.",
        )


def _result_of_curve(curve: Any, values: np.ndarray, goal: CurveGoal) -> dict[str, object]:
    """Return steps, censored and check of a run: the first validation that meets the goal."""
    order = np.argsort(curve["step"].to_numpy(float), kind="stable")
    steps = curve["step"].to_numpy(float)[order]
    values = values[order]
    met = np.flatnonzero(goal.is_met(values) & np.isfinite(values) & (steps > 0))
    if not met.size:
        # A run that ends with an infinite metric never meets the goal.
        last = steps[-1] if np.isfinite(values[-1]) else math.nan
        return {"steps": last, "censored": True, "check": math.nan}
    first = int(met[0])
    before = steps[first - 1] if first else 0.0
    return {"steps": steps[first], "censored": False, "check": steps[first] - before}


def _no_run_meets(goal: CurveGoal, values: Any, source: str) -> ConfigError:
    """Return an error with the best value that a run reached."""
    numbers = as_numbers(values).to_numpy()
    finite = numbers[np.isfinite(numbers)]
    key = "goal.at_least" if goal.at_least else "goal.at_most"
    if not finite.size:
        raise ConfigError(
            f"{goal.metric} of {source}", "not finite in every row", "a metric with finite values"
        )
    best = finite.max() if goal.at_least else finite.min()
    return ConfigError(
        key, goal.value, f"a value that a run meets; the best value in {source} is {best:g}"
    )
