"""Numbers with 95 % intervals, from resampled trials or from repeats on fresh seeds.

Claims on steps are judged on the medians over seeds if the best points of all compared series were
repeated, otherwise on K* (`laws_of`). The intervals of medians come from resampling the seeds, that
is initial weights, masks and orders of examples. Another search might have another best
point: `point_luck` adds that uncertainty to each cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from lit_dps import Cell, Series
from lit_dps.analysis import (
    MAX_MISFIT,
    PERCENTILES,
    REPLICATES,
    Analysis,
    Draws,
    Interval,
    Law,
    estimate,
)

DENSE = 0.0
SPARSE = 0.9  # the sparsity that the paper compares with dense networks
# Trials of a cell, seeds, points of the search or batch sizes below which a bootstrap decides
# nothing.
MIN_SAMPLES = 4
# Standard deviation of log K* between searches of 25 points, of dense and of sparse cells. The next
# 75 points lower log K* by 0.658, 0.346, 0.310, 0.260, 0.071, 0.069 and 9 times 0 in dense cells,
# and by 0.681, 0.616, 0.602, 0.428, 0.400, 0.396, 0.300, 0.258, 0.227, 0.160, 0.132, 0.129 and
# twice 0 at S = 0.9. In mean square these are 1.5 variances of exponential excesses of 0.18 and
# 0.31; the value for sparse cells is rounded up.
LUCK_POINTS = 25
POINT_LUCK = {DENSE: 0.18, SPARSE: 0.35}


class Estimate(NamedTuple):
    """A number with its interval, which is unbounded on the sides that the data leave open."""

    value: float
    interval: Interval

    def __str__(self) -> str:
        return estimate(self.value, self.interval)

    def map(self, function: Callable[[float], float]) -> Estimate:
        """Return the estimate of an increasing function of the number."""
        low, high = self.interval
        return Estimate(function(self.value), Interval(function(low), function(high)))


class Resampled(NamedTuple):
    """A number and its values (R,) in resamples."""

    value: float
    draws: np.ndarray

    @property
    def estimate(self) -> Estimate:
        """The number with its interval."""
        return estimate_of(self.value, self.draws)


def estimate_of(value: float, low: np.ndarray, high: np.ndarray | None = None) -> Estimate:
    """Return a number from all trials with its interval, widened to hold the number.

    Args:
        value: The number.
        low: (R,), its lower limits in resamples, nan where it could be anything.
        high: (R,), its upper limits; by default `low`, which then holds values.
    """
    if high is None:
        high = low
    lows = np.where(np.isnan(low), -np.inf, low)
    highs = np.where(np.isnan(high), np.inf, high)
    # Percentiles that are values of the data: interpolation does not survive infinities.
    lower = np.percentile(lows, PERCENTILES[0], method="inverted_cdf")
    upper = np.percentile(highs, PERCENTILES[1], method="inverted_cdf")
    return Estimate(value, Interval(min(float(lower), value), max(float(upper), value)))


def rests_on_medians(study: Analysis, *series: Series) -> bool:
    """Return True if claims on steps in some series are judged on the medians over seeds.

    They are if each K* of each series was repeated on `MIN_SAMPLES` seeds. A median is no minimum,
    so its resamples are not biased. If trials stop at K*, a resample of trials without the best one
    has no information. Series that are compared are all judged in the same way, since a K* is
    luckier than a median.
    """
    return all(study.is_repeated(each, MIN_SAMPLES) for each in series)


def laws_of(study: Analysis, *series: Series) -> list[Law]:
    """Return the laws that claims on steps are judged on: of medians (`rests_on_medians`) or K*."""
    over_seeds = rests_on_medians(study, *series)
    return [study.law(each, over_seeds, point_luck(study, each)) for each in series]


def point_luck(study: Analysis, series: Series) -> float:
    """Return the standard deviation of log K* between searches of equally many points.

    It falls at least with the square root of the number of points: the nearest of n points is
    nearer to the best one by n to the power of one over the dimensions, here one or two, and K is
    smooth around it. The cell with the fewest points counts.
    """
    fewest = max(1, min(len(cell.trials) for cell in study.cells))
    luck = POINT_LUCK[DENSE if series.sparsity == DENSE else SPARSE]
    return luck * math.sqrt(LUCK_POINTS / fewest)


def k_star_draws(study: Analysis, cell: Cell, of_medians: bool = False) -> Draws:
    """Return limits of K* of a cell in resamples, or of its median over seeds.

    A cell with fewer than `MIN_SAMPLES` trials has the limits 0 and infinity.
    """
    if of_medians:
        return study.k_star_draws(cell, over_seeds=True, luck=point_luck(study, cell.series))
    if len(study.by_cell[cell].trials) < MIN_SAMPLES:
        return Draws(np.zeros(REPLICATES), np.full(REPLICATES, np.inf))
    return study.k_star_draws(cell)


def log_ratio(over: Draws, under: Draws) -> Draws:
    """Return limits of log(over / under), from limits of both."""
    with np.errstate(divide="ignore"):  # a lower limit of 0 steps
        low = np.log(over.low) - np.log(under.high)
        high = np.log(over.high) - np.log(under.low)
    return Draws(low, high)


def ratio_of_laws(
    over: Law, under: Law, value: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> Resampled | None:
    """Return the ratio of `value(c1, c2)` of two laws; None if a law has no fit.

    The draws of the two laws are independent.
    """
    if over.fit is None or under.fit is None:
        return None
    draws_under = np.random.default_rng(0).permutation(under.draws)
    with np.errstate(divide="ignore", invalid="ignore"):
        numerator = value(np.array(over.fit.c1), np.array(over.fit.c2))
        denominator = value(np.array(under.fit.c1), np.array(under.fit.c2))
        drawn_numerators = value(*over.draws.T)
        drawn_denominators = value(*draws_under.T)
        ratio = float(np.divide(numerator, denominator))
        return Resampled(ratio, np.divide(drawn_numerators, drawn_denominators))


def misfit_note(laws: Mapping[str, Law]) -> str | None:
    """Return which laws do not describe what they are fitted to; None if all do.

    The constants of such a law are not reliable. The misfit here includes the noise of K*. The
    misfit that refuses a prediction (`law.Law.misfit_beyond_noise`) does not, but c1 and c2 of a
    noisy curve are not reliable either.
    """
    misfits = []
    for name, law in laws.items():
        if law.misfit > MAX_MISFIT:
            misfits.append(f"by {law.misfit:.0%} at {name}")
    if not misfits:
        return None
    return f"c1 / B + c2 misses K* {', '.join(misfits)}"
