"""Limits of K* in resamples of one cell, without a law: for exponents and ratios of single cells.

K* is observed on the grid of the checks: the goal was met after the last check that missed it, and
not after the one that met it. Each resample therefore has a lower and an upper limit of K*.
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

_SEED = 0


class Draws(NamedTuple):
    """Limits of K* in resamples of a cell, each (R,) in steps."""

    low: np.ndarray
    high: np.ndarray


def draws_of_trials(record: StudyRecord, summary: CellSummary) -> Draws:
    """Return limits of K* over resampled trials of a cell.

    A resample without a complete trial would have met the goal after the step budget, or after the
    step at which the race, the module or a callback stopped the first trial. Failed trials do not
    count. Cells of one batch size with equally many trials are resampled by the same points.
    """
    drawn = resample(summary.steps, REPLICATES, (_SEED, summary.cell.batch_size))
    ends = [last_step(summary.k_star, record.race_factor), record.goal.max_steps]
    for result in summary.trials:
        if result.status is Status.STOPPED:
            ends.append(result.steps_run)
    met = np.isfinite(drawn)
    low = np.where(met, drawn - record.goal.check_interval, min(ends))
    return Draws(low, np.where(met, drawn, np.inf))


def draws_of_repeats(
    steps: Sequence[float], batch_size: int, check_interval: int, name: str, luck: float
) -> Draws:
    """Return limits of the median over seeds, over resampled repeats of a cell's best point.

    A median at a repeat that missed the goal is infinite. Its lower limit is the median of the
    repeats that met the goal.

    Args:
        steps: Steps to result of the repeats; infinite for one that missed the goal.
        batch_size: Of the cell, in examples.
        check_interval: Steps between two checks.
        name: Of the study and the series, which seeds the resampling.
        luck: As in `median_draws`.
    """
    drawn = median_draws(steps, REPLICATES, (_SEED, batch_size), name, luck)
    finite_steps = [k for k in steps if math.isfinite(k)]
    low = np.where(np.isfinite(drawn), drawn, np.median(finite_steps))
    return Draws(low - check_interval, drawn)


def resample(steps: Sequence[int | None], replicates: int, seed: tuple[int, int]) -> np.ndarray:
    """Return K* of resamples of one cell, (R,) in steps; nan where no drawn trial is complete.

    A resample draws as many trials as the cell has, with replacement. The seed is that of the
    study's resampling, and the batch size: cells with the same one and the same number of trials
    are resampled by the same points of the search.
    """
    values = np.array([np.inf if k is None else k for k in steps], float)
    shape = (replicates, len(values))
    chosen = resampling_rng(*seed).integers(len(values), size=shape)
    least = values[chosen].min(axis=1)
    return np.where(np.isfinite(least), least, np.nan)


def draw_repeats(
    steps: Sequence[float], replicates: int, seed: tuple[int, ...], name: str
) -> np.ndarray:
    """Return resamples (R, n) of the n repeats of a cell, drawn with replacement, in steps.

    Repeats of two cells have nothing in common, as each has its own seeds: `name`, of the study and
    the series, and the batch size in the seed keep their resamples independent.
    """
    values = np.asarray(steps, float)
    random = resampling_rng(*seed, name)
    return random.choice(values, (replicates, len(values)))


def median_draws(
    steps: Sequence[float], replicates: int, seed: tuple[int, int], name: str, luck: float = 0.0
) -> np.ndarray:
    """Return medians of resamples of a cell's repeats, (R,) in steps; infinite if that one missed.

    Repeats are of the best of the points that were searched. `luck` is what another search may
    find: the standard deviation of log K between searches.
    """
    medians = np.median(draw_repeats(steps, replicates, (*seed, 2), name), axis=1)
    if not luck:
        return medians
    random = resampling_rng(*seed, 4, name)
    return medians * np.exp(luck * random.standard_normal(replicates))
