"""The law K = c1 / B + c2 as an answer: predictions with intervals, or why it is refused.

`law_of` fits it to observations, lower and upper bounds among them, by weighted M-estimation
(`law_fit.fit_many`). It adds an error of the law itself, a posterior of the constants
(`law_posterior`), an alternative form with a minimum of examples, and a verdict: the reasons not to
trust any of it. `law_bootstrap` is the other law of this room: the table's, with bootstrap
intervals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from lit_dps.analysis.law_fit import LOSS_SCALE, MIN_BATCH_SIZES, Fit, fit_many
from lit_dps.analysis.law_posterior import DRAWS, grid_of_bends, posterior
from lit_dps.analysis.observations import Observation, exact, note_on_edges
from lit_dps.analysis.tables import listed_numbers, three_digits

# How far the law itself is off: a prior of the root mean square of log K at a batch size that was
# left out, worth so many points. 7 % is the median of public curves (docs/advice-law.md).
TYPICAL_ERROR = 0.07
PRIOR_POINTS = 3.0
# What is added to it for each doubling beyond the measured batch sizes, in log K. On public curves
# 9 of 10 errors are below 20 % up to 2 times the largest batch size, 38 % up to 4 times, 71 % up to
# 16 times. Farther nothing is known.
ERROR_PER_DOUBLING = 0.11
MAX_EXTRAPOLATION = 16.0
# The form with c3 is tried above this misfit of the additive law, and taken if an F test of the
# further constant is significant at this level.
MIN_MISFIT_FOR_OPTIMUM = 0.05
SIGNIFICANCE = 0.05

# Limits of the verdict.
# Batch sizes whose largest is below this times the smallest show no curve.
MIN_RANGE = 1.2
# Share of B_crit that the largest batch size has to reach: c2 is then a third of K there.
MIN_SHARE_OF_CRITICAL = 0.5
# Root mean square of the residuals of log K, above which the law does not describe K.
MAX_MISFIT = 0.2
# Log of the fall of K over the range, below which a curve is flat.
MIN_DECLINE = 0.1
# Log of a rise of K with B, above which it may be more than noise.
MAX_RISE = 0.2
# Factor that the 95 % interval of B_crit may span.
MAX_SPAN = 100.0


@dataclass(frozen=True)
class Reason:
    """Why a law is not identifiable.

    Attributes:
        why: A clause.
        within: Whether the law still describes K between the measured batch sizes.
    """

    why: str
    within: bool = False

    def __str__(self) -> str:
        return self.why


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
    """K(B) = c1 / B + c2, or with c3 / B^2 added, and how far it can be trusted.

    Attributes:
        observations: What it is fitted to, by batch size.
        form: "additive"; "optimum" with c3, whose examples to goal B K(B) have a minimum at sqrt(c3
            / c2).
        fit: c1 [examples] and c2 [steps]; None with fewer than 2 batch sizes with a K.
        c3: [examples^2 steps]; 0 of the additive form.
        misfit: Root mean square of the residuals of log K, corrected for the number of constants;
            nan without a fit.
        error: Standard deviation of log K about the law within the range, from residuals and
            `TYPICAL_ERROR`.
        refused: Why it is not identifiable, or None.
        draws: (DRAWS, 3), c1, c2, c3 from their posterior.
        deviates: (DRAWS,), of the law's error, in units of its standard deviation.
        evidence: Log of the marginal likelihood of the form (`posterior`).
        expected: Other evidence on B_crit (`law_of`).
    """

    observations: tuple[Observation, ...]
    form: Literal["additive", "optimum"] = "additive"
    fit: Fit | None = None
    c3: float = 0.0
    misfit: float = math.nan
    error: float = math.nan
    refused: Reason | None = None
    draws: np.ndarray = field(default_factory=lambda: np.empty((0, 3)), repr=False, compare=False)
    deviates: np.ndarray = field(default_factory=lambda: np.empty(0), repr=False, compare=False)
    evidence: float = field(default=-math.inf, repr=False, compare=False)
    expected: tuple[float, float] | None = None

    @cached_property
    def mixed(self) -> np.ndarray:
        """(n, 3): `draws` and draws of the other form, in proportion to their probabilities."""
        if self.fit is None or len(exact(self.observations)) < MIN_BATCH_SIZES:
            return self.draws
        data = _Data.of(self.observations)
        deviation = np.sqrt(data.variance + self.error**2)
        other_has_c3 = self.form == "additive"
        others, evidence = posterior(
            data.batch_sizes, data.steps, deviation, data.bounds, other_has_c3, self.expected
        )
        share = math.exp(min(evidence - self.evidence, 0.0))
        return np.concatenate([self.draws, others[: round(share * DRAWS)]])

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and largest batch size with a K; nan without any."""
        sizes = [o.batch_size for o in exact(self.observations)] or [math.nan]
        return min(sizes), max(sizes)

    @property
    def reach(self) -> tuple[float, float]:
        """The batch sizes between which the law answers; nan if only measured K are answers.

        An identifiable law answers up to `MAX_EXTRAPOLATION` times beyond its range, a law whose
        range is too short only within it.
        """
        low, high = self.range
        if self.refused is None:
            return low / MAX_EXTRAPOLATION, high * MAX_EXTRAPOLATION
        if self.refused.within and self.fit is not None:
            return low, high
        return math.nan, math.nan

    def steps(self, batch_size: Any) -> Any:
        """Return the fitted steps at a batch size (number or array), also if the law is refused.

        Raises:
            ValueError: without a fit.
        """
        if self.fit is None:
            raise ValueError(f"no law: {self.refused}")
        return self.fit.steps(batch_size) + self.c3 / np.asarray(batch_size, float) ** 2

    def samples(self, batch_sizes: Any) -> np.ndarray:
        """Return steps (DRAWS, n) at batch sizes (n,) within `reach`: the posterior predictive.

        They contain the uncertainty of the constants and the law's own error.
        """
        batch = np.asarray(batch_sizes, float)
        c1, c2, c3 = (column[:, None] for column in self.draws.T)
        low, high = self.range
        doublings_beyond = np.log2(np.maximum(1.0, np.maximum(batch / high, low / batch)))
        error = np.sqrt(self.error**2 + (ERROR_PER_DOUBLING * doublings_beyond) ** 2)
        return (c1 / batch + c2 + c3 / batch**2) * np.exp(error * self.deviates[:, None])

    def predict(self, batch_sizes: Iterable[float]) -> pd.DataFrame:
        """Return steps to result at some batch sizes, with 95 % limits.

        Columns: batch_size [examples], steps, low and high [steps], and known: "law",
        "extrapolated", "measured" (K itself, where the law is refused), or "refused", where the
        steps are missing.
        """
        batch = np.array(list(batch_sizes), float)
        low, high = self.reach
        first, last = self.range
        measured = {o.batch_size: o for o in exact(self.observations)}
        limits = np.full((2, len(batch)), np.nan)
        answered = np.flatnonzero((low <= batch) & (batch <= high))
        if len(answered):
            samples = self.samples(batch[answered])
            limits[:, answered] = np.percentile(samples, (2.5, 97.5), axis=0)
        rows = []
        for b, (least, most) in zip(batch, limits.T, strict=True):
            row = {"batch_size": float(b), "steps": None, "low": None, "high": None}
            if low <= b <= high:
                steps = float(self.steps(b))
                row |= {"steps": steps, "low": min(steps, least), "high": max(steps, most)}
                row["known"] = "law" if first <= b <= last else "extrapolated"
            elif b in measured:
                row |= _measured_steps(measured[b])
                row["known"] = "measured"
            else:
                row["known"] = "refused"
            rows.append(row)
        return pd.DataFrame(rows).astype({"steps": float, "low": float, "high": float})

    @property
    def critical(self) -> tuple[float, float, float]:
        """B_crit = c1 / c2 in examples and its 95 % limits; nan without a fit."""
        if self.fit is None:
            return math.nan, math.nan, math.nan
        low, high = np.percentile(self.draws[:, 0] / self.draws[:, 1], (2.5, 97.5))
        value = self.fit.critical_batch_size
        return value, float(min(low, value)), float(max(high, value))

    @property
    def notes(self) -> list[str]:
        """Notes on the law for a reader, a line each."""
        lines = []
        if self.refused:
            lines.append(f"the law is not identifiable, because {self.refused}")
        if self.form == "optimum" and self.fit is not None:
            optimum = "no floor seen"
            if self.fit.c2:
                batch_size = three_digits(math.sqrt(self.c3 / self.fit.c2))
                optimum = f"fewest examples to goal at B = {batch_size}"
            lines.append(
                f"c1 / B + c2 misses what was measured, c3 / B^2 is added to it: {optimum}"
            )
        edges = note_on_edges(self.observations)
        if edges:
            lines.append(edges)
        return lines

    def describe(self) -> str:
        """Return the law in a line."""
        if self.fit is None or self.refused:
            return f"not identifiable, because {self.refused}"
        constants = f"c1 = {three_digits(self.fit.c1)}  c2 = {three_digits(self.fit.c2)}"
        if self.form == "optimum":
            constants += f"  c3 = {three_digits(self.c3)}"
        value, low, high = map(three_digits, self.critical)
        return f"{constants}  B_crit = {value} [{low}, {high}]  misfit {self.misfit:.0%}"


def _measured_steps(observation: Observation) -> dict[str, float]:
    """Return K of an observation with its 95 % limits, as columns of `Law.predict`."""
    k = observation.steps
    half_width = 1.96 * math.sqrt(observation.variance or LOSS_SCALE**2)
    return {"steps": k, "low": k * math.exp(-half_width), "high": k * math.exp(half_width)}


def law_of(observations: Iterable[Observation], expected: tuple[float, float] | None = None) -> Law:
    """Return the law of some observations, bounds among them, with its verdict.

    Args:
        observations: At most one a batch size.
        expected: Other evidence on B_crit, such as a noise scale: its value [examples] and the
            standard deviation of its logarithm. It narrows the posterior alone, not the fit.

    Raises:
        ValueError: for two observations of one batch size.
    """
    observations = tuple(sorted(observations))
    if len({o.batch_size for o in observations}) < len(observations):
        raise ValueError("more than one observation of a batch size: take their median (`medians`)")
    reason = _why_not_fitted(observations)
    count = len(exact(observations))
    if count < 2:
        return _unfitted(observations, reason, expected)
    law = _fitted(observations, "additive", expected)
    if reason is None and count > 4 and law.misfit > MIN_MISFIT_FOR_OPTIMUM:
        other = _fitted(observations, "optimum", expected)
        if other.c3 > 0 and _p_value(law.misfit, other.misfit, count - 3) < SIGNIFICANCE:
            law = other
    if reason is None:
        reason = _why_not_identifiable(law)
    if reason is None:
        return law
    return replace(law, refused=reason)


def _p_value(misfit: float, misfit_with_c3: float, free: int) -> float:
    """Return the p-value of the F test of c3, with `free` degrees of freedom beside it."""
    gain = ((misfit / misfit_with_c3) ** 2 * (free + 1) / free - 1) * free
    return float(special.fdtrc(1, free, max(gain, 0.0)))


def _why_not_fitted(observations: Sequence[Observation]) -> Reason | None:
    """Return what is missing for a law at all."""
    sizes = [o.batch_size for o in exact(observations)]
    if len(sizes) < MIN_BATCH_SIZES:
        listed = listed_numbers(sizes) or "none"
        return Reason(
            f"K is known at {len(sizes)} batch sizes ({listed}), and {MIN_BATCH_SIZES} are needed"
        )
    if max(sizes) <= MIN_RANGE * min(sizes):
        span = max(sizes) / min(sizes) - 1
        return Reason(f"all batch sizes lie within {100 * span:.0f} %: {listed_numbers(sizes)}")
    return None


def _why_not_identifiable(law: Law) -> Reason | None:
    """Return why a fitted law is refused: K rises, a misfit, a flat curve, or B_crit out of sight.

    None if it is not refused.
    """
    low, high = law.range
    rise = _rise(exact(law.observations))
    if rise is not None:
        return rise
    if law.misfit > MAX_MISFIT:
        other_form = "with too few points for another"
        if len(exact(law.observations)) > 4:
            other_form = "nor does c3 / B^2 mend it"
        return Reason(f"c1 / B + c2 does not fit: it misses K by {law.misfit:.0%}, {other_form}")
    fall = math.log(float(law.steps(low)) / float(law.steps(high)))
    if fall < MIN_DECLINE:
        share = 1 - math.exp(-fall)
        return Reason(
            f"K is flat: it falls by {share:.0%} from B = {low:g} to {high:g}", within=True
        )
    value, least, most = law.critical
    if high < MIN_SHARE_OF_CRITICAL * value:
        what = "B_crit is far"
        if value > 10 * high:
            what = "K falls in proportion to 1 / B as far as it is measured"
        return Reason(
            f"{what}: the largest B, {high:g}, is below half of B_crit, which lies above "
            f"{three_digits(max(least, high))}",
            within=True,
        )
    if most > MAX_SPAN * least:
        interval = f"[{three_digits(least)}, {three_digits(most)}]"
        return Reason(
            f"the 95 % interval of B_crit, {interval}, spans more than a factor of {MAX_SPAN:g}",
            within=True,
        )
    return None


def _rise(observations: Iterable[Observation]) -> Reason | None:
    """Return the first rise of K with the batch size that is more than noise; None without one."""
    ascending = sorted(observations)
    for before in ascending:
        for after in ascending:
            if after.batch_size <= before.batch_size:
                continue
            rise = math.log(after.steps / before.steps)
            noise = math.sqrt(before.variance + after.variance + 2 * TYPICAL_ERROR**2)
            if rise > max(MAX_RISE, 3 * noise):
                ends = (
                    f"{before.steps:.0f} at B = {before.batch_size:g} to {after.steps:.0f} at "
                    f"{after.batch_size:g}"
                )
                return Reason(
                    f"K rises, from {ends}, which no law of it does: is the rate tuned at each "
                    "batch size?"
                )
    return None


def _unfitted(
    observations: tuple[Observation, ...],
    reason: Reason | None,
    expected: tuple[float, float] | None,
) -> Law:
    """Return the law of fewer than two K: no fit, but a posterior if there is one K."""
    if not exact(observations):
        return Law(observations, refused=reason)
    data = _Data.of(observations)
    deviation = np.sqrt(data.variance + TYPICAL_ERROR**2)
    draws, _ = posterior(data.batch_sizes, data.steps, deviation, data.bounds, False, expected)
    return Law(observations, refused=reason, draws=draws, error=TYPICAL_ERROR)


def _fitted(
    observations: tuple[Observation, ...],
    form: Literal["additive", "optimum"],
    expected: tuple[float, float] | None,
) -> Law:
    """Return a law of one form, without a verdict."""
    data = _Data.of(observations)
    is_exact = data.is_exact
    constants = 3 if form == "optimum" else 2
    free = max(int(is_exact.sum()) - constants, 0)
    degrees = PRIOR_POINTS + free
    error = TYPICAL_ERROR
    c1, c2, c3 = math.nan, math.nan, math.nan
    squares = np.empty(0)
    # Weights need the law's own error, and the error needs the residuals: iterate once.
    for _ in range(2):
        weights = 1 / (data.variance + error**2)
        c1, c2, c3 = _constants(data, weights / weights[is_exact].mean(), form)
        fitted = c1 / data.batch_sizes + c2 + c3 / data.batch_sizes**2
        squares = (np.log(data.steps) - np.log(fitted))[is_exact] ** 2
        excess = max(0.0, float((squares - data.variance[is_exact]).sum()))
        error = math.sqrt((PRIOR_POINTS * TYPICAL_ERROR**2 + excess) / degrees)
    misfit = math.nan
    if free:
        misfit = math.sqrt(float(squares.sum()) / free)
    # The error is an estimate, so deviations follow Student's t, which has more variance.
    deviation = np.sqrt((data.variance + error**2) * degrees / (degrees - 2))
    draws, evidence = posterior(
        data.batch_sizes, data.steps, deviation, data.bounds, form == "optimum", expected
    )
    deviates = special.stdtrit(degrees, (np.arange(DRAWS) + 0.5) / DRAWS)
    np.random.default_rng(0).shuffle(deviates)
    return Law(
        observations=observations,
        form=form,
        fit=Fit(c1, c2),
        c3=c3,
        misfit=misfit,
        error=error,
        draws=draws,
        deviates=deviates,
        evidence=evidence,
        expected=expected,
    )


def _constants(data: _Data, weights: np.ndarray, form: str) -> tuple[float, float, float]:
    """Return c1, c2, c3 of the best fit.

    At a fixed s = c3 / c1 the law is the additive one of batch sizes B / (1 + s / B), so only s is
    searched: on a grid, then twice on a finer one around the best.
    """
    batch = data.batch_sizes
    bends = np.zeros(1)
    rounds = 1
    if form == "optimum":
        bends = np.concatenate([bends, grid_of_bends(batch)])
        rounds = 3
    c1, c2, c3 = math.nan, math.nan, math.nan
    for _ in range(rounds):
        steps = np.broadcast_to(data.steps, (len(bends), len(batch)))
        straightened = batch / (1 + bends[:, None] / batch)
        fits = fit_many(straightened, steps, LOSS_SCALE, weights, data.bounds)
        fitted = fits[:, :1] * (1 / batch + bends[:, None] / batch**2) + fits[:, 1:]
        residuals = np.log(data.steps) - np.log(fitted)
        z = np.where(data.bounds * residuals < 0, 0.0, residuals) / LOSS_SCALE
        best = int((weights * (np.sqrt(1 + z * z) - 1)).sum(axis=1).argmin())
        bend = bends[best]
        c1, c2, c3 = float(fits[best, 0]), float(fits[best, 1]), float(fits[best, 0] * bend)
        bends = np.linspace(bends[max(best - 1, 0)], bends[min(best + 1, len(bends) - 1)], 12)
    return c1, c2, c3
