"""The law K = c1 / B + c2 of steps to result against batch size, and how far it can be trusted.

`fit_law` fits it to observations of K (`observations`), lower and upper bounds among them, by
weighted M-estimation (`law_fit`). It adds the error of the law and a posterior of the constants
(`posterior`), which give the intervals, and a `verdict`: which answers can be trusted. The table,
the figures, the answer, the forecast, advice and the replication all use this law.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from lit_dps.analysis.critical_prior import CriticalPrior, default_prior
from lit_dps.analysis.intervals import PERCENTILES, Interval, estimate, percentile_interval
from lit_dps.analysis.law_fit import (
    DRAWS,
    MIN_BATCH_SIZES,
    PRIOR_TAILS,
    TYPICAL_ERROR,
    LawConstants,
    data_of,
    error_draws,
    error_of_law,
    posterior,
    residuals_about,
    weighted_fit,
)
from lit_dps.analysis.law_verdict import (
    LawVerdict,
    Trust,
    judge_data,
    judge_fit,
    judge_prior,
    rise_of_k,
)
from lit_dps.analysis.observations import AT_LEAST, Observation, exact, note_on_boundaries
from lit_dps.core.unit import STEPS, Unit

# What is added to the law's error, in quadrature, for each doubling beyond the measured batch
# sizes, in log K.
ERROR_PER_DOUBLING = 0.03
# Factor beyond the measured batch sizes up to which K is predicted.
MAX_EXTRAPOLATION = 16.0
# Standard deviation of log K between two measured batch sizes where K follows no law: on public
# curves half of the straight lines between neighbours are off by more than 14 %.
INTERPOLATION_ERROR = 0.2


class Prediction(NamedTuple):
    """Steps to result at a batch size, with 95 % limits; nan if refused.

    Attributes:
        batch_size: In examples.
        steps, low, high: In steps.
        known: "law", "extrapolated", "prior" (fewer K than the law needs, and a prior of B_crit),
            "interpolated", "measured" or "refused".
    """

    batch_size: float
    steps: float
    low: float
    high: float
    known: str


@dataclass(frozen=True)
class Law:
    """K(B) = c1 / B + c2, and how far it can be trusted.

    Attributes:
        observations: What it is fitted to, by batch size.
        verdict: Which answers of it can be trusted, and why not all.
        fit: c1 [examples] and c2 [steps]; None with fewer than `MIN_BATCH_SIZES` K.
        prior: Evidence on B_crit other than K; None without any.
        beyond: If the law does not fit and there is a prior: the law above the measured batch
            sizes, from the largest one and the prior. Else None.
        misfit: Root mean square of the residuals of log K, corrected for two constants; nan without
            a fit.
        misfit_beyond_noise: The part of it that the noise of the observations does not explain.
        error: Standard deviation of log K about the law within the range (`error_of_law`).
        uses_medians: Whether K is the median over seeds of the best point, not K*.
        unit: The unit of K* in tables. The law is of steps; K in examples is B times as large.
        is_applicable: Whether K is of steps on B examples, or of these examples.
        draws: (DRAWS, 2), c1 and c2 from their posterior; empty without any K.
        deviates: (DRAWS,), draws of the law's error, in units of `error`.
    """

    observations: tuple[Observation, ...]
    verdict: LawVerdict = LawVerdict()
    fit: LawConstants | None = None
    prior: CriticalPrior | None = None
    beyond: Law | None = None
    misfit: float = math.nan
    misfit_beyond_noise: float = math.nan
    error: float = TYPICAL_ERROR
    uses_medians: bool = False
    unit: Unit = STEPS
    is_applicable: bool = True
    draws: np.ndarray = field(default_factory=lambda: np.empty((0, 2)), repr=False, compare=False)
    deviates: np.ndarray = field(default_factory=lambda: np.zeros(DRAWS), repr=False, compare=False)

    @cached_property
    def k_star(self) -> dict[int, float]:
        """K by batch size, ascending, with upper bounds and without lower bounds."""
        return _k_by_batch_size(o for o in self.observations if o.bound != AT_LEAST)

    @cached_property
    def upper_bounds(self) -> frozenset[int]:
        """The batch sizes whose K is only an upper bound."""
        return frozenset(self.k_star.keys() - self.exact_k.keys())

    @cached_property
    def exact_k(self) -> dict[int, float]:
        """K by batch size, ascending, without bounds."""
        return _k_by_batch_size(exact(self.observations))

    @cached_property
    def limits(self) -> dict[int, Interval]:
        """95 % limits of each K alone, by batch size, if its noise is known."""
        limits = {}
        for o in self.observations:
            if o.limits is not None:
                limits[_integer(o.batch_size)] = o.limits
        return limits

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and largest batch size with a K that is no bound; nan without any."""
        measured = exact(self.observations)
        if not measured:
            return math.nan, math.nan
        return measured[0].batch_size, measured[-1].batch_size

    def observation(self, batch_size: float) -> Observation | None:
        """Return the observation at a batch size; None without one."""
        for o in self.observations:
            if o.batch_size == batch_size:
                return o
        return None

    def draw_observations(self, count: int, name: str) -> np.ndarray:
        """Return draws (count, n) of the n K in `exact_k`; (0, n) if the noise of one is unknown.

        Args:
            count: Number of draws.
            name: As in `Observation.draws`.
        """
        measured = exact(self.observations)
        if not measured or not all(o.noise for o in measured):
            return np.empty((0, len(measured)))
        return np.stack([o.draws(count, name) for o in measured], axis=1)

    @property
    def is_b_crit_known(self) -> bool:
        """Whether the data show B_crit."""
        return self.verdict.trust is Trust.B_CRIT

    @property
    def rests_on_prior(self) -> bool:
        """Whether K beyond the measured batch sizes rests on a prior, because too few are known."""
        return self.prior is not None and self.fit is None and self.describes_k

    @property
    def describes_k(self) -> bool:
        """Whether K follows the law, also if the data do not show B_crit."""
        return self.verdict.trust >= Trust.PREDICTED

    @cached_property
    def c1_interval(self) -> Interval | None:
        """95 % interval of c1, in examples; None without a fit."""
        if self.fit is None:
            return None
        return percentile_interval(self.draws[:, 0], self.fit.c1)

    @cached_property
    def c2_interval(self) -> Interval | None:
        """95 % interval of c2, in steps; None without a fit."""
        if self.fit is None:
            return None
        return percentile_interval(self.draws[:, 1], self.fit.c2)

    @cached_property
    def b_crit_interval(self) -> Interval | None:
        """95 % interval of B_crit = c1 / c2, in examples; None without a fit."""
        if self.fit is None:
            return None
        ratios = self.draws[:, 0] / self.draws[:, 1]
        return percentile_interval(ratios, self.fit.critical_batch_size)

    # Former names, which scripts of users may have.
    c1 = property(lambda self: self.c1_interval)
    c2 = property(lambda self: self.c2_interval)
    critical = property(lambda self: self.b_crit_interval)

    @property
    def reach(self) -> tuple[float, float]:
        """The batch sizes between which K is predicted; nan if only measured K are answers."""
        low, high = self.range
        if self.describes_k:
            return low / MAX_EXTRAPOLATION, high * MAX_EXTRAPOLATION
        if self.verdict.trust is Trust.INTERPOLATED:
            if self.beyond is not None:
                return low, self.beyond.reach[1]
            return low, high
        return math.nan, math.nan

    def steps(self, batch_size: Any) -> Any:
        """Return the fitted steps at a batch size (number or array), also if the law is refused.

        If the law rests on a prior, they are the median of the posterior.

        Raises:
            ValueError: without a fit and a prior.
        """
        if self.rests_on_prior:
            batch = np.asarray(batch_size, float)
            return np.median(self._steps_of_draws(batch.ravel()), axis=0).reshape(batch.shape)[()]
        if self.fit is None:
            raise ValueError(f"there is no law: {self.verdict}")
        return self.fit.steps(batch_size)

    def predict(self, batch_sizes: Iterable[float]) -> pd.DataFrame:
        """Return the `Prediction` at each of some batch sizes, one row each.

        It is of the law between the measured batch sizes, or extrapolated within `reach`. If the
        law does not describe K, it is measured, or interpolated within `reach`.
        """
        rows = [self._prediction(float(batch_size)) for batch_size in batch_sizes]
        columns = Prediction._fields
        return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(columns[:-1], float))

    def _prediction(self, batch_size: float) -> Prediction:
        """Return a row of `predict`."""
        if not self.describes_k:
            observation = self.observation(batch_size)
            if observation is not None and not observation.bound:
                limits = observation.interval(observation.assumed_variance)
                return Prediction(batch_size, observation.expected_k, *limits, "measured")
        low, high = self.reach
        if not low <= batch_size <= high:
            return Prediction(batch_size, math.nan, math.nan, math.nan, "refused")
        if self.beyond is not None and batch_size > self.range[1]:
            return self.beyond._prediction(batch_size)
        if self.verdict.trust is Trust.INTERPOLATED:
            known = "interpolated"
            steps = math.exp(self._interpolated(np.array([batch_size]))[0][0])
        else:
            known = "extrapolated"
            low, high = self.range
            if self.rests_on_prior:
                known = "prior"
            elif low <= batch_size <= high:
                known = "law"
            steps = float(self.steps(batch_size))
        limits = percentile_interval(self.samples([batch_size])[:, 0], steps)
        return Prediction(batch_size, steps, limits.low, limits.high, known)

    def samples(self, batch_sizes: Any) -> np.ndarray:
        """Return steps (DRAWS, n) at batch sizes (n,) within `reach`: the posterior predictive.

        They contain the uncertainty of the constants and the law's error or, if the law does not
        describe K, the error of interpolation.
        """
        batch = np.asarray(batch_sizes, float)
        if self.verdict.trust is Trust.INTERPOLATED:
            log_steps, error = self._interpolated(batch)
            draws = np.exp(log_steps + error * self.deviates[:, None])
            if self.beyond is not None:
                is_beyond = batch > self.range[1]
                draws[:, is_beyond] = self.beyond.samples(batch[is_beyond])
            return draws
        return self._law_samples(batch)

    def _law_samples(self, batch: np.ndarray) -> np.ndarray:
        """Return steps (DRAWS, n) by the law, also where it is refused."""
        error = np.hypot(self.error, self._error_beyond(batch))
        return self._steps_of_draws(batch) * np.exp(error * self.deviates[:, None])

    def reducible_samples(self, batch_sizes: Any) -> np.ndarray:
        """Return steps (DRAWS, n) without the error of the law within its range.

        The spread is what more K would reduce: of the constants, and of the extrapolation.
        """
        batch = np.asarray(batch_sizes, float)
        error = self._error_beyond(batch)
        return self._steps_of_draws(batch) * np.exp(error * self.deviates[:, None])

    def _steps_of_draws(self, batch: np.ndarray) -> np.ndarray:
        """Return c1 / B + c2 (DRAWS, n) of each draw."""
        return self.draws[:, :1] / batch + self.draws[:, 1:]

    def _error_beyond(self, batch: np.ndarray) -> np.ndarray:
        """Return (n,): the standard deviation of log K that extrapolation adds."""
        return ERROR_PER_DOUBLING * doublings_beyond(batch, *self.range)

    def _interpolated(self, batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return log K (n,) on chords between measured batch sizes, and its standard deviation."""
        observations = exact(self.observations)
        measured = data_of(observations)
        log_b = np.log(measured.batch_sizes)
        x = np.log(batch)
        log_steps = np.interp(x, log_b, np.log(measured.steps))
        variance = np.interp(x, log_b, [o.assumed_variance for o in observations])
        is_measured = np.isclose(x[:, None], log_b).any(axis=1)
        error = np.where(is_measured, 0.0, INTERPOLATION_ERROR)
        return log_steps, np.sqrt(variance + error**2)

    def band(self, batch_sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the 95 % limits (n,) of the law at some batch sizes (n,); None without a fit."""
        if self.fit is None:
            return None
        low, high = np.percentile(self._law_samples(batch_sizes), PERCENTILES, axis=0)
        fitted = self.fit.steps(batch_sizes)
        return np.minimum(low, fitted), np.maximum(high, fitted)

    @property
    def notes(self) -> list[str]:
        """Notes on the law for a reader, a line each."""
        lines = []
        if not self.is_b_crit_known:
            lines.append(f"B_crit is not identifiable: {self.verdict}")
        return [*lines, *self._notes_on_boundaries]

    @property
    def notes_beside_line(self) -> list[str]:
        """The notes whose content is not in `line`."""
        return self.notes if self.rests_on_prior else self._notes_on_boundaries

    @property
    def _notes_on_boundaries(self) -> list[str]:
        note = note_on_boundaries(self.observations)
        return [note] if note else []

    def describe(self) -> str:
        """Return B_crit as text: its interval, or why it is not identifiable, without advice."""
        if self.rests_on_prior:
            assert self.prior is not None
            ratios = self.draws[:, 0] / self.draws[:, 1]
            middle = float(np.median(ratios))
            text = estimate(middle, percentile_interval(ratios, middle))
            return f"B_crit is about {text}, predicted from {self.prior.source}"
        if self.fit is None:
            return self.verdict.reason
        if not self.is_b_crit_known:
            return f"not identifiable: {self.verdict.reason}"
        text = f"B_crit = {estimate(self.fit.critical_batch_size, self.b_crit_interval)}"
        if self.fit.critical_batch_size < self.range[0]:
            text += ", below the smallest batch size"
        return text

    def line(self) -> str:
        """Return the law in a line: its constants with intervals, `describe`, and advice."""
        return "; ".join(filter(None, [self.constants_line(), self.verdict.advice]))

    def constants_line(self) -> str:
        """Return the law in a line: its constants with intervals, and `describe`."""
        if self.fit is None:
            return self.describe()
        c1 = estimate(self.fit.c1, self.c1_interval)
        c2 = estimate(self.fit.c2, self.c2_interval)
        return f"c1 = {c1}  c2 = {c2}  {self.describe()}"


def doublings_beyond(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return by how many doublings values are outside of a range; 0 inside."""
    return np.log2(np.maximum(1.0, np.maximum(values / high, low / values)))


def _k_by_batch_size(observations: Iterable[Observation]) -> dict[int, float]:
    """Return K by batch size."""
    return {_integer(o.batch_size): _integer(o.k) for o in observations}


def _integer(number: float) -> Any:
    """Return a number as an integer if it is one."""
    if number == int(number):
        return int(number)
    return number


# The fit


def fit_law(
    observations: Iterable[Observation],
    prior: CriticalPrior | None = None,
    uses_medians: bool = False,
    unit: Unit = STEPS,
    why_inapplicable: str = "",
) -> Law:
    """Return the law of some observations, bounds among them, with its verdict.

    Args:
        observations: At most one per batch size.
        prior: Other evidence on B_crit, such as a noise scale. It predicts K where the law cannot,
            and narrows the posterior, not the fit.
        uses_medians: Whether the observations are medians over seeds, not K*.
        unit: The unit of their K.
        why_inapplicable: Why the law does not describe them. Then their K are the only answers.

    Raises:
        ValueError: for two observations of one batch size.
    """
    observations = tuple(sorted(o.in_steps(unit) for o in observations))
    sizes = [o.batch_size for o in observations]
    if len(set(sizes)) < len(sizes):
        raise ValueError(f"batch sizes {sizes} must be unique; use `medians` of repeated ones")
    verdict = judge_data(observations)
    measured = exact(observations)
    are_too_few = verdict.trust is Trust.MEASURED
    if prior is not None and are_too_few and measured:
        verdict = judge_prior(observations, prior)
    if not unit.has_law:
        why_inapplicable = f"K* counts {unit.axis}, but c1 / B + c2 is a law of steps"
    if why_inapplicable:
        verdict = LawVerdict(Trust.MEASURED, why_inapplicable)
    law = Law(
        observations,
        verdict,
        prior=prior,
        uses_medians=uses_medians,
        unit=unit,
        is_applicable=not why_inapplicable,
    )
    if why_inapplicable or not measured:
        return law
    if len(measured) >= MIN_BATCH_SIZES and not (are_too_few and prior is not None):
        law = _with_fit(law)
    law = _with_posterior(law, prior)
    if verdict.trust is Trust.B_CRIT:
        assert law.fit is not None and law.b_crit_interval is not None
        verdict = judge_fit(
            observations, law.fit, law.b_crit_interval, law.misfit, law.misfit_beyond_noise
        )
    if prior is not None and verdict.trust is Trust.INTERPOLATED:
        tail = [o for o in observations if o.batch_size >= measured[-1].batch_size]
        # Lower bounds above the largest K contradict the law.
        if not rise_of_k(tail):
            law = replace(law, beyond=fit_law(tail, prior))
    return replace(law, verdict=verdict)


def relative_law(batch_size: float, prior: CriticalPrior | None = None) -> Law:
    """Return the law of K(B) / K(B0) if no K is known; its K at B0 is 1.

    Args:
        batch_size: B0, in examples.
        prior: Evidence on B_crit; by default the prior of public runs (`default_prior`).
    """
    if prior is None:
        prior = default_prior(batch_size)
    reason = f"no K is measured; K(B) / K({batch_size:g}) is predicted from {prior.source}"
    probabilities = (np.arange(DRAWS) + 0.5) / DRAWS
    deviations = prior.log_deviation * special.stdtrit(PRIOR_TAILS, probabilities)
    critical = prior.value * np.exp(deviations)
    np.random.default_rng(1).shuffle(critical)
    c1 = 1 / (1 / batch_size + 1 / critical)
    return Law(
        (Observation(batch_size, 1.0),),
        LawVerdict(Trust.PREDICTED, reason),
        prior=prior,
        error=0.0,
        draws=np.stack([c1, c1 / critical], axis=1),
        deviates=error_draws(0),
    )


def _with_fit(law: Law) -> Law:
    """Return a law with its constants, its misfit and its error, from `MIN_BATCH_SIZES` K or more.

    Weights need the law's error, and the error needs residuals. So the fit is repeated once.
    """
    data = data_of(law.observations)
    first = weighted_fit(data, TYPICAL_ERROR)
    residuals = residuals_about(data, first)
    fit = weighted_fit(data, error_of_law(residuals.excess, residuals.free))
    residuals = residuals_about(data, fit)
    return replace(
        law,
        fit=fit,
        misfit=math.sqrt(residuals.squares / residuals.free),
        misfit_beyond_noise=math.sqrt(residuals.excess / residuals.free),
        error=error_of_law(residuals.excess, residuals.free),
    )


def _with_posterior(law: Law, prior: CriticalPrior | None) -> Law:
    """Return a law with draws of its constants and of its error; `prior` as in `fit_law`."""
    draws = posterior(data_of(law.observations), law.error, prior)
    free = max(len(exact(law.observations)) - 2, 0)
    return replace(law, draws=draws, deviates=error_draws(free))
