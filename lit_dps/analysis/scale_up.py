"""Steps to a goal at a larger size of data or model, from smaller sizes: `fit_scale_up`.

The law is K(B, D) = c1(D) / B + c2(D), with powers c1 = a1 D^p1 and c2 = a2 D^p2 of the size D. So
B_crit = c1 / c2 is a power of D too. For language models, Bergsma et al. (2025, arXiv 2505.13738)
find the power 0.47 of the tokens, and Zhang et al. (2024, arXiv 2410.21676) a similar one.

Given B_crit(D), log K is linear in log a1 and p1. So the posterior is a grid over B_crit at the
mean size and over its power; the rest is known in closed form (normal errors of log K, a flat prior
of log a1 and p1, and the prior of the error that `law_fit` uses). Lower bounds weight the draws by
the probability that the law keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pandas as pd
from scipy import special

from lit_dps.analysis.intervals import Interval, percentile_interval
from lit_dps.analysis.law import ERROR_PER_DOUBLING, MAX_EXTRAPOLATION, Law, doublings_beyond
from lit_dps.analysis.law_fit import MIN_BATCH_SIZES, PRIOR_POINTS, TYPICAL_ERROR
from lit_dps.analysis.law_verdict import MAX_MISFIT
from lit_dps.analysis.observations import AT_LEAST, AT_MOST, is_censored
from lit_dps.analysis.tables import listed_numbers, numbers
from lit_dps.core.errors import ConfigError
from lit_dps.core.text import number_text
from lit_dps.core.trial import Series

COLUMNS = ("size", "batch_size", "steps")
CENSORED = "censored"
MIN_SIZES = 3
# The largest size over the smallest. Closer sizes do not show a power.
MIN_RANGE = 3.0
# K is predicted up to this factor beyond the measured sizes.
MAX_SCALE = 10.0
# The error of log K grows by this for each doubling beyond the measured sizes. The value is the one
# for batch sizes, because we know no public data with K at several sizes that could set it.
ERROR_PER_DOUBLING_OF_SIZE = ERROR_PER_DOUBLING
# Variance of the error that all K of a size share, over the variance of the separate error of each
# K. On models of 85M to 1.2B parameters (Zhang et al. 2024) the K of a size deviate together.
SHARED_VARIANCE = 1.0
# The search for B_crit extends this factor beyond the measured batch sizes. The search for its
# power of the size has the limits `POWERS`.
MAX_DISTANCE = 100.0
POWERS = (-1.0, 2.0)
CRITICAL_POINTS = 241
POWER_POINTS = 121
DRAWS = 4000
CONSTANTS = 4
# The power of B_crit is known if its 95 % interval spans at most this. The search limits span 3.
MAX_POWER_SPAN = 1.5
# The power is at a limit of the search if more than this share of its draws is within a grid step.
MAX_SHARE_AT_LIMIT = 0.025


@dataclass(frozen=True)
class ScaleUp:
    """The law of steps against batch size and size.

    Attributes:
        sizes: The measured sizes, ascending.
        batch_sizes: The smallest and the largest measured batch size.
        misfit: Root mean square of the residuals of log K, without the error that a size shares.
        reference: The size at which `draws` has c1 and B_crit, the geometric mean of the data.
        draws: (DRAWS, 4): log c1, its power, log B_crit, its power.
        errors: (DRAWS,), standard deviation of the error of one K, in log K. An error that all K
            of a size share has `SHARED_VARIANCE` times its variance.
        deviates: (DRAWS,), standard normal draws.
    """

    sizes: tuple[float, ...]
    batch_sizes: tuple[float, float]
    misfit: float
    reference: float
    draws: np.ndarray = field(repr=False)
    errors: np.ndarray = field(repr=False)
    deviates: np.ndarray = field(repr=False)

    @cached_property
    def power(self) -> Interval:
        """95 % interval of the power of the size by which B_crit grows."""
        return percentile_interval(self.draws[:, 3], float(np.median(self.draws[:, 3])))

    @property
    def is_power_known(self) -> bool:
        """Whether the data show the power of B_crit."""
        return not self.is_power_at_limit and self.power.high - self.power.low <= MAX_POWER_SPAN

    @property
    def is_power_at_limit(self) -> bool:
        """Whether the power of B_crit is at a limit of the search, and may be beyond it."""
        lowest, highest = POWERS
        step = (highest - lowest) / (POWER_POINTS - 1)
        powers = self.draws[:, 3]
        shares = np.mean(powers < lowest + step), np.mean(powers > highest - step)
        return bool(max(shares) > MAX_SHARE_AT_LIMIT)

    def critical(self, size: float) -> Interval:
        """Return the 95 % interval of B_crit at a size, in examples.

        Raises:
            ConfigError: for a size more than `MAX_SCALE` beyond the measured ones.
        """
        self._check(size)
        draws = np.exp(self.draws[:, 2] + self.draws[:, 3] * math.log(size / self.reference))
        return percentile_interval(draws, float(np.median(draws)))

    def samples(self, size: float, batch_sizes: Sequence[float]) -> np.ndarray:
        """Return draws (DRAWS, n) of K at batch sizes (n,), with the law's error.

        Raises:
            ConfigError: for a size more than `MAX_SCALE` beyond the measured ones.
        """
        self._check(size)
        batch = np.asarray(batch_sizes, float)
        x = math.log(size / self.reference)
        c1 = np.exp(self.draws[:, 0] + self.draws[:, 1] * x)
        critical = np.exp(self.draws[:, 2] + self.draws[:, 3] * x)
        steps = c1[:, None] * (1 / batch + 1 / critical[:, None])
        of_batch = ERROR_PER_DOUBLING * doublings_beyond(batch, *self.batch_sizes)
        ends = self.sizes[0], self.sizes[-1]
        of_size = ERROR_PER_DOUBLING_OF_SIZE * doublings_beyond(np.array(size), *ends)
        variance = (1 + SHARED_VARIANCE) * self.errors[:, None] ** 2
        error = np.sqrt(variance + of_batch**2 + of_size**2)
        return steps * np.exp(error * self.deviates[:, None])

    def predict(self, size: float, batch_sizes: Iterable[float]) -> pd.DataFrame:
        """Return one row per batch size: K at a size with its 95 % limits.

        Columns: size, batch_size [examples], steps (the median), low, high, known: "law" at a
        measured size and batch size, "extrapolated", or "refused" for a batch size more than
        `law.MAX_EXTRAPOLATION` beyond the measured ones, without steps.

        Raises:
            ConfigError: for a size more than `MAX_SCALE` beyond the measured ones.
        """
        batch = [float(each) for each in batch_sizes]
        samples = self.samples(size, batch)
        low, high = self.batch_sizes
        rows = []
        for number, batch_size in enumerate(batch):
            row = {"size": float(size), "batch_size": batch_size, "steps": math.nan}
            row |= {"low": math.nan, "high": math.nan, "known": "refused"}
            if low / MAX_EXTRAPOLATION <= batch_size <= high * MAX_EXTRAPOLATION:
                steps = float(np.median(samples[:, number]))
                limits = percentile_interval(samples[:, number], steps)
                is_inside = low <= batch_size <= high and self.sizes[0] <= size <= self.sizes[-1]
                row |= {"steps": steps, "low": limits.low, "high": limits.high}
                row["known"] = "law" if is_inside else "extrapolated"
            rows.append(row)
        return pd.DataFrame(rows, columns=["size", "batch_size", "steps", "low", "high", "known"])

    def describe(self) -> str:
        """Return how B_crit grows with the size, in a line."""
        low, middle, high = self.power.low, float(np.median(self.draws[:, 3])), self.power.high
        if not self.is_power_known:
            text = (
                "how B_crit grows with the size is not identifiable: the 95 % interval of its "
                f"power is [{low:.2f}, {high:.2f}]"
            )
            if self.is_power_at_limit:
                lowest, highest = POWERS
                text += (
                    f", at an end of the search from {lowest:g} to {highest:g}. So K beyond the "
                    "measured sizes may be wrong"
                )
            return f"{text}. Measure larger batch sizes, or more sizes"
        return (
            f"B_crit grows with the power {middle:.2f} [{low:.2f}, {high:.2f}] of the size, from "
            f"{number_text(self.sizes[0])} to {number_text(self.sizes[-1])}"
        )

    def _check(self, size: float) -> None:
        low = self.sizes[0] / MAX_SCALE
        high = self.sizes[-1] * MAX_SCALE
        if not low <= size <= high:
            allowed = (
                f"a size from {number_text(low, 4)} to {number_text(high, 4)}, at most "
                f"{MAX_SCALE:g} times beyond the measured sizes"
            )
            raise ConfigError("size", size, allowed, "Measure K at sizes closer to it")


def fit_scale_up(runs: pd.DataFrame) -> ScaleUp:
    """Return the law of steps against batch size and size.

    Args:
        runs: A row for each size and batch size: size (such as training examples, or the width of
            the model), batch_size [examples], steps (K, of the best learning rate), and perhaps
            censored: 1 if the goal was not met within these steps, else 0 or missing.

    Raises:
        ConfigError: for columns that are missing, numbers that are not positive, two rows of a size
            and a batch size, too few sizes or batch sizes, or data that do not follow the law.
    """
    _check_runs(runs)
    is_bound = np.zeros(len(runs), bool)
    if CENSORED in runs:
        is_bound = is_censored(runs[CENSORED])
    measured = runs.loc[~is_bound, :]
    bounds = runs.loc[is_bound, :]
    _check_design(measured)
    size = numbers(measured["size"])
    batch = numbers(measured["batch_size"])
    log_k = np.log(numbers(measured["steps"]))
    reference = float(np.exp(np.log(size).mean()))
    grid = _Grid.of(np.log(size / reference), batch, log_k)
    misfit = math.sqrt(float(grid.squares.min()) / (len(log_k) - CONSTANTS))
    if misfit > MAX_MISFIT:
        allowed = (
            f"a table whose steps follow c1 / B + c2 with powers of the size, within "
            f"{number_text(100 * MAX_MISFIT)} %"
        )
        hint = "Tune the learning rate at each size and batch size, or use medians over seeds"
        deviation = f"a table whose steps deviate by {number_text(100 * misfit)} %"
        raise ConfigError("runs", deviation, allowed, hint)
    draws, errors = grid.draw(np.random.default_rng(0))
    deviates = np.random.default_rng(1).standard_normal(DRAWS)
    sizes = tuple(sorted(set(size.tolist())))
    law = ScaleUp(sizes, (batch.min(), batch.max()), misfit, reference, draws, errors, deviates)
    if len(bounds):
        law = _with_bounds(law, bounds)
    return law


@dataclass(frozen=True)
class _Grid:
    """The posterior on a grid of G points (log B_crit at the reference, its power).

    Attributes:
        points: (G, 2).
        coefficients: (G, 2), the least-squares log c1 at the reference and its power.
        squares: (G,), the sum of squared residuals of log K, which are made independent.
        design: (n, 2), the linear design in these units.
    """

    points: np.ndarray
    coefficients: np.ndarray
    squares: np.ndarray
    design: np.ndarray

    @classmethod
    def of(cls, x: np.ndarray, batch: np.ndarray, log_k: np.ndarray) -> _Grid:
        """Return the grid for log sizes x, batch sizes and log K, each of shape (n,)."""
        low = math.log(batch.min() / MAX_DISTANCE)
        high = math.log(batch.max() * MAX_DISTANCE)
        critical, power = np.meshgrid(
            np.linspace(low, high, CRITICAL_POINTS), np.linspace(*POWERS, POWER_POINTS)
        )
        points = np.stack([critical.ravel(), power.ravel()], axis=1)
        log_critical = points[:, :1] + points[:, 1:] * x
        is_same_size = np.isclose(x[:, None], x)
        covariance = np.eye(len(x)) + SHARED_VARIANCE * is_same_size
        whitening = np.linalg.inv(np.linalg.cholesky(covariance))
        targets = (log_k - np.log(1 / batch + np.exp(-log_critical))) @ whitening.T
        design = whitening @ np.stack([np.ones_like(x), x], axis=1)
        coefficients = targets @ np.linalg.pinv(design).T
        residuals = targets - coefficients @ design.T
        return cls(points, coefficients, (residuals**2).sum(axis=1), design)

    def draw(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return draws (DRAWS, 4) of the constants, and of the standard deviation of log K."""
        # The prior of the variance counts as some points with a typical error.
        squares = self.squares + PRIOR_POINTS * TYPICAL_ERROR**2
        freedom = len(self.design) - self.design.shape[1] + PRIOR_POINTS
        log_weights = -freedom / 2 * np.log(squares)
        weights = np.exp(log_weights - log_weights.max())
        chosen = rng.choice(len(weights), DRAWS, p=weights / weights.sum())
        errors = np.sqrt(squares[chosen] / rng.chisquare(freedom, DRAWS))
        spread = np.linalg.cholesky(np.linalg.inv(self.design.T @ self.design))
        noise = rng.standard_normal((DRAWS, 2)) @ spread.T
        constants = self.coefficients[chosen] + errors[:, None] * noise
        # A draw is anywhere in the cell of its point.
        steps = [_spacing(self.points[:, 0]), _spacing(self.points[:, 1])]
        points = self.points[chosen] + (rng.random((DRAWS, 2)) - 0.5) * steps
        return np.concatenate([constants, points], axis=1), errors


def _spacing(values: np.ndarray) -> float:
    """Return the distance of neighbouring values on a regular grid."""
    distinct = np.unique(values)
    return float(distinct[1] - distinct[0])


def _with_bounds(law: ScaleUp, bounds: pd.DataFrame) -> ScaleUp:
    """Return a law whose draws are resampled by the probability that K exceeds its lower bounds."""
    log_weights = np.zeros(DRAWS)
    columns = [numbers(bounds[name]) for name in COLUMNS]
    for size, batch_size, steps in zip(*columns, strict=True):
        x = math.log(size / law.reference)
        c1 = law.draws[:, 0] + law.draws[:, 1] * x
        critical = law.draws[:, 2] + law.draws[:, 3] * x
        log_k = c1 + np.log(1 / batch_size + np.exp(-critical))
        error = math.sqrt(1 + SHARED_VARIANCE) * law.errors
        log_weights += special.log_ndtr((log_k - math.log(steps)) / error)
    weights = np.exp(log_weights - log_weights.max())
    chosen = np.random.default_rng(2).choice(DRAWS, DRAWS, p=weights / weights.sum())
    return replace(law, draws=law.draws[chosen], errors=law.errors[chosen])


def _check_runs(runs: pd.DataFrame) -> None:
    """Raise ConfigError for columns that are missing or values that are not positive numbers."""
    missing = [name for name in COLUMNS if name not in runs]
    if missing:
        raise ConfigError("runs", list(runs.columns), f"a table with columns {', '.join(COLUMNS)}")
    for name in COLUMNS:
        for value in runs[name].tolist():
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"runs.{name}", value, "a finite number above 0 in every row")
    seen = set()
    for size, batch_size in zip(numbers(runs["size"]), numbers(runs["batch_size"]), strict=True):
        if (size, batch_size) in seen:
            hint = "Take the median over seeds"
            raise ConfigError(
                "runs.batch_size", f"{batch_size:g} twice", "different in all rows of a size", hint
            )
        seen.add((size, batch_size))


def _check_design(measured: pd.DataFrame) -> None:
    """Raise ConfigError for too few sizes, too close ones, or too few batch sizes."""
    of_row = numbers(measured["size"])
    batch = numbers(measured["batch_size"])
    sizes = sorted(set(of_row.tolist()))
    if len(sizes) < MIN_SIZES or sizes[-1] < MIN_RANGE * sizes[0]:
        allowed = (
            f"at least {MIN_SIZES} sizes at which the goal was met, the largest {MIN_RANGE:g} "
            "times the smallest"
        )
        raise ConfigError("runs.size", listed_numbers(sizes), allowed, "Measure K at other sizes")
    for size in sizes:
        batch_sizes = sorted(batch[of_row == size].tolist())
        if len(batch_sizes) < MIN_BATCH_SIZES:
            allowed = f"at least {MIN_BATCH_SIZES} batch sizes at which size {size:g} met the goal"
            hint = "Measure K at more batch sizes"
            raise ConfigError("runs.batch_size", listed_numbers(batch_sizes), allowed, hint)


def runs_of_axis(laws: Mapping[Series, Law], axis: str) -> pd.DataFrame:
    """Return the runs for `fit_scale_up` from the cells of a study whose grid has an axis of sizes.

    Cells whose K is an upper bound are left out.

    Args:
        laws: The law of each series (`Analysis.laws`).
        axis: The configuration key of the size, such as "data.train_examples".

    Raises:
        ConfigError: if the key is no axis of the study, has values that are not positive numbers,
            has several series of one size, such as several sparsities, or series whose K are not
            steps on B examples.
    """
    rows = []
    series_of: dict[float, Series] = {}
    for series, law in laws.items():
        size = dict(series.axes).get(axis)
        if size is None:
            axes = sorted({key for each in laws for key, _ in each.axes})
            raise ConfigError(
                "--scale",
                axis,
                f"an axis of study.grid ({', '.join(axes) or 'the study has none'})",
            )
        if isinstance(size, bool) or not isinstance(size, int | float) or not size > 0:
            raise ConfigError(f"study.grid.{axis}", size, "a number above 0 if --scale is set")
        if size in series_of:
            allowed = (
                f"an axis with one series per size; {series_of[size]} and {series} have the same "
                "size"
            )
            raise ConfigError("--scale", axis, allowed)
        series_of[size] = series
        if not law.is_applicable:
            allowed = f"an axis of series whose law applies: {law.verdict.reason}"
            raise ConfigError("--scale", axis, allowed)
        for observation in law.observations:
            if observation.bound != AT_MOST:
                is_bound = int(observation.bound == AT_LEAST)
                rows.append((size, observation.batch_size, observation.k, is_bound))
    return pd.DataFrame(rows, columns=[*COLUMNS, CENSORED])
