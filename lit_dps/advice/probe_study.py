"""Probes of K at a batch size: ordinary trials of an ordinary study, within a time limit."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain

from lightning.pytorch import LightningDataModule

from lit_dps.advice.options import Clock
from lit_dps.advice.step_memory import is_full
from lit_dps.advice.step_probe import is_above_split
from lit_dps.core.errors import StorageError, UserError, first_line, place_in_user_code
from lit_dps.core.progress_line import StageLine
from lit_dps.core.record import StudyRecord
from lit_dps.core.text import number_text
from lit_dps.core.trial import Status, TrialResult, Value
from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.storage.header import stored_workload
from lit_dps.storage.ownership import remember
from lit_dps.storage.read import read_study
from lit_dps.study.declare import declare_study, mlflow_of, open_run
from lit_dps.study.failures import AllFail, Failures
from lit_dps.study.progress_event import ProgressEvent
from lit_dps.study.setup import StudySetup
from lit_dps.study.workers import Results, WorkerDied, train_remaining
from lit_dps.training.workload import Workload


@dataclass(frozen=True)
class ChosenPoints:
    """What a caller decides of the trials at a batch size.

    Attributes:
        points: The metaparameters of each trial.
        cost_limit: The steps after which each trial ends without the goal.
        change: Returns the study to train from the declared one, with callbacks that measure; None
            for the declared one.
    """

    points: tuple[Mapping[str, Value], ...]
    cost_limit: float = math.inf
    change: Callable[[StudySetup], StudySetup] | None = None

    def of(self, setup: StudySetup) -> StudySetup:
        """Return the study that trains these trials."""
        setup = dataclasses.replace(setup, given_points=self.points, cost_limit=self.cost_limit)
        if self.change is not None:
            setup = self.change(setup)
        return setup


class CannotRun(UserError):
    """A batch size does not fit in memory, or exceeds the training split."""


class Probes:
    """The study that probes, as far as it was run.

    Args:
        setup: Its configuration, checked.
        data: Its data module, set up.

    Attributes:
        without_room: Batch sizes that `run` could not run.
        mlflow: Shows the study in MLflow.
    """

    def __init__(self, setup: StudySetup, data: LightningDataModule):
        self.setup = setup
        self.data = data
        self.without_room: set[int] = set()
        self.url = setup.storage.optuna_url
        self.name = setup.study.name
        workload = setup.study.workload or stored_workload(self.url, self.name)
        self.mlflow = mlflow_of(setup, data, workload or setup.workload_name())

    def run(
        self,
        batch_size: int,
        end: float,
        stop: StopRequest,
        clock: Clock,
        chosen: ChosenPoints,
    ) -> bool:
        """Run the trials of a batch size until they end, or until `end` on the monotonic clock.

        At that time a trial is stored after its next validation, and continues in the next run.

        Args:
            batch_size: The batch size, in examples.
            end: When to stop, on the monotonic clock.
            stop: The request to stop.
            clock: The clock of the budget.
            chosen: What the caller decides of the trials.

        Returns:
            Whether all trials have ended.

        Raises:
            Interrupted: if the user asked to stop.
            CannotRun: if the batch size does not fit in memory, or exceeds the training split.
            AllFail: if the first trials all fail, or all that end in time.
            UserError: with the cause of another failure.
        """
        trials = len(chosen.points)
        study = dataclasses.replace(self.setup.study, batch_sizes=[batch_size], trials=trials)
        setup = declare_study(dataclasses.replace(self.setup, study=study), self.data)
        if setup.uid is not None:
            remember(setup.uid)
        record = read_study(self.url, self.name)
        remaining = sum(len(points) for points in setup.remaining_points(record.results).values())
        if not remaining:
            return True
        workers = min(setup.workers, remaining)
        setup = open_run(setup, record, workers, self.mlflow)

        def has_ended() -> bool:
            clock.tick()
            return bool(stop) or time.monotonic() > end

        setup = chosen.of(setup)
        seconds = end - time.monotonic()
        line = StageLine(f"  B = {batch_size}", seconds if seconds < math.inf else None)
        show = partial(_show, line, setup.built_goal.metric)
        results = train_remaining(setup, workers, StopRequest(has_ended), show)
        earlier = chain.from_iterable(record.results.values())
        failures = Failures(setup.storage.failures(self.name), earlier)
        try:
            with line:
                all_ended = self._take(results, failures, stop)
            failures.refuse_if_all_failed()
        except AllFail as error:
            raise AllFail(f"the probe at B = {batch_size}: {error}", value=error.value) from None
        except Exception as error:
            cause = _cause(error, setup, batch_size)
            if isinstance(cause, CannotRun):
                self.without_room.add(batch_size)
            if cause is error:
                raise
            raise cause from error
        return all_ended

    def _take(self, results: Results, failures: Failures, stop: StopRequest) -> bool:
        """Log results as they come; return whether all came in time."""
        try:
            with closing(results):
                for result in results:
                    self.mlflow.log_result(result)
                    failed = result.status is Status.FAILED
                    if failed and has_no_room(result.failure, self.setup.workload):
                        raise CannotRun(result.failure)
                    failures.add(result)
        except Interrupted:
            stop.raise_if_requested()
            return False
        return True

    def record(self, truncates: bool = True) -> StudyRecord | None:
        """Return the stored study; None before the first probe."""
        try:
            return read_study(self.url, self.name, truncates=truncates)
        except StorageError:
            return None

    def all_runs(self) -> StudyRecord | None:
        """Return the stored study with each run as it ended; None before the first probe.

        `record` has no run that its step limit stopped while no run at its batch size has met the
        goal: such a run would continue with a larger limit.
        """
        return self.record(truncates=False)


def _show(line: StageLine, metric: str, event: ProgressEvent) -> None:
    """Show the progress of a trial on a line."""
    state = f"step {event.step}"
    if event.best is not None:
        state += f", {metric} {number_text(event.best, 3)}"
    line.update(state)


def has_no_room(failure: str, workload: Workload) -> bool:
    """Return True for the failure of a batch that exceeds memory or the training split."""
    return is_full(failure) or is_above_split(failure, workload.batch_size_key)


def _cause(error: Exception, setup: StudySetup, batch_size: int) -> Exception:
    """Return what ended a probe, as the user reads it."""
    if isinstance(error, (CannotRun, StorageError)):
        return error
    if isinstance(error, WorkerDied) and error.exit_code == -signal.SIGKILL:
        return CannotRun(f"worker {error.pid} was killed, probably because memory was full")
    line = first_line(error)
    if is_full(error) or has_no_room(str(error), setup.workload):
        return CannotRun(line)
    if isinstance(error, UserError) or setup.ranks == 1:
        return error
    # On several ranks, errors of the module are raised as they are.
    where = place_in_user_code(error)
    return UserError(
        f"advise: the probe at B = {batch_size} failed: {type(error).__name__}: {line}{where}",
        value=batch_size,
    )


def failed_trials(record: StudyRecord | None) -> dict[int, list[TrialResult]]:
    """Return the failed trials of each batch size that has some."""
    if record is None:
        return {}
    failed: dict[int, list[TrialResult]] = {}
    for cell, results in record.results.items():
        for result in results:
            if result.status is Status.FAILED:
                failed.setdefault(cell.batch_size, []).append(result)
    return failed
