"""MLflow: the view of a study. Optuna's storage holds the truth; whatever is missing here can be logged again.

An experiment per workload, a run per study, below it a run per cell, below that a run per trial. Runs are found again
by their tags, so that a study that is taken up goes on in the same runs.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lit_dps.errors import StorageError
from lit_dps.storage import sqlite_file
from lit_dps.trial import Cell, Status, TrialResult

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its 7 keep a study waiting for minutes on a dead server
warnings.filterwarnings("ignore", message='.*"noload".*')  # MLflow 3.17 under SQLAlchemy 2.1; harmless

import mlflow  # noqa: E402
from filelock import FileLock  # noqa: E402
from mlflow.entities import Experiment, Metric, Param, RunTag  # noqa: E402
from sqlalchemy.exc import SQLAlchemyError  # noqa: E402

logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("alembic").setLevel(logging.WARNING)

BATCH = 1000  # metrics that MLflow takes in one request
NAME, KIND, CELL, POINT, STATUS = (f"lit_dps.{key}" for key in ("study", "kind", "cell", "point", "status"))
PARENT = "mlflow.parentRunId"


class Tracker:
    """Logs one study to MLflow.

    Args:
        uri: Tracking URI.
        folder: Folder of the artifacts where the URI is a local sqlite file.
        experiment: Name of the experiment.
        study: Name of the study.
        tags: Tags of the study's run.

    Raises:
        StorageError: if the tracking store cannot be opened.
    """

    def __init__(self, uri: str, folder: str, experiment: str, study: str, tags: Mapping[str, str]):
        self.uri, self.study = uri, study
        with _one_line(uri):
            self.client, self.experiment_id = open_experiment(uri, folder, experiment)
            self.run_id = self._run({KIND: "study"}, study, None)
            self._batch(self.run_id, tags=tags)
        self._cells: dict[Cell, str] = {}
        self._trials: dict[tuple[str, int], str] = {}

    def logged(self) -> dict[tuple[str, int], float]:
        """(cell, point) -> seconds of all trials that are logged whole; the seconds tell attempts at a point apart.

        Runs that were cut short are deleted on the way.
        """
        self._trials, seconds = {}, {}
        with _one_line(self.uri):
            for run in self._find({KIND: "trial"}):
                if run.info.status == "RUNNING":
                    self.client.delete_run(run.info.run_id)
                else:
                    key = run.data.tags[CELL], int(run.data.tags[POINT])
                    self._trials[key], seconds[key] = run.info.run_id, run.data.metrics["seconds"]
        return seconds

    def log_trial(self, result: TrialResult) -> None:
        """A run with the trial's metaparameters, status, steps to result, curves and kept weights, in few requests.

        It takes the place of the run of an earlier attempt at the same point, which was outraced.
        """
        trial = result.trial
        with _one_line(self.uri):
            if (earlier := self._trials.pop((str(trial.cell), trial.point), None)) is not None:
                self.client.delete_run(earlier)
            parent = self._cell_run(trial.cell)
            tags = {NAME: self.study, KIND: "trial", CELL: str(trial.cell), POINT: str(trial.point), PARENT: parent}
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
            self._batch(run, params=params, metrics=metrics, curves=_series(result.curve))
            self._batch(run, curves=_series(result.smoothness))
            self.client.set_terminated(run, "FAILED" if result.status is Status.INFEASIBLE else "FINISHED")
            self._trials[str(trial.cell), trial.point] = run

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
            files: Artifacts; they keep their places below the folder that holds them all.
            texts: Artifacts by name, as text.
            finished: Whether no trial is left to run.
        """
        with _one_line(self.uri):
            new = {name: dict(values) for name, values in scaling.items()}
            for name, values in new.items():
                for metric in self.client.get_metric_history(self.run_id, name):
                    if values.get(metric.step) == metric.value:
                        del values[metric.step]
            for name, values in new.items():
                self._batch(self.run_id, curves=(list(values), {name: list(values.values())}))
            known = self.client.get_run(self.run_id).data
            self._batch(
                self.run_id,
                params={key: value for key, value in params.items() if key not in known.params},
                metrics={key: value for key, value in metrics.items() if known.metrics.get(key) != value},
            )
            root = os.path.commonpath([path.parent for path in files]) if files else ""
            for path in files:
                below = os.path.relpath(path.parent, root)
                self.client.log_artifact(self.run_id, str(path), None if below == "." else below)
            for name, text in texts.items():
                self.client.log_text(self.run_id, text, name)
            if finished:
                for run in (*self._cells.values(), self.run_id):
                    self.client.set_terminated(run)

    def log_cell(self, cell: Cell, k_star: int | None, numbers: Mapping[str, float]) -> None:
        """K* of a cell and other numbers of it, such as how many trials were complete, on the cell's run."""
        with _one_line(self.uri):
            metrics = dict(numbers) | ({} if k_star is None else {"K_star": k_star})
            known = self.client.get_run(self._cell_run(cell)).data.metrics
            self._batch(self._cell_run(cell), metrics={k: v for k, v in metrics.items() if known.get(k) != v})

    def _cell_run(self, cell: Cell) -> str:
        if cell not in self._cells:
            run = self._run({KIND: "cell", CELL: str(cell)}, str(cell), self.run_id)
            params = {"batch_size": cell.batch_size, "sparsity": cell.sparsity}
            if not self.client.get_run(run).data.params:
                self._batch(run, params=params)
            self._cells[cell] = run
        return self._cells[cell]

    def _run(self, tags: Mapping[str, str], name: str, parent: str | None) -> str:
        """The run with these tags, made where there is none and running again where it was ended."""
        for run in self._find(tags):
            if run.info.status != "RUNNING":
                self.client.update_run(run.info.run_id, status="RUNNING")
            return run.info.run_id
        every = {NAME: self.study, **tags, **({PARENT: parent} if parent else {})}
        return self.client.create_run(self.experiment_id, tags=every, run_name=name).info.run_id

    def _find(self, tags: Mapping[str, str]) -> Iterator[mlflow.entities.Run]:
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in {NAME: self.study, **tags}.items())
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


def open_experiment(uri: str, folder: str, name: str) -> tuple[mlflow.MlflowClient, str]:
    """A client and the experiment's id, made where there is none; safe for several processes at once."""
    local = sqlite_file(uri) is not None
    root = Path(folder).absolute()
    if local:
        root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".mlflow.lock") if local else _unlocked():
        client = mlflow.MlflowClient(tracking_uri=uri)
        found: Experiment | None = client.get_experiment_by_name(name)
        if found is not None:
            return client, found.experiment_id
        location = (root / "artifacts" / name.replace("/", "_")).as_uri() if local else None
        return client, client.create_experiment(name, artifact_location=location)


def experiments(uri: str) -> list[Experiment]:
    """The experiments that hold runs. Raises StorageError if the tracking store cannot be read or does not exist."""
    file = sqlite_file(uri)
    if file is not None and not file.exists():
        raise StorageError(f"no MLflow database at {file}: run a study first, or name it by --storage.folder")
    with _one_line(uri):
        client = mlflow.MlflowClient(tracking_uri=uri)
        found = client.search_experiments(order_by=["name ASC"])
        return [e for e in found if client.search_runs([e.experiment_id], max_results=1)]


def page_address(experiment_id: str, run_id: str | None = None, port: int = 5000) -> str:
    """The page of an experiment's runs, or of the charts of one run, on the server that `ui` starts.

    Without the workflow type MLflow 3 opens its pages for language models.
    """
    page = "runs" if run_id is None else f"runs/{run_id}/model-metrics"
    return f"http://127.0.0.1:{port}/#/experiments/{experiment_id}/{page}?workflowType=machine_learning"


def _series(curve: Mapping[str, Sequence[float]]) -> tuple[list[int], dict[str, Sequence[float]]]:
    """A curve as `Tracker._batch` takes it: its steps, and the others by name."""
    return [int(step) for step in curve.get("step", [])], {key: v for key, v in curve.items() if key != "step"}


@contextmanager
def _unlocked() -> Iterator[None]:
    yield


@contextmanager
def _one_line(uri: str) -> Iterator[None]:
    try:
        yield
    except (mlflow.exceptions.MlflowException, SQLAlchemyError, OSError) as error:
        said = getattr(error, "orig", None) or error  # what the database said, without the statement
        text = " ".join(str(said).split())
        raise StorageError(f"MLflow at {uri.split('@')[-1]}: {text[:300]}") from error
