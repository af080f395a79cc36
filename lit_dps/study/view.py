"""MLflow while a study runs, and made from a study that is stored. It is a view: without it the study goes on."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml

from lit_dps.analysis import Analysis, records
from lit_dps.config import StorageConfig
from lit_dps.errors import StorageError
from lit_dps.record import StudyRecord
from lit_dps.store.database import peers
from lit_dps.store.mlflow_tracker import Tracker
from lit_dps.trial import Series, Status, TrialResult

PACKAGES = ("lit_dps", "torch", "torchvision", "lightning", "optuna", "mlflow", "numpy", "scipy")
# Terms of the theory and what it predicts, on the run of each cell
THEORY = ("delta", "lipschitz", "beta", "epsilon", "rate", "predicted_c1", "predicted_c2", "predicted_k_star")


class View:
    """MLflow while a study runs: when it fails, also at the start, the study goes on and says so once.

    Args:
        connect: Makes the tracker.

    Attributes:
        tracker: The tracker; None where MLflow cannot be used.
    """

    def __init__(self, connect: Callable[[], Tracker]):
        self.tracker: Tracker | None = None
        self._connect, self._warned = connect, False

    def begin(self, record: StudyRecord, goes_on: bool) -> None:
        """Logs the stored results that are not logged, and whether the study goes on."""
        self._try(lambda: log_missing(self._connected(), record))
        if goes_on and self.tracker is not None:
            self._try(self.tracker.go_on)

    def log(self, result: TrialResult) -> None:
        """Logs a result, if MLflow has not failed so far."""
        if self.tracker is not None:
            self._try(lambda: self.tracker.log_trial(result))

    def end(self, study: Analysis, files: list[Path]) -> None:
        """Logs the outcome, and whatever is missing; MLflow may be back by now."""
        self._try(lambda: sync(self._connected(), study, files))

    def _connected(self) -> Tracker:
        self.tracker = self.tracker or self._connect()
        return self.tracker

    def _try(self, log: Callable[[], None]) -> None:
        try:
            log()
        except StorageError as error:
            self.tracker = None
            if not self._warned:
                self._warned = True
                said = f"{error}; the study goes on, and its next run, or analyze --sync, logs what is missing"
                print(f"\nwarning: {said}", file=sys.stderr, flush=True)


def connect(storage: StorageConfig, workload: str, study: str, tags: Mapping[str, str]) -> Tracker:
    """The tracker of a study, among all processes that share its storage. Raises StorageError if there is no MLflow."""
    lock = partial(peers(storage.optuna_url).lock, "view")
    return Tracker(storage.mlflow_uri, storage.folder, workload, study, tags, lock)


def log_missing(tracker: Tracker, record: StudyRecord) -> None:
    """Logs the stored results that are not logged: a process was killed before it could, or another attempt counts."""
    logged = tracker.logged()
    for cell, results in record.results.items():
        for result in results:
            if not math.isclose(logged.get((str(cell), result.trial.point), math.inf), result.seconds):
                tracker.log_trial(result)


def sync(tracker: Tracker, study: Analysis, files: list[Path]) -> None:
    """Logs all that MLflow is told of a study and does not know yet."""
    log_missing(tracker, study.record)
    log_outcome(tracker, study, files)


def delete_orphans(tracker: Tracker, record: StudyRecord, logged: Mapping[tuple[str, int], float]) -> None:
    """Deletes the runs of trials that are not stored: the database was put back, or the study made anew.

    Args:
        tracker: Where.
        record: The study, read after `logged`, since a trial is stored before it is logged.
        logged: What was logged.
    """
    stored = {(str(cell), result.trial.point) for cell, results in record.results.items() for result in results}
    for cell, point in logged.keys() - stored:
        tracker.delete_trial(cell, point)


def environment_tags(digest: str | None) -> dict[str, str]:
    """Versions, machine, data digest and git commit, as tags of a study's run."""
    tags = {"python": platform.python_version(), "machine": f"{platform.machine()} {platform.system()}"}
    for package in PACKAGES:
        try:
            tags[f"version.{package}"] = version(package)
        except PackageNotFoundError:
            tags[f"version.{package}"] = "not installed"
    tags["data_digest"] = digest or "unknown"
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return tags | {"mlflow.source.git.commit": commit or "none", "mlflow.source.name": "lit-dps study"}


def log_outcome(tracker: Tracker, study: Analysis, files: list[Path]) -> None:
    """K*, the fitted laws, the theory, table, figures and configuration, on the runs of the study and its cells."""
    record, scaling = study.record, {}
    for cell, terms in zip(study.cells, records(study.theory), strict=True):
        counts = {status: cell.counts[status] for status in Status}
        if cell.at_first_check:  # then K* is no more than an upper bound
            counts["K_star_at_first_check"] = 1
        measured = {f"theory/{name}": terms[name] for name in THEORY if terms[name] is not None}
        tracker.log_cell(cell.cell, cell.k_star, {**counts, **measured})
        if cell.k_star is not None:
            scaling.setdefault(f"K_star/{_key(cell.cell.series)}", {})[cell.cell.batch_size] = cell.k_star
    metrics: dict[str, float] = {}
    for series, row in zip(sorted(study.scalings), records(study.laws), strict=True):
        names = ["c1", "c2"] + (["b_crit"] if row["identifiable"] else ["b_crit_low"])
        metrics |= {f"{name}/{_key(series)}": row[name] for name in names if row[name] is not None}
    params = {"goal.error": record.goal.error, "goal.check_interval": record.goal.check_interval}
    params |= {"goal.max_steps": record.goal.max_steps, "seed": record.seed}
    params |= {key: f"[{r.low:g}, {r.high:g}] {r.scale}" for key, r in record.space.items()}
    tracker.log_study(
        scaling,
        metrics,
        params,
        files,
        {"config.yaml": yaml.safe_dump(record.config, sort_keys=False)},
        finished=not any(cell.pending for cell in study.cells),
    )


def _key(series: Series) -> str:
    """A series as part of a metric's name: S_0.9, or S_0.9_method_snip."""
    return str(series).replace("=", "_").replace(" ", "_")
