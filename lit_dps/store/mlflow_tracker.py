"""Tracker: logs a study to MLflow.

An experiment per workload, a run per study, below it a run per cell, below that a run per trial. Runs are found again
by their tags, so that a study that is taken up goes on in the same runs, whichever process logs to them. What is logged
already is not logged again: a finished study stays as it is, and so do the times at which its runs ended.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from mlflow.entities import Metric, Param, Run, RunTag

from lit_dps.store.mlflow_artifacts import log_artifacts
from lit_dps.store.mlflow_experiments import mlflow_errors, open_experiment
from lit_dps.trial import Cell, Status, TrialResult

BATCH = 1000  # metrics that MLflow takes in one request
NAME, KIND, CELL, POINT, STATUS, FAILURE = (
    f"lit_dps.{key}" for key in ("study", "kind", "cell", "point", "status", "failure")
)
PARENT = "mlflow.parentRunId"
LONGEST = 5000  # characters of a tag's value that every MLflow takes
# How a trial's run ends in MLflow, where not as FINISHED
STATES = {Status.INFEASIBLE: "FAILED", Status.FAILED: "FAILED", Status.STOPPED: "KILLED"}


class Tracker:
    """Logs one study to MLflow.

    Args:
        uri: Tracking URI.
        folder: Folder of the artifacts where the URI is a local sqlite file.
        experiment: Name of the experiment.
        study: Name of the study.
        tags: Tags of the study's run, as of when its trials were run last.
        lock: Makes the lock of all processes that log this study; the process that holds it may take it again.

    Raises:
        StorageError: if the tracking store cannot be opened.
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
            self.run_id = self._run({KIND: "study"}, study, self.tags)

    def go_on(self) -> None:
        """Shows that trials of the study are run, here and now."""
        with mlflow_errors(self.uri):
            self._resume(self.run_id)
            self._batch(self.run_id, tags=self.tags)

    def logged(self) -> dict[tuple[str, int], float]:
        """(cell, point) -> seconds of all trials that are logged whole; the seconds tell attempts at a point apart."""
        with mlflow_errors(self.uri):
            return {_point(run): _seconds(run) for run in self._find({KIND: "trial"}) if run.info.status != "RUNNING"}

    def log_trial(self, result: TrialResult) -> None:
        """A run with the trial's metaparameters, status, steps to result, curves and kept weights, in few requests.

        It takes the place of the runs of other attempts at the same point, and of one that was cut short. Nothing
        happens if this attempt is logged already.
        """
        trial = result.trial
        with mlflow_errors(self.uri), self.lock():
            if self._logged_else_cleared(result):
                return
            parent = self._cell_run(trial.cell)
            for run in (self.run_id, parent):
                self._resume(run)
            tags = {NAME: self.study, KIND: "trial", CELL: str(trial.cell), POINT: str(trial.point), PARENT: parent}
            tags |= {FAILURE: result.failure[:LONGEST]} if result.failure else {}
            run = self.client.create_run(
                self.experiment_id,
                start_time=int((time.time() - result.seconds) * 1000),
                tags={**tags, STATUS: str(result.status)},
                run_name=f"{trial.cell} point {trial.point}",
            ).info.run_id
            metrics = {f"kept/{name}": kept for name, (kept, _) in result.kept.items()}
            metrics["seconds"] = result.seconds
            if result.steps is not None:
                metrics["steps_to_result"] = result.steps
            params = {"batch_size": trial.cell.batch_size, "sparsity": trial.cell.sparsity, "point": trial.point}
            params |= trial.params
            params |= {f"total/{name}": total for name, (_, total) in result.kept.items()}
            metrics |= {f"theory/{name}": value for name, value in result.theory.items()}
            metrics |= {f"observed/{name}": value for name, value in result.observed.items()}
            self._batch(run, params=params, metrics=metrics, curves=_series(result.curve))
            self._batch(run, curves=_series(result.smoothness))
            if result.traceback:
                self.client.log_text(run, result.traceback, "traceback.txt")
            self.client.set_terminated(run, STATES.get(result.status, "FINISHED"))

    def delete_trial(self, cell: str, point: int) -> None:
        """Deletes the runs of a point."""
        with mlflow_errors(self.uri), self.lock():
            for run in self._find({POINT: str(point), CELL: cell, KIND: "trial"}):
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
        """The outcome, on the study's run.

        Args:
            scaling: Metric name -> {batch size: value}; logged with step = batch size, so that the UI's own chart of it
                is a scaling curve. Only what changed since the last call is logged.
            metrics: Single numbers.
            params: Parameters of the study.
            files: Artifacts; they keep their places below the folder that holds them all. Those that are there with the
                same content are not logged again.
            texts: Artifacts by name, as text. Likewise.
            finished: Whether no trial is left to run.
        """
        with mlflow_errors(self.uri):
            new = {name: dict(values) for name, values in scaling.items()}
            for name, values in new.items():
                for metric in self.client.get_metric_history(self.run_id, name):
                    if metric.step in values and _same(values[metric.step], metric.value):
                        del values[metric.step]
            for name, values in new.items():
                self._batch(self.run_id, curves=(list(values), {name: list(values.values())}))
            known = self.client.get_run(self.run_id).data
            self._batch(
                self.run_id,
                params={key: value for key, value in params.items() if key not in known.params},
                metrics=_new(metrics, known.metrics),
            )
            log_artifacts(self.client, self.run_id, files, texts)
            if finished:
                for run in (*self._cells.values(), self.run_id):
                    if self.client.get_run(run).info.status == "RUNNING":
                        self.client.set_terminated(run)
                self._running.clear()

    def log_cell(self, cell: Cell, k_star: int | None, numbers: Mapping[str, float]) -> None:
        """K* of a cell and other numbers of it, such as how many trials were complete, on the cell's run."""
        with mlflow_errors(self.uri):
            metrics = dict(numbers) | ({} if k_star is None else {"K_star": k_star})
            known = self.client.get_run(self._cell_run(cell)).data.metrics
            self._batch(self._cell_run(cell), metrics=_new(metrics, known))

    def _logged_else_cleared(self, result: TrialResult) -> bool:
        """Whether a result is logged; runs of its point that are not of this attempt are deleted."""
        found = False
        for run in self._find({POINT: str(result.trial.point), CELL: str(result.trial.cell), KIND: "trial"}):
            same = run.data.tags[STATUS] == result.status and math.isclose(_seconds(run), result.seconds)
            if same and not found and run.info.status != "RUNNING":
                found = True
            else:
                self.client.delete_run(run.info.run_id)
        return found

    def _cell_run(self, cell: Cell) -> str:
        if cell not in self._cells:
            run = self._run({CELL: str(cell), KIND: "cell"}, str(cell), {PARENT: self.run_id})
            params = {"batch_size": cell.batch_size, "sparsity": cell.sparsity}
            if not self.client.get_run(run).data.params:
                self._batch(run, params=params)
            self._cells[cell] = run
        return self._cells[cell]

    def _run(self, tags: Mapping[str, str], name: str, further: Mapping[str, str]) -> str:
        """The run with these tags, made, with further ones, where there is none."""
        with self.lock():
            for run in self._find(tags):
                return run.info.run_id
            every = {**further, NAME: self.study, **tags}
            return self.client.create_run(self.experiment_id, tags=every, run_name=name).info.run_id

    def _resume(self, run: str) -> None:
        """Shows a run of the study or a cell as running."""
        if run not in self._running and self.client.get_run(run).info.status != "RUNNING":
            self.client.update_run(run, status="RUNNING")
        self._running.add(run)

    def _find(self, tags: Mapping[str, str]) -> Iterator[Run]:
        """The study's runs with these tags, the rarest first: MLflow's database has no index of a tag's values.

        It goes through all runs for the first, and looks up the others in those that have it.
        """
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in {**tags, NAME: self.study}.items())
        token = None
        while token != "":
            page = self.client.search_runs([self.experiment_id], query, max_results=1000, page_token=token)
            yield from page
            token = page.token or ""

    def _batch(self, run: str, params=None, metrics=None, tags=None, curves=((), {})) -> None:
        now = int(time.time() * 1000)
        points = [Metric(key, float(value), now, 0) for key, value in (metrics or {}).items()]
        steps, series = curves
        for key, values in series.items():
            points += [Metric(key, float(value), now, step) for step, value in zip(steps, values, strict=True)]
        texts = [Param(key, str(value)) for key, value in (params or {}).items()]
        labels = [RunTag(key, str(value)) for key, value in (tags or {}).items()]
        self.client.log_batch(run, points[:BATCH], texts[:100], labels)
        for start in range(BATCH, len(points), BATCH):
            self.client.log_batch(run, points[start : start + BATCH])


def _series(curve: Mapping[str, Sequence[float]]) -> tuple[list[int], dict[str, Sequence[float]]]:
    """A curve as `Tracker._batch` takes it: its steps, and the others by name."""
    return [int(step) for step in curve.get("step", [])], {key: v for key, v in curve.items() if key != "step"}


def _new(metrics: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
    """The metrics that are not known, or with another value."""
    return {key: value for key, value in metrics.items() if key not in known or not _same(value, known[key])}


def _same(value: float, stored: float) -> bool:
    """Whether MLflow, which stores infinity as the largest float, was told a value before."""
    kept = max(-sys.float_info.max, min(value, sys.float_info.max))
    return kept == stored or (math.isnan(value) and math.isnan(stored))


def _point(run: Run) -> tuple[str, int]:
    return run.data.tags[CELL], int(run.data.tags[POINT])


def _seconds(run: Run) -> float:
    return run.data.metrics.get("seconds", math.inf)
