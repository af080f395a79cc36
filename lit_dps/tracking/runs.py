"""The MLflow runs of one study, recognised by their tags, and what is logged of a trial.

Values, parameters and artifacts that a run has are not logged again. So a finished study does not
change, nor do the times at which its runs ended.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag

import lit_dps.storage.schema as schema
from lit_dps.core.trial import THEORY, Cell, Trial, TrialResult
from lit_dps.tracking.client import open_experiment, search_runs

MAX_TAG_CHARACTERS = 5000  # of a tag's value that every MLflow takes
# The most points of one curve, as many as MLflow's charts draw. 40,000 validations would take 13 MB
# for each trial.
CURVE_POINTS = 1000


class TrialKey(NamedTuple):
    """What identifies a trial or a repeat of a study.

    Attributes:
        cell: The cell, as `Cell.stored_name`.
        point: The point.
        repeat: Number of the repeat; 0 for a trial of the search.
    """

    cell: str
    point: int
    repeat: int

    @classmethod
    def of_trial(cls, trial: Trial) -> TrialKey:
        """Return the key of a trial."""
        return cls(trial.cell.stored_name, trial.point, trial.repeat)

    @classmethod
    def of_run(cls, run: Run) -> TrialKey:
        """Return the key of the trial that a run shows."""
        tags = run.data.tags
        return cls(
            tags[schema.CELL_TAG], int(tags[schema.POINT_TAG]), int(tags.get(schema.REPEAT_TAG, 0))
        )

    def tags(self) -> dict[str, str]:
        """Return the tags that identify the runs of the trial, the rarest first."""
        tags = {schema.POINT_TAG: str(self.point), schema.CELL_TAG: self.cell}
        if self.repeat:
            return {schema.REPEAT_TAG: str(self.repeat), **tags, schema.KIND_TAG: "repeat"}
        return {**tags, schema.KIND_TAG: "trial"}


@dataclass(frozen=True)
class LoggedAttempt:
    """The attempt that the run of a trial shows.

    Attributes:
        attempt: Its number; None if an earlier version logged it.
        status: Its status. The race limit may change it after the run was logged.
        seconds: Its wall time.
    """

    attempt: int | None
    status: str
    seconds: float

    @classmethod
    def of_run(cls, run: Run) -> LoggedAttempt:
        """Return the attempt that a run shows."""
        # MLflow is not migrated: runs of earlier versions have no number of the attempt.
        attempt = run.data.tags.get(schema.ATTEMPT_TAG)
        number = None
        if attempt is not None:
            number = int(attempt)
        seconds = run.data.metrics.get("seconds", math.inf)
        return cls(number, run.data.tags[schema.STATUS_TAG], seconds)

    def shows(self, result: TrialResult) -> bool:
        """Return True if it is the attempt and has the status of a result.

        If a database was restored from a copy, new attempts get the numbers of lost ones. Their
        seconds differ.
        """
        has_numbers = self.attempt is not None and result.attempt is not None
        if has_numbers and self.attempt != result.attempt:
            return False
        return self.status == result.status and math.isclose(self.seconds, result.seconds)


def run_name(trial: Trial) -> str:
    """Return the name of a trial's run; the sample comes first, because lists cut names short."""
    if trial.repeat:
        return f"sample {trial.point} repeat {trial.repeat} | {trial.cell}"
    return f"sample {trial.point} | {trial.cell}"


def trial_tags(result: TrialResult) -> dict[str, str]:
    """Return the tags of a trial's run."""
    tags = TrialKey.of_trial(result.trial).tags()
    tags[schema.STATUS_TAG] = str(result.status)
    if result.attempt is not None:
        tags[schema.ATTEMPT_TAG] = str(result.attempt)
    if result.failure:
        tags[schema.FAILURE_TAG] = result.failure[:MAX_TAG_CHARACTERS]
    return tags


def trial_points(result: TrialResult) -> list[MetricPoint]:
    """Return all metrics of a trial's run: those with one value at step 0, then its curves.

    A curve gets the prefix "curve/" if its name is a metric with one value: "seconds" is the wall
    time of the trial, and "curve/seconds" its training time so far. `LoggedAttempt` needs the
    former, which points at later steps would replace.
    """
    values = _trial_metrics(result)
    points = [MetricPoint(name, value, 0) for name, value in values.items()]
    for curve in (result.curve, *result.readings.values()):
        for point in _curve_points(curve):
            if point.name in values:
                point = point._replace(name=f"curve/{point.name}")
            points.append(point)
    return points


def _trial_metrics(result: TrialResult) -> dict[str, float]:
    """Return the metrics of a trial's run that have one value."""
    metrics = {"seconds": result.seconds}
    if result.steps is not None and result.cost is not None:
        metrics["steps_to_result"] = result.steps
        metrics[f"{result.unit.name}_to_result"] = result.cost
    for name, (kept, _) in result.kept.items():
        metrics[f"kept/{name}"] = kept
    for column, value in result.end_readings.items():
        if math.isfinite(value):
            metrics[column] = value
    for name, value in result.flags.items():
        if math.isfinite(value):
            prefix = "" if name.startswith(THEORY) else "observed/"
            metrics[prefix + name] = value
    return metrics


def trial_params(result: TrialResult) -> dict[str, object]:
    """Return the parameters of a trial's run."""
    trial = result.trial
    params = cell_params(trial.cell)
    params["point"] = trial.point
    params |= trial.params
    if trial.repeat:
        params["repeat"] = trial.repeat
    for name, (_, total) in result.kept.items():
        params[f"total/{name}"] = total
    return params


def cell_params(cell: Cell) -> dict[str, object]:
    """Return the parameters of a cell's run."""
    return {"batch_size": cell.batch_size, "sparsity": cell.sparsity, **dict(cell.axes)}


def _curve_points(curve: Mapping[str, Sequence[float]]) -> list[MetricPoint]:
    """Return the logged points of a curve."""
    steps = curve.get("step", ())
    points = []
    for name, values in curve.items():
        if name == "step":
            continue
        for i in _logged_indices(len(steps)):
            points.append(MetricPoint(name, values[i], int(steps[i])))
    return points


def _logged_indices(length: int) -> Sequence[int]:
    """Return the indices of a curve's logged points: all, or `CURVE_POINTS` evenly spaced ones."""
    if length <= CURVE_POINTS:
        return range(length)
    return [round(i * (length - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)]


class MetricPoint(NamedTuple):
    """One value of a metric."""

    name: str
    value: float
    step: int


class StudyRuns:
    """The runs of one study in MLflow. Methods raise MLflow's errors (`client.mlflow_errors`).

    Args:
        uri: Tracking URI.
        folder: Folder of the artifacts if the URI is a local SQLite file.
        experiment: Name of the experiment.
        study: Name of the study.
        tags: Tags of the study's run, if it does not exist yet.
        lock: Returns the lock of all processes that log this study. Its holder may acquire it
            again.

    Attributes:
        client: MLflow's client.
        experiment_id: The experiment.
        run_id: The run of the study.
    """

    def __init__(
        self,
        uri: str,
        folder: str,
        experiment: str,
        study: str,
        tags: Mapping[str, str],
        lock: Callable[[], AbstractContextManager],
    ):
        self.study = study
        self._lock = lock
        self._shown_running: set[str] = set()
        self.client, self.experiment_id = open_experiment(uri, folder, experiment)
        self.run_id = self.find_or_create({schema.KIND_TAG: "study"}, study, tags)

    def find_or_create(
        self, tags: Mapping[str, str], name: str, other_tags: Mapping[str, str]
    ) -> str:
        """Return the id of the run with some tags; create it, with other tags, if needed."""
        with self._lock():
            for run in self.find(tags):
                return run.info.run_id
            all_tags = {**other_tags, schema.NAME_TAG: self.study, **tags}
            run = self.client.create_run(self.experiment_id, tags=all_tags, run_name=name)
            return run.info.run_id

    def find(self, tags: Mapping[str, str]) -> Iterator[Run]:
        """Return the study's runs with some tags, the rarest tag first.

        MLflow's database has no index of a tag's values. It passes over all runs for the first tag.
        """
        terms = []
        for key, value in {**tags, schema.NAME_TAG: self.study}.items():
            terms.append(f"tags.`{key}` = '{value}'")
        return search_runs(self.client, self.experiment_id, " and ".join(terms))

    def set_running(self, run: str) -> None:
        """Show a run of the study or of a cell as running."""
        if run in self._shown_running:
            return
        if self.client.get_run(run).info.status != "RUNNING":
            self.client.update_run(run, status="RUNNING")
        self._shown_running.add(run)

    def set_finished(self, run: str) -> None:
        """Show a run as finished if it is shown as running."""
        if self.client.get_run(run).info.status == "RUNNING":
            self.client.set_terminated(run)
        self._shown_running.discard(run)

    def log_changes(
        self,
        run: str,
        metrics: Mapping[str, float],
        params: Mapping[str, object],
        series: Mapping[str, Mapping[int, float]],
        *,
        tags: Mapping[str, str] | None = None,
        families: tuple[str, ...] = (),
    ) -> None:
        """Log the values that a run does not have yet, or that have changed.

        Args:
            run: Id of the run.
            metrics: Metrics with one value.
            params: Parameters. MLflow cannot change a parameter that is logged.
            series: Metric name -> {step: value}.
            tags: Tags.
            families: First characters of metrics' names. `metrics` and `series` have all values of
                these metrics. Other logged values become NaN, because MLflow deletes no metric.
        """
        logged = self.client.get_run(run).data
        points = []
        for name, value in metrics.items():
            if not _is_same_value(value, logged.metrics.get(name)):
                points.append(MetricPoint(name, value, 0))
        names = list(series)
        for name in logged.metrics:
            is_known = name in metrics or name in series
            if name.startswith(families) and not is_known:
                names.append(name)
        for name in names:
            points += self._changed_points(run, name, series.get(name, {}), families)
        new_params = {key: value for key, value in params.items() if key not in logged.params}
        new_tags = {}
        for key, text in (tags or {}).items():
            if logged.tags.get(key) != text:
                new_tags[key] = text
        self.log(run, points, new_params, new_tags)

    def _changed_points(
        self, run: str, name: str, values: Mapping[int, float], families: tuple[str, ...]
    ) -> list[MetricPoint]:
        """Return the points of a metric by step that are to be logged, see `log_changes`."""
        points = []
        logged = _last_values(self.client.get_metric_history(run, name))
        for step, value in values.items():
            if not _is_same_value(value, logged.get(step)):
                points.append(MetricPoint(name, value, step))
        if name.startswith(families):
            for step, value in logged.items():
                if step not in values and not math.isnan(value):
                    points.append(MetricPoint(name, math.nan, step))
        return points

    def log(
        self,
        run: str,
        points: Sequence[MetricPoint] = (),
        params: Mapping[str, object] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, value, step in points]
        all_params = [Param(key, str(value)) for key, value in (params or {}).items()]
        all_tags = [RunTag(key, str(value)) for key, value in (tags or {}).items()]
        # The client splits them into requests of the size that MLflow takes.
        self.client.log_batch(run, metrics, all_params, all_tags)


def _last_values(history: Sequence[Metric]) -> dict[int, float]:
    """Return the value of a metric that was logged last, by step."""
    values = {}
    for metric in sorted(history, key=lambda metric: metric.timestamp):
        values[metric.step] = metric.value
    return values


def _is_same_value(value: float, logged: float | None) -> bool:
    """Return True if MLflow has logged a value. It stores infinity as the largest float."""
    if logged is None:
        return False
    stored = max(-sys.float_info.max, min(value, sys.float_info.max))
    return stored == logged or (math.isnan(value) and math.isnan(logged))


# ---- Artifacts ----


def log_artifacts(
    client: MlflowClient, run: str, files: Sequence[Path], texts: Mapping[str, str]
) -> None:
    """Log files and texts to a run, unless it has artifacts of the same name and content.

    Args:
        client: The client.
        run: Id of the run.
        files: Files. They keep their places below the folder that contains all of them.
        texts: Text by the name of its artifact.
    """
    root = ""
    if files:
        root = os.path.commonpath([path.parent for path in files])
    artifacts = _Artifacts(client, run)
    for path in files:
        name = os.path.relpath(path, root)
        if artifacts.differ(name, path.read_bytes()):
            client.log_artifact(run, str(path), os.path.dirname(name) or None)
    for name, text in texts.items():
        if artifacts.differ(name, text.encode()):
            client.log_text(run, text, name)


class _Artifacts:
    """The artifacts of a run, listed once for each folder."""

    def __init__(self, client: MlflowClient, run: str):
        self._client, self._run = client, run
        self._sizes: dict[str, dict[str, Any]] = {}  # folder -> path -> bytes

    def differ(self, name: str, content: bytes) -> bool:
        """Return True if there is no artifact of this name and content."""
        folder = os.path.dirname(name)
        if folder not in self._sizes:
            items = self._client.list_artifacts(self._run, folder or None)
            self._sizes[folder] = {item.path: item.file_size for item in items}
        if self._sizes[folder].get(name) != len(content):
            return True
        with tempfile.TemporaryDirectory() as temporary:
            path = self._client.download_artifacts(self._run, name, temporary)
            return Path(path).read_bytes() != content
