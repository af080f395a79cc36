"""Runs a study from its configuration to its result, or takes it up where it stopped."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator

from lightning.pytorch import LightningDataModule

from lit_dps.analysis.publish import figures_folder, publish
from lit_dps.analysis.results import StudyRecord, read_study
from lit_dps.errors import StorageError
from lit_dps.parallel import ranks
from lit_dps.storage import check_place
from lit_dps.study import header
from lit_dps.study.group import follow_torchrun, group_of, quiet
from lit_dps.study.interrupt import INTERRUPTED, Interrupted, Leave, interruptible
from lit_dps.study.progress import Progress
from lit_dps.study.setup import StudySetup
from lit_dps.study.view import environment_tags, log_outcome
from lit_dps.study.workers import work, work_in_processes
from lit_dps.tracking import Tracker, page_address
from lit_dps.trial import TrialResult

LEAVING = "\n{}: leaving at the next check; once more to leave now\n"


def run_study(setup: StudySetup) -> int:
    """Runs what is left of a study, then prints and logs its result.

    Under torchrun rank 0 does; the others train its trials with it, and know of no storage.

    Returns:
        The exit code: 0, or 130 if it was interrupted. What is stored stays stored; the same call goes on.

    Raises:
        UserError: for configuration, data or storage that do not serve, before anything is created.
    """
    if ranks.follows_torchrun():
        return follow_torchrun(setup)
    data = check_study(setup)
    url, name, workload = setup.storage.optuna_url, setup.study.name, setup.workload_name()
    tags = environment_tags(getattr(data, "digest", None))
    tracker = Tracker(setup.storage.mlflow_uri, setup.storage.folder, workload, name, tags)
    slack = header.declare(url, setup.study, workload, setup.goal_of_trials, setup.identity(data), setup.config())
    setup = dataclasses.replace(setup, study=dataclasses.replace(setup.study, slack=slack))

    view = _View(tracker)
    record = read_study(url, name)
    view.catch_up(record)
    left, leave = _left(setup, record), Leave()
    try:
        with interruptible(leave, LEAVING):
            if left:
                _train(setup, record, view, min(setup.workers, left), leave)
            else:
                print(f"study {name}: nothing left to run", file=sys.stderr)
                if ranks.started_by_torchrun():
                    with group_of(setup):  # the others wait to be told
                        pass
            _finish(setup, view)
    except Interrupted as signal:
        left = _left(setup, read_study(url, name))
        print(f"\ninterrupted by {signal}: {left} trials are left, the others are stored; the same command goes on")
        return INTERRUPTED
    return 0


def check_study(setup: StudySetup) -> LightningDataModule:
    """Checks configuration, data and storage, and that a study that is there already may go on; creates nothing.

    Returns:
        The data module, set up for training.

    Raises:
        UserError: for what does not serve.
    """
    quiet()
    data = setup.check()
    for place in (setup.storage.optuna_url, setup.storage.mlflow_uri):
        check_place(place)
    header.check_unchanged(setup.storage.optuna_url, setup.study.name, setup.identity(data))
    return data


def _train(setup: StudySetup, record: StudyRecord, view: _View, workers: int, leave: Leave) -> None:
    progress = Progress(record.results, setup.cells, setup.study.trials, workers, setup.study.slack)
    shown = "1 trial" if workers == 1 else f"{workers} trials"
    print(f"study {record.name}: {shown} at a time in {setup.storage.optuna_url}", file=sys.stderr, flush=True)
    progress.show()
    results: Iterator[TrialResult] = work(setup, leave) if workers == 1 else work_in_processes(setup, workers, leave)
    try:
        for result in results:
            progress.update(result)
            view.log(result)
    finally:
        progress.close()
        results.close()


def _finish(setup: StudySetup, view: _View) -> None:
    storage, name = setup.storage, setup.study.name
    record = read_study(storage.optuna_url, name)
    text, scalings, files = publish(record, figures_folder(storage.folder, name))
    view.log_outcome(record, scalings, files)
    sys.stderr.flush()
    experiment = view.tracker.experiment_id
    pages = f"  then open {page_address(experiment)}\n    and for K* {page_address(experiment, view.tracker.run_id)}"
    default = storage.mlflow_uri == type(storage)().mlflow_uri
    command = "make ui" if default else f"lit-dps ui --storage.mlflow {storage.mlflow_uri}"
    print(f"\n{text}\nbrowse it in MLflow: {command}\n{pages}", flush=True)


def _left(setup: StudySetup, record: StudyRecord) -> int:
    """Trials of this configuration that have no result yet."""
    return sum(map(len, setup.left(record.results).values()))


class _View:
    """MLflow while a study runs. It is a view: when it fails, the study goes on and says so once."""

    def __init__(self, tracker: Tracker):
        self.tracker, self.failed = tracker, False

    def catch_up(self, record: StudyRecord) -> None:
        """Logs the stored results that are not logged: a run was killed before it could, or another attempt counts."""
        logged = self.tracker.logged()
        for cell, results in record.results.items():
            for result in results:
                if not math.isclose(logged.get((str(cell), result.trial.point), math.inf), result.seconds):
                    self.log(result)

    def log(self, result: TrialResult) -> None:
        self._try(self.tracker.log_trial, result)

    def log_outcome(self, record, scalings, files) -> None:
        self._try(self.catch_up, record)
        self._try(log_outcome, self.tracker, record, scalings, files)

    def _try(self, log, *args) -> None:
        if self.failed:
            return
        try:
            log(*args)
        except StorageError as error:
            self.failed = True
            print(f"\nwarning: {error}; the study goes on, and its next run logs what is missing", file=sys.stderr)
