"""Probes of K at a batch size: ordinary trials of an ordinary study, until a time is over."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule

from lit_dps.advising.clock import Clock
from lit_dps.analysis import Analysis, Observation, observed, step_seconds
from lit_dps.analysis.best_rates import RateCurve
from lit_dps.errors import StorageError
from lit_dps.provenance import KEY
from lit_dps.record import StudyRecord
from lit_dps.runtime import Interrupted, StopRequest
from lit_dps.store import begin_run, declare, keep_environment, read_study
from lit_dps.study.failures import Failures
from lit_dps.study.setup import StudySetup
from lit_dps.study.view import View, connect, environment_tags
from lit_dps.study.workers import warm_up, work, work_in_processes


class Probes:
    """The study that probes, as far as it was run.

    Args:
        setup: Of it, checked.
        data: Its data module, set up.
        environment: What its trials are made of (`lit_dps.provenance`); None stores nothing of it.
    """

    def __init__(self, setup: StudySetup, data: LightningDataModule, environment: Mapping[str, Any] | None = None):
        self.setup, self.data, self.environment = setup, data, environment
        storage, digest = setup.storage, getattr(data, "digest", None)
        self.url, self.name = storage.optuna_url, setup.study.name
        self.view = View(partial(connect, storage, setup.workload_name(), self.name, environment_tags(digest)))
        self.failures = Failures(storage.failures(self.name))

    def run(self, batch_size: int, end: float, stop: StopRequest, clock: Clock) -> bool:
        """Runs the trials of a batch size until they are done, or until `end` on the monotonic clock.

        A trial leaves at its next check; it is stored, or goes on in the next run. Returns whether all are done.

        Raises:
            Interrupted: if the user asked to leave.
            AllFail: if the first trials all fail.
        """
        study = dataclasses.replace(self.setup.study, batch_sizes=[batch_size])
        setup = dataclasses.replace(self.setup, study=study)
        goal, identity = setup.goal_of_trials, setup.identity(self.data)
        slack, uid = declare(self.url, study, setup.workload_name(), goal, identity, setup.config())
        study = dataclasses.replace(study, slack=slack)
        setup = dataclasses.replace(setup, study=study, uid=uid)
        record = read_study(self.url, self.name)
        left = sum(map(len, setup.left(record.results).values()))
        if not left:
            return True
        setup = dataclasses.replace(setup, run_number=begin_run(self.url, self.name))
        if self.environment is not None:
            keep_environment(self.url, self.name, self.environment)
            setup = dataclasses.replace(setup, environment=self.environment[KEY])
        self.view.sync(record, goes_on=True)

        def over() -> bool:
            clock.tick()
            return bool(stop) or time.monotonic() > end

        until = StopRequest(over)
        workers = min(setup.workers, left)
        if workers > 1:
            warm_up()
        results = work(setup, until) if workers == 1 else work_in_processes(setup, workers, until)
        try:
            with closing(results):
                for result in results:
                    self.failures.on_result_stored(result)
                    self.view.log(result)
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
    """What each probe says of K, bounds among it (`lit_dps.analysis.observed`)."""
    return [] if record is None else [o for cell in Analysis(record).cells if (o := observed(record, cell))]


def best_rates(record: StudyRecord | None) -> RateCurve | None:
    """The best learning rates of the probes, a study of one series; None where no rate is searched."""
    return None if record is None else next(iter(Analysis(record).rate_curves), None)


def check_seconds(record: StudyRecord | None, timed: float) -> float:
    """Seconds of a check in the probes: the median of their cells; as it was `timed`, in full, before there are any.

    Checks that stop early take less (`lit_dps.training.early_check`).
    """
    found = [] if record is None else [each.check for each in step_seconds(record).values()]
    found = [each for each in found if not math.isnan(each)]
    return float(np.median(found)) if found else timed


def unfinished(record: StudyRecord | None) -> list[int]:
    """Batch sizes whose trials are not all done."""
    return [] if record is None else [c.cell.batch_size for c in Analysis(record).cells if c.pending]
