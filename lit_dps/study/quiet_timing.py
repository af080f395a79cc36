"""Measures seconds of a training step in each cell of a study, when nothing else of ours runs."""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from lit_dps.analysis import step_seconds, summarize
from lit_dps.errors import StorageError, UserError
from lit_dps.parallel import ranks
from lit_dps.record import StudyRecord
from lit_dps.runtime import StopRequest
from lit_dps.step_timing import CellTiming, StepTiming
from lit_dps.store import keep_step_timing, read_study
from lit_dps.study.hardware import hardware
from lit_dps.study.setup import StudySetup
from lit_dps.study.timing import timed_run
from lit_dps.trial import Cell, Trial

# The first steps of a run allocate memory and choose kernels; they are not typical.
WARM_UP_STEPS = 3
# Long enough that one interruption by the system does not decide, short enough for many cells.
SECONDS_PER_CELL = 0.25
MIN_STEPS = 5
MAX_STEPS = 100
# Cells are interleaved in rounds, so that a change of the machine's load reaches all of them.
ROUNDS = 5
MIN_ROUNDS = 3
TARGET_SECONDS = 20.0  # no further round begins after this time, if there are MIN_ROUNDS
# Longer measurements are skipped, unless they take a small share of the time that the trials took.
MAX_SECONDS = 60.0
MAX_SHARE = 0.05
# An environment variable that switches the measurement off if it is 0, for tests and scripts.
SWITCH = "LIT_DPS_STEP_TIMING"


def update_step_timing(setup: StudySetup, record: StudyRecord, stop: StopRequest, asked: bool = False) -> StudyRecord:
    """Measure and store the step times of a study, unless they are stored already.

    A failure is printed and costs nothing but the times: the answer then uses those of the trials.

    Args:
        setup: The study.
        record: What is stored of it.
        stop: Ends the measurement between two runs.
        asked: Measure again, although times under the same conditions are stored.

    Returns:
        The record, with the times.

    Raises:
        Interrupted: if `stop` was requested.
    """
    trials = _trials_to_time(setup, record)
    # torchrun's other ranks have left by now, so nobody could train with this process
    if not trials or ranks.started_by_torchrun() or os.environ.get(SWITCH) == "0":
        return record
    machine = hardware()
    conditions = machine, setup.study.threads, setup.ranks
    known = record.step_timing
    stored = known is not None and known.conditions == conditions
    if stored and not asked and known.covers(trial.cell for trial in trials):
        return record
    print(f"study {record.name}: timing steps of {len(trials)} cells", file=sys.stderr, flush=True)
    try:
        cells = measure_steps(setup, record, trials, stop)
    except (UserError, RuntimeError, MemoryError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        print(f"study {record.name}: step times were not measured: {reason}", file=sys.stderr, flush=True)
        return record
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    timing = StepTiming(machine, date, setup.study.threads, setup.ranks, tuple(cells))
    try:
        keep_step_timing(setup.storage.optuna_url, record.name, timing)
    except StorageError as error:
        # The answer has the times all the same.
        print(f"study {record.name}: step times were not stored: {error}", file=sys.stderr, flush=True)
        return dataclasses.replace(record, step_timing=timing)
    return read_study(setup.storage.optuna_url, record.name)


def measure_steps(
    setup: StudySetup, record: StudyRecord, trials: Sequence[Trial], stop: StopRequest
) -> list[CellTiming]:
    """Return the step times of some trials, one for each cell, by Lightning's Trainer in this process.

    Each round trains every trial for a few steps, after a warm-up, and validates once. Pruning is done as
    in the study, so that the masks are those of the trials; its time is not counted.

    Raises:
        UserError: if a trial cannot be trained, or if the measurement takes too long.
        Interrupted: if `stop` was requested.
    """
    torch.set_num_threads(setup.study.threads)
    # Measurements of smoothness take longer than the training that they watch.
    setup = dataclasses.replace(setup, smoothness={**setup.smoothness, "interval": None})
    known = step_seconds(record)
    limit = max(MAX_SECONDS, MAX_SHARE * _seconds_of_trials(record))
    together = setup.ranks > 1
    steps: dict[Cell, list[float]] = {trial.cell: [] for trial in trials}
    checks: dict[Cell, list[float]] = {trial.cell: [] for trial in trials}
    timed_run(setup, trials[0], MIN_STEPS, together)
    began = time.monotonic()
    for number in range(ROUNDS):
        if number >= MIN_ROUNDS and time.monotonic() - began > TARGET_SECONDS:
            break
        for index, trial in enumerate(trials):
            stop.check()
            count = _steps_to_time(known.get(trial.cell))
            _, step, check = timed_run(setup, trial, count, together, WARM_UP_STEPS)
            steps[trial.cell].append(step)
            checks[trial.cell].append(check)
            if number == 0:
                expected = (time.monotonic() - began) / (index + 1) * len(trials) * MIN_ROUNDS
                _refuse_if_longer(expected, limit)
    return [CellTiming(cell, tuple(times), statistics.median(checks[cell])) for cell, times in steps.items()]


def _refuse_if_longer(expected: float, limit: float) -> None:
    if expected > limit:
        raise UserError(
            f"it would take about {expected:.0f} s, more than {limit:.0f} s; the answer uses times of the trials"
        )


def _trials_to_time(setup: StudySetup, record: StudyRecord) -> list[Trial]:
    """Return the best trial of each cell that has one; at further goals other cells have a K*, too."""
    trials = []
    for summary in summarize(record):
        if summary.best is not None:
            trials.append(summary.best.trial)
        elif record.goals:
            trials.append(Trial(summary.cell, 0, setup.middle, setup.study.seed))
    return trials


def _steps_to_time(known: object) -> int:
    """Return how many steps take about `SECONDS_PER_CELL`."""
    median = getattr(known, "median", 0.0)
    if median <= 0:
        return MIN_STEPS
    return max(MIN_STEPS, min(MAX_STEPS, round(SECONDS_PER_CELL / median)))


def _seconds_of_trials(record: StudyRecord) -> float:
    """Return the seconds that all finished trials took."""
    return sum(result.seconds for results in record.results.values() for result in results)
