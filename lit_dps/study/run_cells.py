"""Trains the remaining trials of a study in workers: for `study`, and for the probes of `advise`.

The order of the calls is `declare_study`, `begin_run` and `run_cells`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningDataModule

from lit_dps.core.record import StudyRecord
from lit_dps.parallel.process import StopRequest
from lit_dps.storage.header import declare
from lit_dps.storage.run_records import begin_run as store_begin_of_run
from lit_dps.storage.run_records import store_environment
from lit_dps.study.setup import StudySetup
from lit_dps.study.workers import EventListener, Results, warm_up, work, work_in_processes
from lit_dps.tracking.sync import MlflowSync, environment_tags


def mlflow_of(setup: StudySetup, data: LightningDataModule) -> MlflowSync:
    """Return what logs a study in MLflow."""
    tags = environment_tags(getattr(data, "digest", None))
    workload = setup.workload_name()
    return MlflowSync.of_study(setup.storage, workload, setup.study.name, tags, is_optional=True)


def declare_study(setup: StudySetup, data: LightningDataModule) -> StudySetup:
    """Create a study in the storage, or extend the stored one to this configuration.

    Returns:
        The setup with the uid and the race factor of the stored study.
    """
    race_factor, uid = declare(
        setup.storage.optuna_url,
        setup.study,
        setup.workload_name(),
        setup.goal_of_trials,
        setup.identity(data),
        setup.config(),
        setup.boxes,
    )
    # A stored study may have raced its trials by a larger factor, which is kept.
    study = dataclasses.replace(setup.study, race_factor=race_factor)
    return dataclasses.replace(setup, study=study, uid=uid)


def begin_run(
    setup: StudySetup,
    record: StudyRecord,
    workers: int,
    mlflow: MlflowSync,
    environment: Mapping[str, Any] | None,
) -> StudySetup:
    """Begin a run of a declared study: store its environment and show it in MLflow.

    Args:
        setup: The study.
        record: The stored study.
        workers: The number of processes that will train it.
        mlflow: Logs the study.
        environment: Code, data, versions and machine of the run (`lit_dps.core.environment`); None
            stores nothing of it.

    Returns:
        The setup with the number of this run.
    """
    url, name = setup.storage.optuna_url, setup.study.name
    setup = dataclasses.replace(setup, run_number=store_begin_of_run(url, name))
    if workers > 1:
        warm_up()
    if environment is not None:
        store_environment(url, name, environment)
    mlflow.sync(record, is_running=True)
    return setup


def run_cells(
    setup: StudySetup, workers: int, until: StopRequest, on_event: EventListener | None = None
) -> Results:
    """Train the remaining trials of a study, and yield each result once it is stored.

    Args:
        setup: The study, as `begin_run` returns it.
        workers: The number of processes; 1 trains in this process.
        until: A request to stop. It may depend on the time.
        on_event: Called with the progress of the running trials.

    Raises:
        Interrupted, UserError, WorkerDied, WorkerError: see `work` and `work_in_processes`.
    """
    if workers == 1:
        return work(setup, until, on_event)
    return work_in_processes(setup, workers, until, on_event)
