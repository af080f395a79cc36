"""Seconds of a training step of each cell of a study."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lit_dps.core.record import StudyRecord
from lit_dps.core.step_timing import CellTiming
from lit_dps.core.trial import SPARSE_KERNELS, STACKED, Cell, Status, TrialResult

# Sources of the seconds of a step
QUIET = "quiet timing"  # at the end of the study, alone on the machine as far as lit_dps knows
TRIALS = "trials"  # beside other workers and other programs
WITH_CHECKS = (
    "trials with checks"  # likewise, by an earlier version that did not separate steps from checks
)

# Trials of these ends ran as many steps as their curves have; one that a race ended may be shown
# shorter than it was.
WHOLE = (Status.COMPLETE, Status.INCOMPLETE)
# share of a trial's time that counts as steps at least, where its start took longer on other trials
LEAST = 0.05


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a training step in a cell, without checks of the goal where `source` allows that.

    Attributes:
        median, low, high: Median and quartiles, over the rounds of a quiet timing or over trials.
        training: Seconds of a step without checks, median; nan where the trials do not separate the
            two.
        check: Seconds of a check of the goal, median; nan where the trials do not separate the two.
        source: Where the times are from: `QUIET`, `TRIALS`, or `WITH_CHECKS`.
    """

    median: float
    low: float
    high: float
    training: float = math.nan
    check: float = math.nan
    source: str = WITH_CHECKS


def step_seconds(record: StudyRecord) -> dict[Cell, StepSeconds]:
    """Return the seconds of a step of each cell for which they are known.

    If the steps of all cells with a complete trial were timed alone at the end of the study, these
    times are used. Else the trials that ran to the goal or to max steps give them. Trials time
    their steps and checks separately (`TrialResult.timed`). Trials of earlier versions did not; for
    their cells the wall time is start + steps x seconds of a step, and a step includes its share of
    the checks. The start (building, pruning) is one number for all cells, fitted with the steps of
    each by least squares of relative errors, all at least 0. If no cell has trials of different
    lengths, the start counts as steps. Stacked trials are not used, since they share their time;
    nor, in the fit, trials that measured smoothness. Times from trials include the load by other
    workers and other programs.
    """
    timing = record.step_timing
    complete = [
        cell
        for cell, results in record.results.items()
        if any(r.steps is not None for r in results)
    ]
    if timing is not None and timing.covers(complete):
        return {cell: _of_rounds(each) for cell, each in timing.by_cell.items()}
    seconds = {}
    for cell, results in record.results.items():
        timed = [r.timed for r in results if r.status in WHOLE and r.timed.get("steps")]
        if timed:
            step_times = [t["training"] / t["steps"] for t in timed]
            check = float(np.median([t["checking"] / t["checks"] for t in timed]))
            median, low, high = map(float, np.percentile(step_times, (50, 25, 75)))
            seconds[cell] = StepSeconds(median, low, high, median, check, TRIALS)
    return seconds | _of_whole_trials(record, {*record.results} - {*seconds})


def _of_rounds(timing: CellTiming) -> StepSeconds:
    """Return the median and quartiles over the rounds of a quiet timing."""
    median, low, high = map(float, np.percentile(timing.steps, (50, 25, 75)))
    return StepSeconds(median, low, high, median, timing.check, QUIET)


def _of_whole_trials(record: StudyRecord, among: set[Cell]) -> dict[Cell, StepSeconds]:
    """Return the seconds of a step of some cells from the wall time of their trials."""
    # Its import takes a tenth of a second that a study without seconds does not need.
    from scipy.optimize import nnls

    rows = []
    for cell, results in record.results.items():
        if cell in among:
            rows += [(cell, r.steps_run, r.seconds) for r in results if _tells_seconds(r)]
    if not rows:
        return {}
    cells = list(dict.fromkeys(cell for cell, _, _ in rows))
    which = np.array([cells.index(cell) for cell, _, _ in rows])
    steps = np.array([steps for _, steps, _ in rows], float)
    seconds = np.array([seconds for _, _, seconds in rows], float)
    design = np.zeros((len(rows), len(cells) + 1))
    design[:, 0] = 1
    design[np.arange(len(rows)), which + 1] = steps
    start = 0.0
    if any(np.unique(steps[which == i]).size > 1 for i in range(len(cells))):
        start = nnls(design / seconds[:, None], np.ones(len(rows)))[0][0]
    step_times = np.maximum(seconds - start, LEAST * seconds) / steps
    found = {}
    for i, cell in enumerate(cells):
        median, low, high = map(float, np.percentile(step_times[which == i], (50, 25, 75)))
        found[cell] = StepSeconds(median, low, high)
    return found


def _tells_seconds(result: TrialResult) -> bool:
    """Return True if the wall time of a trial is that of its own steps."""
    if result.status not in WHOLE or result.seconds <= 0 or not result.steps_run:
        return False
    is_shared = bool(result.flags.keys() & {STACKED, SPARSE_KERNELS})
    return not is_shared and not result.smoothness.get("step")
