"""Tracker: logs a study to MLflow.

Runs are found again by their tags (`lit_dps.storage.schema`), so that a study that is taken up goes
on in the same runs, whichever process logs to them. What is logged already is not logged again: a
finished study stays as it is, and so do the times at which its runs ended.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from mlflow.entities import Metric, Param, Run, RunTag

from lit_dps.core.trial import Cell, Status, Trial, TrialResult
from lit_dps.storage.schema import (
    ATTEMPT_TAG,
    CELL_TAG,
    FAILURE_TAG,
    KIND_TAG,
    NAME_TAG,
    STATUS_TAG,
)
from lit_dps.tracking.client import log_artifacts, mlflow_errors, open_experiment
from lit_dps.tracking.places import Logged, Place, logged_in, place, place_of, tags_of
from lit_dps.tracking.views import SHARED, view_key

BATCH = 1000  # metrics that MLflow takes in one request
# of one curve: the most that MLflow's charts draw. 40,000 validations would take 13 MB a trial.
CURVE_POINTS = 1000
PART = 50  # trials logged under one lock. Workers wait for it, for a second or two.
PARENT, NOTE = "mlflow.parentRunId", "mlflow.note.content"
LONGEST = 5000  # characters of a tag's value that every MLflow takes
# How a trial's run ends in MLflow, where not as FINISHED
RUN_STATES = {Status.INFEASIBLE: "FAILED", Status.FAILED: "FAILED", Status.STOPPED: "KILLED"}
Point = tuple[str, float, int]  # a metric's name, value and step


class Tracker:
    """Logs one study to MLflow. All its methods raise StorageError where MLflow cannot be used.

    Args:
        uri: Tracking URI.
        folder: Folder of the artifacts where the URI is a local sqlite file.
        experiment: Name of the experiment.
        study: Name of the study.
        tags: Tags of the study's run, as of when its trials were run last.
        lock: Makes the lock of all processes that log this study; the process that holds it may
            take it again.
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
        self._cells: dict[Cell, str] = {}
        self._running: set[str] = set()
        with mlflow_errors(uri):
            self.client, self.experiment_id = open_experiment(uri, folder, experiment)
            self.run_id = self._run({KIND_TAG: "study"}, study, self.tags)

    def go_on(self) -> None:
        """Shows that trials of the study are run, here and now."""
        with mlflow_errors(self.uri):
            self._resume(self.run_id)
            self._batch(self.run_id, tags=self.tags)

    def logged(self) -> dict[Place, Logged]:
        """The attempts that are shown, of all trials and repeats that are logged whole."""
        with mlflow_errors(self.uri):
            runs = [run for kind in ("trial", "repeat") for run in self._find({KIND_TAG: kind})]
        return {
            place_of(run.data.tags): logged_in(run) for run in runs if run.info.status != "RUNNING"
        }

    def log_trial(self, result: TrialResult) -> None:
        """Logs a run with the trial's metaparameters, status, steps to result, curves and kept
        weights.

        The run replaces the runs of earlier attempts at the point, and an interrupted one. A result
        that is logged already is not logged again. Curves have at most `CURVE_POINTS` points;
        Optuna stores all points.
        """
        with mlflow_errors(self.uri), self.lock():
            self._log_unless_logged(result, list(self._find(tags_of(place(result.trial)))))

    def log_trials(self, results: Sequence[TrialResult]) -> Iterator[int]:
        """Log many results as `log_trial` does, and yield their number so far after each part.

        MLflow passes over all runs to find the runs of one trial. Here one search finds the runs of
        `PART` trials of a cell.
        """
        cells: dict[Cell, list[TrialResult]] = {}
        for result in results:
            cells.setdefault(result.trial.cell, []).append(result)
        done = 0
        for cell, of_cell in cells.items():
            for start in range(0, len(of_cell), PART):
                part = of_cell[start : start + PART]
                with mlflow_errors(self.uri), self.lock():
                    known: dict[Place, list[Run]] = {}
                    for run in self._find({CELL_TAG: str(cell)}):
                        if run.data.tags.get(KIND_TAG) in ("trial", "repeat"):
                            known.setdefault(place_of(run.data.tags), []).append(run)
                    for result in part:
                        self._log_unless_logged(result, known.get(place(result.trial), []))
                done += len(part)
                yield done

    def _log_unless_logged(self, result: TrialResult, known: Sequence[Run]) -> None:
        """Log a result unless a known run has it; delete the known runs of other attempts."""
        trial, cell = result.trial, result.trial.cell
        if self._logged_else_cleared(result, known):
            return
        parent = self._cell_run(cell)
        for run in (self.run_id, parent):
            self._resume(run)
        tags = tags_of(place(trial)) | {
            NAME_TAG: self.study,
            STATUS_TAG: str(result.status),
            PARENT: parent,
        }
        if result.attempt is not None:
            tags[ATTEMPT_TAG] = str(result.attempt)
        if result.failure:
            tags[FAILURE_TAG] = result.failure[:LONGEST]
        run = self.client.create_run(
            self.experiment_id,
            start_time=int((time.time() - result.seconds) * 1000),
            tags=tags,
            run_name=run_name(trial),
        ).info.run_id
        metrics = {"seconds": result.seconds}
        if result.steps is not None:
            metrics["steps_to_result"] = result.steps
        metrics |= {f"kept/{name}": kept for name, (kept, _) in result.kept.items()}
        metrics |= {f"theory/{name}": value for name, value in result.theory.items()}
        metrics |= {
            f"observed/{name}": value
            for name, value in result.flags.items()
            if math.isfinite(value)
        }
        params = _params(cell) | {"point": trial.point, **trial.params}
        params |= {"repeat": trial.repeat} if trial.repeat else {}
        params |= {f"total/{name}": total for name, (_, total) in result.kept.items()}
        single = [(name, value, 0) for name, value in metrics.items()]
        self._batch(run, [*single, *_along(result.curve), *_along(result.smoothness)], params)
        if result.traceback:
            self.client.log_text(run, result.traceback, "traceback.txt")
        self.client.set_terminated(run, RUN_STATES.get(result.status, "FINISHED"))

    def delete_trial(self, where: Place) -> None:
        """Deletes the runs of a trial or a repeat."""
        with mlflow_errors(self.uri), self.lock():
            for run in self._find(tags_of(where)):
                self.client.delete_run(run.info.run_id)

    def log_study(
        self,
        scaling: Mapping[str, Mapping[int, float]],
        metrics: Mapping[str, float],
        params: Mapping[str, object],
        files: Sequence[Path],
        texts: Mapping[str, str],
        finished: bool,
    ) -> None:
        """The outcome, on the study's run. Only what changed since the last call is logged.

        Args:
            scaling: Metric name -> {batch size: value}; with step = batch size, the UI's chart is a
                scaling curve.
            metrics, params, files, texts: Of the study; artifacts as `log_artifacts` takes them.
            finished: Whether no trial is left to run.
        """
        with mlflow_errors(self.uri):
            self._log_new(self.run_id, metrics, params, scaling)
            log_artifacts(self.client, self.run_id, files, texts)
            if finished:
                for run in (*self._cells.values(), self.run_id):
                    if self.client.get_run(run).info.status == "RUNNING":
                        self.client.set_terminated(run)
                self._running.clear()

    def describe(self, note: str, views: Mapping[str, object]) -> None:
        """The description of the study's run, in Markdown, and views of the experiment's runs
        (`views.views_of`)."""
        with mlflow_errors(self.uri):
            if self.client.get_run(self.run_id).data.tags.get(NOTE) != (note := note[:LONGEST]):
                self.client.set_tag(self.run_id, NOTE, note)
            known = self.client.get_experiment(self.experiment_id).tags
            for name, view in views.items():
                key, text = f"{SHARED}{view_key(self.study, name)}", json.dumps(view)
                if known.get(key) != text and len(text) <= LONGEST:
                    self.client.set_experiment_tag(self.experiment_id, key, text)

    def artifact_page(self, name: str) -> str:
        """The page of an artifact of the study's run, as a link on MLflow's own pages."""
        return f"#/experiments/{self.experiment_id}/runs/{self.run_id}/artifacts/{name}"

    def log_cell(self, cell: Cell, k_star: int | None, numbers: Mapping[str, float]) -> None:
        """K* of a cell and other numbers of it, such as how many trials were complete, on the
        cell's run."""
        with mlflow_errors(self.uri):
            self._log_new(
                self._cell_run(cell),
                dict(numbers) | ({} if k_star is None else {"K_star": k_star}),
                {},
                {},
            )

    def _logged_else_cleared(self, result: TrialResult, known: Sequence[Run]) -> bool:
        """Whether a result is logged; runs of its point that are not of this attempt are
        deleted."""
        found = False
        for run in known:
            same = run.data.tags[STATUS_TAG] == result.status and logged_in(run).shows(result)
            if same and not found and run.info.status != "RUNNING":
                found = True
            else:
                self.client.delete_run(run.info.run_id)
        return found

    def _cell_run(self, cell: Cell) -> str:
        if cell not in self._cells:
            run = self._run(
                {CELL_TAG: str(cell), KIND_TAG: "cell"}, str(cell), {PARENT: self.run_id}
            )
            if not self.client.get_run(run).data.params:
                self._batch(run, params=_params(cell))
            self._cells[cell] = run
        return self._cells[cell]

    def _run(self, tags: Mapping[str, str], name: str, further: Mapping[str, str]) -> str:
        """The run with these tags, made, with further ones, where there is none."""
        with self.lock():
            for run in self._find(tags):
                return run.info.run_id
            every = {**further, NAME_TAG: self.study, **tags}
            return self.client.create_run(self.experiment_id, tags=every, run_name=name).info.run_id

    def _resume(self, run: str) -> None:
        """Shows a run of the study or a cell as running."""
        if run not in self._running and self.client.get_run(run).info.status != "RUNNING":
            self.client.update_run(run, status="RUNNING")
        self._running.add(run)

    def _find(self, tags: Mapping[str, str]) -> Iterator[Run]:
        """The study's runs with these tags, the rarest first.

        MLflow's database has no index of a tag's values: it goes through all runs for the first
        tag.
        """
        query = " and ".join(
            f"tags.`{key}` = '{value}'" for key, value in {**tags, NAME_TAG: self.study}.items()
        )
        token = None
        while token != "":
            page = self.client.search_runs(
                [self.experiment_id], query, max_results=1000, page_token=token
            )
            yield from page
            token = page.token or ""

    def _log_new(
        self, run: str, metrics: Mapping[str, float], params: Mapping, series: Mapping[str, Mapping]
    ) -> None:
        """Logs what a run does not hold yet, or with another value."""
        known = self.client.get_run(run).data
        points = [
            (name, value, 0)
            for name, value in metrics.items()
            if not _same(value, known.metrics.get(name))
        ]
        for name, values in series.items():
            there = [
                (metric.step, metric.value) for metric in self.client.get_metric_history(run, name)
            ]
            for step, value in values.items():
                if not any(step == at and _same(value, stored) for at, stored in there):
                    points.append((name, value, step))
        self._batch(
            run, points, {key: value for key, value in params.items() if key not in known.params}
        )

    def _batch(
        self, run: str, points: Iterable[Point] = (), params: Iterable = (), tags: Iterable = ()
    ) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, float(value), now, step) for name, value, step in points]
        texts = [Param(key, str(value)) for key, value in dict(params).items()]
        labels = [RunTag(key, str(value)) for key, value in dict(tags).items()]
        self.client.log_batch(run, metrics[:BATCH], texts[:100], labels)
        for start in range(BATCH, len(metrics), BATCH):
            self.client.log_batch(run, metrics[start : start + BATCH])


def run_name(trial: Trial) -> str:
    """The name of a trial's run: what differs first, since lists of runs cut names short."""
    repeat = f" repeat {trial.repeat}" if trial.repeat else ""
    return f"point {trial.point}{repeat} | {trial.cell}"


def _params(cell: Cell) -> dict[str, object]:
    return {"batch_size": cell.batch_size, "sparsity": cell.sparsity, **dict(cell.axes)}


def _along(curve: Mapping[str, Sequence[float]]) -> list[Point]:
    """The points of a curve at its steps."""
    steps = [int(step) for step in curve.get("step", ())]
    shown = _shown(len(steps))
    named = [(name, values) for name, values in curve.items() if name != "step"]
    return [(name, values[i], steps[i]) for name, values in named for i in shown]


def _shown(length: int) -> Sequence[int]:
    """Return the indices of the logged points: all, or `CURVE_POINTS` evenly spaced ones with both
    ends."""
    if length <= CURVE_POINTS:
        return range(length)
    return [round(i * (length - 1) / (CURVE_POINTS - 1)) for i in range(CURVE_POINTS)]


def _same(value: float, stored: float | None) -> bool:
    """Whether MLflow, which stores infinity as the largest float, was told a value before."""
    kept = max(-sys.float_info.max, min(value, sys.float_info.max))
    return stored is not None and (kept == stored or (math.isnan(value) and math.isnan(stored)))
