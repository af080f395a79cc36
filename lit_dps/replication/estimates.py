"""Numbers with 95 % intervals, from draws of K* or of medians over fresh seeds.

Claims on steps are judged on the medians over seeds if the best points of all compared series were
repeated, otherwise on K* (`laws_of`). Draws have the noise of the observations that the law is
fitted to. Another search might have another best point. The noise of a K* includes this
uncertainty. `Analysis.search_noise` adds it to the medians.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lit_dps import Cell, Series
from lit_dps.analysis import (
    MAX_MISFIT,
    PERCENTILES,
    REPLICATES,
    Analysis,
    Interval,
    Law,
    estimate,
    resampling_rng,
)

DENSE = 0.0
SPARSE = 0.9  # the sparsity that the paper compares with dense networks
# A bootstrap needs at least this many trials of a cell, seeds, points of the search or batch sizes.
MIN_SAMPLES = 4


class Draws(NamedTuple):
    """Lower and upper limits of a number, each (R,); both are equal if the number is known."""

    low: np.ndarray
    high: np.ndarray


class Estimate(NamedTuple):
    """A number with its interval, which is infinite on sides that the data do not limit."""

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
    """Return a number with its interval from resamples, widened to contain the number.

    Args:
        value: The number, from all trials.
        low: (R,), its lower limits in resamples; nan without a limit.
        high: (R,), its upper limits. By default `low`, which then contains values.
    """
    if high is None:
        high = low
    lows = np.where(np.isnan(low), -np.inf, low)
    highs = np.where(np.isnan(high), np.inf, high)
    # Percentiles that are values of the data, because interpolation fails at infinities.
    lower = np.percentile(lows, PERCENTILES[0], method="inverted_cdf")
    upper = np.percentile(highs, PERCENTILES[1], method="inverted_cdf")
    return Estimate(value, Interval(min(float(lower), value), max(float(upper), value)))


def rests_on_medians(study: Analysis, *series: Series) -> bool:
    """Return True if claims on steps in some series are judged on the medians over seeds.

    Each K* of each series must be repeated on `MIN_SAMPLES` seeds. A median is not a minimum, so
    its resamples are unbiased. If trials stop at K*, a resample without the best trial has no
    information. All compared series are judged in the same way, because a K* is a minimum and so
    smaller than a median.
    """
    return all(study.is_repeated(each, MIN_SAMPLES) for each in series)


def laws_of(study: Analysis, *series: Series) -> list[Law]:
    """Return the laws for claims on steps: of medians if `rests_on_medians`, else of K*."""
    laws = study.laws
    if rests_on_medians(study, *series):
        laws = study.median_laws
    return [laws[each] for each in series]


def k_star_draws(study: Analysis, law: Law, cell: Cell, shares_search: bool = False) -> Draws:
    """Return draws of K* of a cell, or of its median over seeds if the law uses medians.

    If every trial of the cell missed the goal, the draws are lower limits. If K* is an upper bound,
    they are upper limits. The limits are 0 and infinity if the law has no K* of the cell, or if the
    cell has fewer than `MIN_SAMPLES` trials.

    Args:
        study: The study.
        law: The law of the cell's series.
        cell: The cell.
        shares_search: Whether the noise of the search is the same in all cells of the series with
            one best point. Otherwise it is independent. The truth is in between: all batch sizes
            are searched at the same points, but a point is not equally good at each.
    """
    unlimited = np.full(REPLICATES, np.inf)
    observation = law.observation(cell.batch_size)
    if observation is None:
        observation = study.laws[cell.series].observation(cell.batch_size)
    if observation is None or len(study.by_cell[cell].trials) < MIN_SAMPLES:
        return Draws(np.zeros(REPLICATES), unlimited)
    if observation.is_lower_bound:
        return Draws(np.full(REPLICATES, observation.k), unlimited)
    if observation.bound:
        return Draws(np.zeros(REPLICATES), np.full(REPLICATES, observation.k))
    name = study.name_of(cell.series)
    best = study.by_cell[cell].best
    if not shares_search or best is None:
        drawn = observation.draws(REPLICATES, name)
        return Draws(drawn, drawn)
    of_search = min(study.search_noise, observation.noise)
    of_cell = math.sqrt(observation.noise**2 - of_search**2)
    drawn = replace(observation, noise=of_cell).draws(REPLICATES, name)
    random = resampling_rng(best.trial.point, f"{name} | search")
    drawn = drawn * np.exp(of_search * random.standard_normal(REPLICATES))
    return Draws(drawn, drawn)


def widest(estimate: Callable[[bool], Estimate]) -> Estimate:
    """Return an estimate over several batch sizes, with the wider limits of two.

    Args:
        estimate: Returns the estimate for an argument `shares_search` of `k_star_draws`.
    """
    independent, shared = estimate(False), estimate(True)
    low = min(independent.interval.low, shared.interval.low)
    high = max(independent.interval.high, shared.interval.high)
    return Estimate(independent.value, Interval(low, high))


def log_ratio(over: Draws, under: Draws) -> Draws:
    """Return draws of log(over / under), from draws of both."""
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


def is_misfit(law: Law) -> bool:
    """Return True if a law does not fit its data, so that its constants are not reliable."""
    return law.misfit > MAX_MISFIT


def misfit_note(laws: Mapping[str, Law]) -> str | None:
    """Return a note on the laws that do not fit their data; None if all laws fit.

    The constants of such a law are not reliable. The misfit here includes the noise of K*, because
    c1 and c2 of a noisy curve are not reliable either. The misfit that refuses a prediction
    (`law.Law.misfit_beyond_noise`) excludes the noise.
    """
    misfits = []
    for name, law in laws.items():
        if is_misfit(law):
            misfits.append(f"by {law.misfit:.0%} at {name}")
    if not misfits:
        return None
    return f"c1 / B + c2 misses K* {', '.join(misfits)}"
