"""Reads the runs of any MLflow experiment as a table: one row per run and validation."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import mlflow
import pandas as pd
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from lit_dps.core.errors import ConfigError
from lit_dps.core.text import closest_name
from lit_dps.storage.urls import absolute
from lit_dps.tracking.client import check_exists, mlflow_errors, search_runs

MILLISECONDS = 1000.0
# A run in another state may have ended early.
FAILED = "FAILED"
INVALID_FILTER = "INVALID_PARAMETER_VALUE"  # MLflow's code of an error


class LoggedExperiment(NamedTuple):
    """The runs of an experiment.

    Attributes:
        client: The client that reads them.
        runs: The runs that did not fail.
        failed: The number of failed runs.
        metrics: The names of their metrics, sorted.
    """

    client: mlflow.MlflowClient
    runs: list[Run]
    failed: int
    metrics: list[str]


def read_experiment(uri: str, name: str, terms: str = "") -> LoggedExperiment:
    """Return the runs of an experiment.

    Args:
        uri: Tracking URI.
        name: The name of the experiment.
        terms: MLflow's filter of runs; "" for all.

    Raises:
        ConfigError: if there is no such experiment, if it has no such runs, or for a wrong filter.
        StorageError: if the tracking store cannot be read.
    """
    check_exists(uri, "Set --storage.mlflow to the tracking URI.", "storage.mlflow")
    with mlflow_errors(uri):
        client = mlflow.MlflowClient(tracking_uri=absolute(uri))
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            names = [each.name for each in client.search_experiments()]
            near = closest_name(name, names)
            hint = None if near is None else f"Did you mean mlflow:{near}?"
            allowed = f"one of the experiments {', '.join(names)}"
            raise ConfigError("--runs", f"mlflow:{name}", allowed, hint)
        try:
            runs = list(search_runs(client, experiment.experiment_id, terms))
        except MlflowException as error:
            if not terms or error.error_code != INVALID_FILTER:
                raise
            why = " ".join(str(error).split())
            raise ConfigError("--filter", terms, f"a filter of MLflow: {why}") from error
    if terms and not runs:
        raise ConfigError("--filter", terms, f"a filter that runs of mlflow:{name} meet")
    finished = [run for run in runs if run.info.status != FAILED]
    if not finished:
        raise ConfigError("--runs", f"mlflow:{name}", "an experiment with runs that did not fail")
    metrics: set[str] = set()
    for run in finished:
        metrics |= set(run.data.metrics)
    return LoggedExperiment(client, finished, len(runs) - len(finished), sorted(metrics))


def table_of(experiment: LoggedExperiment, uri: str, metric: str) -> pd.DataFrame:
    """Return one row per run and value of a metric.

    Columns: run; step; the metric, infinite where NaN or infinity was logged; step_seconds, from
    the timestamps of the metric (missing if it was logged at once); and the parameters of the runs
    by their names.
    """
    rows: list[dict[str, Any]] = []
    with mlflow_errors(uri):
        for run in experiment.runs:
            history = experiment.client.get_metric_history(run.info.run_id, metric)
            points = sorted((point.step, point.timestamp, point.value) for point in history)
            # A resumed run may log a step twice; the last value counts.
            by_step = {step: (timestamp, value) for step, timestamp, value in points}
            seconds = _step_seconds(by_step)
            for step, (_, value) in by_step.items():
                # A NaN in a table means that nothing was logged. MLflow's SQL store replaces
                # infinity by the largest float.
                is_finite = abs(value) < sys.float_info.max
                logged = value if is_finite else math.inf
                values = {"run": run.info.run_id, "step": step, metric: logged}
                rows.append({**run.data.params, "step_seconds": seconds, **values})
    return pd.DataFrame(rows)


def _step_seconds(by_step: dict[int, tuple[int, float]]) -> float | None:
    """Return the median seconds of a step between values of a metric; None if unknown."""
    steps = sorted(by_step)
    rates = []
    for before, after in zip(steps, steps[1:], strict=False):
        elapsed = (by_step[after][0] - by_step[before][0]) / MILLISECONDS
        rates.append(elapsed / (after - before))
    if not rates:
        return None
    median = float(pd.Series(rates).median())
    if median <= 0:
        return None
    return median
