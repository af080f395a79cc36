"""Seconds of a step of each cell of a study, as its trials tell them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lit_dps.record import StudyRecord
from lit_dps.trial import SPARSE_KERNELS, STACKED, Cell, Status

# Trials of these ends ran as many steps as their curves have; one that a race ended may be shown shorter than it was.
WHOLE = (Status.COMPLETE, Status.INCOMPLETE)
LEAST = 0.05  # share of a trial's time that counts as steps at least, where its start took longer on other trials


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step in the trials of a cell, with its share of checks: the median, and the quartiles around it.

    Attributes:
        median, low, high: Of the trials.
        training, check: Seconds of a step alone, and of a check, medians; nan where trials did not tell them.
    """

    median: float
    low: float
    high: float
    training: float = math.nan
    check: float = math.nan


def step_seconds(record: StudyRecord) -> dict[Cell, StepSeconds]:
    """Seconds of a step of each cell, from its trials that ran to the goal or the budget.

    They were timed (`TrialResult.timed`), whatever else was measured along them. Of a cell whose trials were not, by an
    earlier version, it is from their wall time: a trial takes start + steps x seconds a step. The start (building,
    pruning) is one number for all cells of the study, fitted with the steps of each by least squares of relative
    errors, all at least 0; what is left of a trial is divided by its steps. Where no cell has trials of different
    lengths the start counts as steps. Left out are trials that were stacked, which shared their time, and, of those not
    timed, the ones that measured smoothness, which costs more than the training that it watches. The share of checks
    is in, as is whatever other workers and other programs of the machine took.
    """
    found = {}
    for cell, results in record.results.items():
        timed = [r.timed for r in results if r.status in WHOLE and r.timed.get("steps")]
        if not timed:
            continue
        each = np.percentile([(t["training"] + t["checking"]) / t["steps"] for t in timed], (50, 25, 75))
        alone = np.median([t["training"] / t["steps"] for t in timed])
        check = np.median([t["checking"] / t["checks"] for t in timed])
        found[cell] = StepSeconds(*map(float, (*each, alone, check)))
    return found | _of_whole_trials(record, {*record.results} - {*found})


def _of_whole_trials(record: StudyRecord, among: set[Cell]) -> dict[Cell, StepSeconds]:
    """The same of some cells from the wall time of their trials."""
    from scipy.optimize import nnls  # a tenth of a second that a study without seconds does not need

    rows = [
        (cell, result.steps_run, result.seconds)
        for cell, results in record.results.items()
        for result in results
        if cell in among and result.status in WHOLE and result.seconds > 0 and result.steps_run
        if not (result.observed.keys() & {STACKED, SPARSE_KERNELS} or result.smoothness.get("step"))
    ]
    if not rows:
        return {}
    cells = list(dict.fromkeys(cell for cell, _, _ in rows))
    steps, seconds = (np.array(column, float) for column in list(zip(*rows, strict=True))[1:])
    which = np.array([cells.index(cell) for cell, _, _ in rows])
    design = np.zeros((len(rows), len(cells) + 1))
    design[:, 0], design[np.arange(len(rows)), which + 1] = 1, steps
    told = any(np.unique(steps[which == i]).size > 1 for i in range(len(cells)))
    start = nnls(design / seconds[:, None], np.ones(len(rows)))[0][0] if told else 0.0
    each = np.maximum(seconds - start, LEAST * seconds) / steps
    return {
        cell: StepSeconds(*map(float, np.percentile(each[which == i], (50, 25, 75)))) for i, cell in enumerate(cells)
    }
