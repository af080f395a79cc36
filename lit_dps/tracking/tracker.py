"""Logs one study to MLflow, as runs of the study, its cells, its trials and its repeats.

Runs are found again by their tags (`lit_dps.storage.schema.RUN_TAGS`). So a resumed study continues
in the same runs, whichever process logs to them. What is logged already is not logged again, so a
finished study does not change, nor do the times at which its runs ended.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag

from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.storage.schema import (
    CELL_TAG,
    KIND_TAG,
    NAME_TAG,
    STATUS_TAG,
)
from lit_dps.tracking.client import mlflow_errors, open_experiment
from lit_dps.tracking.pages import SHARED, view_key
from lit_dps.tracking.trial_run import (
    MAX_TAG_CHARACTERS,
    LoggedAttempt,
    MetricPoint,
    TrialKey,
    cell_params,
    curve_points,
    run_name,
    trial_metrics,
    trial_params,
    trial_tags,
)

MAX_METRICS = 1000  # that MLflow takes in one request
MAX_PARAMS = 100  # likewise
PART = 50  # trials logged under one lock. Workers wait for it, for a second or two.
RUNS_PER_PAGE = 1000  # of a search
PARENT_TAG, NOTE_TAG = "mlflow.parentRunId", "mlflow.note.content"
# How a trial's run ends in MLflow; all others end as FINISHED.
RUN_STATES = {Status.INFEASIBLE: "FAILED", Status.FAILED: "FAILED", Status.STOPPED: "KILLED"}


class Tracker:
    """Logs one study to MLflow. All methods raise StorageError if MLflow cannot be used.

    Args:
        uri: Tracking URI.
        folder: Folder of the artifacts if the URI is a local SQLite file.
        experiment: Name of the experiment.
        study: Name of the study.
        tags: Tags of the study's run, as of the last run of its trials.
        lock: Returns the lock of all processes that log this study. Its holder may acquire it
            again.
    """

    def __init__(
        self,
        uri: str,
        folder: str,
        experiment: str,
        study: str,
        tags: Mapping[str, str],
        lock: Callable[[], AbstractContextManager] = nullcontext,
    ):
        self.uri, self.study, self.tags, self.lock = uri, study, dict(tags), lock
        self._cell_runs: dict[Cell, str] = {}
        self._shown_running: set[str] = set()
        with mlflow_errors(uri):
            self.client, self.experiment_id = open_experiment(uri, folder, experiment)
            self.run_id = self._find_or_create_run({KIND_TAG: "study"}, study, self.tags)

    def show_running(self) -> None:
        """Show that trials of the study run now, with the versions of this process."""
        with mlflow_errors(self.uri):
            self._set_running(self.run_id)
            self._log_batch(self.run_id, tags=self.tags)

    # ---- Trials ----

    def logged(self) -> dict[TrialKey, LoggedAttempt]:
        """Return the attempts of all trials and repeats that are logged completely."""
        attempts = {}
        with mlflow_errors(self.uri):
            for kind in ("trial", "repeat"):
                for run in self._find_runs({KIND_TAG: kind}):
                    if run.info.status != "RUNNING":
                        attempts[TrialKey.of_run(run)] = LoggedAttempt.of_run(run)
        return attempts

    def log_trial(self, result: TrialResult) -> None:
        """Log a trial's metaparameters, status, steps to result, curves and kept weights as a run.

        The run replaces the runs of earlier attempts at the point, and an interrupted one. A result
        that is logged already is not logged again. Curves have at most `CURVE_POINTS` points;
        Optuna stores all points.
        """
        with mlflow_errors(self.uri), self.lock():
            key = TrialKey.of_trial(result.trial)
            self._log_unless_logged(result, list(self._find_runs(key.tags())))

    def log_trials(self, results: Sequence[TrialResult]) -> Iterator[int]:
        """Log many results as `log_trial` does, and yield their number so far after each part.

        MLflow passes over all runs to find the runs of one trial. Here one search finds the runs of
        `PART` trials of a cell.
        """
        by_cell: dict[Cell, list[TrialResult]] = {}
        for result in results:
            by_cell.setdefault(result.trial.cell, []).append(result)
        done = 0
        for cell, cell_results in by_cell.items():
            for start in range(0, len(cell_results), PART):
                part = cell_results[start : start + PART]
                with mlflow_errors(self.uri), self.lock():
                    runs = self._trial_runs(cell)
                    for result in part:
                        key = TrialKey.of_trial(result.trial)
                        self._log_unless_logged(result, runs.get(key, []))
                done += len(part)
                yield done

    def delete_trial(self, key: TrialKey) -> None:
        """Delete the runs of a trial or a repeat."""
        with mlflow_errors(self.uri), self.lock():
            for run in self._find_runs(key.tags()):
                self.client.delete_run(run.info.run_id)

    def _trial_runs(self, cell: Cell) -> dict[TrialKey, list[Run]]:
        """Return the runs of a cell's trials and repeats."""
        runs: dict[TrialKey, list[Run]] = {}
        for run in self._find_runs({CELL_TAG: str(cell)}):
            if run.data.tags.get(KIND_TAG) in ("trial", "repeat"):
                runs.setdefault(TrialKey.of_run(run), []).append(run)
        return runs

    def _log_unless_logged(self, result: TrialResult, runs: Sequence[Run]) -> None:
        """Log a result unless one of the trial's runs shows it; delete its other runs."""
        if self._is_logged(result, runs):
            return
        cell_run = self._cell_run(result.trial.cell)
        for run in (self.run_id, cell_run):
            self._set_running(run)
        run = self.client.create_run(
            self.experiment_id,
            start_time=int((time.time() - result.seconds) * 1000),
            tags={**trial_tags(result), NAME_TAG: self.study, PARENT_TAG: cell_run},
            run_name=run_name(result.trial),
        )
        run_id = run.info.run_id
        points = [MetricPoint(name, value, 0) for name, value in trial_metrics(result).items()]
        points += curve_points(result.curve)
        points += curve_points(result.smoothness)
        self._log_batch(run_id, points, trial_params(result))
        if result.traceback:
            self.client.log_text(run_id, result.traceback, "traceback.txt")
        self.client.set_terminated(run_id, RUN_STATES.get(result.status, "FINISHED"))

    def _is_logged(self, result: TrialResult, runs: Sequence[Run]) -> bool:
        """Return True if one run shows a result completely; delete all other runs."""
        is_logged = False
        for run in runs:
            has_status = run.data.tags[STATUS_TAG] == result.status
            is_complete = run.info.status != "RUNNING"
            is_shown = has_status and is_complete and LoggedAttempt.of_run(run).shows(result)
            if is_shown and not is_logged:
                is_logged = True
            else:
                self.client.delete_run(run.info.run_id)
        return is_logged

    # ---- Cells and the study ----

    def log_cell(self, cell: Cell, k_star: int | None, metrics: Mapping[str, float]) -> None:
        """Log K* of a cell and its other metrics on the cell's run."""
        values = dict(metrics)
        if k_star is not None:
            values["K_star"] = k_star
        with mlflow_errors(self.uri):
            self._log_changes(self._cell_run(cell), values, {}, {})

    def log_study(
        self,
        scaling: Mapping[str, Mapping[int, float]],
        metrics: Mapping[str, float],
        params: Mapping[str, object],
        files: Sequence[Path],
        texts: Mapping[str, str],
        finished: bool,
    ) -> None:
        """Log the outcome on the study's run, as far as it has changed since the last call.

        Args:
            scaling: Metric name -> {batch size: value}. The step is the batch size, so the UI's
                chart is a scaling curve.
            metrics, params: Metrics and parameters of the study.
            files, texts: Artifacts, as `log_artifacts` takes them.
            finished: Whether no trial remains to be run.
        """
        with mlflow_errors(self.uri):
            self._log_changes(self.run_id, metrics, params, scaling)
            log_artifacts(self.client, self.run_id, files, texts)
            if finished:
                for run in (*self._cell_runs.values(), self.run_id):
                    if self.client.get_run(run).info.status == "RUNNING":
                        self.client.set_terminated(run)
                self._shown_running.clear()

    def describe(self, note: str, views: Mapping[str, object]) -> None:
        """Set the description of the study's run, and views of the experiment's runs.

        Args:
            note: The description in Markdown.
            views: The views by name (`lit_dps.tracking.pages.views_of`).
        """
        note = note[:MAX_TAG_CHARACTERS]
        with mlflow_errors(self.uri):
            if self.client.get_run(self.run_id).data.tags.get(NOTE_TAG) != note:
                self.client.set_tag(self.run_id, NOTE_TAG, note)
            tags = self.client.get_experiment(self.experiment_id).tags
            for name, view in views.items():
                key, text = f"{SHARED}{view_key(self.study, name)}", json.dumps(view)
                if tags.get(key) != text and len(text) <= MAX_TAG_CHARACTERS:
                    self.client.set_experiment_tag(self.experiment_id, key, text)

    def artifact_page(self, name: str) -> str:
        """Return the page of an artifact of the study's run, as a link on MLflow's own pages."""
        return f"#/experiments/{self.experiment_id}/runs/{self.run_id}/artifacts/{name}"

    # ---- Runs ----

    def _cell_run(self, cell: Cell) -> str:
        """Return the id of a cell's run; create the run if it does not exist."""
        if cell not in self._cell_runs:
            tags = {CELL_TAG: str(cell), KIND_TAG: "cell"}
            run = self._find_or_create_run(tags, str(cell), {PARENT_TAG: self.run_id})
            if not self.client.get_run(run).data.params:
                self._log_batch(run, params=cell_params(cell))
            self._cell_runs[cell] = run
        return self._cell_runs[cell]

    def _find_or_create_run(
        self, tags: Mapping[str, str], name: str, other_tags: Mapping[str, str]
    ) -> str:
        """Return the id of the run with some tags; create it, with other tags, if needed."""
        with self.lock():
            for run in self._find_runs(tags):
                return run.info.run_id
            all_tags = {**other_tags, NAME_TAG: self.study, **tags}
            run = self.client.create_run(self.experiment_id, tags=all_tags, run_name=name)
            return run.info.run_id

    def _find_runs(self, tags: Mapping[str, str]) -> Iterator[Run]:
        """Yield the study's runs with some tags, the rarest tag first.

        MLflow's database has no index of a tag's values. It passes over all runs for the first tag.
        """
        terms = [f"tags.`{key}` = '{value}'" for key, value in tags.items()]
        terms.append(f"tags.`{NAME_TAG}` = '{self.study}'")
        token = None
        while token != "":
            page = self.client.search_runs(
                [self.experiment_id],
                " and ".join(terms),
                max_results=RUNS_PER_PAGE,
                page_token=token,
            )
            yield from page
            token = page.token or ""

    def _set_running(self, run: str) -> None:
        """Show a run of the study or of a cell as running."""
        if run in self._shown_running:
            return
        if self.client.get_run(run).info.status != "RUNNING":
            self.client.update_run(run, status="RUNNING")
        self._shown_running.add(run)

    def _log_changes(
        self,
        run: str,
        metrics: Mapping[str, float],
        params: Mapping[str, object],
        series: Mapping[str, Mapping[int, float]],
    ) -> None:
        """Log the values that a run does not have yet, or that have changed."""
        logged = self.client.get_run(run).data
        points = []
        for name, value in metrics.items():
            if not _is_same_value(value, logged.metrics.get(name)):
                points.append(MetricPoint(name, value, 0))
        for name, values in series.items():
            history = self.client.get_metric_history(run, name)
            for step, value in values.items():
                if not _has_value(history, step, value):
                    points.append(MetricPoint(name, value, step))
        new_params = {key: value for key, value in params.items() if key not in logged.params}
        self._log_batch(run, points, new_params)

    def _log_batch(
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
        self.client.log_batch(run, metrics[:MAX_METRICS], all_params[:MAX_PARAMS], all_tags)
        for start in range(MAX_METRICS, len(metrics), MAX_METRICS):
            self.client.log_batch(run, metrics[start : start + MAX_METRICS])


def _has_value(history: Sequence[Metric], step: int, value: float) -> bool:
    values = [metric.value for metric in history if metric.step == step]
    return any(_is_same_value(value, logged) for logged in values)


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
    root = os.path.commonpath([path.parent for path in files]) if files else ""
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
