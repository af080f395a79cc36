"""All critical batch sizes of a study in one table: each definition in examples, with interval.

- law: c1 / c2 of K* = c1 / B + c2, where a run needs 2 x the examples of a small batch (McCandlish
  et al. 2018; Lee et al. 2021, Section 4). Interval of the bootstrap over trials, or seeds where
  all is repeated (`law_bootstrap.bootstrap_law`).
- overhead: where the law needs 20 % more examples than at the smallest batch size measured (Zhang
  et al. 2024, "How Does Critical Batch Size Scale in Pre-training?";
  `law_fit.overhead_batch_size`). The same bootstrap.
- linear_20, linear_50: the end of perfect scaling as measured, without a law: where the examples
  B K* exceed those at the smallest batch size by 20 % and by 50 %. Shallue et al. (2019) read it
  off by eye. Here log(B K*) is made monotone in B first by isotonic regression, so that one lucky
  or unlucky cell is no end; then it is interpolated in log B. Resamples of the same kind; without
  limits where too many lack a cell that the end depends on.
- theory: eta L beta / (mu epsilon) (Lee et al. 2021, Section 4), c1 / c2 of the terms of each K*
  trial.
- noise_scale: tr(Sigma) / |G|^2 (McCandlish et al. 2018, Section 2.2). Both parts are averaged over
  the measurements of each K* trial, then over these trials, then divided; Fieller's limits
  (`lit_dps.core.noise_scale.noise_scale`).
- noise_law: M + sigma^2 / epsilon (Stich, Mohtashami, Jaggi 2021: batch sizes up to its order do
  not slow SGD down), of the line through the noise of each K* trial (`gradient_noise.noise_law`),
  with epsilon its squared gradient at the last measurement before the goal. With the mean over the
  run instead it would be the noise scale again.

Theory and noise law are geometric means over the K* trials of the batch sizes, with 95 % limits of
Student's t: how far the batch sizes agree. Both are orders of magnitude, not predictions: their
constants are not known. Measurements after the goal, of runs that trained past it, do not count;
where their rates changed there is no theory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special
from scipy.optimize import isotonic_regression

from lit_dps.analysis.gradient_noise import Readings, noise_law, readings_of
from lit_dps.analysis.intervals import (
    PERCENTILES,
    Interval,
    estimate,
    inverted,
    percentile_interval,
    resampling_rng,
)
from lit_dps.analysis.law_bootstrap import Scaling, resample
from lit_dps.analysis.law_fit import MIN_BATCH_SIZES, Fit, overhead_batch_size
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import aligned, columns_of, frame, short_columns, three_digits
from lit_dps.analysis.theory import terms_of
from lit_dps.core.noise_scale import LEVEL, noise_scale
from lit_dps.core.progress_line import with_progress
from lit_dps.core.racing import to_goal
from lit_dps.core.trial import Series

DEFINITIONS = {  # what the report calls them
    "law": "law, 2x",
    "overhead": "law, +20 %",
    "linear_20": "measured, +20 %",
    "linear_50": "measured, +50 %",
    "theory": "eta L beta/(mu eps)",
    "noise_scale": "tr(Sigma)/|G|^2",
    "noise_law": "M + sigma^2/eps",
}
OVERHEAD = 0.2
LINEAR_ENDS = {"linear_20": 0.2, "linear_50": 0.5}
NOT_MEASURED = "not measured"
FOOTNOTE = (
    "* below the smallest batch size, counted from one beyond linear scaling, of one trial, or "
    "without limits: critical.csv says which"
)


@dataclass(frozen=True)
class Critical:
    """A critical batch size by one definition, in examples.

    Attributes:
        value: None where there is none.
        interval: 95 %; None where there is none.
        verdict: Why there is no value, or its limitation; else empty.
        bound: What it exceeds where it is not identifiable.
    """

    value: float | None = None
    interval: Interval | None = None
    verdict: str = NOT_MEASURED
    bound: float | None = None

    def __str__(self) -> str:
        if self.value is not None:
            return estimate(self.value, self.interval) + " *" * bool(self.verdict)
        if self.bound is not None:
            return f"> {three_digits(self.bound)}"
        return "-"


def critical_batch_sizes(
    cells: Iterable[CellSummary],
    scalings: Mapping[Series, Scaling],
    seeds: Mapping[Series, Mapping[int, Sequence[float]]],
    check_interval: int,
    replicates: int,
) -> dict[Series, dict[str, Critical]]:
    """Return each definition's critical batch size in each series, in the order of `DEFINITIONS`.

    Args:
        cells, scalings: Of a study, and the law of each series (`bootstrap_law`).
        seeds: Steps to result of repeats of the K* trials on fresh seeds, by series and batch size.
        check_interval, replicates: As in `bootstrap_law`.
    """
    by_series: dict[Series, list[CellSummary]] = {series: [] for series in sorted(scalings)}
    for summary in cells:
        by_series[summary.cell.series].append(summary)
    table = {}
    for series in with_progress("critical batch sizes", list(by_series)):
        of_series = by_series[series]
        scaling = scalings[series]
        resamples = resampled_k_star(
            scaling, of_series, seeds.get(series, {}), check_interval, replicates
        )
        definitions = _by_law(scaling) | _by_measurement(scaling, resamples)
        definitions["theory"] = _geometric_mean([_by_theory(summary) for summary in of_series])
        definitions["noise_scale"] = _noise_scale(of_series)
        definitions["noise_law"] = _geometric_mean([_by_noise(s) for s in of_series])
        table[series] = definitions
    return table


def _by_law(scaling: Scaling) -> dict[str, Critical]:
    """Return the definitions that take the law of K*: law and overhead."""
    if scaling.fit is None:
        return dict.fromkeys(("law", "overhead"), Critical(verdict=scaling.describe()))
    smallest = min(scaling.resolved)

    def overhead(critical: float) -> float:
        return overhead_batch_size(Fit(critical, 1.0), OVERHEAD, smallest)

    if not scaling.identifiable:
        assert scaling.bound is not None
        return {"law": _above(scaling.bound), "overhead": _above(overhead(scaling.bound))}
    value = scaling.fit.critical_batch_size
    shifted = None
    if scaling.critical is not None:
        low, high = scaling.critical
        shifted = Interval(overhead(low), overhead(high))
    below = ""
    if value < smallest:
        below = f"below the smallest batch size, {smallest}"
    return {
        "law": Critical(value, scaling.critical, below),
        "overhead": Critical(overhead(value), shifted, _late_start(scaling, OVERHEAD)),
    }


def _above(bound: float) -> Critical:
    """Return the critical batch size of which only a lower bound is known."""
    return Critical(verdict=f"not identifiable: > {three_digits(bound)}", bound=bound)


def _late_start(scaling: Scaling, share: float) -> str:
    """Return a verdict if the smallest batch size is beyond linear scaling already, else empty."""
    assert scaling.fit is not None
    smallest = min(scaling.resolved)
    overhead = smallest / scaling.fit.critical_batch_size
    if overhead < share:
        return ""
    return f"counted from B = {smallest}, where the law has {overhead:.0%} overhead already"


class PooledExamples(NamedTuple):
    """Examples B K of one curve, made monotone in B by isotonic regression.

    Attributes:
        known: (n,), whether the steps of a batch size are known.
        log_b: (m,), logarithms of the batch sizes whose steps are known.
        excess: (m,), log(B K) less that of the smallest batch size, ascending; empty where m < 2.
    """

    known: np.ndarray
    log_b: np.ndarray
    excess: np.ndarray

    @classmethod
    def of(cls, batch_sizes: np.ndarray, steps: np.ndarray) -> PooledExamples:
        """Return the pooled examples of a curve.

        Args:
            batch_sizes: Ascending, shape (n,).
            steps: Steps to result at each; nan where unknown.
        """
        known = np.isfinite(steps)
        log_b = np.log(batch_sizes[known])
        if len(log_b) < 2:
            return cls(known, log_b, np.empty(0))
        excess = isotonic_regression(log_b + np.log(np.asarray(steps)[known])).x
        return cls(known, log_b, excess - excess[0])

    def end(self, share: float) -> float:
        """Return the batch size where the examples exceed those at the smallest one by a share.

        Infinite if they never do. Nan where it is not known: where the steps of fewer than 2 batch
        sizes are, or not those of the smallest, which it counts from, or of another up to the first
        one beyond the end. Batch sizes missing further up need more examples still.
        """
        if not len(self.excess):
            return math.nan
        log_b = self.log_b
        excess = self.excess - math.log1p(share)
        above = int(np.argmax(excess > 0))
        has_end = excess[above] > 0
        needed = len(self.known)
        if has_end:
            needed = np.flatnonzero(self.known)[above]
        if not self.known[:needed].all():
            return math.nan
        if not has_end:
            return math.inf
        low, high = excess[above - 1], excess[above]
        distance = log_b[above] - log_b[above - 1]
        return float(np.exp(log_b[above - 1] - low / (high - low) * distance))


def linear_end(batch_sizes: np.ndarray, steps: np.ndarray, share: float) -> float:
    """Return the end of linear scaling of one curve (`PooledExamples.end`)."""
    return PooledExamples.of(batch_sizes, steps).end(share)


def _by_measurement(scaling: Scaling, steps: np.ndarray) -> dict[str, Critical]:
    """Return the definitions that take K* as measured.

    Args:
        scaling: The law of a series.
        steps: `resampled_k_star`.
    """
    sizes = list(scaling.resolved)
    if scaling.fit is None:
        verdict = f"needs K* at {MIN_BATCH_SIZES} batch sizes; has {len(sizes)}"
        return dict.fromkeys(LINEAR_ENDS, Critical(verdict=verdict))
    batch = np.array(sizes, float)
    measured = PooledExamples.of(batch, np.array(list(scaling.resolved.values()), float))
    resamples = [PooledExamples.of(batch, row) for row in steps]
    definitions = {}
    for name, share in LINEAR_ENDS.items():
        end = measured.end(share)
        if math.isinf(end):
            bound = sizes[-1]
            definitions[name] = Critical(None, None, f"not identifiable: > {bound}", bound)
            continue
        interval, why = end_interval(np.array([each.end(share) for each in resamples]), end)
        verdicts = [text for text in (_late_start(scaling, share), why) if text]
        definitions[name] = Critical(end, interval, "; ".join(verdicts))
    return definitions


def resampled_k_star(
    scaling: Scaling,
    cells: Iterable[CellSummary],
    seeds: Mapping[int, Sequence[float]],
    check_interval: int,
    replicates: int,
) -> np.ndarray:
    """Return K* of resamples (R, batch sizes) of the cells of a law, nan without a complete trial.

    Over trials or seeds as the intervals of the law are. Without a row where a cell has one trial
    and too few repeats.

    Args:
        scaling: The law of a series.
        cells: The cells of the series, by batch size.
        seeds: Steps to result of repeats of the K* trials on fresh seeds, by batch size.
        check_interval, replicates: As in `bootstrap_law`.
    """
    columns = []
    for summary in cells:
        b = summary.cell.batch_size
        if b not in scaling.resolved:
            continue
        u = resampling_rng(0, b, 2).random(replicates)
        if scaling.over == "seeds":
            repeats = resampling_rng(0, b, 1).choice(seeds[b], replicates)
            k_star = scaling.resolved[b]
            columns.append((k_star - check_interval * u) * (repeats / np.median(seeds[b])))
        elif len(summary.trials) > 1:
            columns.append(resample(summary.steps, replicates, (0, b)) - check_interval * u)
    if not columns or len(columns) < len(scaling.resolved):
        return np.empty((0, len(scaling.resolved)))
    return np.stack(columns, axis=1)


def end_interval(ends: np.ndarray, end: float) -> tuple[Interval | None, str]:
    """Return the 95 % interval of an end from resamples (R,), and why there is none, else empty.

    The interval is widened to hold the end. None where one in 40 resamples or more is nan, as of
    ratios (`sparse_ratios.Ratio`): the steps of a cell without a complete trial are unknown.
    """
    known = ends[~np.isnan(ends)]
    if not len(ends) or not math.isfinite(end):
        return None, ""
    if len(known) <= (1 - PERCENTILES[0] / 100) * len(ends):
        lack = f"{1 - len(known) / len(ends):.0%} of the resamples of its trials"
        return None, f"no limits: {lack} have no complete one at a batch size that it hangs on"
    # 1 / end is finite where a resample has no end.
    return inverted(percentile_interval(1 / known, 1 / end)), ""


def _by_theory(summary: CellSummary) -> float | None:
    """Return c1 / c2 of the theory's terms of a cell's K* trial."""
    if summary.best is None or summary.k_star is None:
        return None
    terms = terms_of(summary.best)
    law = None if terms is None else terms.law_of(summary.k_star)
    return None if law is None else law.critical_batch_size


def _by_noise(summary: CellSummary) -> float | None:
    """Return the noise over the squared gradient at the goal of a cell's K* trial."""
    readings = None
    if summary.best is not None:
        readings = readings_of(to_goal(summary.best))
    if readings is None:
        return None
    law = noise_law([readings])
    if law is None:
        return None
    squared_gradient = float(readings[0][-1])
    value = law.at(squared_gradient) / squared_gradient
    return value if value > 0 else None


def _noise_scale(cells: Iterable[CellSummary]) -> Critical:
    """Return the noise scale of the K* trials of a series."""
    trials: list[Readings] = []
    for summary in cells:
        if summary.best is None:
            continue
        readings = readings_of(to_goal(summary.best))
        if readings is not None:
            trials.append(readings)
    if not trials:
        return Critical()
    squared_gradients = [squared_gradient.mean() for squared_gradient, _ in trials]
    variances = [noise.mean() for _, noise in trials]
    if len(trials) == 1:
        return Critical(float(variances[0] / squared_gradients[0]), None, "of one trial")
    scale: Any = noise_scale({"squared_gradient": squared_gradients, "variance": variances}, 0)
    if not scale.resolved:
        return Critical(None, None, f"not resolved: > {three_digits(scale.low)}", scale.low)
    return Critical(scale.value, Interval(scale.low, scale.high), "")


def _geometric_mean(values: Iterable[float | None]) -> Critical:
    """Return the geometric mean of the values that are known, with limits of Student's t."""
    logs = np.log([value for value in values if value is not None])
    if not len(logs):
        return Critical()
    mean = float(logs.mean())
    if len(logs) == 1:
        return Critical(math.exp(mean), None, "of one trial")
    quantile = special.stdtrit(len(logs) - 1, 0.5 + LEVEL / 2)
    half = float(quantile * logs.std(ddof=1) / math.sqrt(len(logs)))
    return Critical(math.exp(mean), Interval(math.exp(mean - half), math.exp(mean + half)), "")


def critical_rows(table: Mapping[Series, Mapping[str, Critical]]) -> pd.DataFrame:
    """Return one row a series and definition.

    Columns: sparsity and further axes, definition (those of the module's docstring), critical
    [examples], low and high, its 95 % limits, bound [examples], what it exceeds where it is not
    identifiable, and verdict.
    """
    rows = []
    for series, definitions in table.items():
        for name, critical in definitions.items():
            low, high = critical.interval or (None, None)
            rows.append(
                {
                    **columns_of(series),
                    "definition": name,
                    "critical": critical.value,
                    "low": low,
                    "high": high,
                    "bound": critical.bound,
                    "verdict": critical.verdict,
                }
            )
    return frame(rows)


def critical_text(table: Mapping[Series, Mapping[str, Critical]]) -> str:
    """Return the section of a report: a line a series; empty of fewer than two definitions.

    Definitions without a value or bound in any series are left out.
    """
    shown = []
    for name in DEFINITIONS:
        if any(str(definitions[name]) != "-" for definitions in table.values()):
            shown.append(name)
    if len(shown) < 2:
        return ""
    rows = []
    has_footnote = False
    for series, definitions in table.items():
        row = short_columns(series)
        for name in shown:
            critical = definitions[name]
            row[DEFINITIONS[name]] = str(critical)
            if critical.value is not None and critical.verdict:
                has_footnote = True
        rows.append(row)
    lines = ["critical batch sizes in examples, by definition", *aligned(rows)]
    if has_footnote:
        lines.append(FOOTNOTE)
    return "\n".join(lines) + "\n"
