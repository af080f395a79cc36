"""Reads a table of finished runs: one row per run, or one row per run and logged step.

`read_runs` returns one row per run, with the columns of `COLUMNS`. It refuses what it cannot read,
in one line with row and column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from lit_dps.core.errors import ConfigError
from lit_dps.core.metric_names import is_rising
from lit_dps.core.text import number_text

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
POSITIVE = ("batch_size", "steps", "learning_rate", "devices", "step_seconds", "check", "step")
# Columns that distinguish the runs of a table of loss curves without a column run.
RUN_KEYS = ("batch_size", "learning_rate", "seed", "devices")
SETTINGS = ("batch_size", "seed", "devices")  # one value in all rows of a run
YES = ("1", "1.0", "true", "yes")
NO = ("0", "0.0", "false", "no", "", "nan", "none")
_GOAL = re.compile(r"\s*(?P<metric>\S+)\s*(?P<sign><=|>=)\s*(?P<value>\S+)\s*")
ROWS_BEFORE_FIRST = 2  # of a CSV file: lines count from 1, and the first one has the names


class CurveGoal(NamedTuple):
    """The goal of runs whose loss curves are given.

    Attributes:
        metric: The column of the metric.
        value: The value that meets the goal.
        at_least: Whether the metric must be at least `value`; otherwise at most.
    """

    metric: str
    value: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.at_least else '<='} {self.value:g}"

    def is_met(self, values: np.ndarray) -> np.ndarray:
        """Return (n,): whether each of the values (n,) meets the goal."""
        if self.at_least:
            return values >= self.value
        return values <= self.value


class RunTable(NamedTuple):
    """One row per run, and what a reader should know about how the table was read."""

    runs: pd.DataFrame
    notes: list[str]


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
        ConfigError: for a missing column, a wrong value, and a run that occurs twice.
    """
    if not len(table):
        raise ConfigError(source, "empty", "a table with at least one run")
    notes: list[str] = []
    columns = _find_columns(table, source, names or {}, notes)
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
            f"a column; there are {_listed(table)}",
            "Name it with --columns batch_size=NAME.",
        )
    for column in POSITIVE:
        if column in renamed:
            may_be_zero = column == "step" or (column == "learning_rate" and "steps" not in renamed)
            renamed[column] = _positive_numbers(renamed[column], column, source, may_be_zero)
    if "censored" in renamed:
        renamed["censored"] = _flags(renamed["censored"], source)
    if "steps" in renamed:
        if goal is not None:
            notes.append(f"The goal {goal} is ignored: {source} has steps to a goal.")
        runs: Any = renamed
    else:
        runs = _runs_of_curves(renamed, table, source, goal, notes)
    if "censored" not in runs:
        runs["censored"] = False
    _refuse_missing_values(runs, source)
    _refuse_repeated_runs(runs, source)
    kept = [column for column in COLUMNS if column in runs and column != "step"]
    return RunTable(runs[kept].copy(), notes)


def _find_columns(
    table: pd.DataFrame, source: str, names: Mapping[str, str], notes: list[str]
) -> dict[str, str]:
    """Return the name in the table of each column that it has."""
    columns = {}
    for ours, theirs in names.items():
        if ours not in COLUMNS:
            raise ConfigError("--columns", ours, f"one of {', '.join(COLUMNS)}")
        if theirs not in table:
            raise ConfigError("--columns", f"{ours}={theirs}", f"a column of {_listed(table)}")
        columns[ours] = theirs
    for ours, aliases in COLUMNS.items():
        if ours in columns:
            continue
        if ours in table and ours not in columns.values():
            columns[ours] = ours
            continue
        candidates = []
        for name in table.columns:
            if name not in columns.values() and _plain_name(str(name)) in (ours, *aliases):
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
            is_result = _plain_name(str(name)) in (ours, *COLUMNS[ours])
            if is_result and name not in names.values():
                results.append(name)
    return table.drop(columns=results)


def _plain_name(name: str) -> str:
    """Return the last part of a dotted or slashed name, in small letters with underscores."""
    last = re.split(r"[./]", name)[-1]
    return re.sub(r"[^a-z0-9]+", "_", last.lower()).strip("_")


def _listed(table: pd.DataFrame) -> str:
    return ", ".join(map(str, table.columns))


def _positive_numbers(values: pd.Series, column: str, source: str, may_be_zero: bool) -> pd.Series:
    """Return a column as numbers, nan where it is empty."""
    numbers: pd.Series = pd.to_numeric(values, errors="coerce")  # pyright: ignore
    for row, (number, written) in enumerate(zip(numbers, values, strict=True)):
        is_empty = pd.isna(written) or str(written).strip() in ("", "None")
        is_allowed_zero = may_be_zero and number == 0
        if is_empty or is_allowed_zero or 0 < number < math.inf:
            continue
        allowed = "a finite number above 0"
        raise ConfigError(_place(column, row, source), written, allowed)
    return numbers


def _flags(values: pd.Series, source: str) -> pd.Series:
    """Return the column censored as booleans."""
    flags = []
    for row, value in enumerate(values):
        text = str(value).strip().lower()
        if text not in YES and text not in NO:
            allowed = "1 for a run that missed the goal, else 0"
            raise ConfigError(_place("censored", row, source), value, allowed)
        flags.append(text in YES)
    return pd.Series(flags, index=values.index)


def _place(column: str, row: int, source: str) -> str:
    return f"{column} in line {row + ROWS_BEFORE_FIRST} of {source}"


def _refuse_missing_values(runs: pd.DataFrame, source: str) -> None:
    """Raise ConfigError for a run without a batch size, or without steps although it met its goal.

    A censored run without steps has diverged.
    """
    for row, run in enumerate(runs.to_dict("records")):
        if math.isnan(run["batch_size"]):
            raise ConfigError(_place("batch_size", row, source), None, "a number of examples")
        if math.isnan(run["steps"]) and not run["censored"]:
            raise ConfigError(
                _place("steps", row, source),
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
        same = ", ".join(f"{key} {_cell_text(first[key])}" for key in keys)
        hint = "Give each run another name in a column run."
        if "run" in runs:
            hint += " If a row is a validation, choose its column with --columns step=NAME."
        raise ConfigError(
            source, f"a table with two runs of {same}", "a table with each run once", hint
        )


def _cell_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, (float, np.floating)) else str(value)


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
            f"{_listed(table)}",
            "Name it with --columns steps=NAME.",
        )
    if goal is None:
        raise ConfigError(
            "goal.metric",
            None,
            "the column of the metric of the goal. Set goal.at_most or goal.at_least too",
        )
    if goal.metric not in rows:
        raise ConfigError("goal.metric", goal.metric, f"a column of {_listed(table)}")
    keys = ["run"]
    if "run" not in rows:
        keys = [column for column in RUN_KEYS if column in rows]
        _refuse_rates_of_schedules(rows, keys, source)
    runs = []
    has_schedule = False
    for _, curve in rows.groupby(keys, dropna=False, sort=False):
        values = _metric_values(curve[goal.metric], source)
        is_logged = ~np.isnan(values) & ~np.isnan(curve["step"].to_numpy(float))
        if is_logged.any():
            logged: Any = curve[is_logged]
            _refuse_repeated_steps(logged, source)
            _refuse_several_runs(curve, source)
            settings = logged.iloc[0].to_dict() | _settings_of_run(curve)
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
    result = pd.DataFrame(runs)
    if all(run["censored"] for run in runs):
        raise _no_run_meets(goal, rows[goal.metric], source)
    return result


def _settings_of_run(curve: Any) -> dict[str, object]:
    """Return the settings of a run that any of its rows has."""
    settings = {}
    for column in SETTINGS:
        if column in curve and curve[column].notna().any():
            settings[column] = curve[column].dropna().iloc[0]
    return settings


def _refuse_several_runs(curve: Any, source: str) -> None:
    """Raise ConfigError for a curve with two batch sizes, seeds or numbers of devices."""
    for column in SETTINGS:
        if column not in curve:
            continue
        values = curve[column].dropna()
        for row, value in values.items():
            if value != values.iloc[0]:
                raise ConfigError(
                    _place(column, int(str(row)), source),
                    _cell_text(value),
                    f"{_cell_text(values.iloc[0])}, as in the rows before of this run",
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
    """Return a metric as numbers (n,); nan where it was not logged."""
    numbers = np.asarray(pd.to_numeric(values, errors="coerce"), float)
    for number, (row, written) in zip(numbers, values.items(), strict=True):
        if np.isnan(number) and isinstance(written, str) and written.strip().lower() != "nan":
            raise ConfigError(_place(str(values.name), int(str(row)), source), written, "a number")
    return numbers


def _refuse_repeated_steps(curve: Any, source: str) -> None:
    """Raise ConfigError if a curve has two values at one step: it is of several runs."""
    is_repeated = curve["step"].duplicated()
    if is_repeated.any():
        row = int(str(curve.index[is_repeated.to_numpy()][0]))
        raise ConfigError(
            _place("step", row, source),
            number_text(float(curve["step"].loc[row]), 6),
            "a step that its run has only once",
            "Add a column run or seed with a name for each run.",
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
    numbers = np.asarray(pd.to_numeric(values, errors="coerce"), float)
    finite = numbers[np.isfinite(numbers)]
    key = "goal.at_least" if goal.at_least else "goal.at_most"
    if not finite.size:
        raise ConfigError(
            f"{goal.metric} of {source}", "infinite in every row", "a metric with finite values"
        )
    best = finite.max() if goal.at_least else finite.min()
    return ConfigError(
        key, goal.value, f"a value that a run meets; the best value in {source} is {best:g}"
    )


def read_goal(text: str) -> CurveGoal:
    """Return the goal of a text such as "val_loss <= 0.2".

    Raises:
        ConfigError: for any other text.
    """
    match = _GOAL.fullmatch(text)
    try:
        value = float(match["value"]) if match is not None else math.nan
    except ValueError:
        value = math.nan
    if match is None or not math.isfinite(value):
        raise ConfigError("goal", text, 'a metric and a value, such as "val_loss <= 0.2"')
    at_least = match["sign"] == ">="
    return goal_of(match["metric"], None if at_least else value, value if at_least else None, ())


def goal_of(
    metric: str | None, at_most: float | None, at_least: float | None, metrics: Sequence[str]
) -> CurveGoal:
    """Return the goal of loss curves, with a guessed metric if there is only one candidate.

    Args:
        metric: The metric; None to guess it.
        at_most, at_least: The value of the goal; one of them.
        metrics: The metrics of the runs.

    Raises:
        ConfigError: for a missing value, several possible metrics, or the wrong direction.
    """
    if metric is None:
        candidates = [name for name in metrics if re.split(r"[/_.]", name)[0].startswith("val")]
        if len(candidates) != 1:
            listed = ", ".join(candidates or metrics) or "none"
            raise ConfigError("goal.metric", None, f"the name of a metric; there are {listed}")
        metric = candidates[0]
    if (at_most is None) == (at_least is None):
        key = "goal.at_least" if is_rising(metric) else "goal.at_most"
        raise ConfigError(key, None, f"the value of {metric} that ends a run")
    if at_least is not None:
        return CurveGoal(metric, float(at_least), at_least=True)
    assert at_most is not None
    if is_rising(metric):
        raise ConfigError(
            "goal.at_most", at_most, f"omitted, because {metric} rises", "Set goal.at_least."
        )
    return CurveGoal(metric, float(at_most))
