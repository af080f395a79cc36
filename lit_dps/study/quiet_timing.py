"""Measures seconds of a training step in each cell, while no trial of the study runs."""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from lit_dps.analysis.step_seconds import step_seconds
from lit_dps.analysis.summary import summarize
from lit_dps.core.errors import StorageError, UserError, first_line
from lit_dps.core.record import StudyRecord
from lit_dps.core.step_timing import CellTiming, StepTiming
from lit_dps.core.trial import Cell, Trial
from lit_dps.parallel import ranks
from lit_dps.parallel.process import Interrupted, StopRequest
from lit_dps.storage.read import read_study
from lit_dps.storage.run_records import store_step_timing
from lit_dps.study.display import print_line
from lit_dps.study.hardware import hardware
from lit_dps.study.probe_run import steps_that_take, timed_run
from lit_dps.study.setup import StudySetup

# The first steps of a run are slower: they allocate memory and choose kernels.
WARM_UP_STEPS = 3
# Long enough to average over interruptions by the system, short enough for many cells.
SECONDS_PER_CELL = 0.25
MIN_STEPS = 5
MAX_STEPS = 100
# Cells are timed in rounds, so that a change of the machine's load affects all cells.
ROUNDS = 5
MIN_ROUNDS = 3
TARGET_SECONDS = 20.0  # after this time and MIN_ROUNDS, no further round begins
# A longer measurement is skipped, unless it takes less than MAX_SHARE of the trials' time, or the
# user asked for it.
MAX_SECONDS = 60.0
MAX_SHARE = 0.05
# Environment variable for tests and scripts: the value 0 turns the measurement off.
SWITCH = "LIT_DPS_STEP_TIMING"


def update_step_timing(
    setup: StudySetup, record: StudyRecord, stop: StopRequest, asked: bool = False
) -> StudyRecord:
    """Measure and store the step times of a study, unless they are stored already.

    Stored times of another machine, of other code or of a trial of another size are removed before
    the measurement. Those of earlier versions under the same conditions, whose code is unknown,
    remain if it fails. The reason of a failure is printed. Without stored times, the answer uses
    the times of the trials.

    Args:
        setup: The study.
        record: The stored results of the study.
        stop: A request to stop ends the measurement between two runs.
        asked: Whether to measure again if times under the same conditions are stored.

    Returns:
        The record with the times.

    Raises:
        Interrupted: if `stop` was requested. Stored times under the same conditions remain.
    """
    trials = _trials_to_time(setup, record)
    # The other ranks of torchrun have ended by now, so this process cannot train with them.
    if not trials or ranks.started_by_torchrun() or os.environ.get(SWITCH) == "0":
        return record
    machine = hardware()
    stored = record.step_timing
    if stored is not None:
        has_conditions = stored.conditions == (machine, setup.study.threads, setup.ranks)
        is_of_code = has_conditions and stored.environment == setup.environment.code_key
        is_current = is_of_code and stored.is_of(trials, record.space)
        if is_current and not asked:
            return record
        is_unknown = has_conditions and stored.environment is None
        if not is_current and not is_unknown:
            record = _without_times(setup, record)
    print_line(setup, f"timing the training steps of {len(trials)} cells")
    try:
        limit = math.inf if asked else max(MAX_SECONDS, MAX_SHARE * _seconds_of_trials(record))
        cells = measure_steps(setup, record, trials, limit, stop)
    except (UserError, RuntimeError, MemoryError) as error:
        used = "times of the trials"
        if record.step_timing is not None and record.step_timing.is_of(trials, record.space):
            used = "the stored times"
        reason = first_line(error)
        print_line(setup, f"step times were not measured, the answer uses {used}: {reason}")
        return record
    except Interrupted:
        print_line(setup, "step times were not measured; --time-steps measures them")
        raise
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    timing = StepTiming(
        machine, date, setup.study.threads, setup.ranks, tuple(cells), setup.environment.code_key
    )
    try:
        store_step_timing(setup.storage.optuna_url, record.name, timing)
    except StorageError as error:
        # The answer can use the times although they are not stored.
        print_line(setup, f"step times were not stored: {error}")
        return dataclasses.replace(record, step_timing=timing)
    return read_study(setup.storage.optuna_url, record.name)


def _without_times(setup: StudySetup, record: StudyRecord) -> StudyRecord:
    """Remove the stored times of a study, and return its record without them."""
    try:
        store_step_timing(setup.storage.optuna_url, record.name, None)
    except StorageError as error:
        print_line(setup, f"step times of earlier conditions were not removed: {error}")
    return dataclasses.replace(record, step_timing=None)


def measure_steps(
    setup: StudySetup, record: StudyRecord, trials: Sequence[Trial], limit: float, stop: StopRequest
) -> list[CellTiming]:
    """Return the step times of some trials, one for each cell, trained in this process.

    Each round trains every trial for a few steps, after a warm-up, and validates once. Networks are
    pruned as in the study; the time of pruning is not counted.

    Args:
        setup: The study.
        record: The stored results of the study.
        trials: The trials.
        limit: The longest time that the measurement may take, in seconds.
        stop: A request to stop ends the measurement between two runs.

    Raises:
        UserError: if a trial cannot be trained, or if the measurement takes too long.
        Interrupted: if `stop` was requested.
    """
    torch.set_num_threads(setup.study.threads)
    # Readings would take longer than the steps themselves.
    setup = setup.without_readings()
    times_of_trials = step_seconds(record)
    has_ranks = setup.ranks > 1
    steps: dict[Cell, list[float]] = {trial.cell: [] for trial in trials}
    checks: dict[Cell, list[float]] = {trial.cell: [] for trial in trials}
    timed_run(setup, trials[0], MIN_STEPS, has_ranks)
    began = time.monotonic()
    for number in range(ROUNDS):
        if number >= MIN_ROUNDS and time.monotonic() - began > TARGET_SECONDS:
            break
        for index, trial in enumerate(trials):
            stop.raise_if_requested()
            count = MIN_STEPS
            if trial.cell in times_of_trials:
                count = steps_that_take(
                    SECONDS_PER_CELL, times_of_trials[trial.cell].median, MIN_STEPS, MAX_STEPS
                )
            times = timed_run(setup, trial, count, has_ranks, WARM_UP_STEPS)
            steps[trial.cell].append(times.step)
            checks[trial.cell].append(times.check)
            if number == 0:
                expected = (time.monotonic() - began) / (index + 1) * len(trials) * MIN_ROUNDS
                if expected > limit:
                    raise UserError(
                        f"timing all steps would take about {expected:.0f} s; the limit without "
                        f"--time-steps is {limit:.0f} s",
                        value=limit,
                    )
    timings = []
    for trial in trials:
        seconds = tuple(steps[trial.cell])
        check = statistics.median(checks[trial.cell])
        timings.append(CellTiming(trial.cell, seconds, check, dict(trial.params)))
    return timings


def _trials_to_time(setup: StudySetup, record: StudyRecord) -> list[Trial]:
    """Return the best trial of each cell with a K*.

    If the study has further goals, a cell without a K* may have one at such a goal. It gets a trial
    at the middle of the search space.
    """
    trials = []
    trained = set(record.trained_cells)
    for summary in summarize(record):
        # The first steps of a trial, which are timed, are not like the others if the batch grows.
        if summary.cell not in trained or not record.has_constant_batch(summary.cell):
            continue
        if summary.best is not None:
            trials.append(summary.best.trial)
        elif record.goals:
            trials.append(Trial(summary.cell, 0, setup.middle, setup.study.seed))
    return trials


def _seconds_of_trials(record: StudyRecord) -> float:
    """Return the total seconds of all finished trials."""
    seconds = 0.0
    for cell in record.trained_cells:
        for result in record.results[cell]:
            seconds += result.seconds
    return seconds
