"""Trains the remaining trials of a study in workers: for `study`, and for the probes of `advise`.

The order of the calls is `declare_study`, `begin_run` and `run_cells`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from lightning.pytorch import LightningDataModule

from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import LIGHTNING, SINGLE, STACKED, Trial
from lit_dps.engines.trial_engine import LoopChoice
from lit_dps.parallel.process import StopRequest
from lit_dps.storage.header import declare
from lit_dps.storage.run_records import begin_run as store_begin_of_run
from lit_dps.storage.run_records import store_environment
from lit_dps.study.setup import StudySetup
from lit_dps.study.workers import EventListener, Results, warm_up, work, work_in_processes
from lit_dps.tracking.sync import MlflowSync, environment_tags

# The loops that train trials, in words.
LOOPS = {
    SINGLE: "the loop of lit_dps, one network at a time",
    STACKED: "the loop of lit_dps, several networks at once",
    LIGHTNING: "Lightning's loop, slower with equal results",
}


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
        setup.spaces,
    )
    # A stored study may have raced its trials by a larger factor, which is kept.
    return dataclasses.replace(setup.with_study(race_factor=race_factor), uid=uid)


def begin_run(
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
    setup = dataclasses.replace(setup, run_number=store_begin_of_run(url, name))
    if workers > 1:
        warm_up()
    if setup.environment.content:
        store_environment(url, name, setup.environment.content)
    mlflow.sync(record, is_running=True)
    return setup


def run_cells(
    setup: StudySetup, workers: int, stop: StopRequest, on_event: EventListener | None = None
) -> Results:
    """Train the remaining trials of a study, and yield each result once it is stored.

    Args:
        setup: The study, as `begin_run` returns it.
        workers: The number of processes; 1 trains in this process.
        stop: A request to stop. It may depend on the time.
        on_event: Called with the progress of the running trials.

    Raises:
        Interrupted, UserError, WorkerDied, WorkerError: see `work` and `work_in_processes`.
    """
    if workers == 1:
        return work(setup, stop, on_event)
    return work_in_processes(setup, workers, stop, on_event)


def describe_loops(choices: Sequence[LoopChoice]) -> str:
    """Return which loop trains the trials, with the number of cells if loops differ.

    Args:
        choices: The loop of each cell (`loop_choices`). Results store the loop of each trial.
    """
    counts = Counter(choices)
    if len(counts) == 1:
        return f"training with {_describe(next(iter(counts)))}"
    parts = []
    for choice, cells in counts.most_common():
        parts.append(f"{cells} cells with {_describe(choice)}")
    return f"training {'; '.join(parts)}"


def loop_choices(setup: StudySetup) -> list[LoopChoice]:
    """Return the loop of each cell.

    A trial in the middle of the search space decides for the cells that differ in their batch size
    or their pruning alone.
    """
    engine = setup.engine()
    by_axes: dict[tuple, LoopChoice] = {}
    choices = []
    for cell in setup.cells:
        axes = cell.stack_axes
        if axes not in by_axes:
            by_axes[axes] = engine.choose(Trial(cell, 0, setup.middle, setup.study.seed))
        choices.append(by_axes[axes])
    return choices


def trials_at_a_time(
    setup: StudySetup, choices: Sequence[LoopChoice], workers: int, record: StudyRecord
) -> int:
    """Return how many trials train at the same time, at most.

    Args:
        setup: The study.
        choices: The loop of each cell.
        workers: The number of processes.
        record: The stored study.
    """
    points = setup.remaining_points(record.results)
    stackable: Counter[tuple] = Counter()  # the remaining trials that one stack may train
    for cell, choice in zip(setup.cells, choices, strict=True):
        if choice.engine == STACKED:
            stackable[cell.batch_size, cell.stack_axes] += len(points[cell])
    most = max(stackable.values(), default=0)
    if stackable:
        # Repeats of all cells follow the search. Those of one batch size are not counted here.
        most = most or setup.remaining_repeats(record)
    return max(workers, min(most, workers * setup.stack_size))


def _describe(choice: LoopChoice) -> str:
    """Return the name and the description of a loop, and why it is not a faster one."""
    text = f"engine {choice.engine} ({LOOPS[choice.engine]})"
    if choice.reason:
        text += f", because {choice.reason}"
    return text
