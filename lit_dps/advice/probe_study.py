"""Probes of K at a batch size: ordinary trials of an ordinary study, until a time is over."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Mapping
from contextlib import closing
from itertools import chain
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule

from lit_dps.advice.memory import is_full
from lit_dps.advice.stages import Clock
from lit_dps.advice.step_probe import is_above_split
from lit_dps.analysis.analysis import Analysis
from lit_dps.analysis.observations import Observation, observation_of_cell
from lit_dps.analysis.rates import RateCurve
from lit_dps.analysis.step_seconds import step_seconds
from lit_dps.core.environment import KEY, SOURCES
from lit_dps.core.error_origin import place_in_user_code
from lit_dps.core.errors import StorageError, UserError
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Status, TrialResult
from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.storage.read import read_study
from lit_dps.study.failures import AllFail, Failures
from lit_dps.study.run_cells import begin_run, declare_study, mlflow_of, run_cells
from lit_dps.study.setup import StudySetup
from lit_dps.study.workers import Results, WorkerDied
from lit_dps.training.workload import Workload


class CannotRun(UserError):
    """A batch size that memory, or the training split, has no room for."""


def has_no_room(failure: str, workload: Workload) -> bool:
    """Return whether a failure says that memory, or the training split, has no room for a batch."""
    return is_full(failure) or is_above_split(failure, workload.batch_size_key)


def _cause(error: Exception, setup: StudySetup, batch_size: int) -> Exception:
    """Return what ended a probe, as the user reads it."""
    if isinstance(error, (CannotRun, StorageError)):
        return error
    if isinstance(error, WorkerDied) and error.exit_code == -signal.SIGKILL:
        return CannotRun(f"{error.pid} was killed, by the system's want of memory perhaps")
    line = next(iter(str(error).splitlines()), type(error).__name__)
    if is_full(error) or has_no_room(str(error), setup.workload):
        return CannotRun(line)
    if isinstance(error, UserError) or setup.ranks == 1:
        return error
    # of several ranks, what the module raises ends the study
    where = place_in_user_code(error)
    return UserError(
        f"advise: the probe at B = {batch_size} failed: {type(error).__name__}: {line}{where}"
    )


class Probes:
    """The study that probes, as far as it was run.

    Args:
        setup: Of it, checked.
        data: Its data module, set up.
        environment: What its trials are made of (`lit_dps.core.environment`); None stores nothing
            of it.

    Attributes:
        without_room: Batch sizes that `run` could not run.
    """

    def __init__(
        self,
        setup: StudySetup,
        data: LightningDataModule,
        environment: Mapping[str, Any] | None = None,
    ):
        if environment is not None:
            setup = dataclasses.replace(
                setup, environment=environment[KEY], sources=environment[SOURCES]
            )
        self.setup, self.data, self.environment = setup, data, environment
        self.without_room: set[int] = set()
        self.url, self.name = setup.storage.optuna_url, setup.study.name
        self.view = mlflow_of(setup, data)

    def run(self, batch_size: int, end: float, stop: StopRequest, clock: Clock) -> bool:
        """Runs the trials of a batch size until they are done, or until `end` on the monotonic
        clock.

        A trial leaves at its next check; it is stored, or goes on in the next run. Returns whether
        all are done.

        Raises:
            Interrupted: if the user asked to leave.
            CannotRun: if memory, or the training split, has no room for the batch size.
            AllFail: if its first trials all fail, or all that end in time.
            UserError: with the cause of another failure.
        """
        study = dataclasses.replace(self.setup.study, batch_sizes=[batch_size])
        setup = declare_study(dataclasses.replace(self.setup, study=study), self.data)
        record = read_study(self.url, self.name)
        left = sum(map(len, setup.remaining_points(record.results).values()))
        if not left:
            return True
        workers = min(setup.workers, left)
        setup = begin_run(setup, record, workers, self.view, self.environment)

        def over() -> bool:
            clock.tick()
            return bool(stop) or time.monotonic() > end

        until = StopRequest(over)
        results = run_cells(setup, workers, until)
        failures = Failures(
            setup.storage.failures(self.name), chain.from_iterable(record.results.values())
        )
        try:
            is_whole = self._take(results, failures, stop)
            failures.refuse_if_all_failed()
        except AllFail as error:
            raise AllFail(f"the probe at B = {batch_size}: {error}") from None
        except Exception as error:
            cause = _cause(error, setup, batch_size)
            if isinstance(cause, CannotRun):
                self.without_room.add(batch_size)
            if cause is error:
                raise
            raise cause from error
        return is_whole

    def _take(self, results: Results, failures: Failures, stop: StopRequest) -> bool:
        """Log results as they come. Return whether they came to their end before the time was
        over."""
        try:
            with closing(results):
                for result in results:
                    self.view.log(result)
                    if result.status is Status.FAILED and has_no_room(
                        result.failure, self.setup.workload
                    ):
                        raise CannotRun(result.failure)
                    failures.on_result_stored(result)
        except Interrupted:
            stop.check()
            return False
        return True

    def record(self) -> StudyRecord | None:
        """What is stored of it; None before the first probe."""

        try:
            return read_study(self.url, self.name)
        except StorageError:
            return None


def observations(record: StudyRecord | None) -> list[Observation]:
    """What each probe says of K, bounds among it (`observation_of_cell`)."""
    return (
        []
        if record is None
        else [o for cell in Analysis(record).cells if (o := observation_of_cell(record, cell))]
    )


def best_rates(record: StudyRecord | None) -> RateCurve | None:
    """The best learning rates of the probes, a study of one series; None where no rate is
    searched."""
    return None if record is None else next(iter(Analysis(record).rate_curves), None)


def check_seconds(record: StudyRecord | None, timed: float) -> float:
    """Seconds of a check in the probes: the median of their cells; as it was `timed`, in full,
    before there are any.

    Checks that stop early take less (`lit_dps.training.early_check`).
    """
    found = [] if record is None else [each.check for each in step_seconds(record).values()]
    found = [each for each in found if not math.isnan(each)]
    return float(np.median(found)) if found else timed


def failed_trials(record: StudyRecord | None) -> dict[int, list[TrialResult]]:
    """Return the failed trials of each batch size that has some."""
    found = {}
    for cell, results in ({} if record is None else record.results).items():
        failed = [result for result in results if result.status is Status.FAILED]
        if failed:
            found[cell.batch_size] = failed
    return found


def unfinished(record: StudyRecord | None) -> list[int]:
    """Batch sizes whose trials are not all done."""
    return (
        [] if record is None else [c.cell.batch_size for c in Analysis(record).cells if c.pending]
    )
