"""One law for batch size and delay: K*(B, tau) = c1 / B + c2 / sin(pi / (2 (2 tau + 1))).

Gradient descent with gradients of tau steps ago is stable on curvature h for rates below 2 s / h,
where s is that sine. So the floor c2 of the steps grows by 1 / s, about (4 tau + 2) / pi, while c1,
the noise's part, stays. This is an approximation of ours, from the stability of a single mode;
Stich, Mohtashami and Jaggi (2021) give orders: one critical parameter of the data for batch size
and delay alike. It can be seen to fail, in the laws of each delay beside it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from lit_dps.analysis.law_bootstrap import (
    Interval,
    Scaling,
    estimate,
    percentile_interval,
    resample,
)
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


def stable_share(delay: float) -> float:
    """sin(pi / (2 (2 tau + 1))): the largest stable rate over that without a delay; 1 at 0."""
    return math.sin(math.pi / (2 * (2 * delay + 1)))


def delay_of(share: float) -> float:
    """The inverse of `stable_share`."""
    return (math.pi / (2 * math.asin(share)) - 1) / 2


@dataclass(frozen=True)
class DelayLaw:
    """The law of batch size and delay in one series, all delays together.

    Attributes:
        series: Without its delay.
        delays: Those of the grid.
        k_star: K* beyond the first check by (batch size, delay), in steps.
        fit: c1 [examples] and c2 [steps]; None where `k_star` has fewer than
            `MIN_BATCH_SIZES` values of B / `stable_share`: the law meets any two.
        replicates: (R, 2), c1 and c2 of resamples of the trials.
    """

    series: Series
    delays: tuple[int, ...]
    k_star: Mapping[tuple[int, int], int]
    fit: Fit | None = None
    replicates: np.ndarray | None = None

    def steps(self, batch_size, delay: float):
        """Steps to result by the law, at batch sizes (number or array)."""
        return self.fit.c1 / batch_size + self.fit.c2 / stable_share(delay)

    @cached_property
    def misfit(self) -> float:
        """The root mean square of log K* less log of the law."""
        return self.misfit_at(self.delays)

    def misfit_at(self, delays: Collection[int]) -> float:
        """The misfit of the law at some delays alone; nan where none of them has a K*."""
        cells = ((b, tau, k) for (b, tau), k in self.k_star.items() if tau in delays)
        return _root_mean_square([math.log(k / self.steps(b, tau)) for b, tau, k in cells])

    def doubling(self, batch_size: int) -> tuple[float, Interval | None]:
        """The critical delay at a batch size, which doubles K*, and its 95 % interval; infinite
        where c2 is 0."""
        own = _doubling(self.fit.critical_batch_size, batch_size)
        if self.replicates is None:
            return own, None
        with np.errstate(divide="ignore"):
            critical = self.replicates[:, 0] / self.replicates[:, 1]
        return own, percentile_interval(np.array([_doubling(c, batch_size) for c in critical]), own)


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(sum(x * x for x in values) / len(values)) if values else math.nan


def _doubling(critical_batch_size: float, batch_size: float) -> float:
    """tau at which c1 / B + c2 / share(tau) = 2 (c1 / B + c2)."""
    excess = 2 + critical_batch_size / batch_size
    return delay_of(1 / excess) if math.isfinite(excess) else math.inf


def delay_laws(
    cells: Iterable[CellSummary], check_interval: int, replicates: int
) -> list[DelayLaw]:
    """The law of each series that was run at several delays; none where the delay is no axis of the
    grid."""
    trials: dict[Series, dict[tuple[int, int], Sequence[int | None]]] = {}
    for summary in cells:
        others = dict(summary.cell.axes)
        if KEY in others and not summary.sooner:
            delay = others.pop(KEY)
            series = replace(summary.cell.series, axes=tuple(sorted(others.items())))
            trials.setdefault(series, {})[summary.cell.batch_size, delay] = summary.steps
    return [
        _law(series, found, check_interval, replicates) for series, found in sorted(trials.items())
    ]


def _law(
    series: Series,
    trials: Mapping[tuple[int, int], Sequence[int | None]],
    check_interval: int,
    replicates: int,
) -> DelayLaw:
    k_star = {
        cell: k for cell, steps in sorted(trials.items()) if (k := best_steps(steps)) is not None
    }
    k_star = {cell: k for cell, k in k_star.items() if not at_first_check(k, check_interval)}
    bare = DelayLaw(series, tuple(sorted({delay for _, delay in trials})), k_star)
    # K* share = c1 share / B + c2: the law without a delay, of batch sizes B / share and steps K*
    # share
    share = np.array([stable_share(delay) for _, delay in k_star])
    batch = np.array([b for b, _ in k_star]) / share if k_star else share
    if len(np.unique(batch)) < MIN_BATCH_SIZES:
        return bare
    ((c1, c2),) = fit_many(batch, (np.array(list(k_star.values())) * share)[None])
    fitted = replace(bare, fit=Fit(float(c1), float(c2)))
    if max(len(trials[cell]) for cell in k_star) < 2:
        return fitted
    drawn = []
    for b, delay in k_star:
        u = np.random.default_rng((0, b, delay, 1)).random(replicates)
        drawn.append(resample(trials[b, delay], replicates, (0, b)) - check_interval * u)
    steps = np.stack(drawn, axis=1) * share
    steps = steps[np.isfinite(steps).sum(axis=1) >= 2]
    return replace(fitted, replicates=fit_many(batch, steps)) if len(steps) else fitted


def delay_rows(laws: Iterable[DelayLaw], scalings: Mapping[Series, Scaling]) -> pd.DataFrame:
    """One row a series and delay: the one law beside that of the delay alone.

    Columns: sparsity and further axes, delay [steps], c1 [examples] and c2 [steps] of the law of
    all delays, misfit (root mean square of log K* less its log) and misfit_here, that at this
    delay; floor [steps], what it predicts for c2 of this delay; own_c1 and own_c2, the law of this
    delay alone, each with its 95 % limits (own_c1_low and so on), and own_misfit, from its own K*.
    """
    rows = []
    for law in laws:
        for delay in law.delays:
            series = replace(law.series, axes=tuple(sorted((*law.series.axes, (KEY, delay)))))
            own = scalings[series]
            known = law.fit is not None
            rows.append(
                {
                    **columns_of(law.series),
                    "delay": delay,
                    "c1": law.fit.c1 if known else None,
                    "c2": law.fit.c2 if known else None,
                    "misfit": law.misfit if known else None,
                    "misfit_here": law.misfit_at((delay,)) if known else None,
                    "floor": law.fit.c2 / stable_share(delay) if known else None,
                    **_limits("own_c1", own.fit and own.fit.c1, own.c1),
                    **_limits("own_c2", own.fit and own.fit.c2, own.c2),
                    "own_misfit": own.fit
                    and _root_mean_square(
                        [math.log(k / own.fit.steps(b)) for b, k in own.resolved.items()]
                    ),
                }
            )
    return frame(rows)


def doubling_rows(laws: Iterable[DelayLaw]) -> pd.DataFrame:
    """One row a series and batch size: the critical delay by the law of all delays.

    Columns: sparsity and further axes, batch_size [examples], critical_delay [steps], which doubles
    K*, with its 95 % limits low and high; infinite where c2 is 0.
    """
    rows = []
    for law in laws:
        for b in sorted({b for b, _ in law.k_star}) if law.fit else ():
            value, interval = law.doubling(b)
            row = {**columns_of(law.series), "batch_size": b, "critical_delay": value}
            rows.append(row | dict(zip(("low", "high"), interval or (None, None), strict=True)))
    return frame(rows)


def _limits(name: str, value: float | None, interval: Interval | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def delay_text(laws: Iterable[DelayLaw], rows: pd.DataFrame) -> str:
    """The section of a report on stale gradients: the one law of each series, beside the free laws
    of each delay.

    Args:
        laws: Of each series.
        rows: Those of `delay_rows`.
    """
    laws = [law for law in laws if law.fit]
    if not laws:
        return ""
    lines = ["K* = c1 / B + c2 / sin(pi / (2 (2 tau + 1))), all delays tau together"]
    for law in laws:
        smallest, largest = min(b for b, _ in law.k_star), max(b for b, _ in law.k_star)
        doubles = " and ".join(
            f"{estimate(*law.doubling(b))} at B={b}" for b in dict.fromkeys((smallest, largest))
        )
        fitted = (
            f"c1 = {three_digits(law.fit.c1)}  c2 = {three_digits(law.fit.c2)}  misfit "
            f"{law.misfit:.0%}"
        )
        lines.append(f"  {law.series}  {fitted}  the delay that doubles K*: {doubles}")
    lines += ["", "each delay by a law of its own, and what the one law says of its c1 and c2"]
    lines += aligned(
        _free_row(law, row) for law in laws for row in records(rows_of(law.series, rows))
    )
    return "\n".join(lines) + "\n"


def _free_row(law: DelayLaw, row: Row) -> dict[str, str]:
    free = {}
    for name, one in (("c1", row["c1"]), ("c2", row["floor"])):
        low, high = row[f"own_{name}_low"], row[f"own_{name}_high"]
        own = row[f"own_{name}"]
        interval = None if low is None else Interval(low, high)
        free |= {
            f"own {name}": "-" if own is None else estimate(own, interval),
            f"one law's {name}": three_digits(one),
        }
    misfit = {
        name: "-" if row[key] is None else f"{row[key]:.0%}"
        for name, key in (("own misfit", "own_misfit"), ("one law's misfit", "misfit_here"))
    }
    return {**short_columns(law.series), "delay": str(row["delay"]), **free, **misfit}
