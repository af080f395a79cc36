"""Declares a study in its storage, and begins its runs: for `study`, and for `advise`'s probes."""

from __future__ import annotations

import dataclasses

from lightning.pytorch import LightningDataModule

from lit_dps.core.record import StudyRecord
from lit_dps.storage.header import declare
from lit_dps.storage.run_records import begin_run, store_environment
from lit_dps.study.setup import StudySetup
from lit_dps.study.workers import warm_up
from lit_dps.tracking.sync import MlflowSync, environment_tags


def mlflow_of(setup: StudySetup, data: LightningDataModule, workload: str) -> MlflowSync:
    """Return what logs a study in MLflow, in the experiment `workload`."""
    tags = environment_tags(getattr(data, "digest", None))
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
        setup.built_goal,
        setup.identity(data),
        setup.config(),
        setup.spaces,
    )
    # A stored study may have raced its trials by a larger factor, which is kept.
    return dataclasses.replace(setup.with_study(race_factor=race_factor), uid=uid)


def open_run(
    setup: StudySetup, record: StudyRecord, workers: int, mlflow: MlflowSync
) -> StudySetup:
    """Begin a run of a declared study: store its environment and show it in MLflow.

    Args:
        setup: The study.
        record: The stored study.
        workers: The number of processes that will train it.
        mlflow: Logs the study.

    Returns:
        The setup with the number of this run.
    """
    url, name = setup.storage.optuna_url, setup.study.name
    setup = dataclasses.replace(setup, run_number=begin_run(url, name))
    if workers > 1:
        warm_up()
    if setup.environment.content:
        store_environment(url, name, setup.environment.content)
    mlflow.sync(record, is_running=True)
    return setup
