"""The law K = c1 / B + c2 of steps to result against batch size, and how far it can be trusted.

`fit_law` fits it to observations, lower and upper bounds among them, by weighted M-estimation
(`law_fit.fit_many`). It adds an error of the law itself, a posterior of the constants
(`law_posterior`), and a verdict: what is refused, and why. The table, the figures, the answer, the
forecast, advice and the replication all use this law.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from lit_dps.analysis.intervals import (
    NORMAL_95,
    PERCENTILES,
    Interval,
    estimate,
    percentile_interval,
)
from lit_dps.analysis.law_fit import AT_LEAST, AT_MOST, LOSS_SCALE, MIN_BATCH_SIZES, Fit, fit_many
from lit_dps.analysis.law_posterior import DRAWS, posterior
from lit_dps.analysis.observations import Observation, exact, note_on_edges
from lit_dps.analysis.tables import listed_numbers, three_digits

# How far the law itself is off: a prior of the root mean square of log K at a batch size that was
# left out, worth so many points. With 0.05 and 0.03 the 80 % intervals hold 87 % of the 275 K of
# public runs that were left out (`python -m benchmarks law`); with 0.07 and 0.11 they held 95 %.
TYPICAL_ERROR = 0.05
PRIOR_POINTS = 3.0
# What is added to it, in quadrature, for each doubling beyond the measured batch sizes, in log K.
ERROR_PER_DOUBLING = 0.03
# Farther from the measured batch sizes nothing is known.
MAX_EXTRAPOLATION = 16.0
# Standard deviation of log K at a batch size between two measured ones where K follows no law: on
# public curves half of the straight lines between neighbours are off by more than 14 %.
INTERPOLATION_ERROR = 0.2

# Limits of the verdict.
# Batch sizes whose largest is below this times the smallest show no curve.
MIN_RANGE = 1.2
# Share of B_crit that the largest batch size has to reach: c2 is then a third of K there.
MIN_SHARE_OF_CRITICAL = 0.5
# Root mean square of the residuals of log K beyond their noise, above which the law does not
# describe K.
MAX_MISFIT = 0.2
# Log of the fall of K over the range, below which a curve is flat.
MIN_DECLINE = 0.1
# Log of a rise of K with B, above which it may be more than noise.
MAX_RISE = 0.2
# Factor that the 95 % interval of B_crit may span.
MAX_SPAN = 100.0


class Refusal(IntEnum):
    """What a verdict refuses; each value also refuses what the values before it refuse."""

    NOTHING = 0
    # B_crit is not identifiable. K is predicted, up to `MAX_EXTRAPOLATION` times the range.
    CRITICAL = 1
    # The law does not describe K. K is interpolated between the measured batch sizes.
    EXTRAPOLATION = 2
    # Only measured K are answers.
    PREDICTION = 3


@dataclass(frozen=True)
class Verdict:
    """What is refused of a law, and why.

    Attributes:
        refusal: What is refused.
        reason: A clause; empty where nothing is refused.
        bound: What B_crit exceeds, in examples; None where that is not known.
    """

    refusal: Refusal = Refusal.NOTHING
    reason: str = ""
    bound: float | None = None

    def __str__(self) -> str:
        return self.reason


class _Data(NamedTuple):
    """Observations as arrays (n,)."""

    batch_sizes: np.ndarray
    steps: np.ndarray
    variance: np.ndarray
    bounds: np.ndarray

    @classmethod
    def of(cls, observations: Sequence[Observation]) -> _Data:
        """Return the arrays of some observations."""
        names = ("batch_size", "steps", "variance", "bound")
        return cls(*(np.array([getattr(o, n) for o in observations], float) for n in names))

    @property
    def is_exact(self) -> np.ndarray:
        """(n,): whether an observation is K itself, no bound."""
        return self.bounds == 0


@dataclass(frozen=True)
class Law:
    """K(B) = c1 / B + c2, and how far it can be trusted.

    Attributes:
        observations: What it is fitted to, by batch size.
        verdict: What is refused of it, and why.
        fit: c1 [examples] and c2 [steps]; None with fewer than `MIN_BATCH_SIZES` K.
        misfit: Root mean square of the residuals of log K, corrected for two constants; nan without
            a fit.
        misfit_beyond_noise: The part of it that the noise of the observations does not explain.
        error: Standard deviation of log K about the law within the range, from residuals and
            `TYPICAL_ERROR`.
        of_medians: Whether K is the median over seeds of the best point, not K*.
        draws: (DRAWS, 2), c1 and c2 from their posterior; empty without any K.
        deviates: (DRAWS,), of the law's error, in units of its standard deviation.
    """

    observations: tuple[Observation, ...]
    verdict: Verdict = Verdict()
    fit: Fit | None = None
    misfit: float = math.nan
    misfit_beyond_noise: float = math.nan
    error: float = TYPICAL_ERROR
    of_medians: bool = False
    draws: np.ndarray = field(default_factory=lambda: np.empty((0, 2)), repr=False, compare=False)
    deviates: np.ndarray = field(default_factory=lambda: np.zeros(DRAWS), repr=False, compare=False)

    # What it is fitted to

    @cached_property
    def k_star(self) -> dict[int, float]:
        """K by batch size, ascending; upper bounds are among them, lower bounds are not."""
        k_star = {}
        for o in self.observations:
            if o.bound != AT_LEAST:
                k_star[_integer(o.batch_size)] = _integer(o.steps)
        return k_star

    @cached_property
    def upper_bounds(self) -> frozenset[int]:
        """The batch sizes whose K is only an upper bound."""
        return frozenset(_integer(o.batch_size) for o in self.observations if o.bound == AT_MOST)

    @cached_property
    def resolved(self) -> dict[int, float]:
        """K by batch size, without bounds."""
        return {b: k for b, k in self.k_star.items() if b not in self.upper_bounds}

    @cached_property
    def limits(self) -> dict[int, Interval]:
        """95 % limits of each K alone, by batch size, where its noise is known."""
        limits = {}
        for o in self.observations:
            if o.limits is not None:
                limits[_integer(o.batch_size)] = o.limits
        return limits

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and largest batch size with a K; nan without any."""
        sizes = [o.batch_size for o in exact(self.observations)] or [math.nan]
        return min(sizes), max(sizes)

    # The constants

    @property
    def identifiable(self) -> bool:
        """Whether the data show B_crit: nothing is refused."""
        return self.verdict.refusal is Refusal.NOTHING

    @cached_property
    def c1(self) -> Interval | None:
        """95 % interval of c1, in examples; None without a fit."""
        if self.fit is None:
            return None
        return percentile_interval(self.draws[:, 0], self.fit.c1)

    @cached_property
    def c2(self) -> Interval | None:
        """95 % interval of c2, in steps; None without a fit."""
        if self.fit is None:
            return None
        return percentile_interval(self.draws[:, 1], self.fit.c2)

    @cached_property
    def critical(self) -> Interval | None:
        """95 % interval of B_crit = c1 / c2, in examples; None without a fit."""
        if self.fit is None:
            return None
        ratios = self.draws[:, 0] / self.draws[:, 1]
        return percentile_interval(ratios, self.fit.critical_batch_size)

    # Predictions

    @property
    def reach(self) -> tuple[float, float]:
        """The batch sizes between which K is predicted; nan if only measured K are answers."""
        low, high = self.range
        if self.verdict.refusal <= Refusal.CRITICAL:
            return low / MAX_EXTRAPOLATION, high * MAX_EXTRAPOLATION
        if self.verdict.refusal is Refusal.EXTRAPOLATION:
            return low, high
        return math.nan, math.nan

    def steps(self, batch_size: Any) -> Any:
        """Return the fitted steps at a batch size (number or array), also if the law is refused.

        Raises:
            ValueError: without a fit.
        """
        if self.fit is None:
            raise ValueError(f"no law: {self.verdict}")
        return self.fit.steps(batch_size)

    def samples(self, batch_sizes: Any) -> np.ndarray:
        """Return steps (DRAWS, n) at batch sizes (n,) within `reach`: the posterior predictive.

        They contain the uncertainty of the constants and the law's own error, or, where the law
        does not describe K, the error of interpolation.
        """
        batch = np.asarray(batch_sizes, float)
        if self.verdict.refusal is Refusal.EXTRAPOLATION:
            log_steps, error = self._interpolated(batch)
            return np.exp(log_steps + error * self.deviates[:, None])
        return self._law_samples(batch)

    def _law_samples(self, batch: np.ndarray) -> np.ndarray:
        """Return steps (DRAWS, n) by the law, also where it is refused."""
        c1, c2 = (column[:, None] for column in self.draws.T)
        low, high = self.range
        doublings_beyond = np.log2(np.maximum(1.0, np.maximum(batch / high, low / batch)))
        error = np.sqrt(self.error**2 + (ERROR_PER_DOUBLING * doublings_beyond) ** 2)
        return (c1 / batch + c2) * np.exp(error * self.deviates[:, None])

    def _interpolated(self, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log K (n,) on chords between measured batch sizes, and its standard deviation."""
        measured = exact(self.observations)
        log_b = np.log([o.batch_size for o in measured])
        x = np.log(batch)
        log_steps = np.interp(x, log_b, np.log([o.steps for o in measured]))
        variance = np.interp(x, log_b, [_known_variance(o) for o in measured])
        is_measured = np.isclose(x[:, None], log_b).any(axis=1)
        error = np.where(is_measured, 0.0, INTERPOLATION_ERROR)
        return log_steps, np.sqrt(variance + error**2)

    def predict(self, batch_sizes: Iterable[float]) -> pd.DataFrame:
        """Return steps to result at some batch sizes, with 95 % limits.

        Columns: batch_size [examples], steps, low and high [steps], and known: "law",
        "extrapolated", "interpolated" or "measured" (where the law is refused), or "refused", where
        the steps are missing.
        """
        measured = {o.batch_size: o for o in exact(self.observations)}
        rows = []
        for b in map(float, batch_sizes):
            row: dict[str, object] = {"batch_size": b, "steps": None, "low": None, "high": None}
            low, high = self.reach
            if self.verdict.refusal >= Refusal.EXTRAPOLATION and b in measured:
                row |= _measured_steps(measured[b])
            elif low <= b <= high:
                row |= self._prediction(b)
            else:
                row["known"] = "refused"
            rows.append(row)
        columns = ["batch_size", "steps", "low", "high", "known"]
        return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[:-1], float))

    def _prediction(self, batch_size: float) -> dict[str, object]:
        """Return the columns of `predict` at a batch size within `reach`."""
        if self.verdict.refusal is Refusal.EXTRAPOLATION:
            known = "interpolated"
            steps = math.exp(self._interpolated(np.array([batch_size]))[0][0])
        else:
            low, high = self.range
            known = "law" if low <= batch_size <= high else "extrapolated"
            steps = float(self.steps(batch_size))
        limits = percentile_interval(self.samples([batch_size])[:, 0], steps)
        return {"steps": steps, "low": limits.low, "high": limits.high, "known": known}

    def band(self, batch_sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the 95 % limits (n,) of the law at some batch sizes (n,); None without a fit."""
        if self.fit is None:
            return None
        low, high = np.percentile(self._law_samples(batch_sizes), PERCENTILES, axis=0)
        fitted = self.fit.steps(batch_sizes)
        return np.minimum(low, fitted), np.maximum(high, fitted)

    def draw_observations(self, count: int, name: str) -> np.ndarray:
        """Return draws (count, n) of the n K in `resolved`; none if no noise or check is known.

        Args:
            count, name: As of `Observation.draws`.
        """
        measured = exact(self.observations)
        if not any(o.variance for o in measured):
            return np.empty((0, len(measured)))
        return np.stack([o.draws(count, name) for o in measured], axis=1)

    def observation(self, batch_size: float) -> Observation | None:
        """Return the observation at a batch size; None without one."""
        for o in self.observations:
            if o.batch_size == batch_size:
                return o
        return None

    # In words

    @property
    def notes(self) -> list[str]:
        """Notes on the law for a reader, a line each."""
        lines = []
        if not self.identifiable:
            lines.append(f"the law is not identifiable: {self.verdict}")
        edges = note_on_edges(self.observations)
        if edges:
            lines.append(edges)
        return lines

    def describe(self) -> str:
        """Return B_crit in words: its interval, or why it is not identifiable."""
        if self.fit is None:
            return str(self.verdict)
        if not self.identifiable:
            return f"not identifiable: {self.verdict}"
        text = f"B_crit = {estimate(self.fit.critical_batch_size, self.critical)}"
        if self.fit.critical_batch_size < self.range[0]:
            text += ", below the smallest batch size"
        return text

    def line(self) -> str:
        """Return the law in a line: its constants with their intervals, and `describe`."""
        if self.fit is None:
            return self.describe()
        constants = f"c1 = {estimate(self.fit.c1, self.c1)}  c2 = {estimate(self.fit.c2, self.c2)}"
        return f"{constants}  {self.describe()}"


def _integer(number: float) -> Any:
    """Return a number as an integer if it is one."""
    return int(number) if number == int(number) else number


def _known_variance(observation: Observation) -> float:
    """Return the variance of log K of an observation, that of `LOSS_SCALE` if it is unknown."""
    return observation.variance or LOSS_SCALE**2


def _measured_steps(observation: Observation) -> dict[str, object]:
    """Return K of an observation with its 95 % limits, as columns of `Law.predict`."""
    k = observation.steps
    half_width = NORMAL_95 * math.sqrt(_known_variance(observation))
    low, high = k * math.exp(-half_width), k * math.exp(half_width)
    return {"steps": k, "low": low, "high": high, "known": "measured"}


def fit_law(
    observations: Iterable[Observation],
    expected: tuple[float, float] | None = None,
    of_medians: bool = False,
) -> Law:
    """Return the law of some observations, bounds among them, with its verdict.

    Args:
        observations: At most one a batch size.
        expected: Other evidence on B_crit, such as a noise scale: its value [examples] and the
            standard deviation of its logarithm. It narrows the posterior alone, not the fit.
        of_medians: Whether the observations are medians over seeds, not K*.

    Raises:
        ValueError: for two observations of one batch size.
    """
    observations = tuple(sorted(observations))
    if len({o.batch_size for o in observations}) < len(observations):
        raise ValueError("more than one observation of a batch size: take their median (`medians`)")
    verdict = Verdict()
    reason = _why_not_fitted(observations)
    if reason:
        verdict = Verdict(Refusal.PREDICTION, reason)
    law = Law(observations, verdict, of_medians=of_medians)
    if not exact(observations):
        return law
    law = _fitted(law, expected)
    if reason:
        return law
    return replace(law, verdict=_verdict(law))


def _why_not_fitted(observations: Sequence[Observation]) -> str:
    """Return what is missing for a law at all; empty if nothing is."""
    sizes = [o.batch_size for o in exact(observations)]
    if len(sizes) < MIN_BATCH_SIZES:
        listed = f" ({listed_numbers(sizes)})" if sizes else ""
        reason = f"K is known at {len(sizes)} batch sizes{listed}; {MIN_BATCH_SIZES} are needed"
        upper_bounds = sum(o.bound == AT_MOST for o in observations)
        if upper_bounds:
            reason += f", and {upper_bounds} K are upper bounds"
        return reason
    if max(sizes) <= MIN_RANGE * min(sizes):
        span = max(sizes) / min(sizes) - 1
        return f"all batch sizes lie within {100 * span:.0f} %: {listed_numbers(sizes)}"
    return ""


def _verdict(law: Law) -> Verdict:
    """Return what is refused of a fitted law: K rises, a misfit, a flat curve, B_crit not shown."""
    assert law.fit is not None and law.critical is not None
    rise = _rise(exact(law.observations))
    if rise:
        return Verdict(Refusal.PREDICTION, rise)
    if law.misfit_beyond_noise > MAX_MISFIT:
        reason = f"c1 / B + c2 does not fit: it misses K by {law.misfit:.0%}"
        return Verdict(Refusal.EXTRAPOLATION, reason)
    low, high = law.range
    fall = math.log(float(law.steps(low)) / float(law.steps(high)))
    if fall < MIN_DECLINE:
        share = 1 - math.exp(-fall)
        reason = f"K is flat: it falls by {share:.0%} from B = {low:g} to {high:g}"
        return Verdict(Refusal.CRITICAL, reason)
    bound = law.critical.low
    if high < MIN_SHARE_OF_CRITICAL * law.fit.critical_batch_size:
        return Verdict(Refusal.CRITICAL, f"B_crit > {three_digits(bound)}", bound)
    if law.critical.high > MAX_SPAN * bound:
        interval = f"[{three_digits(bound)}, {three_digits(law.critical.high)}]"
        reason = f"the 95 % interval of B_crit, {interval}, spans more than x{MAX_SPAN:g}"
        return Verdict(Refusal.CRITICAL, reason, bound)
    return Verdict()


def _rise(observations: Iterable[Observation]) -> str:
    """Return the first rise of K with the batch size that is more than noise; empty if none is."""
    ascending = sorted(observations)
    for i, before in enumerate(ascending):
        for after in ascending[i + 1 :]:
            rise = math.log(after.steps / before.steps)
            noise = math.sqrt(before.variance + after.variance + 2 * TYPICAL_ERROR**2)
            if rise > max(MAX_RISE, 3 * noise):
                return (
                    f"K rises from {before.steps:.0f} at B = {before.batch_size:g} to "
                    f"{after.steps:.0f} at {after.batch_size:g}; is the rate tuned at each batch "
                    "size?"
                )
    return ""


def _fitted(law: Law, expected: tuple[float, float] | None) -> Law:
    """Return a law with constants, their posterior and its error; without a fit of too few K."""
    data = _Data.of(law.observations)
    is_exact = data.is_exact
    free = max(int(is_exact.sum()) - 2, 0)
    degrees = PRIOR_POINTS + free
    error = TYPICAL_ERROR
    misfit, misfit_beyond_noise = math.nan, math.nan
    fit = None
    if int(is_exact.sum()) >= MIN_BATCH_SIZES:
        # Weights need the law's own error, and the error needs the residuals: iterate once.
        for _ in range(2):
            weights = 1 / (data.variance + error**2)
            weights = weights / weights[is_exact].mean()
            ((c1, c2),) = fit_many(
                data.batch_sizes, data.steps[None], LOSS_SCALE, weights, data.bounds
            )
            fit = Fit(float(c1), float(c2))
            residuals = np.log(data.steps) - np.log(fit.steps(data.batch_sizes))
            squares = residuals[is_exact] ** 2
            excess = max(0.0, float((squares - data.variance[is_exact]).sum()))
            error = math.sqrt((PRIOR_POINTS * TYPICAL_ERROR**2 + excess) / degrees)
            misfit = math.sqrt(float(squares.sum()) / free)
            misfit_beyond_noise = math.sqrt(excess / free)
    deviation = np.sqrt(data.variance + error**2)
    draws = posterior(data.batch_sizes, data.steps, deviation, data.bounds, expected)
    # The error is an estimate from few residuals, so deviations from the law follow Student's t.
    deviates = special.stdtrit(degrees, (np.arange(DRAWS) + 0.5) / DRAWS)
    np.random.default_rng(0).shuffle(deviates)
    return replace(
        law,
        fit=fit,
        misfit=misfit,
        misfit_beyond_noise=misfit_beyond_noise,
        error=error,
        draws=draws,
        deviates=deviates,
    )
