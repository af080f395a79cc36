"""Limits of K* in resamples of one cell, without a law: for exponents and ratios of single cells.

K* is observed on the grid of the checks: the goal was met after the last check that missed it, and
not after the check that met it. So each resample has a lower and an upper limit of K*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lit_dps.analysis.intervals import REPLICATES, resampling_rng
from lit_dps.analysis.summary import CellSummary
from lit_dps.core.racing import last_step
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Status

# With other salts the verdicts on stored studies would change.
_SEED = 0
_REPEATS_SALT = 2
_SEARCH_SALT = 4


class Draws(NamedTuple):
    """Limits of K* in resamples of a cell, each (R,) in steps."""

    low: np.ndarray
    high: np.ndarray


def draws_of_trials(record: StudyRecord, summary: CellSummary) -> Draws:
    """Return limits of K* over resamples of a cell's trials, drawn with replacement.

    A resample without a complete trial would have met the goal after the step budget, or after the
    step at which the race, the module or a callback stopped the first trial. Failed trials do not
    count. Cells of one batch size with equally many trials are resampled by the same points.
    """
    steps = np.array([math.inf if k is None else k for k in summary.steps], float)
    random = resampling_rng(_SEED, summary.cell.batch_size)
    chosen = random.integers(len(steps), size=(REPLICATES, len(steps)))
    k_star = steps[chosen].min(axis=1)
    ends = [last_step(summary.k_star, record.race_factor), record.goal.max_steps]
    for result in summary.trials:
        if result.status is Status.STOPPED:
            ends.append(result.steps_run)
    low = np.where(np.isfinite(k_star), k_star - record.goal.check_interval, min(ends))
    return Draws(low, k_star)


def draws_of_repeats(
    steps: Sequence[float], batch_size: int, check_interval: int, name: str, search_noise: float
) -> Draws:
    """Return limits of the median over seeds, over resampled repeats of a cell's best point.

    A median at a repeat that missed the goal is infinite. Its lower limit is the median of the
    repeats that met the goal. Repeats have different seeds in each cell, so resamples of cells are
    independent.

    Args:
        steps: Steps to result of the repeats; infinite for a repeat that missed the goal.
        batch_size: Of the cell, in examples.
        check_interval: Steps between two checks.
        name: Of the study and the series; with the batch size it seeds the resampling.
        search_noise: Standard deviation of log K between searches, which would repeat other points.
    """
    random = resampling_rng(_SEED, batch_size, _REPEATS_SALT, name)
    repeats = random.choice(np.asarray(steps, float), (REPLICATES, len(steps)))
    medians = np.median(repeats, axis=1)
    if search_noise:
        random = resampling_rng(_SEED, batch_size, _SEARCH_SALT, name)
        medians = medians * np.exp(search_noise * random.standard_normal(REPLICATES))
    median_of_met = np.median([k for k in steps if math.isfinite(k)])
    low = np.where(np.isfinite(medians), medians, median_of_met)
    return Draws(low - check_interval, medians)
