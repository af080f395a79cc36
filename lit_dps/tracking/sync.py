"""MlflowSync: mirrors a stored study to MLflow, while it runs and afterwards (`analyze --sync`).

MLflow only shows what Optuna's storage holds, as runs of the study, its cells, its trials and its
repeats. Tags identify the runs (`lit_dps.storage.schema`). So a resumed study continues in
the same runs, whichever process logs to them.
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml
from mlflow.entities import Run

from lit_dps.analysis.analysis import Analysis
from lit_dps.core.config import StorageConfig
from lit_dps.core.config_yaml import ConfigDumper
from lit_dps.core.errors import StorageError
from lit_dps.core.progress_line import ProgressLine
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Status, TrialResult
from lit_dps.storage.locks import peers
from lit_dps.storage.schema import CELL_TAG, KIND_TAG, NAME_TAG, SPACE_TAG
from lit_dps.tracking.client import mlflow_errors
from lit_dps.tracking.description import (
    LAW_FAMILIES,
    cell_outcomes,
    is_finished,
    lines_within,
    markdown,
    scaling,
    space_text,
    study_metrics,
    study_params,
)
from lit_dps.tracking.pages import SHARED, view_key, views_of
from lit_dps.tracking.runs import (
    MAX_TAG_CHARACTERS,
    LoggedAttempt,
    StudyRuns,
    TrialKey,
    cell_params,
    log_artifacts,
    run_name,
    trial_params,
    trial_points,
    trial_tags,
)

PACKAGES = ("lit_dps", "torch", "torchvision", "lightning", "optuna", "mlflow", "numpy", "scipy")
SYNC_SECONDS = 120.0  # limit for logging missing trials in a study; `analyze --sync` has no limit
GIT_SECONDS = 10  # limit for reading the commit
PART = 50  # trials logged under one lock. Workers wait for it, for a second or two.
PARENT_TAG, NOTE_TAG = "mlflow.parentRunId", "mlflow.note.content"
# How a trial's run ends in MLflow; all others end as FINISHED.
RUN_STATES = {Status.INFEASIBLE: "FAILED", Status.FAILED: "FAILED", Status.STOPPED: "KILLED"}


class MlflowSync:
    """Mirrors one study to MLflow, and connects when something is logged first.

    All methods raise StorageError if MLflow cannot be used, unless it is optional. Then `sync`,
    `log_result` and `log_outcome` print the first failure as a warning, and a study continues
    without MLflow.

    Args:
        uri: Tracking URI.
        folder: Folder of the artifacts if the URI is a local SQLite file.
        experiment: Name of the experiment.
        study: Name of the study.
        tags: Tags of the study's run, as of the last run of its trials.
        lock: Returns the lock of all processes that log this study. Its holder may acquire it
            again.
        is_optional: Whether a failure of MLflow is only a warning.
    """

    def __init__(
        self,
        uri: str,
        folder: str,
        experiment: str,
        study: str,
        tags: Mapping[str, str],
        lock: Callable[[], AbstractContextManager] = nullcontext,
        is_optional: bool = False,
    ):
        self.uri = uri
        self.study = study
        self.tags = dict(tags)
        self.is_optional = is_optional
        self._lock = lock
        self._open = partial(StudyRuns, uri, folder, experiment, study, self.tags, lock)
        self._runs: StudyRuns | None = None  # None while MLflow is not connected
        self._cell_runs: dict[Cell, str] = {}
        self._has_warned = False

    @classmethod
    def of_study(
        cls,
        storage: StorageConfig,
        experiment: str,
        study: str,
        tags: Mapping[str, str],
        is_optional: bool = False,
    ) -> MlflowSync:
        """Return the mirror of a study, with the lock of all processes that share its storage."""
        lock = partial(peers(storage.optuna_url).lock, "view")
        uri, folder = storage.mlflow_uri, storage.folder
        return cls(uri, folder, experiment, study, tags, lock, is_optional)

    @property
    def runs(self) -> StudyRuns:
        """The runs of the study.

        Raises:
            StorageError: if MLflow cannot be used.
        """
        if self._runs is None:
            with mlflow_errors(self.uri):
                self._runs = self._open()
            self._cell_runs = {}
        return self._runs

    @property
    def experiment_id(self) -> str | None:
        """The id of the experiment; None if MLflow has failed, or was not used yet."""
        if self._runs is None:
            return None
        return self._runs.experiment_id

    # ---- The entire study ----

    def sync(
        self,
        record: StudyRecord,
        study: Analysis | None = None,
        files: Sequence[Path] = (),
        *,
        is_running: bool = False,
        logged: Mapping[TrialKey, LoggedAttempt] | None = None,
        obsolete: Collection[TrialKey] = (),
    ) -> None:
        """Log all that MLflow lacks of a study; what it has is not logged again.

        Trials are missing if a process was killed before it logged them, if MLflow was unavailable,
        or if another attempt counts by now. If MLflow has failed before, this tries again.

        Args:
            record: The study.
            study: The analysis of the study, to log the outcome too.
            files: Artifacts of the outcome.
            is_running: Whether trials of the study run now.
            logged: The logged attempts, as `logged` returns them; None searches for them.
            obsolete: Logged trials that are not stored (`unstored_trials`). Their runs are deleted.

        Raises:
            StorageError: if MLflow cannot be used, unless it is optional.
        """
        with self._tolerated():
            if logged is None:
                logged = self.logged()
            self._log_all_trials(record, logged)
            for key in obsolete:
                self.delete_trial(key)
            if is_running:
                self.show_running()
            if study is not None:
                self._log_analysis(study, files)

    def log_result(self, result: TrialResult) -> None:
        """Log a result as `log_trial`; if MLflow is optional, only unless it has failed before."""
        if self.is_optional and self._runs is None:
            return
        with self._tolerated():
            self.log_trial(result)

    def log_outcome(
        self,
        metrics: Mapping[str, float],
        curves: Mapping[str, Mapping[int, float]] | None = None,
        files: Sequence[Path] = (),
        note: str | None = None,
        has_ended: bool = False,
    ) -> None:
        """Log metrics, artifacts and a description on the run of the study.

        Args:
            metrics, curves, files: As `log_study` takes them.
            note: The description; None keeps the former one.
            has_ended: Whether the study has ended.
        """
        with self._tolerated():
            if note is not None:
                self.describe(note, {})
            self.log_study(curves or {}, metrics, {}, files, {}, finished=has_ended)

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """If MLflow is optional, print its first failure in the block as a warning."""
        try:
            yield
        except StorageError as error:
            if not self.is_optional:
                raise
            self._runs = None
            if not self._has_warned:
                self._has_warned = True
                print(
                    f"\nwarning: {error}; the study continues without MLflow. Its next run, or "
                    "analyze --sync, logs what is missing",
                    file=sys.stderr,
                    flush=True,
                )

    def _log_all_trials(
        self, record: StudyRecord, attempts: Mapping[TrialKey, LoggedAttempt]
    ) -> None:
        """Log the trials of a study that are missing among the logged attempts.

        In a study, which waits for MLflow, this takes at most `SYNC_SECONDS`.
        """
        missing: list[TrialResult] = []
        for result in itertools.chain(*record.results.values(), *record.repeats.values()):
            key = TrialKey.of_trial(result.trial)
            if key not in attempts or not attempts[key].shows(result):
                missing.append(result)
        limit = SYNC_SECONDS if self.is_optional else math.inf
        deadline = time.monotonic() + limit
        line = ProgressLine("MLflow: trials logged", len(missing))
        for done in self.log_trials(missing):
            line.update(done)
            if time.monotonic() > deadline and done < len(missing):
                raise StorageError(
                    f"MLflow is slow: it has {done} of {len(missing)} trials after {limit:.0f} "
                    "seconds"
                )
        line.end()

    def _log_analysis(self, study: Analysis, files: Sequence[Path]) -> None:
        """Log K*, laws, theory, artifacts and configuration on the runs of study and cells."""
        record = study.record
        for outcome in cell_outcomes(study):
            self.log_cell(outcome.cell, outcome.metrics)
        values = scaling(study)
        curves = sorted(name for name in values if name.startswith("K_star/"))
        keys = ["batch_size", "sparsity", *record.axes]
        views = views_of(record.name, keys, list(record.space), record.goal.metric, curves)
        report = None
        if files:
            report = self.report_page()
        self.describe(markdown(study, report, MAX_TAG_CHARACTERS), views)
        self.log_study(
            values,
            study_metrics(study),
            study_params(record),
            files,
            {"config.yaml": yaml.dump(record.config, Dumper=ConfigDumper, sort_keys=False)},
            finished=is_finished(study),
            tags={SPACE_TAG: space_text(record)[:MAX_TAG_CHARACTERS]},
            families=LAW_FAMILIES,
        )

    def show_running(self) -> None:
        """Show that trials of the study run now, with the versions of this process."""
        runs = self.runs
        with mlflow_errors(self.uri):
            runs.set_running(runs.run_id)
            runs.log(runs.run_id, tags=self.tags)

    # ---- Trials ----

    def logged(self) -> dict[TrialKey, LoggedAttempt]:
        """Return the attempts of all trials and repeats that are logged completely."""
        attempts = {}
        with mlflow_errors(self.uri):
            for kind in ("trial", "repeat"):
                for run in self.runs.find({KIND_TAG: kind}):
                    if run.info.status != "RUNNING":
                        attempts[TrialKey.of_run(run)] = LoggedAttempt.of_run(run)
        return attempts

    def log_trial(self, result: TrialResult) -> None:
        """Log a trial's metaparameters, status, steps to result, curves and kept weights as a run.

        The run replaces the runs of earlier attempts at the point, and an interrupted one. A result
        that is logged already is not logged again. Curves have at most `CURVE_POINTS` points;
        Optuna stores all points.
        """
        with mlflow_errors(self.uri), self._lock():
            key = TrialKey.of_trial(result.trial)
            self._log_unless_logged(result, list(self.runs.find(key.tags())))

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
                with mlflow_errors(self.uri), self._lock():
                    runs = self._trial_runs(cell)
                    for result in part:
                        key = TrialKey.of_trial(result.trial)
                        self._log_unless_logged(result, runs.get(key, []))
                done += len(part)
                yield done

    def delete_trial(self, key: TrialKey) -> None:
        """Delete the runs of a trial or a repeat."""
        with mlflow_errors(self.uri), self._lock():
            for run in self.runs.find(key.tags()):
                self.runs.client.delete_run(run.info.run_id)

    def _trial_runs(self, cell: Cell) -> dict[TrialKey, list[Run]]:
        """Return the runs of a cell's trials and repeats."""
        runs: dict[TrialKey, list[Run]] = {}
        for run in self.runs.find({CELL_TAG: cell.stored_name}):
            if run.data.tags.get(KIND_TAG) in ("trial", "repeat"):
                runs.setdefault(TrialKey.of_run(run), []).append(run)
        return runs

    def _log_unless_logged(self, result: TrialResult, runs: Sequence[Run]) -> None:
        """Log a result unless one of the trial's runs shows it; delete its other runs."""
        if self._is_logged(result, runs):
            return
        cell_run = self._cell_run(result.trial.cell)
        for run in (self.runs.run_id, cell_run):
            self.runs.set_running(run)
        run = self.runs.client.create_run(
            self.runs.experiment_id,
            start_time=int((time.time() - result.seconds) * 1000),
            tags={**trial_tags(result), NAME_TAG: self.study, PARENT_TAG: cell_run},
            run_name=run_name(result.trial),
        )
        run_id = run.info.run_id
        self.runs.log(run_id, trial_points(result), trial_params(result))
        if result.traceback:
            self.runs.client.log_text(run_id, result.traceback, "traceback.txt")
        self.runs.client.set_terminated(run_id, RUN_STATES.get(result.status, "FINISHED"))

    def _is_logged(self, result: TrialResult, runs: Sequence[Run]) -> bool:
        """Return True if one run shows a result completely; delete all other runs."""
        is_logged = False
        for run in runs:
            is_complete = run.info.status != "RUNNING"
            is_shown = is_complete and LoggedAttempt.of_run(run).shows(result)
            if is_shown and not is_logged:
                is_logged = True
            else:
                self.runs.client.delete_run(run.info.run_id)
        return is_logged

    # ---- Cells and the study ----

    def log_cell(self, cell: Cell, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a cell on its run."""
        with mlflow_errors(self.uri):
            # All metrics of a cell's run come from this method.
            self.runs.log_changes(self._cell_run(cell), metrics, {}, {}, families=("",))

    def log_study(
        self,
        scaling: Mapping[str, Mapping[int, float]],
        metrics: Mapping[str, float],
        params: Mapping[str, object],
        files: Sequence[Path],
        texts: Mapping[str, str],
        finished: bool,
        tags: Mapping[str, str] | None = None,
        families: tuple[str, ...] = (),
    ) -> None:
        """Log the outcome on the study's run, as far as it has changed since the last call.

        Args:
            scaling: Metric name -> {batch size: value}. The step is the batch size, so the UI's
                chart is a scaling curve.
            metrics, params, tags: Metrics, parameters and tags of the study.
            files, texts: Artifacts, as `log_artifacts` takes them.
            finished: Whether no trial remains to be run.
            families: See `StudyRuns.log_changes`.
        """
        with mlflow_errors(self.uri):
            self.runs.log_changes(
                self.runs.run_id, metrics, params, scaling, tags=tags, families=families
            )
            log_artifacts(self.runs.client, self.runs.run_id, files, texts)
            if finished:
                for run in (*self._cell_runs.values(), self.runs.run_id):
                    self.runs.set_finished(run)

    def describe(self, note: str, views: Mapping[str, object]) -> None:
        """Set the description of the study's run, and views of the experiment's runs.

        Args:
            note: The description in Markdown.
            views: The views by name (`lit_dps.tracking.pages.views_of`).
        """
        note = lines_within(note, MAX_TAG_CHARACTERS)
        with mlflow_errors(self.uri):
            if self.runs.client.get_run(self.runs.run_id).data.tags.get(NOTE_TAG) != note:
                self.runs.client.set_tag(self.runs.run_id, NOTE_TAG, note)
            tags = self.runs.client.get_experiment(self.runs.experiment_id).tags
            for name, view in views.items():
                key, text = f"{SHARED}{view_key(self.study, name)}", json.dumps(view)
                if tags.get(key) != text and len(text) <= MAX_TAG_CHARACTERS:
                    self.runs.client.set_experiment_tag(self.runs.experiment_id, key, text)

    def report_page(self) -> str:
        """Return a link, for MLflow's pages, to the report page of the study."""
        artifacts = f"{self.runs.experiment_id}/runs/{self.runs.run_id}/artifacts"
        return f"#/experiments/{artifacts}/report.html"

    def _cell_run(self, cell: Cell) -> str:
        """Return the id of a cell's run; create the run if it does not exist."""
        if cell not in self._cell_runs:
            tags = {CELL_TAG: cell.stored_name, KIND_TAG: "cell"}
            run = self.runs.find_or_create(tags, str(cell), {PARENT_TAG: self.runs.run_id})
            if not self.runs.client.get_run(run).data.params:
                self.runs.log(run, params=cell_params(cell))
            self._cell_runs[cell] = run
        return self._cell_runs[cell]


def unstored_trials(logged: Collection[TrialKey], record: StudyRecord) -> set[TrialKey]:
    """Return the logged trials that are not stored.

    The database was restored from a copy, or the study was deleted and made again.

    Args:
        logged: The logged trials.
        record: The study with all its results, also of trials that must run again. It was read
            after the logged trials, so that each of them was stored by then.
    """
    unstored = set(logged)
    for result in itertools.chain(*record.results.values(), *record.repeats.values()):
        unstored.discard(TrialKey.of_trial(result.trial))
    return unstored


def environment_tags(digest: str | None) -> dict[str, str]:
    """Return versions, machine, data digest and git commit, as tags of a study's run."""
    tags = {
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}",
    }
    for package in PACKAGES:
        try:
            tags[f"version.{package}"] = version(package)
        except PackageNotFoundError:
            tags[f"version.{package}"] = "not installed"
    tags["data_digest"] = digest or "unknown"
    tags["mlflow.source.git.commit"] = _git_commit() or "none"
    tags["mlflow.source.name"] = "lit-dps study"
    return tags


def _git_commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return output.stdout.strip()
