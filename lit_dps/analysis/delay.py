"""One law for batch size and delay: K*(B, tau) = c1 / B + c2 / sin(pi / (2 (2 tau + 1))).

Gradient descent with gradients of tau steps ago is stable on curvature h for rates below 2 s / h,
where s is that sine. So the floor c2 of the steps grows by 1 / s, about (4 tau + 2) / pi, while c1,
the noise's part, stays. This is an approximation of ours, from the stability of a single mode;
Stich, Mohtashami and Jaggi (2021) give orders: one critical parameter of the data for both batch
size and delay. The separate laws of each delay, in the same table, show where it fails.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import Interval, estimate, interval_columns, percentile_interval
from lit_dps.analysis.law import Law, fit_law
from lit_dps.analysis.law_fit import Fit
from lit_dps.analysis.tables import (
    Row,
    aligned,
    columns_of,
    frame,
    records,
    rows_of,
    short_columns,
    three_digits,
)
from lit_dps.core.trial import Series

KEY = "optim.delay"
CURVE_POINTS = 64  # of a law that is drawn


def stable_share(delay: float) -> float:
    """Return the largest stable rate over that without a delay: sin(pi / (2 (2 tau + 1)))."""
    return math.sin(math.pi / (2 * (2 * delay + 1)))


def delay_of(share: float) -> float:
    """Return the delay of a share, the inverse of `stable_share`."""
    return (math.pi / (2 * math.asin(share)) - 1) / 2


@dataclass(frozen=True)
class DelayLaw:
    """The law of batch size and delay in one series, all delays together.

    Attributes:
        series: Without its delay.
        delays: Those of the grid.
        k_star: K* without bounds by (batch size, delay), in steps.
        law: The law without a delay, of batch sizes B / share and steps K* share, with share =
            `stable_share`; it has no fit with fewer than 3 K*.
    """

    series: Series
    delays: tuple[int, ...]
    k_star: Mapping[tuple[int, int], float]
    law: Law

    @property
    def fit(self) -> Fit | None:
        """c1 [examples] and c2 [steps]; None with too few K*."""
        return self.law.fit

    @property
    def fitted(self) -> Fit:
        """The fit, of a law that has one."""
        assert self.law.fit is not None, "the law has no fit"
        return self.law.fit

    def steps(self, batch_size: Any, delay: float) -> Any:
        """Return the steps to result by the law, at batch sizes (number or array)."""
        return self.fitted.c1 / batch_size + self.fitted.c2 / stable_share(delay)

    @cached_property
    def misfit(self) -> float:
        """The root mean square of log K* less log of the law."""
        return self.misfit_at(self.delays)

    def misfit_at(self, delays: Collection[int]) -> float:
        """Return the misfit of the law at some delays; nan where none of them has a K*."""
        residuals = []
        for (batch_size, delay), k_star in self.k_star.items():
            if delay in delays:
                residuals.append(math.log(k_star / self.steps(batch_size, delay)))
        return _root_mean_square(residuals)

    def doubling(self, batch_size: int) -> tuple[float, Interval]:
        """Return the critical delay, which doubles K*, with its 95 % interval.

        Infinite if c2 is 0.
        """
        value = _doubling(self.fitted.critical_batch_size, batch_size)
        critical = self.law.draws[:, 0] / self.law.draws[:, 1]
        drawn = np.array([_doubling(c, batch_size) for c in critical])
        return value, percentile_interval(drawn, value)


def _root_mean_square(values: Sequence[float]) -> float:
    """Return the root mean square of some values; nan without any."""
    if not values:
        return math.nan
    return math.sqrt(sum(x * x for x in values) / len(values))


def _doubling(critical_batch_size: float, batch_size: float) -> float:
    """Return the tau at which c1 / B + c2 / share(tau) = 2 (c1 / B + c2)."""
    excess = 2 + critical_batch_size / batch_size
    if math.isinf(excess):
        return math.inf
    return delay_of(1 / excess)


def delay_laws(laws: Mapping[Series, Law]) -> list[DelayLaw]:
    """Return the law of each series that was run at several delays.

    Empty where the delay is no axis of the grid.

    Args:
        laws: The law of each series and delay.
    """
    by_delay: dict[Series, dict[int, Law]] = {}
    for series, law in laws.items():
        axes: dict[str, Any] = dict(series.axes)
        if KEY in axes:
            delay = axes.pop(KEY)
            without_delay = replace(series, axes=tuple(sorted(axes.items())))
            by_delay.setdefault(without_delay, {})[delay] = law
    return [_joint_law(series, of_series) for series, of_series in sorted(by_delay.items())]


def _joint_law(series: Series, laws: Mapping[int, Law]) -> DelayLaw:
    """Return the law of one series over all its delays.

    K* share = c1 share / B + c2: this is the law without a delay, of batch sizes B / share and
    steps K* share.
    """
    k_star = {}
    observations = []
    for delay, law in laws.items():
        share = stable_share(delay)
        for o in law.observations:
            observations.append(
                replace(
                    o, batch_size=o.batch_size / share, steps=o.steps * share, check=o.check * share
                )
            )
        for batch_size, k in law.resolved.items():
            k_star[batch_size, delay] = k
    k_star = dict(sorted(k_star.items()))
    return DelayLaw(series, tuple(sorted(laws)), k_star, fit_law(observations))


def delay_rows(laws: Iterable[DelayLaw], separate_laws: Mapping[Series, Law]) -> pd.DataFrame:
    """Return one row a series and delay: the law of all delays beside that of the delay alone.

    Columns: sparsity and further axes, delay [steps], c1 [examples] and c2 [steps] of the law of
    all delays, misfit (root mean square of log K* less its log) and misfit_here, that at this
    delay; floor [steps], what it predicts for c2 of this delay; own_c1 and own_c2, the law of this
    delay alone, each with its 95 % limits (own_c1_low and so on), and own_misfit, from its own K*.
    """
    rows = []
    for law in laws:
        for delay in law.delays:
            axes = tuple(sorted((*law.series.axes, (KEY, delay))))
            separate = separate_laws[replace(law.series, axes=axes)]
            row: dict[str, object] = {**columns_of(law.series), "delay": delay}
            row |= dict.fromkeys(("c1", "c2", "misfit", "misfit_here", "floor"))
            if law.fit is not None:
                row["c1"] = law.fit.c1
                row["c2"] = law.fit.c2
                row["misfit"] = law.misfit
                row["misfit_here"] = law.misfit_at((delay,))
                row["floor"] = law.fit.c2 / stable_share(delay)
            c1, c2, misfit = None, None, None
            if separate.fit is not None:
                c1 = separate.fit.c1
                c2 = separate.fit.c2
                fitted = {b: separate.fit.steps(b) for b in separate.resolved}
                residuals = [math.log(k / fitted[b]) for b, k in separate.resolved.items()]
                misfit = _root_mean_square(residuals)
            row |= interval_columns("own_c1", c1, separate.c1)
            row |= interval_columns("own_c2", c2, separate.c2)
            row["own_misfit"] = misfit
            rows.append(row)
    return frame(rows)


def doubling_rows(laws: Iterable[DelayLaw]) -> pd.DataFrame:
    """Return one row a series and batch size: the critical delay by the law of all delays.

    Columns: sparsity and further axes, batch_size [examples], critical_delay [steps], which doubles
    K*, with its 95 % limits low and high; infinite where c2 is 0.
    """
    rows = []
    for law in laws:
        if law.fit is None:
            continue
        for batch_size in sorted({b for b, _ in law.k_star}):
            value, (low, high) = law.doubling(batch_size)
            row = {**columns_of(law.series), "batch_size": batch_size, "critical_delay": value}
            rows.append(row | {"low": low, "high": high})
    return frame(rows)


def delay_points(laws: Iterable[DelayLaw]) -> pd.DataFrame:
    """Return K* of each cell beyond its first validation, beside the law of all delays.

    Columns: sparsity and further axes, batch_size [examples], delay [steps], k_star [steps], law
    [steps]; in_flight [examples], B / s with s = `stable_share`, and scaled [steps], s K*, in which
    the law is one curve.
    """
    rows = []
    for law in laws:
        for (batch_size, delay), k_star in law.k_star.items():
            share = stable_share(delay)
            rows.append(
                {
                    **columns_of(law.series),
                    "batch_size": batch_size,
                    "delay": delay,
                    "k_star": k_star,
                    "law": None if law.fit is None else law.steps(batch_size, delay),
                    "in_flight": batch_size / share,
                    "scaled": k_star * share,
                }
            )
    return frame(rows)


def steps_by_delay(law: DelayLaw, batch_size: Any) -> pd.DataFrame:
    """Return the law at a batch size as a curve over tau + 1; columns gradients and k_star."""
    gradients = np.geomspace(1, max(law.delays) + 1, CURVE_POINTS)
    steps = [law.steps(batch_size, gradient - 1) for gradient in gradients]
    return pd.DataFrame({"gradients": gradients, "k_star": steps})


def scaled_law(law: DelayLaw, in_flight: Any) -> pd.DataFrame:
    """Return the law over the range of some B / s (n,); columns in_flight and scaled."""
    batch = np.geomspace(in_flight.min(), in_flight.max(), CURVE_POINTS)
    return pd.DataFrame({"in_flight": batch, "scaled": law.fitted.steps(batch)})


def delay_text(laws: Iterable[DelayLaw], rows: pd.DataFrame) -> str:
    """Return the section of a report on stale gradients; empty without a law.

    Args:
        laws: Of each series.
        rows: Those of `delay_rows`.
    """
    fitted = [law for law in laws if law.fit is not None]
    if not fitted:
        return ""
    lines = ["K* = c1 / B + c2 / sin(pi / (2 (2 tau + 1))), all delays tau together"]
    lines += [f"  {law.series}  {_law_text(law)}" for law in fitted]
    lines += ["", "each delay by a law of its own, and what the one law says of its c1 and c2"]
    table = []
    for law in fitted:
        table += [_row_to_print(law, row) for row in records(rows_of(law.series, rows))]
    lines += aligned(table)
    return "\n".join(lines) + "\n"


def _law_text(law: DelayLaw) -> str:
    """Return the constants of a law and the delays that double K*, in words."""
    batch_sizes = [b for b, _ in law.k_star]
    doublings = []
    for batch_size in dict.fromkeys((min(batch_sizes), max(batch_sizes))):
        doublings.append(f"{estimate(*law.doubling(batch_size))} at B={batch_size}")
    constants = f"c1 = {three_digits(law.fitted.c1)}  c2 = {three_digits(law.fitted.c2)}"
    doubles = " and ".join(doublings)
    return f"{constants}  misfit {law.misfit:.0%}  the delay that doubles K*: {doubles}"


def _row_to_print(law: DelayLaw, row: Row) -> dict[str, str]:
    """Return a row of `delay_rows` as text, by column."""
    columns = {**short_columns(law.series), "delay": str(row["delay"])}
    for name, common in (("c1", row["c1"]), ("c2", row["floor"])):
        columns[f"own {name}"] = "-"
        if row[f"own_{name}"] is not None:
            low, high = row[f"own_{name}_low"], row[f"own_{name}_high"]
            interval = None if low is None else Interval(low, high)
            columns[f"own {name}"] = estimate(row[f"own_{name}"], interval)
        columns[f"one law's {name}"] = three_digits(common)
    for name, key in (("own misfit", "own_misfit"), ("one law's misfit", "misfit_here")):
        columns[name] = "-" if row[key] is None else f"{row[key]:.0%}"
    return columns
