"""Seconds of a training step of each cell of a study."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lit_dps.core.racing import best_trial
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import Space
from lit_dps.core.step_timing import sizes_of
from lit_dps.core.trial import SPARSE_KERNELS, STACKED, Cell, Status, TrialResult
from lit_dps.core.unit import SECONDS, value_at

# Sources of the seconds of a step: timed after the trials of the study, maybe beside other programs
# (`StepSeconds.is_busy`); by trials, beside other workers and other programs; by trials of an
# earlier version, which did not separate steps from checks.
QUIET = "after the study"
TRIALS = "trials"
WITH_CHECKS = "trials with checks"

# Source of times to the goal without seconds of a step: the clock of the runs themselves.
OWN_CLOCK = "runs to the goal"

# Trials of these ends ran all steps of their curves. The curve of a trial that a race ended may be
# truncated.
_FULL_LENGTH = (Status.COMPLETE, Status.INCOMPLETE)
# Minimum share of a trial's time that counts as steps, if its start took longer on other trials.
_MIN_STEP_SHARE = 0.05
# Ratio of the quartiles of a cell's step times above which the machine counts as busy.
BUSY_RATIO = 1.25


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a training step in a cell, without checks of the goal if `source` allows that.

    Attributes:
        median, low, high: Median and quartiles, over the rounds of a quiet timing or over trials.
        training: Seconds of a step without checks, median; nan if the trials do not separate the
            two.
        check: Seconds of a check of the goal, median; nan if the trials do not separate the two.
        source: Where the times are from: `QUIET`, `TRIALS`, or `WITH_CHECKS`.
    """

    median: float
    low: float
    high: float
    training: float = math.nan
    check: float = math.nan
    source: str = WITH_CHECKS

    @property
    def is_busy(self) -> bool:
        """Whether the times differ so much that other programs were running."""
        return self.high > BUSY_RATIO * self.low > 0


def seconds_to_goal(result: TrialResult) -> float | None:
    """Return the seconds of training of a run up to its goal, by its own clock; None if unknown.

    They are unknown of a run that was resumed or that continued past its goal, unless its checks
    have recorded them.
    """
    if result.steps is None:
        return None
    seconds = value_at(result.curve, SECONDS.column, result.steps)
    if seconds is None and result.timed.get("steps") == result.steps:
        seconds = result.timed["training"]
    return seconds


def step_seconds(
    record: StudyRecord, original: StudyRecord | None = None
) -> dict[Cell, StepSeconds]:
    """Return the seconds of a step of each cell for which they are known.

    They are unknown if the batch size changes along a trial, since steps then differ.

    If the steps of all cells with a complete trial were timed alone at the end of the study, with
    the sizes of their best trials (`StepTiming.is_of`), these times are used. Else they are from
    the trials that ran to the goal or to max steps, with the sizes of the best one, and include the
    load by other workers and other programs. Trials time their steps and checks separately
    (`TrialResult.timed`); for trials of earlier versions see `_by_wall_time`.

    Args:
        record: The study, which decides the best trials.
        original: The study as it was run, if `record` is at another goal or of another statistic.
            Its trials are not truncated, so their clocks are of all their steps.
    """
    trials = _of_best_sizes(record, original or record)
    timing = record.step_timing
    trained = [cell for cell in _complete_cells(record) if cell not in record.shared]
    trained = list(filter(record.has_constant_batch, trained))
    best = [best_trial(record.results[cell], record.statistic) for cell in trained]
    best_trials = [result.trial for result in best if result is not None]
    is_covered = timing is not None and timing.covers(trained)
    if timing is not None and is_covered and timing.is_of(best_trials, record.space):
        seconds = {}
        for cell, rounds in timing.by_cell.items():
            seconds[cell] = _separate_times(rounds.steps, rounds.check, QUIET)
        for cell, source in record.shared.items():
            if source in seconds:
                seconds[cell] = seconds[source]
        return seconds
    seconds = {}
    untimed = {}
    for cell, results in trials.items():
        timed = list(filter(_is_timed, results))
        if not record.has_constant_batch(cell):
            continue
        if timed:
            seconds[cell] = _of_timed_trials(timed)
        else:
            untimed[cell] = results
    return seconds | _by_wall_time(untimed)


def _of_best_sizes(record: StudyRecord, original: StudyRecord) -> dict[Cell, list[TrialResult]]:
    """Return the trials of each cell whose steps take as long as those of its best trial.

    Args:
        record: The study, which decides the best trials.
        original: The study whose trials are returned.
    """
    trials = {}
    for cell, results in record.results.items():
        best = best_trial(results, record.statistic)
        trials[cell] = list(original.results[cell])
        if best is not None:
            trials[cell] = _of_sizes(best, trials[cell], record.space)
    return trials


def _of_sizes(best: TrialResult, results: Iterable[TrialResult], space: Space) -> list[TrialResult]:
    """Return the trials with the sizes of the best one (`sizes_of`)."""
    sizes = sizes_of(best.trial.params, space)
    return [result for result in results if sizes_of(result.trial.params, space) == sizes]


def _is_timed(result: TrialResult) -> bool:
    """Return True if a trial of full length timed its steps and checks."""
    return result.status in _FULL_LENGTH and bool(result.timed.get("steps"))


def _complete_cells(record: StudyRecord) -> list[Cell]:
    """Return the cells with a complete trial."""
    cells = []
    for cell, results in record.results.items():
        if any(result.steps is not None for result in results):
            cells.append(cell)
    return cells


def _of_timed_trials(results: Sequence[TrialResult]) -> StepSeconds:
    """Return the median and quartiles over trials that separate steps from checks."""
    steps = []
    checks = []
    for result in results:
        steps.append(result.timed["training"] / result.timed["steps"])
        checks.append(result.timed["checking"] / result.timed["checks"])
    return _separate_times(steps, float(np.median(checks)), TRIALS)


def _separate_times(steps: Sequence[float], check: float, source: str) -> StepSeconds:
    """Return the seconds of steps (n,) that were timed without checks."""
    times = _quartiles(steps)
    return StepSeconds(*times, times[0], check, source)


def _quartiles(seconds: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Return the median and both quartiles of some seconds (n,)."""
    times: Any = tuple(np.percentile(seconds, (50, 25, 75)).tolist())
    return times


def _by_wall_time(trials: Mapping[Cell, Sequence[TrialResult]]) -> dict[Cell, StepSeconds]:
    """Return the seconds of a step of some cells from the wall time of their trials.

    The wall time is start + steps x seconds of a step, and a step includes its share of the checks.
    The start (building, pruning) is one number for all cells (`_seconds_to_start`).
    """
    steps = {}
    seconds = {}
    for cell, of_cell in trials.items():
        results = list(filter(_ran_alone, of_cell))
        if results:
            steps[cell] = np.array([result.steps_run for result in results], float)
            seconds[cell] = np.array([result.seconds for result in results], float)
    start = _seconds_to_start(steps, seconds)
    by_cell = {}
    for cell, of_cell in seconds.items():
        training = np.maximum(of_cell - start, _MIN_STEP_SHARE * of_cell)
        by_cell[cell] = StepSeconds(*_quartiles(training / steps[cell]))
    return by_cell


def _seconds_to_start(steps: dict[Cell, np.ndarray], seconds: dict[Cell, np.ndarray]) -> float:
    """Return the wall time of a trial before its first step, the same in all cells.

    It is fitted, with the seconds of a step of each cell, by least squares of relative errors; all
    are at least 0. If no cell has trials of different lengths it is 0, and the start counts as
    steps.

    Args:
        steps: Steps of the trials of each cell, each (n,).
        seconds: Their wall time, each (n,).
    """
    if not any(np.unique(of_cell).size > 1 for of_cell in steps.values()):
        return 0.0
    # Its import takes a tenth of a second that a study without seconds does not need.
    from scipy.optimize import nnls

    all_seconds = np.concatenate(list(seconds.values()))
    design = np.zeros((len(all_seconds), len(steps) + 1))
    design[:, 0] = 1
    row = 0
    for column, of_cell in enumerate(steps.values(), 1):
        design[row : row + len(of_cell), column] = of_cell
        row += len(of_cell)
    solution, _ = nnls(design / all_seconds[:, None], np.ones(len(all_seconds)))
    return float(solution[0])


def _ran_alone(result: TrialResult) -> bool:
    """Return True if the wall time of a trial went into its steps alone.

    Stacked trials share their time, and trials with readings spent some on those.
    """
    if result.status not in _FULL_LENGTH or result.seconds <= 0 or not result.steps_run:
        return False
    is_shared = bool(result.flags.keys() & {STACKED, SPARSE_KERNELS})
    return not is_shared and not any(columns.get("step") for columns in result.readings.values())
