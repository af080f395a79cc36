"""One law for batch size and delay: K*(B, tau) = c1 / B + c2 / sin(pi / (2 (2 tau + 1))).

The sine is called s. Gradient descent with gradients from tau steps ago is stable on curvature h
for rates below 2 s / h. So the floor c2 of the steps grows by the factor 1 / s, about (4 tau + 2) /
pi. The term c1 is due to noise and does not change. This law is our approximation, from the
stability of a single mode. Stich, Mohtashami and Jaggi (2021) derive orders of magnitude, with one
critical parameter of the data for both batch size and delay. The tables also have a separate law
for each delay, which shows where the approximation fails.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import Interval, interval_columns, percentile_interval
from lit_dps.analysis.law import Law, fit_law
from lit_dps.analysis.law_fit import LawConstants
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.trial import Series

KEY = "optim.delay"
CURVE_POINTS = 64  # points of a drawn curve
# The law is not used for a tau + 1 above this multiple of the largest one that was measured.
MAX_EXTRAPOLATION = 16
# Columns of `delay_rows` after the series and the delay.
COLUMNS = ["c1", "c2", "misfit", "misfit_here", "floor"]
COLUMNS += [*interval_columns("own_c1", None, None), *interval_columns("own_c2", None, None)]
COLUMNS += ["own_misfit"]


def stable_share(delay: float) -> float:
    """Return the largest stable rate over the one without delay: sin(pi / (2 (2 tau + 1)))."""
    return math.sin(math.pi / (2 * (2 * delay + 1)))


def delay_of(share: float) -> float:
    """Return the delay that has a stable share; the inverse of `stable_share`."""
    return (math.pi / (2 * math.asin(share)) - 1) / 2


@dataclass(frozen=True)
class DelayLaw:
    """The joint law of batch size and delay of one series.

    Attributes:
        series: The series, without its delay.
        separate: The law of each delay alone, by delay, ascending.
        joint: The law without delay that is fitted to batch sizes B / s and steps s K*, with
            s = `stable_share`. It has no fit with fewer than 3 K*.
    """

    series: Series
    separate: Mapping[int, Law]
    joint: Law

    @property
    def fit(self) -> LawConstants | None:
        """c1 [examples] and c2 [steps]; None with too few K*."""
        return self.joint.fit

    @property
    def fitted(self) -> LawConstants:
        """The fit of the law; an error without one."""
        assert self.joint.fit is not None, "the law has no fit"
        return self.joint.fit

    @cached_property
    def k_star(self) -> dict[tuple[int, int], float]:
        """K* in steps by batch size and delay, ascending, without K* that are bounds."""
        k_star = {}
        for delay, law in self.separate.items():
            for batch_size, steps in law.exact_k.items():
                k_star[batch_size, delay] = steps
        return dict(sorted(k_star.items()))

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes with a K*, ascending."""
        return sorted({batch_size for batch_size, _ in self.k_star})

    def predicted(self, delay: float) -> LawConstants:
        """Return the law that the joint law predicts for a delay."""
        return LawConstants(self.fitted.c1, self.fitted.c2 / stable_share(delay))

    @cached_property
    def misfit(self) -> float:
        """The root mean square of the residuals of log K*."""
        residuals = []
        for (batch_size, delay), k_star in self.k_star.items():
            residuals.append(math.log(k_star / self.predicted(delay).steps(batch_size)))
        return _root_mean_square(residuals)

    def critical_delay(self, batch_size: int) -> tuple[float, Interval]:
        """Return the delay that doubles K*, with its 95 % interval; infinity if c2 is 0."""
        value = _doubling_delay(self.fitted.critical_batch_size, batch_size)
        draws = []
        for c1, c2 in self.joint.draws:
            draws.append(_doubling_delay(c1 / c2, batch_size))
        return value, percentile_interval(np.array(draws), value)

    def known_critical_delay(self, batch_size: int) -> tuple[float, Interval]:
        """Return `critical_delay`; if the value is nan, only its lower limit is known.

        The value is unknown if the data do not show B_crit, or if it is beyond
        `MAX_EXTRAPOLATION`.
        """
        value, (low, high) = self.critical_delay(batch_size)
        largest = float(MAX_EXTRAPOLATION * (max(delay for _, delay in self.k_star) + 1) - 1)
        if self.joint.is_b_crit_known and value <= largest:
            return value, Interval(low, high)
        return math.nan, Interval(min(low, largest), math.inf)


def _root_mean_square(values: Sequence[float]) -> float:
    """Return the root mean square of some values; nan without any."""
    if not values:
        return math.nan
    return math.sqrt(sum(x * x for x in values) / len(values))


def misfit_of(fit: LawConstants, k_star: Mapping[int, float]) -> float:
    """Return the root mean square of the residuals of log K* about a fit.

    Args:
        fit: The fit.
        k_star: K* in steps, by batch size.
    """
    return _root_mean_square([math.log(k / fit.steps(b)) for b, k in k_star.items()])


def _doubling_delay(critical_batch_size: float, batch_size: float) -> float:
    """Return the tau at which c1 / B + c2 / s(tau) = 2 (c1 / B + c2)."""
    inverse_share = 2 + critical_batch_size / batch_size
    if math.isinf(inverse_share):
        return math.inf
    return delay_of(1 / inverse_share)


def delay_laws(laws: Mapping[Series, Law]) -> list[DelayLaw]:
    """Return the joint law of each series that has delays; empty if the delay is no axis.

    Args:
        laws: The law of each series; the series have the delay as an axis.
    """
    by_series: dict[Series, dict[int, Law]] = {}
    for series, law in sorted(laws.items(), key=lambda item: item[0]):
        delay: Any = dict(series.axes).get(KEY)
        if delay is not None and law.is_applicable:
            by_series.setdefault(series.without(KEY), {})[delay] = law
    joint_laws = []
    for series, separate in sorted(by_series.items()):
        joint_laws.append(DelayLaw(series, separate, _joint_law(separate)))
    return joint_laws


def _joint_law(separate: Mapping[int, Law]) -> Law:
    """Return the law without delay that is fitted to the observations at all delays.

    s K* = c1 s / B + c2 is the law without delay of batch sizes B / s and steps s K*.
    """
    observations = []
    for delay, law in separate.items():
        share = stable_share(delay)
        for each in law.observations:
            scaled = replace(
                each,
                batch_size=each.batch_size / share,
                k=each.k * share,
                resolution=each.resolution * share,
            )
            observations.append(scaled)
    return fit_law(observations)


def delay_rows(laws: Iterable[DelayLaw]) -> pd.DataFrame:
    """Return one row per series and delay: the joint law, and the separate law of the delay.

    Columns: sparsity and further axes, delay [steps]. The joint law has c1 [examples], c2 [steps],
    misfit (root mean square of the residuals of log K*), misfit_here (the misfit at this delay)
    and floor [steps] (c2 / s, the predicted c2 at this delay). The separate law has own_c1 and
    own_c2, each with its 95 % limits (own_c1_low and so on), and own_misfit.
    """
    rows = []
    for law in laws:
        for delay, separate in law.separate.items():
            row: dict[str, Any] = {**columns_of(law.series), "delay": delay}
            row |= dict.fromkeys(COLUMNS)
            if law.fit is not None:
                predicted = law.predicted(delay)
                row |= {"c1": law.fit.c1, "c2": law.fit.c2, "misfit": law.misfit}
                row["misfit_here"] = misfit_of(predicted, separate.exact_k)
                row["floor"] = predicted.c2
            if separate.fit is not None:
                row |= interval_columns("own_c1", separate.fit.c1, separate.c1_interval)
                row |= interval_columns("own_c2", separate.fit.c2, separate.c2_interval)
                row["own_misfit"] = misfit_of(separate.fit, separate.exact_k)
            rows.append(row)
    return frame(rows)


def critical_delay_rows(laws: Iterable[DelayLaw]) -> pd.DataFrame:
    """Return one row per series and batch size: the critical delay by the joint law.

    Columns: sparsity and further axes, batch_size [examples], critical_delay [steps] (the delay
    that doubles K*; missing if only a lower limit is known, `DelayLaw.known_critical_delay`), low
    and high (its 95 % limits). A joint law that does not describe K has no rows.
    """
    rows = []
    for law in laws:
        if law.fit is None or not law.joint.describes_k:
            continue
        for batch_size in law.batch_sizes:
            value, (low, high) = law.known_critical_delay(batch_size)
            row = {**columns_of(law.series), "batch_size": batch_size, "critical_delay": value}
            rows.append(row | {"low": low, "high": high})
    return frame(rows)


def delay_points(laws: Iterable[DelayLaw]) -> pd.DataFrame:
    """Return one row per cell whose K* is exact: K*, and the value of the joint law.

    Columns: sparsity and further axes, batch_size [examples], delay [steps], k_star [steps], law
    [steps], in_flight [examples] (B / s with s = `stable_share`) and scaled [steps] (s K*). In the
    last two columns, the joint law is a single curve.
    """
    rows = []
    for law in laws:
        for (batch_size, delay), k_star in law.k_star.items():
            share = stable_share(delay)
            row = {**columns_of(law.series), "batch_size": batch_size, "delay": delay}
            row |= {"k_star": k_star, "law": None}
            if law.fit is not None:
                row["law"] = law.predicted(delay).steps(batch_size)
            rows.append(row | {"in_flight": batch_size / share, "scaled": k_star * share})
    return frame(rows)


def steps_by_delay(law: DelayLaw, batch_size: Any) -> pd.DataFrame:
    """Return the curve of the law at a batch size.

    Columns: gradients (tau + 1, the gradients in flight), k_star [steps].
    """
    gradients = np.geomspace(1, max(law.separate) + 1, CURVE_POINTS)
    steps = [law.predicted(gradient - 1).steps(batch_size) for gradient in gradients]
    return pd.DataFrame({"gradients": gradients, "k_star": steps})


def scaled_law(law: DelayLaw, in_flight: Any) -> pd.DataFrame:
    """Return the curve of the joint law over the range of some B / s, (n,).

    Columns: in_flight [examples], scaled [steps].
    """
    batch = np.geomspace(in_flight.min(), in_flight.max(), CURVE_POINTS)
    return pd.DataFrame({"in_flight": batch, "scaled": law.fitted.steps(batch)})
