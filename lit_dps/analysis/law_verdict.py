"""Which answers of the law K = c1 / B + c2 the data support, and why not all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from lit_dps.analysis.critical_prior import CriticalPrior
from lit_dps.analysis.intervals import Interval
from lit_dps.analysis.law_fit import MIN_BATCH_SIZES, TYPICAL_ERROR, LawConstants
from lit_dps.analysis.observations import AT_MOST, Observation, exact
from lit_dps.analysis.tables import listed_numbers, three_digits

# The largest batch size must exceed the smallest by this factor. A smaller range shows no curve.
MIN_RANGE = 1.2
# Share of B_crit that the largest batch size must reach. There c2 is a third of K.
MIN_SHARE_OF_CRITICAL = 0.5
# The law does not describe K if the root mean square of the residuals of log K, beyond their noise,
# exceeds this.
MAX_MISFIT = 0.2
# A curve is flat if log K falls by less than this over the range.
MIN_DECLINE = 0.1
# A rise of K with B is not noise if log K rises by more than both limits: absolute, and in standard
# deviations.
MAX_RISE = 0.2
MAX_RISE_DEVIATIONS = 3
# Factor that the 95 % interval of B_crit may span.
MAX_SPAN = 100.0


class Trust(IntEnum):
    """Which answers of a law can be trusted; each value adds answers to the values before it."""

    # Only measured K.
    MEASURED = 0
    # K between the measured batch sizes, interpolated. The law does not describe K.
    INTERPOLATED = 1
    # K by the law, up to `law.MAX_EXTRAPOLATION` times the range. B_crit is not identifiable.
    PREDICTED = 2
    # B_crit too.
    B_CRIT = 3


@dataclass(frozen=True)
class LawVerdict:
    """Which answers of a law can be trusted, and why not all.

    Attributes:
        trust: The answers that can be trusted.
        reason: Why not all, in a clause; empty if all can be trusted.
        bound: A lower bound of B_crit, in examples; None if it is unknown.
        advice: What to do next; empty if the reason implies it.
    """

    trust: Trust = Trust.B_CRIT
    reason: str = ""
    bound: float | None = None
    advice: str = ""

    def __str__(self) -> str:
        if not self.advice:
            return self.reason
        return f"{self.reason}; {self.advice}"


def judge_data(observations: Sequence[Observation]) -> LawVerdict:
    """Return the verdict before any fit: whether the observations determine a law."""
    sizes = [o.batch_size for o in exact(observations)]
    if len(sizes) < MIN_BATCH_SIZES:
        return LawVerdict(Trust.MEASURED, _too_few(observations, sizes))
    if max(sizes) <= MIN_RANGE * min(sizes):
        span = max(sizes) / min(sizes) - 1
        reason = (
            f"all batch sizes are within {100 * span:.0f} %: {listed_numbers(sizes)}; the largest "
            f"must exceed {MIN_RANGE:g} times the smallest"
        )
        return LawVerdict(Trust.MEASURED, reason)
    return LawVerdict()


def judge_prior(observations: Sequence[Observation], prior: CriticalPrior) -> LawVerdict:
    """Return the verdict on a law that uses a prior of B_crit, with at least one K."""
    rise = rise_of_k(observations)
    if rise:
        return LawVerdict(Trust.MEASURED, rise)
    measured = exact(observations)
    sizes = listed_numbers([o.batch_size for o in measured])
    reason = f"K is measured only at B = {sizes}; elsewhere it is predicted from {prior.source}"
    return LawVerdict(Trust.PREDICTED, reason)


def _too_few(observations: Sequence[Observation], sizes: Sequence[float]) -> str:
    """Return a clause that counts the batch sizes whose K is not a bound."""
    if not sizes:
        reason = "K is known at no batch size"
    elif len(sizes) == 1:
        reason = f"K is known at one batch size ({listed_numbers(sizes)})"
    else:
        reason = f"K is known at {len(sizes)} batch sizes ({listed_numbers(sizes)})"
    upper_bounds = sum(o.bound == AT_MOST for o in observations)
    if upper_bounds:
        verb = "has" if upper_bounds == 1 else "have"
        reason += f"; {upper_bounds} more {verb} only an upper bound of K"
    return f"{reason}; {MIN_BATCH_SIZES} are needed"


def judge_fit(
    observations: Sequence[Observation],
    fit: LawConstants,
    critical: Interval,
    misfit: float,
    misfit_beyond_noise: float,
) -> LawVerdict:
    """Return the verdict on a fit: whether K rises, the law fits, and the range shows B_crit.

    Args:
        observations: The observations that the law is fitted to, by batch size.
        fit: Its constants.
        critical: 95 % interval of B_crit, in examples.
        misfit, misfit_beyond_noise: As in `Law`.
    """
    measured = exact(observations)
    rise = rise_of_k(measured)
    if rise:
        return LawVerdict(Trust.MEASURED, rise)
    if misfit_beyond_noise > MAX_MISFIT:
        reason = f"c1 / B + c2 does not fit: it misses K by {misfit:.0%}"
        return LawVerdict(Trust.INTERPOLATED, reason)
    # The fit hardly moves for one lower bound, so its misfit does not show this contradiction.
    contradiction = rise_of_k(observations)
    if contradiction:
        return LawVerdict(Trust.INTERPOLATED, contradiction)
    low = measured[0].batch_size
    high = measured[-1].batch_size
    fall = math.log(fit.steps(low) / fit.steps(high))
    if fall < MIN_DECLINE:
        share = 1 - math.exp(-fall)
        reason = f"K is flat: it falls by {share:.0%} from B = {low:g} to {high:g}"
        return LawVerdict(Trust.PREDICTED, reason, advice="measure smaller batch sizes")
    bound = critical.low
    if high < MIN_SHARE_OF_CRITICAL * fit.critical_batch_size:
        advice = "measure larger batch sizes"
        return LawVerdict(Trust.PREDICTED, f"B_crit > {three_digits(bound)}", bound, advice)
    if critical.high > MAX_SPAN * bound:
        interval = f"[{three_digits(bound)}, {three_digits(critical.high)}]"
        reason = f"B_crit is only known within {interval}"
        advice = "measure more batch sizes, or run more trials"
        return LawVerdict(Trust.PREDICTED, reason, bound, advice)
    return LawVerdict()


def rise_of_k(ascending: Sequence[Observation]) -> str:
    """Return a clause on the first rise of K with B that is more than noise; empty without one.

    A lower bound above a K at a smaller batch size is a rise too. Upper bounds are ignored.
    """
    for i, before in enumerate(ascending):
        if before.bound:
            continue
        for after in ascending[i + 1 :]:
            if after.bound == AT_MOST:
                continue
            rise = math.log(after.k / before.k)
            noise = math.sqrt(before.variance + after.variance + 2 * TYPICAL_ERROR**2)
            if rise > max(MAX_RISE, MAX_RISE_DEVIATIONS * noise):
                more = "more than " if after.bound else ""
                return (
                    f"K rises from {before.k:.0f} at B = {before.batch_size:g} to "
                    f"{more}{after.k:.0f} at {after.batch_size:g}; check that the learning "
                    "rate is tuned at each batch size"
                )
    return ""
