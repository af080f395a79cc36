"""The scaling law of one sparsity, its uncertainty, and whether the data can tell the critical batch size at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lit_dps.analysis.fit import Fit, fit_many, fit_scaling
from lit_dps.analysis.results import StudyRecord

REPLICATES = 1000
PERCENTILES = (2.5, 97.5)
# c2 counts as zero where it makes up less than this share of the steps at the largest batch size: less than a check
# interval can show, and there c2 / c1 says more of rounding than of the curve.
NEGLIGIBLE = 1e-3


class Interval(NamedTuple):
    """A 95 % bootstrap interval; `high` may be infinite."""

    low: float
    high: float


def three_digits(x: float) -> str:
    """A number to 3 significant digits, written out where that is readable: 42400, 0.123, 4.24e+09."""
    rounded = f"{x:.3g}"
    return f"{float(rounded):.0f}" if 100 <= abs(float(rounded)) < 1e7 else rounded


def estimate(value: float, interval: Interval | None) -> str:
    """A value with its interval, if it has one, to 3 significant digits: 583 [546, 638]."""
    return three_digits(value) + ("" if interval is None else " [{}, {}]".format(*map(three_digits, interval)))


@dataclass(frozen=True)
class Scaling:
    """K* against batch size at one sparsity.

    The intervals are percentiles over resampled trials, widened to hold the estimate where they miss it: the best of a
    resample is never better than the best of all, so they lean towards larger K*. None without a fit, or where no cell
    has two trials to resample.

    Attributes:
        k_star: K* of each batch size that has a complete trial, in steps, ascending.
        fit: The law; None with fewer than two such batch sizes.
        c1: Interval of c1, in examples.
        c2: Interval of c2, in steps.
        critical: Interval of B_crit = c1 / c2, in examples.
        replicates: (R, 2), c1 and c2 of the resamples that could be fitted.
    """

    k_star: dict[int, int]
    fit: Fit | None = None
    c1: Interval | None = None
    c2: Interval | None = None
    critical: Interval | None = None
    replicates: np.ndarray = field(default_factory=lambda: np.empty((0, 2)), repr=False, compare=False)

    @property
    def identifiable(self) -> bool:
        """Whether the data show B_crit: they reach half of it, and c2's lower limit is above zero (see NEGLIGIBLE)."""
        if self.fit is None:
            return False
        largest = max(self.k_star)
        c2 = self.fit.c2 if self.c2 is None else self.c2.low
        return largest >= self.fit.critical_batch_size / 2 and c2 * largest / self.fit.c1 >= NEGLIGIBLE

    @property
    def bound(self) -> float | None:
        """What B_crit exceeds where it is not identifiable, in examples: the lower limit of its interval.

        The largest batch size measured, where that limit is missing or so high that c2 counts as 0. None without a fit.
        """
        if self.fit is None:
            return None
        largest = max(self.k_star)
        if self.critical is None or self.critical.low > largest / NEGLIGIBLE:
            return float(largest)
        return self.critical.low

    def describe(self) -> str:
        """B_crit in words: with its interval, as "not identifiable: B_crit > X", or why there is no fit."""
        if self.fit is None:
            return f"needs complete trials at 2 batch sizes; has {len(self.k_star)}"
        if not self.identifiable:
            return f"not identifiable: B_crit > {three_digits(self.bound)}"
        below = ", below the smallest batch size" if self.fit.critical_batch_size < min(self.k_star) else ""
        return f"B_crit = {estimate(self.fit.critical_batch_size, self.critical)}{below}"

    def band(self, batch_sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Lower and upper 95 % limits of the fitted steps at some batch sizes (n,); None without intervals."""
        if self.fit is None or self.c1 is None:
            return None
        batch = np.asarray(batch_sizes, float)
        low, high = np.percentile(self.replicates[:, :1] / batch + self.replicates[:, 1:], PERCENTILES, axis=0)
        return np.minimum(low, self.fit.steps(batch)), np.maximum(high, self.fit.steps(batch))


def scale(trials: Mapping[int, Sequence[int | None]], replicates: int = REPLICATES, seed: int = 0) -> Scaling:
    """Fits the law to the K* of some cells and bootstraps it over their trials.

    A resample draws as many trials of each cell as it has, with replacement, takes K* over the complete ones (a cell
    without any drops out) and is fitted anew; resamples left with one batch size are left out.

    Args:
        trials: Steps to result of the finished trials by batch size; None for one that is not complete.
        replicates: Number of resamples.
        seed: Of the resampling. The draws of a cell depend on it, its batch size and its number of trials only.
    """
    best = {b: min((k for k in steps if k is not None), default=None) for b, steps in sorted(trials.items())}
    k_star = {b: k for b, k in best.items() if k is not None}
    if len(k_star) < 2:
        return Scaling(k_star)
    fit = fit_scaling(list(k_star), list(k_star.values()))
    if max(len(trials[b]) for b in k_star) < 2:
        return Scaling(k_star, fit)

    steps = np.stack([resample(trials[b], replicates, (seed, b)) for b in k_star], axis=1)
    steps = steps[np.isfinite(steps).sum(axis=1) >= 2]
    if not len(steps):
        return Scaling(k_star, fit)
    distinct, index = np.unique(steps, axis=0, return_inverse=True)  # few trials give the same resample again and again
    fits = fit_many(np.array(list(k_star), float), distinct)[index.reshape(-1)]
    c1, c2 = (percentile_interval(fits[:, i], value) for i, value in enumerate((fit.c1, fit.c2)))
    inverse = percentile_interval(fits[:, 1] / fits[:, 0], fit.c2 / fit.c1)  # 1 / B_crit: finite where c2 is 0
    critical = Interval(*(1 / x if x > 0 else np.inf for x in reversed(inverse)))
    return Scaling(k_star, fit, c1, c2, critical, fits)


def resample(steps: Sequence[int | None], replicates: int, seed: tuple[int, int]) -> np.ndarray:
    """K* of resamples of one cell, each of as many trials as it has, drawn with replacement.

    Cells with the same number of trials and the same seed are resampled by the same points of the search.

    Args:
        steps: Steps to result of the finished trials; None for one that is not complete.
        replicates: Number of resamples R.
        seed: Seed of the study's resampling, and batch size.

    Returns:
        (R,) in steps; nan where none of the drawn trials is complete.
    """
    known = np.array([np.inf if k is None else k for k in steps], float)
    drawn = known[np.random.default_rng(seed).integers(len(known), size=(replicates, len(known)))].min(axis=1)
    return np.where(np.isfinite(drawn), drawn, np.nan)


def percentile_interval(values: np.ndarray, estimate: float) -> Interval:
    """The 95 % percentile interval of resampled values (n,), widened to hold the estimate."""
    low, high = np.percentile(values, PERCENTILES)
    return Interval(float(min(low, estimate)), float(max(high, estimate)))


def scaling_of(record: StudyRecord, replicates: int = REPLICATES) -> dict[float, Scaling]:
    """The scaling law of each sparsity of a study, from the trials finished so far."""
    steps = {s: {} for s in record.sparsities}
    for cell in record.cells:
        steps[cell.sparsity][cell.batch_size] = [result.steps for result in record.told(cell)]
    return {sparsity: scale(trials, replicates) for sparsity, trials in steps.items()}


class FittedStudy(NamedTuple):
    """A study with the scaling law of each of its sparsities."""

    record: StudyRecord
    scalings: Mapping[float, Scaling]
