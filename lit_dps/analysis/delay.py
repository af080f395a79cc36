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

from lit_dps.analysis.intervals import (
    Interval,
    estimate,
    interval_columns,
    percentile_interval,
    resampling_rng,
)
from lit_dps.analysis.law_bootstrap import Scaling, resample
from lit_dps.analysis.law_fit import MIN_BATCH_SIZES, Fit, fit_many
from lit_dps.analysis.summary import CellSummary, at_first_check
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
from lit_dps.core.racing import best_steps
from lit_dps.core.trial import Series

KEY = "optim.delay"
CURVE_POINTS = 64  # of a law that is drawn

# Steps to result of the trials of each cell of a series, by (batch size, delay).
Trials = Mapping[tuple[int, int], Sequence[int | None]]


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
        k_star: K* beyond the first check by (batch size, delay), in steps.
        fit: c1 [examples] and c2 [steps]; None where `k_star` has fewer than `MIN_BATCH_SIZES`
            values of B / `stable_share`.
        replicates: (R, 2), c1 and c2 of resamples of the trials.
    """

    series: Series
    delays: tuple[int, ...]
    k_star: Mapping[tuple[int, int], int]
    fit: Fit | None = None
    replicates: np.ndarray | None = None

    @property
    def fitted(self) -> Fit:
        """The fit, of a law that has one."""
        assert self.fit is not None, "the law has no fit"
        return self.fit

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

    def doubling(self, batch_size: int) -> tuple[float, Interval | None]:
        """Return the critical delay, which doubles K*, with its 95 % interval; infinite if c2 = 0.

        The interval is None without resamples.
        """
        value = _doubling(self.fitted.critical_batch_size, batch_size)
        if self.replicates is None:
            return value, None
        with np.errstate(divide="ignore"):
            critical = self.replicates[:, 0] / self.replicates[:, 1]
        resampled = np.array([_doubling(c, batch_size) for c in critical])
        return value, percentile_interval(resampled, value)


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


def delay_laws(
    cells: Iterable[CellSummary], check_interval: int, replicates: int
) -> list[DelayLaw]:
    """Return the law of each series that was run at several delays.

    Empty where the delay is no axis of the grid.
    """
    trials: dict[Series, dict[tuple[int, int], Sequence[int | None]]] = {}
    for summary in cells:
        axes: dict[str, Any] = dict(summary.cell.axes)
        if KEY in axes and not summary.sooner:
            delay = axes.pop(KEY)
            series = replace(summary.cell.series, axes=tuple(sorted(axes.items())))
            trials.setdefault(series, {})[summary.cell.batch_size, delay] = summary.steps
    laws = []
    for series, of_series in sorted(trials.items()):
        laws.append(_law(series, of_series, check_interval, replicates))
    return laws


def _law(series: Series, trials: Trials, check_interval: int, replicates: int) -> DelayLaw:
    """Return the law of one series, with resamples where a cell has two trials.

    K* share = c1 share / B + c2: this is the law without a delay, of batch sizes B / share and
    steps K* share.
    """
    k_star = {}
    for cell, steps in sorted(trials.items()):
        best = best_steps(steps)
        if best is not None and not at_first_check(best, check_interval):
            k_star[cell] = best
    unfitted = DelayLaw(series, tuple(sorted({delay for _, delay in trials})), k_star)
    share = np.array([stable_share(delay) for _, delay in k_star])
    batch = np.array([batch_size for batch_size, _ in k_star], float) / share
    if len(np.unique(batch)) < MIN_BATCH_SIZES:
        return unfitted
    ((c1, c2),) = fit_many(batch, (np.array(list(k_star.values())) * share)[None])
    fitted = replace(unfitted, fit=Fit(float(c1), float(c2)))
    if max(len(trials[cell]) for cell in k_star) < 2:
        return fitted
    columns = []
    for batch_size, delay in k_star:
        u = resampling_rng(0, batch_size, delay, 1).random(replicates)
        resampled = resample(trials[batch_size, delay], replicates, (0, batch_size))
        columns.append(resampled - check_interval * u)
    resamples = np.stack(columns, axis=1) * share
    resamples = resamples[np.isfinite(resamples).sum(axis=1) >= 2]
    if not len(resamples):
        return fitted
    return replace(fitted, replicates=fit_many(batch, resamples))


def delay_rows(laws: Iterable[DelayLaw], scalings: Mapping[Series, Scaling]) -> pd.DataFrame:
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
            separate = scalings[replace(law.series, axes=axes)]
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
            value, interval = law.doubling(batch_size)
            low, high = interval or (None, None)
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
