"""The law K* = c1 / B + c2 of each series, with bootstrap intervals over its trials or seeds.

K* of a cell is a minimum over trials. A resample of the nonparametric bootstrap (Efron 1979) draws
as many trials of each cell as it has, with replacement, takes the least steps of each, and is
fitted as the data are (`law_fit`). Intervals are percentile intervals. The best of a resample is
never better than the best of all, so they are biased upward; a minimum is the standard example of a
statistic that the bootstrap does not estimate consistently. Repeats on fresh seeds give intervals
without this bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import (
    PERCENTILES,
    REPLICATES,
    Interval,
    estimate,
    interval_columns,
    inverted,
    percentile_interval,
    resampling_rng,
)
from lit_dps.analysis.law_fit import MIN_BATCH_SIZES, Fit, fit_many, fit_scaling
from lit_dps.analysis.summary import at_first_check
from lit_dps.analysis.tables import columns_of, frame, three_digits
from lit_dps.core.racing import best_steps
from lit_dps.core.trial import Series

FEWEST_SEEDS = 3  # repeats of a cell that its intervals may rest on
# c2 counts as zero where it makes up less than this share of the steps at the largest batch size:
# less than a check interval can show, and there c2 / c1 says more of rounding than of the curve.
NEGLIGIBLE = 1e-3


@dataclass(frozen=True)
class Scaling:
    """K* against batch size in one series, and its law with bootstrap intervals.

    The intervals are percentiles over resampled trials and over where between two checks the goal
    was met (`bootstrap_law`), widened to hold the estimate where they miss it. None without a fit,
    or where no cell has two trials to resample.

    Attributes:
        k_star: K* of each batch size that has a complete trial, in steps, ascending.
        fit: The law; None with fewer than `MIN_BATCH_SIZES` batch sizes in `resolved`.
        c1, c2, critical: Intervals of c1 [examples], c2 [steps] and B_crit = c1 / c2 [examples].
        replicates: (R, 2), c1 and c2 of the resamples that could be fitted.
        over: What was resampled: the trials, with an upward bias, or repeats on fresh seeds.
        at_first_check: The batch sizes whose K* is only an upper bound (`summary.at_first_check`).
        of_medians: Whether `k_star` holds medians over seeds of the best points instead.
        limits: 95 % limits of single K*, by batch size (`k_star_limits`); not of upper bounds.
    """

    k_star: Mapping[int, float]
    fit: Fit | None = None
    c1: Interval | None = None
    c2: Interval | None = None
    critical: Interval | None = None
    replicates: np.ndarray = field(
        default_factory=lambda: np.empty((0, 2)), repr=False, compare=False
    )
    at_first_check: frozenset[int] = frozenset()
    over: Literal["trials", "seeds"] = "trials"
    of_medians: bool = False
    limits: Mapping[int, Interval] = field(default_factory=dict, repr=False, compare=False)

    @property
    def resolved(self) -> dict[int, float]:
        """K* of the batch sizes that the law is fitted to: all whose K* is no upper bound."""
        return {b: k for b, k in self.k_star.items() if b not in self.at_first_check}

    @property
    def identifiable(self) -> bool:
        """Return True if the data show B_crit.

        The largest batch size reaches half of it, and the lower limit of c2 is above zero (see
        `NEGLIGIBLE`).
        """
        if self.fit is None:
            return False
        largest = max(self.resolved)
        c2 = self.fit.c2 if self.c2 is None else self.c2.low
        is_reached = largest >= self.fit.critical_batch_size / 2
        return is_reached and c2 * largest / self.fit.c1 >= NEGLIGIBLE

    @property
    def misfit(self) -> float:
        """Return the root mean square of the residuals of log K*, corrected for two constants.

        Nan without a fit. Above `law.MAX_MISFIT` the law does not describe K*.
        """
        if self.fit is None:
            return math.nan
        fitted = self.fit.steps(np.array(list(self.resolved), float))
        residuals = np.log(list(self.resolved.values())) - np.log(fitted)
        return math.sqrt(float((residuals**2).sum()) / (len(residuals) - 2))

    @property
    def bound(self) -> float | None:
        """Return what B_crit exceeds if it is not identifiable, in examples; None without a fit.

        The lower limit of its interval, or the largest batch size fitted, where that limit is
        missing or so high that c2 counts as 0.
        """
        if self.fit is None:
            return None
        largest = max(self.resolved)
        if self.critical is None or self.critical.low > largest / NEGLIGIBLE:
            return float(largest)
        return self.critical.low

    def describe(self) -> str:
        """Return B_crit in words: its interval, its lower bound, or why there is no fit."""
        if self.fit is None:
            text = f"needs complete trials at {MIN_BATCH_SIZES} batch sizes"
            text += f"; has {len(self.resolved)}"
            if self.at_first_check:
                text += f", and {len(self.at_first_check)} with K* at the first check"
            return text
        if not self.identifiable:
            return f"not identifiable: B_crit > {three_digits(self.bound)}"
        text = f"B_crit = {estimate(self.fit.critical_batch_size, self.critical)}"
        if self.fit.critical_batch_size < min(self.resolved):
            text += ", below the smallest batch size"
        return text

    def band(self, batch_sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the 95 % limits (n,) of the fitted steps at some batch sizes (n,).

        None without intervals.
        """
        if self.fit is None or self.c1 is None:
            return None
        resampled = self.replicates[:, :1] / batch_sizes + self.replicates[:, 1:]
        low, high = np.percentile(resampled, PERCENTILES, axis=0)
        fitted = self.fit.steps(batch_sizes)
        return np.minimum(low, fitted), np.maximum(high, fitted)


def bootstrap_law(
    trials: Mapping[int, Sequence[int | None]],
    replicates: int = REPLICATES,
    seed: int = 0,
    check_interval: int = 0,
    seeds: Mapping[int, Sequence[float]] | None = None,
    name: str = "",
) -> Scaling:
    """Return the law of the K* of some cells, with intervals from resampling.

    A cell whose K* is at the first check is left out, since that is an upper bound. Resamples draw
    the trials of each other cell (`resample`); a cell without a complete one drops out of the
    resample, and a resample left with one batch size is left out. K* is observed on the grid of the
    checks, and the goal was met somewhere in (K* - check_interval, K*]: each K* of a resample
    becomes K* - u check_interval with u uniform in [0, 1). The fit itself is of K* as observed.

    Args:
        trials: Steps to result of the finished trials by batch size; None for one that is not
            complete.
        replicates: Number of resamples.
        seed: Of the resampling. u depends on a cell's steps too, so that cells which are resampled
            by the same points are not rounded alike.
        check_interval: Steps between two checks; 0 where steps are exact.
        seeds: Steps to result of repeats of the K* trials on fresh seeds, by batch size; infinite
            for one that missed the goal. Where each has `FEWEST_SEEDS` and none missed, these are
            resampled in place of the trials: K* times one of them over their median, so that K* is
            as uncertain as one trial is over seeds.
        name: Of the study and the series, which seeds the resampling of repeats (`draw_repeats`).
    """
    repeats = seeds or {}
    k_star = _k_star_of(trials)
    upper_bounds = frozenset(b for b, k in k_star.items() if at_first_check(k, check_interval))
    unfitted = Scaling(k_star, at_first_check=upper_bounds)
    resolved = unfitted.resolved
    limits = {}
    for b in resolved:
        interval = k_star_limits(
            trials[b], repeats.get(b), check_interval, replicates, (seed, b), name
        )
        if interval is not None:
            limits[b] = interval
    unfitted = replace(unfitted, limits=limits)
    if len(resolved) < MIN_BATCH_SIZES:
        return unfitted
    fitted = replace(unfitted, fit=fit_scaling(list(resolved), list(resolved.values())))
    over_seeds = all(_has_enough_repeats(repeats.get(b, ())) for b in resolved)
    if not over_seeds and max(len(trials[b]) for b in resolved) < 2:
        return fitted
    if over_seeds:
        fitted = replace(fitted, over="seeds")
    resamples = []
    for b in resolved:
        cell_repeats = repeats[b] if over_seeds else None
        resamples.append(
            draw_k_star(trials[b], cell_repeats, check_interval, replicates, (seed, b), name)
        )
    return with_intervals(fitted, np.stack(resamples, axis=1))


def _k_star_of(trials: Mapping[int, Sequence[int | None]]) -> dict[int, int]:
    """Return K* of each batch size that has a complete trial, by batch size."""
    k_star = {}
    for b, steps in sorted(trials.items()):
        best = best_steps(steps)
        if best is not None:
            k_star[b] = best
    return k_star


def _has_enough_repeats(steps: Sequence[float]) -> bool:
    """Return True if intervals may rest on the repeats of a cell, none of which missed."""
    return len(steps) >= FEWEST_SEEDS and bool(np.isfinite(steps).all())


def draw_k_star(
    trials: Sequence[int | None],
    repeats: Sequence[float] | None,
    check_interval: int,
    replicates: int,
    seed: tuple[int, int],
    name: str,
) -> np.ndarray:
    """Return K* of resamples of one cell, (R,) in steps; arguments as of `bootstrap_law`.

    Over the cell's repeats, or over its trials if `repeats` is None.
    """
    steps = [int(k or 0) for k in trials]
    u = resampling_rng(*seed, *steps).random(replicates)
    if repeats is None:
        return resample(trials, replicates, seed) - check_interval * u
    k_star = best_steps(trials)
    assert k_star is not None, "a cell without a K* has no repeats"
    over_median = draw_repeats(repeats, replicates, (*seed, 1), name)[:, 0] / np.median(repeats)
    return (k_star - check_interval * u) * over_median


def k_star_limits(
    trials: Sequence[int | None],
    repeats: Sequence[float] | None,
    check_interval: int,
    replicates: int,
    seed: tuple[int, int],
    name: str,
) -> Interval | None:
    """Return the 95 % limits of K* of one cell, widened to hold K*; None if they are not known.

    They are limits over seeds where `FEWEST_SEEDS` repeats are known. The upper limit is then
    infinite where more than 2.5 % of the repeats missed the goal. Otherwise they are limits over
    resampled trials, which are biased upward. Where more than 2.5 % of the resamples have no
    complete trial, the trials tell no upper limit.
    """
    k_star = best_steps(trials)
    if repeats is not None and len(repeats) < FEWEST_SEEDS:
        repeats = None
    if k_star is None or (repeats is None and len(trials) < 2):
        return None
    drawn = draw_k_star(trials, repeats, check_interval, replicates, seed, name)
    drawn = np.where(np.isnan(drawn), np.inf, drawn)
    low, high = np.percentile(drawn, PERCENTILES, method="inverted_cdf")
    if repeats is None and np.isinf(high):
        return None
    return Interval(float(min(low, k_star)), float(max(high, k_star)))


def with_intervals(fitted: Scaling, steps: np.ndarray) -> Scaling:
    """Return a fitted law with percentile intervals from resampled steps.

    Args:
        fitted: The law.
        steps: (R, batch sizes of `fitted.resolved`), nan where a resample has no K*.
    """
    fit = fitted.fit
    assert fit is not None
    steps = steps[np.isfinite(steps).sum(axis=1) >= 2]
    if not len(steps):
        return fitted
    fits = fit_many(np.array(list(fitted.resolved), float), steps)
    # 1 / B_crit is finite where c2 is 0.
    inverse = percentile_interval(fits[:, 1] / fits[:, 0], fit.c2 / fit.c1)
    return replace(
        fitted,
        c1=percentile_interval(fits[:, 0], fit.c1),
        c2=percentile_interval(fits[:, 1], fit.c2),
        critical=inverted(inverse),
        replicates=fits,
    )


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


def bootstrap_median_law(
    seeds: Mapping[int, Sequence[float]],
    check_interval: int,
    replicates: int = REPLICATES,
    name: str = "",
    luck: float = 0.0,
) -> Scaling:
    """Return the law of the medians over seeds, with intervals from resampling the repeats.

    A resample draws as many repeats of a cell as it has, with replacement, and takes their median,
    less a uniform part of a check interval. A median at the first check is left out, as K* there
    is. A median is no minimum, so its intervals have no upward bias. No intervals where one in 40
    resamples of a cell or more has its median at a repeat that missed the goal.

    Args:
        seeds: Steps to result of the repeats by batch size, infinite for those that missed; their
            medians are finite.
        check_interval: Steps between two checks.
        replicates: Of the resampling.
        name: Of the study and the series (`draw_repeats`).
        luck: As of `median_draws`.
    """
    medians = {b: float(np.median(steps)) for b, steps in sorted(seeds.items())}
    upper_bounds = frozenset(b for b, k in medians.items() if at_first_check(k, check_interval))
    unfitted = Scaling(medians, at_first_check=upper_bounds, over="seeds", of_medians=True)
    resolved = unfitted.resolved
    if len(resolved) < MIN_BATCH_SIZES:
        return unfitted
    fitted = replace(unfitted, fit=fit_scaling(list(resolved), list(resolved.values())))
    if min(len(seeds[b]) for b in resolved) < 2:
        return fitted
    resamples = []
    for b in resolved:
        drawn = median_draws(seeds[b], replicates, (0, b), name, luck)
        if np.isinf(drawn).mean() >= PERCENTILES[0] / 100:
            return fitted
        u = resampling_rng(0, b, 3, name).random(replicates)
        resamples.append(np.where(np.isfinite(drawn), drawn, np.nan) - check_interval * u)
    return with_intervals(fitted, np.stack(resamples, axis=1))


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


def medians_outside(law: Scaling, medians: Scaling, check_interval: int) -> dict[int, float]:
    """Return median over law, by batch size, of the medians outside the law's 95 % band.

    Empty without a band. A median is exact up to a check interval: it leaves the band if this whole
    interval does. Batch sizes where K* or the median is at the first check are left out.
    """
    outside = {}
    for batch_size, median in medians.resolved.items():
        sizes = np.array([float(batch_size)])
        band = law.band(sizes)
        if law.fit is None or band is None or batch_size not in law.resolved:
            continue
        low, high = band
        if median < low[0] or median - check_interval > high[0]:
            outside[batch_size] = float(median / law.fit.steps(sizes)[0])
    return outside


def law_rows(scalings: Mapping[Series, Scaling]) -> pd.DataFrame:
    """Return one row a series: its law, 95 % limits and a verdict.

    Columns: sparsity and further axes, batch_sizes (the number of those that the law is fitted to),
    c1 [examples], c2 [steps] and b_crit [examples], each with its limits (_low and _high),
    identifiable, verdict.
    """
    rows = []
    for series, scaling in sorted(scalings.items()):
        row: dict[str, object] = {**columns_of(series), "batch_sizes": len(scaling.resolved)}
        c1, c2, critical = None, None, None
        if scaling.fit is not None:
            c1, c2 = scaling.fit.c1, scaling.fit.c2
            critical = scaling.fit.critical_batch_size
        row |= interval_columns("c1", c1, scaling.c1)
        row |= interval_columns("c2", c2, scaling.c2)
        row |= interval_columns("b_crit", critical, scaling.critical)
        row["identifiable"] = scaling.identifiable
        row["verdict"] = scaling.describe()
        rows.append(row)
    return frame(rows)
