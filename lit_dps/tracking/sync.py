"""Keeps MLflow up to date with a study, while it runs and afterwards (`analyze --sync`).

MLflow only shows what Optuna's storage holds. A study runs without it, too.
"""

from __future__ import annotations

import itertools
import math
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.local_sgd import communications
from lit_dps.analysis.tables import records
from lit_dps.core.config import StorageConfig
from lit_dps.core.errors import StorageError
from lit_dps.core.progress_line import ProgressLine
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import FINAL_STATUSES, Cell, Series, TrialResult
from lit_dps.storage.locks import peers
from lit_dps.tracking.description import constants, markdown
from lit_dps.tracking.pages import views_of
from lit_dps.tracking.tracker import Tracker
from lit_dps.tracking.trial_run import LoggedAttempt, TrialKey

PACKAGES = ("lit_dps", "torch", "torchvision", "lightning", "optuna", "mlflow", "numpy", "scipy")
SYNC_SECONDS = 120.0  # limit for logging missing trials in a study; `analyze --sync` has no limit
GIT_SECONDS = 10  # limit for reading the commit
# Terms of the theory and its predictions, which the run of each cell shows.
THEORY = (
    "delta",
    "lipschitz",
    "beta",
    "epsilon",
    "rate",
    "predicted_c1",
    "predicted_c2",
    "predicted_k_star",
)
# Metric of a cell's run -> column of the answer.
ANSWER_METRICS = {
    "seconds_to_goal": "seconds",
    "examples_to_goal": "examples",
    "step_seconds": "step_seconds",
}


class MlflowSync:
    """MLflow while a study runs. If it fails, also at the start, the study continues without it.

    The first failure is printed as a warning.

    Args:
        connect: Makes the tracker.

    Attributes:
        tracker: The tracker; None if MLflow cannot be used.
    """

    def __init__(self, connect: Callable[[], Tracker]):
        self.tracker: Tracker | None = None
        self._connect = connect
        self._has_warned = False

    def sync(
        self,
        record: StudyRecord,
        study: Analysis | None = None,
        files: Sequence[Path] = (),
        *,
        is_running: bool = False,
    ) -> None:
        """Log all that is missing, as the function `sync`.

        Unlike `log`, it also tries if MLflow has failed before, because MLflow may be back.
        """

        def log() -> None:
            tracker = self._connected()
            sync(tracker, record, study, files, is_running=is_running, seconds=SYNC_SECONDS)

        self._try(log)

    def log(self, result: TrialResult) -> None:
        """Log a result, unless MLflow has failed before."""
        tracker = self.tracker
        if tracker is not None:
            self._try(lambda: tracker.log_trial(result))

    def log_outcome(
        self,
        metrics: Mapping[str, float],
        curves: Mapping[str, Mapping[int, float]] | None = None,
        files: Sequence[Path] = (),
        note: str | None = None,
        ended: bool = False,
    ) -> None:
        """Log metrics, artifacts and a description on the run of the study.

        Args:
            metrics, curves, files: As `Tracker.log_study` takes them.
            note: The description; None keeps the former one.
            ended: Whether the study has ended.
        """

        def log() -> None:
            tracker = self._connected()
            if note is not None:
                tracker.describe(note, {})
            tracker.log_study(curves or {}, metrics, {}, files, {}, finished=ended)

        self._try(log)

    def _connected(self) -> Tracker:
        if self.tracker is None:
            self.tracker = self._connect()
        return self.tracker

    def _try(self, log: Callable[[], None]) -> None:
        try:
            log()
        except StorageError as error:
            self.tracker = None
            if not self._has_warned:
                self._has_warned = True
                print(
                    f"\nwarning: {error}; the study continues without MLflow. Its next run, or "
                    "analyze --sync, logs what is missing",
                    file=sys.stderr,
                    flush=True,
                )


def connect(storage: StorageConfig, workload: str, study: str, tags: Mapping[str, str]) -> Tracker:
    """Return the tracker of a study, with the lock of all processes that share its storage.

    Raises:
        StorageError: if MLflow cannot be used.
    """
    lock = partial(peers(storage.optuna_url).lock, "view")
    return Tracker(storage.mlflow_uri, storage.folder, workload, study, tags, lock)


def sync(
    tracker: Tracker,
    record: StudyRecord,
    study: Analysis | None = None,
    files: Sequence[Path] = (),
    *,
    is_running: bool = False,
    logged: Mapping[TrialKey, LoggedAttempt] | None = None,
    seconds: float = math.inf,
) -> None:
    """Log all that MLflow lacks of a study; what it has is not logged again.

    Trials are missing if a process was killed before it logged them, if MLflow was unavailable, or
    if another attempt counts by now.

    Args:
        tracker: The tracker of the study.
        record: The study.
        study: The analysis of the study, to log the outcome too.
        files: Artifacts of the outcome.
        is_running: Whether trials of the study run now.
        logged: What was logged before `record` was read. If it is passed, the runs of trials that
            are not stored are deleted: the database was restored from a copy, or the study was
            deleted and made again.
        seconds: Time limit for the trials.

    Raises:
        StorageError: if MLflow cannot be used, or if trials are missing after the time limit.
    """
    attempts = tracker.logged() if logged is None else logged
    stored, missing = set(), []
    for result in itertools.chain(*record.results.values(), *record.repeats.values()):
        key = TrialKey.of_trial(result.trial)
        stored.add(key)
        if key not in attempts or not attempts[key].shows(result):
            missing.append(result)
    _log_missing(tracker, missing, seconds)
    if logged is not None:
        for key in logged.keys() - stored:
            tracker.delete_trial(key)
    if is_running:
        tracker.show_running()
    if study is not None:
        _log_outcome(tracker, study, files)


def _log_missing(tracker: Tracker, missing: Sequence[TrialResult], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    line = ProgressLine("MLflow: trials logged", len(missing))
    for done in tracker.log_trials(missing):
        line.update(done)
        if time.monotonic() > deadline and done < len(missing):
            raise StorageError(
                f"MLflow is slow: it has {done} of {len(missing)} trials after {seconds:.0f} "
                "seconds"
            )
    line.end()


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


# ---- The outcome ----


def _log_outcome(tracker: Tracker, study: Analysis, files: Sequence[Path]) -> None:
    """Log K*, laws, theory, artifacts and configuration on the runs of the study and its cells."""
    record = study.record
    _log_cells(tracker, study)
    scaling = _scaling(study)
    curves = sorted(name for name in scaling if name.startswith("K_star/"))
    keys = ["batch_size", "sparsity", *record.axes]
    views = views_of(record.name, keys, list(record.space), record.goal.metric, curves)
    report = tracker.artifact_page("report.html") if files else None
    tracker.describe(markdown(study, report), views)
    tracker.log_study(
        scaling,
        _study_metrics(study),
        _study_params(record),
        files,
        {"config.yaml": yaml.safe_dump(record.config, sort_keys=False)},
        finished=_is_finished(study),
    )


def _log_cells(tracker: Tracker, study: Analysis) -> None:
    answer_rows = iter(records(study.answer))  # of the cells with K*
    for cell, terms in zip(study.cells, records(study.theory), strict=True):
        metrics: dict[str, Any] = {status: cell.counts[status] for status in FINAL_STATUSES}
        if cell.at_first_check:
            # K* is only an upper bound.
            metrics["K_star_at_first_check"] = 1
        for repeats in study.repeats:
            if repeats.cell == cell.cell and repeats.rank == 1:
                metrics["repeats"] = len(repeats.results)
                metrics["missed"] = repeats.missed
        median = _repeats_median(study, cell.cell)
        if median is not None:
            metrics["K_median"] = median
        exchanges = communications(study.record, cell)
        if exchanges is not None:
            metrics["communications"] = exchanges
        if cell.k_star is not None:
            row = next(answer_rows)
            for name, column in ANSWER_METRICS.items():
                if row[column] is not None:
                    metrics[name] = row[column]
        for name in THEORY:
            if terms[name] is not None:
                metrics[f"theory/{name}"] = terms[name]
        tracker.log_cell(cell.cell, cell.k_star, metrics)


def _repeats_median(study: Analysis, cell: Cell) -> float | None:
    """Return the median steps of the repeats of a cell's best point; None if it is unknown."""
    median = None
    for repeats in study.repeats:
        is_best_point = repeats.cell == cell and repeats.rank == 1
        if is_best_point and repeats.median is not None and math.isfinite(repeats.median):
            median = repeats.median
    return median


def _scaling(study: Analysis) -> dict[str, dict[int, float]]:
    """Return K* and the median of repeats of each series, by batch size."""
    scaling: dict[str, dict[int, float]] = {}
    for summary in study.cells:
        cell = summary.cell
        series = _metric_name(cell.series)
        median = _repeats_median(study, cell)
        if median is not None:
            scaling.setdefault(f"K_median/{series}", {})[cell.batch_size] = median
        if summary.k_star is not None:
            scaling.setdefault(f"K_star/{series}", {})[cell.batch_size] = summary.k_star
    return scaling


def _study_metrics(study: Analysis) -> dict[str, Any]:
    """Return the constants of the fitted laws and the noise scale."""
    metrics: dict[str, Any] = {}
    for series, row in zip(sorted(study.scalings), records(study.laws), strict=True):
        critical = "b_crit" if row["identifiable"] else "b_crit_low"
        for name in ("c1", "c2", critical):
            if row[name] is not None:
                metrics[f"{name}/{_metric_name(series)}"] = row[name]
    noise = study.record.noise
    if noise is not None:
        metrics["noise_scale_low"] = noise.low
        if noise.resolved:
            metrics["noise_scale"] = noise.value
    return metrics


def _study_params(record: StudyRecord) -> dict[str, object]:
    params: dict[str, object] = dict(constants(record.config))
    for key, value in record.goal.to_dict().items():
        params[f"goal.{key}"] = value
    params["seed"] = record.seed
    for key, box in record.space.items():
        params[key] = str(box)
    return params


def _is_finished(study: Analysis) -> bool:
    """Return True if no trial and no repeat remains to be run."""
    has_repeats = all(len(repeats.results) >= repeats.asked for repeats in study.repeats)
    return has_repeats and not any(cell.pending for cell in study.cells)


def _metric_name(series: Series) -> str:
    """Return a series as part of a metric's name, with characters that MLflow allows: S_0.9."""
    return re.sub(r"[^\w\-. :/]", "_", str(series))
