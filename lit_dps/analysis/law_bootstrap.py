"""The scaling law of each series, and how certain the trials make it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple
from zlib import crc32

import numpy as np
import pandas as pd

from lit_dps.analysis.law_fit import FEWEST, Fit, fit_many, fit_scaling
from lit_dps.analysis.summary import at_first_check
from lit_dps.analysis.tables import columns_of, frame, three_digits
from lit_dps.core.racing import best_steps
from lit_dps.core.trial import Series

REPLICATES = 1000


FEWEST_SEEDS = 3  # repeats of a cell that its intervals may rest on


PERCENTILES = (2.5, 97.5)


# c2 counts as zero where it makes up less than this share of the steps at the largest batch size:
# less than a check interval can show, and there c2 / c1 says more of rounding than of the curve.
NEGLIGIBLE = 1e-3


class Interval(NamedTuple):
    """A 95 % bootstrap interval; `high` may be infinite."""

    low: float
    high: float


def estimate(value: float, interval: Interval | None) -> str:
    """A value with its interval, if it has one, to 3 significant digits: 583 [546, 638]."""
    return three_digits(value) + (
        "" if interval is None else " [{}, {}]".format(*map(three_digits, interval))
    )


@dataclass(frozen=True)
class Scaling:
    """K* against batch size in one series.

    The intervals are percentiles over resampled trials and over where between two checks the goal
    was met (`scale`), widened to hold the estimate where they miss it: the best of a resample is
    never better than the best of all, so they lean towards larger K*. None without a fit, or where
    no cell has two trials to resample.

    Attributes:
        k_star: K* of each batch size that has a complete trial, in steps, ascending.
        fit: The law; None with fewer than `FEWEST` batch sizes in `resolved`: any two points meet
            it.
        c1, c2, critical: Intervals of c1 [examples], c2 [steps] and B_crit = c1 / c2 [examples].
        replicates: (R, 2), c1 and c2 of the resamples that could be fitted.
        over: What was resampled: the trials, so that they lean, or repeats on fresh seeds, so that
            they do not.
        at_first_check: The batch sizes of those K* that are only upper bounds
            (`summary.at_first_check`).
        of_medians: Whether they are no K* but medians over seeds of the best points.
        limits: 95 % limits of single K*, by batch size (`k_star_limits`); not of upper bounds.
    """

    k_star: dict[int, int]
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
    def resolved(self) -> dict[int, int]:
        """K* of the batch sizes that the law is fitted to: all but those where it is only an upper
        bound."""
        return {b: k for b, k in self.k_star.items() if b not in self.at_first_check}

    @property
    def identifiable(self) -> bool:
        """Whether the data show B_crit: they reach half of it, and c2's lower limit is above zero
        (see NEGLIGIBLE)."""
        if self.fit is None:
            return False
        largest = max(self.resolved)
        c2 = self.fit.c2 if self.c2 is None else self.c2.low
        return (
            largest >= self.fit.critical_batch_size / 2 and c2 * largest / self.fit.c1 >= NEGLIGIBLE
        )

    @property
    def misfit(self) -> float:
        """Root mean square of the residuals of log K* of the fit, over the points less its
        constants.

        Nan without a fit. Above `refusal.OFF` the law says little of anything else.
        """
        if self.fit is None:
            return math.nan
        residual = np.log(list(self.resolved.values())) - np.log(
            self.fit.steps(np.array(list(self.resolved), float))
        )
        return math.sqrt(float((residual**2).sum()) / (len(residual) - 2))

    @property
    def bound(self) -> float | None:
        """What B_crit exceeds where it is not identifiable, in examples: the lower limit of its
        interval.

        The largest batch size fitted, where that limit is missing or so high that c2 counts as 0.
        None without a fit.
        """
        if self.fit is None:
            return None
        largest = max(self.resolved)
        if self.critical is None or self.critical.low > largest / NEGLIGIBLE:
            return float(largest)
        return self.critical.low

    def describe(self) -> str:
        """B_crit in words: with its interval, as "not identifiable: B_crit > X", or why there is no
        fit."""
        if self.fit is None:
            bounds = (
                f", and {len(self.at_first_check)} with K* at the first check"
                if self.at_first_check
                else ""
            )
            return (
                f"needs complete trials at {FEWEST} batch sizes; has {len(self.resolved)}{bounds}"
            )
        if not self.identifiable:
            return f"not identifiable: B_crit > {three_digits(self.bound)}"
        below = (
            ", below the smallest batch size"
            if self.fit.critical_batch_size < min(self.resolved)
            else ""
        )
        return f"B_crit = {estimate(self.fit.critical_batch_size, self.critical)}{below}"

    def band(self, batch_sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Lower and upper 95 % limits of the fitted steps at some batch sizes (n,); None without
        intervals."""
        if self.fit is None or self.c1 is None:
            return None
        low, high = np.percentile(
            self.replicates[:, :1] / batch_sizes + self.replicates[:, 1:], PERCENTILES, axis=0
        )
        return np.minimum(low, self.fit.steps(batch_sizes)), np.maximum(
            high, self.fit.steps(batch_sizes)
        )


def scale(
    trials: Mapping[int, Sequence[int | None]],
    replicates: int = REPLICATES,
    seed: int = 0,
    check_interval: int = 0,
    seeds: Mapping[int, Sequence[float]] | None = None,
    name: str = "",
) -> Scaling:
    """Fits the law to the K* of some cells and bootstraps it over their trials and over the
    rounding of K*.

    A cell whose K* is at the first check is left out: that is an upper bound. A resample draws as
    many trials of each other cell as it has (`resample`; a cell without a complete one drops out)
    and is fitted anew; resamples left with one batch size are left out. K* is observed on the grid
    of the checks, the goal was met somewhere in (K* - check_interval, K*]: each K* of a resample
    becomes K* - u check_interval with u uniform in [0, 1). The fit itself is of K* as observed.

    Args:
        trials: Steps to result of the finished trials by batch size; None for one that is not
            complete.
        replicates: Number of resamples.
        seed: Of the resampling. u depends on a cell's steps too, so that cells which are resampled
            by the same points are not rounded alike.
        check_interval: Steps between two checks; 0 where steps are known exactly.
        seeds: Steps to result of repeats of the K* trials on fresh seeds, by batch size; infinite
            for one that missed the goal. Where each has `FEWEST_SEEDS` and none missed, these are
            resampled in place of the trials: K* times one of them over their median, so that K* is
            as uncertain as one trial is over seeds; the least of many trials is no more than that.
        name: Of the study and the series, which their repeats are resampled by (`draw_repeats`).
    """
    k_star = {b: k for b, steps in sorted(trials.items()) if (k := best_steps(steps)) is not None}
    bounds = frozenset(b for b, k in k_star.items() if at_first_check(k, check_interval))
    bare = Scaling(k_star, at_first_check=bounds)
    resolved = bare.resolved
    limits = {}
    for b in resolved:
        repeats = None if seeds is None else seeds.get(b)
        found = k_star_limits(trials[b], repeats, check_interval, replicates, (seed, b), name)
        if found is not None:
            limits[b] = found
    bare = replace(bare, limits=limits)
    if len(resolved) < FEWEST:
        return bare
    fitted = replace(bare, fit=fit_scaling(list(resolved), list(resolved.values())))
    repeated = seeds is not None and all(
        len(seeds.get(b, ())) >= FEWEST_SEEDS and np.isfinite(seeds[b]).all() for b in resolved
    )
    if not repeated and max(len(trials[b]) for b in resolved) < 2:
        return fitted

    drawn = []
    for b in resolved:
        repeats = seeds[b] if repeated else None
        drawn.append(draw_k_star(trials[b], repeats, check_interval, replicates, (seed, b), name))
    return with_intervals(
        replace(fitted, over="seeds" if repeated else "trials"), np.stack(drawn, axis=1)
    )


def draw_k_star(
    trials: Sequence[int | None],
    repeats: Sequence[float] | None,
    check_interval: int,
    replicates: int,
    seed: tuple[int, int],
    name: str,
) -> np.ndarray:
    """K* of resamples of one cell, (R,) in steps, over its repeats or, without any, over its trials
    (`scale`)."""
    u = np.random.default_rng((*seed, *(int(k or 0) for k in trials))).random(replicates)
    if repeats is None:
        return resample(trials, replicates, seed) - check_interval * u
    luck = draw_repeats(repeats, replicates, (*seed, 1), name)[:, 0] / np.median(repeats)
    return (best_steps(trials) - check_interval * u) * luck


def k_star_limits(
    trials: Sequence[int | None],
    repeats: Sequence[float] | None,
    check_interval: int,
    replicates: int,
    seed: tuple[int, int],
    name: str,
) -> Interval | None:
    """The 95 % limits of K* of one cell, widened to hold K*; None where the trials do not tell
    them.

    They are limits over seeds where `FEWEST_SEEDS` repeats are known. The upper limit is then
    infinite where more than 2.5 % of the repeats missed the goal. Otherwise they are limits over
    resampled trials, which lean upward. Where more than 2.5 % of the resamples have no complete
    trial, the trials tell no upper limit.
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
    """A fit with percentile intervals from resampled steps (replicates, batch sizes), nan where
    there are none."""
    steps = steps[np.isfinite(steps).sum(axis=1) >= 2]
    if not len(steps):
        return fitted
    fit, fits = fitted.fit, fit_many(np.array(list(fitted.resolved), float), steps)
    c1, c2 = (percentile_interval(fits[:, i], value) for i, value in enumerate((fit.c1, fit.c2)))
    inverse = percentile_interval(
        fits[:, 1] / fits[:, 0], fit.c2 / fit.c1
    )  # 1 / B_crit: finite where c2 is 0
    critical = Interval(*(1 / x if x > 0 else np.inf for x in reversed(inverse)))
    return replace(fitted, c1=c1, c2=c2, critical=critical, replicates=fits)


def resample(steps: Sequence[int | None], replicates: int, seed: tuple[int, int]) -> np.ndarray:
    """K* of resamples of one cell, (R,) in steps, each of as many trials as it has, drawn with
    replacement.

    Nan where none of the drawn trials is complete. The seed is that of the study's resampling, and
    the batch size: cells with the same one and the same number of trials are resampled by the same
    points of the search.
    """
    known = np.array([np.inf if k is None else k for k in steps], float)
    drawn = known[
        np.random.default_rng(seed).integers(len(known), size=(replicates, len(known)))
    ].min(axis=1)
    return np.where(np.isfinite(drawn), drawn, np.nan)


def draw_repeats(
    steps: Sequence[float], replicates: int, seed: tuple[int, ...], name: str
) -> np.ndarray:
    """Resamples of the repeats of a cell, (R, n) in steps, each of as many as it has, drawn with
    replacement.

    Repeats of two cells have nothing in common, as each has seeds of its own: `name`, of the study
    and the series, and the batch size in the seed keep their resamples independent.
    """
    values = np.asarray(steps, float)
    return np.random.default_rng((*seed, crc32(name.encode()))).choice(
        values, (replicates, len(values))
    )


def percentile_interval(values: np.ndarray, estimate: float) -> Interval:
    """The 95 % percentile interval of resampled values (n,), widened to hold the estimate."""
    low, high = np.percentile(values, PERCENTILES)
    return Interval(float(min(low, estimate)), float(max(high, estimate)))


def law_rows(scalings: Mapping[Series, Scaling]) -> pd.DataFrame:
    """One row a series: c1 [examples], c2 [steps] and b_crit [examples], each with its 95 % limits,
    and a verdict.

    `batch_sizes` is the number of those that the law is fitted to.
    """
    rows = []
    for series, scaling in sorted(scalings.items()):
        row: dict[str, object] = {**columns_of(series), "batch_sizes": len(scaling.resolved)}
        fit = scaling.fit
        values = (None,) * 3 if fit is None else (fit.c1, fit.c2, fit.critical_batch_size)
        intervals = (scaling.c1, scaling.c2, scaling.critical)
        for name, value, interval in zip(("c1", "c2", "b_crit"), values, intervals, strict=True):
            row[name], (row[f"{name}_low"], row[f"{name}_high"]) = value, interval or (None, None)
        rows.append(row | {"identifiable": scaling.identifiable, "verdict": scaling.describe()})
    return frame(rows)


def scale_medians(
    seeds: Mapping[int, Sequence[float]],
    check_interval: int,
    replicates: int = REPLICATES,
    name: str = "",
    luck: float = 0.0,
) -> Scaling:
    """The law of the medians over seeds, with percentile intervals from resampling the repeats of
    each cell.

    A resample draws as many repeats of a cell as it has, with replacement, and takes their median,
    less a uniform part of a check interval. A median at the first check is left out, as K* there
    is. Of a median nothing leans: it is no minimum. No intervals where one in 40 resamples of a
    cell or more has its median at a repeat that missed the goal.

    Args:
        seeds: Steps to result of the repeats by batch size, infinite for those that missed; their
            medians are finite.
        check_interval: Steps between two checks.
        replicates: Of the resampling.
        name: Of the study and the series (`draw_repeats`).
        luck: As of `median_draws`.
    """
    medians = {b: float(np.median(steps)) for b, steps in sorted(seeds.items())}
    bounds = frozenset(b for b, median in medians.items() if at_first_check(median, check_interval))
    bare = Scaling(medians, at_first_check=bounds, over="seeds", of_medians=True)
    resolved = bare.resolved
    if len(resolved) < FEWEST:
        return bare
    fitted = replace(bare, fit=fit_scaling(list(resolved), list(resolved.values())))
    if min(len(seeds[b]) for b in resolved) < 2:
        return fitted
    drawn = []
    for b in resolved:
        medians = median_draws(seeds[b], replicates, (0, b), name, luck)
        if np.isinf(medians).mean() >= PERCENTILES[0] / 100:
            return fitted
        u = np.random.default_rng((0, b, 3, crc32(name.encode()))).random(replicates)
        drawn.append(np.where(np.isfinite(medians), medians, np.nan) - check_interval * u)
    return with_intervals(fitted, np.stack(drawn, axis=1))


def median_draws(
    steps: Sequence[float], replicates: int, seed: tuple[int, int], name: str, luck: float = 0.0
) -> np.ndarray:
    """Medians of resamples of a cell's repeats (`draw_repeats`), (R,) in steps; infinite where that
    is a missed one.

    Repeats are of the best of the points that were searched. `luck` is what another search may
    find: the standard deviation of log K between searches.
    """
    medians = np.median(draw_repeats(steps, replicates, (*seed, 2), name), axis=1)
    if not luck:
        return medians
    return medians * np.exp(
        luck * np.random.default_rng((*seed, 4, crc32(name.encode()))).standard_normal(replicates)
    )


def medians_outside(law: Scaling, medians: Scaling, check_interval: int) -> dict[int, float]:
    """Medians over seeds outside the 95 % band of the law of K*: median over the law's steps, by
    batch size.

    Empty without a band. A median is known up to a check interval: it leaves the band if this whole
    interval does. Batch sizes where K* or the median is at the first check are left out.
    """
    found = {}
    for batch_size, median in medians.resolved.items():
        sizes = np.array([float(batch_size)])
        band = law.band(sizes)
        if band is None or batch_size not in law.resolved:
            continue
        if median < band[0][0] or median - check_interval > band[1][0]:
            found[batch_size] = float(median / law.fit.steps(sizes)[0])
    return found
