"""When the law of batch size is refused: not identifiable, because ...

The law K = c1 / B + c2 as an answer: its interval within and beyond what was measured, or why it
is refused.

`Fit` is the law and `fit_many` fits it; here are bounds and weights for it, a posterior of its
constants, the error that the law itself makes, a form with a minimum of examples, and the reasons
not to trust any of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import special

from lit_dps.analysis.law_fit import FEWEST, LOSS_SCALE, Fit, fit_many
from lit_dps.analysis.law_posterior import DRAWS, bends_of, posterior
from lit_dps.analysis.observations import Observation, edges, exact
from lit_dps.analysis.tables import listed_numbers, three_digits

CLOSE = 1.2  # batch sizes whose largest is below this times the smallest show no curve


REACHED = (
    0.5  # share of B_crit that the largest batch size has to reach: c2 is then a third of K there
)


OFF = 0.2  # of log K: a law that misses what it is fitted to by more says little of anything else


DECLINE = 0.1  # log of the fall of K over the range, below which a curve is flat


RISE, TYPICAL = (
    0.2,
    0.07,
)  # log of a rise of K with B that is none by chance, for a law's typical error


WIDE = 100.0  # B_crit is not known, where its 95 % interval spans more than this factor


@dataclass(frozen=True)
class Reason:
    """Why a law is not identifiable.

    Attributes:
        why: A clause.
        within: Whether the law still describes what was measured, so that it serves between those
            batch sizes.
    """

    why: str
    within: bool = False

    def __str__(self) -> str:
        return self.why


def why_not_fitted(observations: Sequence[Observation]) -> Reason | None:
    """What is missing to tell a law at all."""
    known = exact(observations)
    sizes = [o.batch_size for o in known]
    if len(known) < FEWEST:
        listed = listed_numbers(sizes) or "none"
        return Reason(f"K is known at {len(known)} batch sizes ({listed}), and {FEWEST} are needed")
    if max(sizes) <= CLOSE * min(sizes):
        span = max(sizes) / min(sizes) - 1
        return Reason(f"all batch sizes lie within {100 * span:.0f} %: {listed_numbers(sizes)}")
    return None


def reason_to_refuse(
    observations: Sequence[Observation],
    ends: tuple[float, float],
    misfit: float,
    critical: tuple[float, float, float],
) -> Reason | None:
    """What a fitted law lacks: it does not fit, is flat or linear, or B_crit is out of sight.

    Args:
        observations: What it is fitted to.
        ends: Its steps at the smallest and the largest batch size with a K.
        misfit: Root mean square of its residuals of log K.
        critical: B_crit and its 95 % limits.
    """
    known = sorted(exact(observations))
    low, high = known[0].batch_size, known[-1].batch_size
    for before in known:
        for after in known:
            rise = math.log(after.steps / before.steps)
            noise = math.sqrt(before.variance + after.variance + 2 * TYPICAL**2)
            if after.batch_size > before.batch_size and rise > max(RISE, 3 * noise):
                ends = (
                    f"{before.steps:.0f} at B = {before.batch_size:g} to {after.steps:.0f} at "
                    f"{after.batch_size:g}"
                )
                return Reason(
                    f"K rises, from {ends}, which no law of it does: is the rate tuned at each "
                    "batch size?"
                )
    fall = math.log(ends[0] / ends[1])
    if misfit > OFF:
        forms = "nor does c3 / B^2 mend it" if len(known) > 4 else "with too few points for another"
        return Reason(f"c1 / B + c2 does not fit: it misses K by {misfit:.0%}, {forms}")
    if fall < DECLINE:
        return Reason(
            f"K is flat: it falls by {1 - math.exp(-fall):.0%} from B = {low:g} to {high:g}",
            within=True,
        )
    value, least, most = critical
    if high < REACHED * value:
        least = max(least, high)
        kind = (
            "K falls in proportion to 1 / B as far as it is measured"
            if value > 10 * high
            else "B_crit is far"
        )
        return Reason(
            f"{kind}: the largest B, {high:g}, is below half of B_crit, which lies above "
            f"{three_digits(least)}",
            True,
        )
    if most > WIDE * least:
        interval = f"[{three_digits(least)}, {three_digits(most)}]"
        return Reason(
            f"the 95 % interval of B_crit, {interval}, spans more than a factor of {WIDE:g}",
            within=True,
        )
    return None


# How far the law itself is off: a prior of the root mean square of log K at a batch size that was
# left out, worth so many points. 7 % is the median of public curves (docs/advice-law.md).
TYPICAL_ERROR, WORTH = 0.07, 3.0


# What is added to it for each doubling beyond the measured batch sizes, in log K. On public curves
# 9 of 10 errors are below 20 % up to 2 times the largest batch size, 38 % up to 4 times, 71 % up to
# 16 times; farther nothing is known.
PER_DOUBLING, FARTHEST = 0.11, 16.0


WORSE, LIKELY = (
    0.05,
    0.05,
)  # c3 is offered above this error of the additive law, and below this probability of chance


@dataclass(frozen=True)
class Law:
    """K(B) = c1 / B + c2, or with c3 / B^2 added, and how far it can be trusted.

    Attributes:
        observations: What it is fitted to, by batch size.
        form: "additive"; "optimum" with c3, whose examples to goal B K(B) have a minimum at sqrt(c3
            / c2).
        fit: c1 [examples] and c2 [steps]; None with fewer than 2 batch sizes with a K.
        c3: [examples^2 steps]; 0 of the additive form.
        misfit: Root mean square of the residuals of log K, over the points less the constants; nan
            without a fit.
        error: Standard deviation of log K about the law within the range, from residuals and
            `TYPICAL_ERROR`.
        refused: Why it is not identifiable, or None.
        draws: (DRAWS, 3), c1, c2, c3 from their posterior.
        deviates: (DRAWS,), of the law's error, in units of its standard deviation.
        expected: What else was said of B_crit (`law_of`).
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
        """(n, 3), `draws` and those of the other form, as many as its probability beside this one
        asks for."""
        if self.fit is None or len(exact(self.observations)) < FEWEST:
            return self.draws
        batch, steps, variance, bounds = _arrays(self.observations)
        bent = self.form == "additive"
        other, evidence = posterior(
            batch, steps, np.sqrt(variance + self.error**2), bounds, bent, self.expected
        )
        share = math.exp(min(evidence - self.evidence, 0.0))
        return np.concatenate([self.draws, other[: round(share * DRAWS)]])

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and largest batch size with a K; nan without any."""
        sizes = [o.batch_size for o in exact(self.observations)] or [math.nan]
        return min(sizes), max(sizes)

    @property
    def reach(self) -> tuple[float, float]:
        """Batch sizes between which the law answers; nan where it does only at those measured.

        Within what was measured, where the range is too short; up to `FARTHEST` times beyond, where
        it is not.
        """
        low, high = self.range
        if self.refused is None:
            return low / FARTHEST, high * FARTHEST
        return (low, high) if self.refused.within and self.fit else (math.nan, math.nan)

    def steps(self, batch_size):
        """Fitted steps to result at a batch size (number or array), refused or not.

        Raises:
            ValueError: without a fit.
        """
        if self.fit is None:
            raise ValueError(f"no law: {self.refused}")
        return self.fit.steps(batch_size) + self.c3 / np.asarray(batch_size, float) ** 2

    def samples(self, batch_sizes) -> np.ndarray:
        """(DRAWS, n): steps at some batch sizes by the posterior and the law's own error; for
        `reach` alone."""
        batch = np.asarray(batch_sizes, float)
        c1, c2, c3 = (column[:, None] for column in self.draws.T)
        low, high = self.range
        beyond = np.log2(np.maximum(1.0, np.maximum(batch / high, low / batch)))
        spread = np.sqrt(self.error**2 + (PER_DOUBLING * beyond) ** 2)
        return (c1 / batch + c2 + c3 / batch**2) * np.exp(spread * self.deviates[:, None])

    def predict(self, batch_sizes: Iterable[float]) -> pd.DataFrame:
        """Steps to result at some batch sizes, with 95 % limits.

        Columns: batch_size [examples], steps, low and high [steps], and how they are known: "law",
        "extrapolated", "measured" (K itself, where the law is refused), or "refused", where they
        are missing.
        """
        batch = np.array(list(batch_sizes), float)
        low, high = self.reach
        first, last = self.range
        measured = {o.batch_size: o for o in exact(self.observations)}
        limits = np.full((2, len(batch)), np.nan)
        if answers := [i for i, b in enumerate(batch) if low <= b <= high]:
            limits[:, answers] = np.percentile(self.samples(batch[answers]), (2.5, 97.5), axis=0)
        rows = []
        for b, (least, most) in zip(batch, limits.T, strict=True):
            row = {
                "batch_size": float(b),
                "steps": None,
                "low": None,
                "high": None,
                "known": "refused",
            }
            if low <= b <= high:
                steps = float(self.steps(b))
                row |= {"steps": steps, "low": min(steps, least), "high": max(steps, most)}
                row["known"] = "law" if first <= b <= last else "extrapolated"
            elif b in measured:
                k, wide = measured[b].steps, 1.96 * math.sqrt(measured[b].variance or LOSS_SCALE**2)
                row |= {
                    "steps": k,
                    "low": k * math.exp(-wide),
                    "high": k * math.exp(wide),
                    "known": "measured",
                }
            rows.append(row)
        return pd.DataFrame(rows).astype({"steps": float, "low": float, "high": float})

    @property
    def critical(self) -> tuple[float, float, float]:
        """B_crit = c1 / c2 in examples and its 95 % limits; nan without a fit."""
        if self.fit is None:
            return (math.nan,) * 3
        low, high = np.percentile(self.draws[:, 0] / self.draws[:, 1], (2.5, 97.5))
        value = self.fit.critical_batch_size
        return value, float(min(low, value)), float(max(high, value))

    @property
    def notes(self) -> list[str]:
        """What to know of it, a line each."""
        lines = [f"the law is not identifiable, because {self.refused}"] if self.refused else []
        if self.form == "optimum":
            least = math.sqrt(self.c3 / self.fit.c2) if self.fit.c2 else math.inf
            where = (
                f"fewest examples to goal at B = {three_digits(least)}"
                if least < math.inf
                else "no floor seen"
            )
            lines.append(f"c1 / B + c2 misses what was measured, c3 / B^2 is added to it: {where}")
        told = edges(self.observations)
        return [*lines, *([told] if told else [])]

    def describe(self) -> str:
        """The law in a line."""
        if self.fit is None or self.refused:
            return f"not identifiable, because {self.refused}"
        constants = f"c1 = {three_digits(self.fit.c1)}  c2 = {three_digits(self.fit.c2)}"
        constants += f"  c3 = {three_digits(self.c3)}" if self.form == "optimum" else ""
        b, low, high = map(three_digits, self.critical)
        return f"{constants}  B_crit = {b} [{low}, {high}]  misfit {self.misfit:.0%}"


def law_of(observations: Iterable[Observation], expected: tuple[float, float] | None = None) -> Law:
    """The law of some observations, bounds among them, with its verdict.

    Args:
        observations: At most one a batch size.
        expected: What else says of B_crit, a noise scale say: its value [examples] and the standard
            deviation of its logarithm. It narrows the posterior alone, not the fit.

    Raises:
        ValueError: for two observations of one batch size.
    """
    known = tuple(sorted(observations))
    if len({o.batch_size for o in known}) < len(known):
        raise ValueError("more than one observation of a batch size: take their median (`medians`)")
    reason, count = why_not_fitted(known), len(exact(known))
    if count < 2:
        return Law(known, refused=reason, **_only(known, expected))
    law = _fitted(known, "additive", expected)
    if reason is None and count > 4 and law.misfit > WORSE:
        other = _fitted(known, "optimum", expected)
        free = count - 3
        gain = (
            (law.misfit / other.misfit) ** 2 * (free + 1) / free - 1
        ) * free  # F of one constant more
        if other.c3 > 0 and special.fdtrc(1, free, max(gain, 0.0)) < LIKELY:
            law = other
    if reason is None:
        ends = tuple(float(law.steps(b)) for b in law.range)
        reason = reason_to_refuse(known, ends, law.misfit, law.critical)
    return law if reason is None else replace(law, refused=reason)


def _arrays(known: tuple[Observation, ...]) -> list[np.ndarray]:
    return [
        np.array([getattr(o, name) for o in known], float)
        for name in ("batch_size", "steps", "variance", "bound")
    ]


def _only(known: tuple[Observation, ...], expected: tuple[float, float] | None) -> dict[str, Any]:
    """What one K says: nothing of a fit, but where the next one may lie."""
    if not exact(known):
        return {}
    batch, steps, variance, bounds = _arrays(known)
    draws, _ = posterior(
        batch, steps, np.sqrt(variance + TYPICAL_ERROR**2), bounds, False, expected
    )
    return {"draws": draws, "error": TYPICAL_ERROR}


def _fitted(known: tuple[Observation, ...], form: str, expected: tuple[float, float] | None) -> Law:
    batch, steps, variance, bounds = _arrays(known)
    sure = bounds == 0
    error = TYPICAL_ERROR
    for _ in range(2):  # weights need the law's own error, and that the residuals
        weights = 1 / (variance + error**2)
        c1, c2, c3 = _constants(batch, steps, weights / weights[sure].mean(), bounds, form)
        residual = np.log(steps) - np.log(c1 / batch + c2 + c3 / batch**2)
        free = max(int(sure.sum()) - 2 - (form == "optimum"), 0)
        excess = max(0.0, float((residual[sure] ** 2 - variance[sure]).sum()))
        error = math.sqrt((WORTH * TYPICAL_ERROR**2 + excess) / (WORTH + free))
    misfit = math.sqrt(float((residual[sure] ** 2).sum()) / free) if free else math.nan
    known_by = (
        WORTH + free
    )  # degrees of freedom of the error; as it is not known exactly, its t has more variance
    wider = np.sqrt((variance + error**2) * known_by / (known_by - 2))
    draws, evidence = posterior(batch, steps, wider, bounds, form == "optimum", expected)
    deviates = special.stdtrit(known_by, (np.arange(DRAWS) + 0.5) / DRAWS)
    np.random.default_rng(0).shuffle(deviates)
    return Law(
        known, form, Fit(c1, c2), c3, misfit, error, None, draws, deviates, evidence, expected
    )


def _constants(batch, steps, weights, bounds, form: str) -> tuple[float, float, float]:
    """c1, c2, c3 of the best fit. Given s = c3 / c1, it is the additive law of batch sizes B / (1 +
    s / B)."""
    bends, loss = np.zeros(1), LOSS_SCALE
    if form == "optimum":
        bends = np.concatenate([bends, bends_of(batch)])
    for _ in range(
        1 if form == "additive" else 3
    ):  # a grid of s, then twice a finer one around the best
        every = np.broadcast_to(steps, (len(bends), len(steps)))
        fits = fit_many(batch / (1 + bends[:, None] / batch), every, loss, weights, bounds)
        found = fits[:, :1] * (1 / batch + bends[:, None] / batch**2) + fits[:, 1:]
        residual = np.log(steps) - np.log(found)
        z = np.where(bounds * residual < 0, 0.0, residual) / loss
        best = int((weights * (np.sqrt(1 + z * z) - 1)).sum(axis=1).argmin())
        s = bends[best]
        bends = np.linspace(bends[max(best - 1, 0)], bends[min(best + 1, len(bends) - 1)], 12)
    return float(fits[best, 0]), float(fits[best, 1]), float(fits[best, 0] * s)
