"""advise --runs: advice from runs that exist, without any training and without PyTorch."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd

from lit_dps.advice.curve_goal import CurveGoal, goal_of
from lit_dps.advice.existing_runs import advise_on_runs
from lit_dps.advice.options import devices_of
from lit_dps.advice.run_columns import MLFLOW, refuse_repeated_columns, without_results
from lit_dps.advice.run_table import RunTable, has_steps, read_runs
from lit_dps.cli.command_line import CommandLine
from lit_dps.cli.json_output import Outcome, with_document
from lit_dps.cli.key_checks import check_kinds, check_names, check_options, refuse_options
from lit_dps.cli.options import AdviseOptions, add_options, option_of
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.goal import SINGLE_CHECK, VALIDATION_ERROR, resolve_value
from lit_dps.core.text import terminal_width
from lit_dps.core.unit import STEPS

SEPARATORS = (",", ";", "\t")
# Texts of missing fields of a CSV file: those of pandas without NaN.
MISSING = ["", "NA", "<NA>", "N/A", "n/a", "#N/A", "NULL", "null", "None"]
# Options of the command that trains.
ONLY_WITH_TRAINING = ("budget", "method", "bandwidth", "latency")
# Sections and keys that this command uses.
USED = ("goal", "storage", "study.batch_sizes", "study.name")
# Keys of the section goal that end a trial. Runs that exist are not cut there.
BUDGETS = ("max_steps", "max_examples", "max_seconds")
EXAMPLE = "--columns batch_size=bs,steps=n_steps"


@with_document
def main(command: CommandLine) -> Outcome:
    """Give advice from existing runs, and return the exit code."""
    check_options(command)
    check_names(command)
    check_kinds(command)
    refuse_options(command, USED, "--runs trains nothing")
    options = _parsed(command)
    table = _read(command, options)
    devices = None
    if options.devices is not None:
        devices = devices_of(options.devices)
    advice = advise_on_runs(
        table,
        batch_sizes=command.value("study.batch_sizes"),
        devices=devices,
        price=options.price,
        name=str(options.runs),
    )
    columns = None
    if sys.stdout.isatty():
        columns = terminal_width()
    print(advice.text_at(columns), end="", flush=True)
    return Outcome(advice.exit_code, advice.to_dict)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parsed(command: CommandLine) -> AdviseOptions:
    """Return the options of the verb.

    Raises:
        UserError: for a wrong value, and for an option of the command that trains.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_options(parser, AdviseOptions)
    known, _ = parser.parse_known_args(command.words)
    values = vars(known)
    for field in fields(AdviseOptions):
        if field.name in ONLY_WITH_TRAINING and field.name in values:
            key = option_of(field.name)
            allowed = "omitted, because --runs trains nothing"
            raise ConfigError(key, values[field.name], allowed)
    return AdviseOptions(**values)


def _read(command: CommandLine, options: AdviseOptions) -> RunTable:
    """Return the runs."""
    source = str(options.runs)
    names = _column_names(options.columns)
    if source.startswith(MLFLOW):
        return _read_mlflow(command, source.removeprefix(MLFLOW), options.filter or "", names)
    if options.filter is not None:
        allowed = "omitted, because only mlflow:EXPERIMENT has a filter. Filter the file"
        raise ConfigError("--filter", options.filter, allowed)
    table = _read_file(source)
    goal = None
    is_of_steps = has_steps(table, source, names)
    has_goal = bool(command.section("goal"))
    if has_goal and not is_of_steps:
        goal = _goal(command, list(map(str, table.columns)))
    runs = read_runs(table, source, names, goal)
    if goal is not None:
        runs.notes.extend(_budget_notes(command))
    if has_goal and is_of_steps:
        runs.notes.append(f"The section goal is ignored: {source} has steps to a goal.")
    return runs


def _column_names(text: str | None) -> dict[str, str]:
    """Return the columns of `--columns OURS=THEIRS,...`."""
    names = {}
    for part in (text or "").split(","):
        ours, equals, theirs = part.strip().partition("=")
        if text is not None and not (ours and equals and theirs):
            raise ConfigError("--columns", text, f"pairs NAME=COLUMN, such as {EXAMPLE}")
        if ours in names:
            raise ConfigError("--columns", text, f"one column of {ours}")
        if theirs:
            names[ours] = theirs
    return names


def _read_file(source: str) -> pd.DataFrame:
    path = Path(source)
    if not path.is_file():
        raise ConfigError("--runs", source, "a CSV file, or mlflow:EXPERIMENT")
    try:
        with path.open(encoding="utf-8") as lines:
            names = next(lines, "")
        # The names have no separators, so the most frequent one separates them.
        separator = max(SEPARATORS, key=names.count)
        # pandas would rename the second column of a name.
        refuse_repeated_columns(next(csv.reader([names], delimiter=separator), []), source)
        # A NaN in a column of a metric was logged, and an empty field was not.
        return pd.read_csv(path, sep=separator, keep_default_na=False, na_values=MISSING)
    except ConfigError:
        raise
    except (ValueError, OSError, csv.Error) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            "--runs", source, f"a CSV file whose first line names its columns ({text})"
        ) from error


def _goal(command: CommandLine, metrics: list[str]) -> CurveGoal:
    """Return the goal of loss curves by the keys of the section goal."""
    rule = command.value("goal.rule")
    if rule not in (None, SINGLE_CHECK):
        allowed = f"{SINGLE_CHECK} or omitted, because runs that exist have no other rule"
        raise ConfigError("goal.rule", rule, allowed)
    unit = command.value("goal.unit")
    if unit not in (None, STEPS.name):
        allowed = f"{STEPS.name} or omitted, because --runs answers in optimizer steps"
        raise ConfigError("goal.unit", unit, allowed)
    error = command.value("goal.error")
    metric = command.value("goal.metric")
    at_most: Any = command.value("goal.at_most")
    at_least: Any = command.value("goal.at_least")
    if any(value is not None for value in (error, at_most, at_least)):
        resolve_value(error, at_most, at_least, metric)  # refuses two values
    metric = metric or command.value("goal.monitor")
    if error is not None:
        metric = metric or VALIDATION_ERROR
        at_most = error
    return goal_of(metric, at_most, at_least, metrics)


def _budget_notes(command: CommandLine) -> list[str]:
    """Return a note if the section goal has a budget, which is not applied to the runs."""
    keys = [f"goal.{name}" for name in BUDGETS if command.value(f"goal.{name}") is not None]
    if not keys:
        return []
    return [f"Not applied: {', '.join(keys)}. Each run counts to its last validation."]


def _read_mlflow(command: CommandLine, name: str, terms: str, names: dict[str, str]) -> RunTable:
    """Return the runs of an MLflow experiment that a filter selects."""
    from lit_dps.tracking.logged_runs import read_experiment, table_of  # imports MLflow

    uri = tracking_uri(command)
    experiment = read_experiment(uri, name, terms)
    goal = _goal(command, experiment.metrics)
    if goal.metric not in experiment.metrics:
        allowed = f"a metric of mlflow:{name}: {', '.join(experiment.metrics)}"
        raise ConfigError("goal.metric", goal.metric, allowed)
    source = f"{MLFLOW}{name}"
    logged = without_results(table_of(experiment, uri, goal.metric), names)
    if "steps" in names:
        logged = logged.drop_duplicates("run")  # a parameter is in every row of its run
    table = read_runs(logged, source, names, goal)
    notes = list(table.notes)
    if "steps" not in names:
        notes.append(f"The goal is {goal}.")
        notes += _budget_notes(command)
    else:
        notes.append(f"The goal only selects the runs, because {source} has steps to a goal.")
    notes.append("B is read as the examples of an optimizer step.")
    is_timed_by_logs = "step_seconds" in table.runs and "step_seconds" not in names
    if is_timed_by_logs:
        notes.append(
            f"Step times are from the timestamps of {goal.metric}, so they include validation."
        )
    if experiment.failed:
        notes.append(f"{experiment.failed} failed runs are left out.")
    without_values = len(experiment.runs) - len(set(logged["run"]))
    if without_values:
        notes.append(f"Runs without a value of {goal.metric} are left out ({without_values}).")
    return table._replace(notes=notes, times_include_checks=is_timed_by_logs)


def tracking_uri(command: CommandLine) -> str:
    """Return the tracking URI: of the configuration, else of the environment, else the default."""
    storage = command.section("storage") or {}
    if storage.get("mlflow") is None and storage.get("folder") is None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri:
            return uri
    return command.storage.mlflow_uri
