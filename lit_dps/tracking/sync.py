"""MLflow while a study runs, and made from a study that is stored. It is a view: without it the
study goes on."""

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
from lit_dps.core.trial import FINAL_STATUSES, Series, TrialResult
from lit_dps.storage.locks import peers
from lit_dps.tracking.description import constants, markdown
from lit_dps.tracking.places import Logged, Place, place
from lit_dps.tracking.tracker import Tracker
from lit_dps.tracking.views import views_of

PACKAGES = ("lit_dps", "torch", "torchvision", "lightning", "optuna", "mlflow", "numpy", "scipy")
SYNC_SECONDS = 120.0  # limit for logging missing trials in a study; `analyze --sync` has no limit
# Terms of the theory and what it predicts, on the run of each cell
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


class MlflowSync:
    """MLflow while a study runs: when it fails, also at the start, the study goes on and says so
    once.

    Args:
        connect: Makes the tracker.
    """

    def __init__(self, connect: Callable[[], Tracker]):
        self.tracker: Tracker | None = None  # None where MLflow cannot be used
        self._connect, self._warned = connect, False

    def sync(self, *args: Any, **kw: Any) -> None:
        """As `sync` below but for the tracker; tried also if MLflow has failed before: it may be
        back by now."""
        self._try(lambda: sync(self._connected(), *args, seconds=SYNC_SECONDS, **kw))

    def log(self, result: TrialResult) -> None:
        """Logs a result, if MLflow has not failed so far."""
        if self.tracker is not None:
            self._try(lambda: self.tracker.log_trial(result))

    def further(
        self,
        metrics: Mapping[str, float],
        curves: Mapping[str, Mapping[int, float]] | None = None,
        files: Sequence[Path] = (),
        note: str | None = None,
        ended: bool = False,
    ) -> None:
        """Logs what is no trial, on the run of the study, as `Tracker.log_study` takes it, and its
        description."""

        def log() -> None:
            tracker = self._connected()
            if note is not None:
                tracker.describe(note, {})
            tracker.log_study(curves or {}, metrics, {}, files, {}, finished=ended)

        self._try(log)

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
                said = (
                    f"{error}; the study goes on, and its next run, or analyze --sync, logs "
                    "what "
                    "is missing"
                )
                print(f"\nwarning: {said}", file=sys.stderr, flush=True)


def connect(storage: StorageConfig, workload: str, study: str, tags: Mapping[str, str]) -> Tracker:
    """The tracker of a study, among all processes that share its storage. Raises StorageError if
    there is no MLflow."""
    lock = partial(peers(storage.optuna_url).lock, "view")
    return Tracker(storage.mlflow_uri, storage.folder, workload, study, tags, lock)


def sync(
    tracker: Tracker,
    record: StudyRecord,
    study: Analysis | None = None,
    files: Sequence[Path] = (),
    *,
    goes_on: bool = False,
    logged: Mapping[Place, Logged] | None = None,
    seconds: float = math.inf,
) -> None:
    """Logs all that MLflow does not know yet of a study; what it knows is not logged again.

    Trials may be missing because a process was killed before it could log them, because MLflow was
    away, or because another attempt counts by now.

    Args:
        tracker: Where.
        record: The study.
        study, files: What was computed of it, and artifacts, to log the outcome too.
        goes_on: Whether trials of it are run now.
        logged: What was logged before `record` was read. If given, the runs of trials that are not
            stored are deleted: the database was put back from a copy, or the study made anew.
        seconds: Time limit for the trials.

    Raises:
        StorageError: if MLflow cannot be used, or trials are missing after the time limit.
    """
    deadline = time.monotonic() + seconds
    known, stored = tracker.logged() if logged is None else logged, set()
    missing = []
    for result in itertools.chain(*record.results.values(), *record.repeats.values()):
        where = place(result.trial)
        stored.add(where)
        if where not in known or not known[where].shows(result):
            missing.append(result)
    line = ProgressLine("MLflow: trials logged", len(missing))
    for done in tracker.log_trials(missing):
        line.update(done)
        if time.monotonic() > deadline and done < len(missing):
            raise StorageError(
                f"MLflow is slow: it has {done} of {len(missing)} trials after {seconds:.0f} "
                "seconds"
            )
    line.end()
    for where in () if logged is None else logged.keys() - stored:
        tracker.delete_trial(where)
    if goes_on:
        tracker.go_on()
    if study is not None:
        _log_outcome(tracker, study, files)


def environment_tags(digest: str | None) -> dict[str, str]:
    """Versions, machine, data digest and git commit, as tags of a study's run."""
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
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        commit = ""
    return tags | {
        "mlflow.source.git.commit": commit or "none",
        "mlflow.source.name": "lit-dps study",
    }


def _log_outcome(tracker: Tracker, study: Analysis, files: Sequence[Path]) -> None:
    """K*, the fitted laws, the theory, table, figures and configuration, on the runs of the study
    and its cells."""
    record, scaling, answers = study.record, {}, iter(records(study.answer))
    for cell, terms in zip(study.cells, records(study.theory), strict=True):
        counts = {status: cell.counts[status] for status in FINAL_STATUSES}
        if cell.at_first_check:  # then K* is no more than an upper bound
            counts["K_star_at_first_check"] = 1
        for each in (each for each in study.repeats if each.cell == cell.cell and each.rank == 1):
            counts |= {"repeats": len(each.results), "missed": each.missed}
            if each.median is not None and math.isfinite(each.median):
                counts["K_median"] = each.median
                scaling.setdefault(f"K_median/{_name(cell.cell.series)}", {})[
                    cell.cell.batch_size
                ] = each.median
        if (talks := communications(record, cell)) is not None:
            counts["communications"] = talks
        if cell.k_star is not None:
            row = next(answers)
            known = {"seconds_to_goal": row["seconds"], "examples_to_goal": row["examples"]}
            known["step_seconds"] = row["step_seconds"]
            counts |= {name: value for name, value in known.items() if value is not None}
        measured = {f"theory/{name}": terms[name] for name in THEORY if terms[name] is not None}
        tracker.log_cell(cell.cell, cell.k_star, {**counts, **measured})
        if cell.k_star is not None:
            scaling.setdefault(f"K_star/{_name(cell.cell.series)}", {})[cell.cell.batch_size] = (
                cell.k_star
            )
    metrics: dict[str, float] = {}
    for series, row in zip(sorted(study.scalings), records(study.laws), strict=True):
        names = ["c1", "c2"] + (["b_crit"] if row["identifiable"] else ["b_crit_low"])
        metrics |= {f"{name}/{_name(series)}": row[name] for name in names if row[name] is not None}
    if record.noise is not None:
        named = {"noise_scale": record.noise.value, "noise_scale_low": record.noise.low}
        metrics |= named if record.noise.resolved else {"noise_scale_low": record.noise.low}
    params = {f"goal.{key}": value for key, value in record.goal.to_dict().items()} | {
        "seed": record.seed
    }
    params = (
        constants(record.config) | params | {key: str(box) for key, box in record.space.items()}
    )
    keys = ["batch_size", "sparsity", *record.axes]
    curves = sorted(name for name in scaling if name.startswith("K_star/"))
    tracker.describe(
        markdown(study, tracker.artifact_page("report.html") if files else None),
        views_of(record.name, keys, list(record.space), record.goal.metric, curves),
    )
    tracker.log_study(
        scaling,
        metrics,
        params,
        files,
        {"config.yaml": yaml.safe_dump(record.config, sort_keys=False)},
        finished=not any(cell.pending for cell in study.cells)
        and all(len(each.results) >= each.asked for each in study.repeats),
    )


def _name(series: Series) -> str:
    """A series within the name of a metric, of the characters that MLflow takes: S_0.9."""
    return re.sub(r"[^\w\-. :/]", "_", str(series))
