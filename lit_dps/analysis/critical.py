"""All critical batch sizes of a study in one table: each definition in examples, with interval.

- law: c1 / c2 of K* = c1 / B + c2, where a run needs 2 x the examples of a small batch (McCandlish
  et al. 2018; Lee et al. 2021, Section 4). Interval of the posterior (`law.fit_law`).
- overhead: where the law needs 20 % more examples than at the smallest batch size measured (Zhang
  et al. 2024, "How Does Critical Batch Size Scale in Pre-training?";
  `law_fit.overhead_batch_size`). The same interval.
- linear_20, linear_50: the end of perfect scaling as measured, without a law: where the examples
  B K* exceed those at the smallest batch size by 20 % and by 50 %. Shallue et al. (2019) read it
  off by eye. Here log(B K*) is made monotone in B first by isotonic regression, so that one lucky
  or unlucky cell is no end; then it is interpolated in log B. Interval of draws of each K*
  (`observations.Observation.draws`).
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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special
from scipy.optimize import isotonic_regression

from lit_dps.analysis.gradient_noise import Readings, noise_law, readings_of
from lit_dps.analysis.intervals import (
    Interval,
    estimate,
    inverted,
    percentile_interval,
)
from lit_dps.analysis.law import Law
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
    laws: Mapping[Series, Law],
    replicates: int,
) -> dict[Series, dict[str, Critical]]:
    """Return each definition's critical batch size in each series, in the order of `DEFINITIONS`.

    Args:
        cells, laws: Of a study, and the law of each series.
        replicates: Draws of K* that the ends of linear scaling rest on.
    """
    by_series: dict[Series, list[CellSummary]] = {series: [] for series in sorted(laws)}
    for summary in cells:
        by_series[summary.cell.series].append(summary)
    table = {}
    for series in with_progress("critical batch sizes", list(by_series)):
        of_series = by_series[series]
        law = laws[series]
        draws = law.draw_observations(replicates, str(series))
        definitions = _by_law(law) | _by_measurement(law, draws)
        definitions["theory"] = _geometric_mean([_by_theory(summary) for summary in of_series])
        definitions["noise_scale"] = _noise_scale(of_series)
        definitions["noise_law"] = _geometric_mean([_by_noise(s) for s in of_series])
        table[series] = definitions
    return table


def _by_law(law: Law) -> dict[str, Critical]:
    """Return the definitions that take the law of K*: law and overhead."""
    if law.fit is None or law.critical is None:
        return dict.fromkeys(("law", "overhead"), Critical(verdict=law.describe()))
    smallest = min(law.resolved)

    def overhead(critical: float) -> float:
        return overhead_batch_size(Fit(critical, 1.0), OVERHEAD, smallest)

    if law.verdict.bound is not None:
        bound = law.verdict.bound
        return {"law": _above(bound), "overhead": _above(overhead(bound))}
    if not law.identifiable:
        return dict.fromkeys(("law", "overhead"), Critical(verdict=law.describe()))
    value = law.fit.critical_batch_size
    low, high = law.critical
    below = ""
    if value < smallest:
        below = f"below the smallest batch size, {smallest}"
    late = _late_start(law, OVERHEAD)
    return {
        "law": Critical(value, law.critical, below),
        "overhead": Critical(overhead(value), Interval(overhead(low), overhead(high)), late),
    }


def _above(bound: float) -> Critical:
    """Return the critical batch size of which only a lower bound is known."""
    return Critical(verdict=f"not identifiable: > {three_digits(bound)}", bound=bound)


def _late_start(law: Law, share: float) -> str:
    """Return a verdict if the smallest batch size is beyond linear law already, else empty."""
    assert law.fit is not None
    smallest = min(law.resolved)
    overhead = smallest / law.fit.critical_batch_size
    if overhead < share:
        return ""
    return f"counted from B = {smallest}, where the law has {overhead:.0%} overhead already"


class PooledExamples(NamedTuple):
    """Examples B K of one curve, made monotone in B by isotonic regression.

    Attributes:
        log_b: (n,), logarithms of the batch sizes, ascending.
        excess: (n,), log(B K) less that of the smallest batch size, ascending.
    """

    log_b: np.ndarray
    excess: np.ndarray

    @classmethod
    def of(cls, batch_sizes: np.ndarray, steps: np.ndarray) -> PooledExamples:
        """Return the pooled examples of a curve: batch sizes (n,), ascending, and steps (n,)."""
        log_b = np.log(batch_sizes)
        excess = isotonic_regression(log_b + np.log(steps)).x
        return cls(log_b, excess - excess[0])

    def end(self, share: float) -> float:
        """Return the batch size where the examples exceed those at the smallest one by a share.

        Infinite if they never do.
        """
        excess = self.excess - math.log1p(share)
        above = int(np.argmax(excess > 0))
        if excess[above] <= 0:
            return math.inf
        low, high = excess[above - 1], excess[above]
        distance = self.log_b[above] - self.log_b[above - 1]
        return float(np.exp(self.log_b[above - 1] - low / (high - low) * distance))


def linear_end(batch_sizes: np.ndarray, steps: np.ndarray, share: float) -> float:
    """Return the end of linear scaling of one curve (`PooledExamples.end`)."""
    return PooledExamples.of(batch_sizes, steps).end(share)


def _by_measurement(law: Law, draws: np.ndarray) -> dict[str, Critical]:
    """Return the definitions that take K* as measured.

    Args:
        law: The law of a series.
        draws: (R, batch sizes of `law.resolved`), draws of K*, in steps.
    """
    sizes = list(law.resolved)
    if law.fit is None:
        verdict = f"needs K* at {MIN_BATCH_SIZES} batch sizes; has {len(sizes)}"
        return dict.fromkeys(LINEAR_ENDS, Critical(verdict=verdict))
    batch = np.array(sizes, float)
    measured = PooledExamples.of(batch, np.array(list(law.resolved.values()), float))
    drawn = [PooledExamples.of(batch, row) for row in draws]
    definitions = {}
    for name, share in LINEAR_ENDS.items():
        end = measured.end(share)
        if math.isinf(end):
            bound = sizes[-1]
            definitions[name] = Critical(None, None, f"not identifiable: > {bound}", bound)
            continue
        interval = end_interval(np.array([each.end(share) for each in drawn]), end)
        definitions[name] = Critical(end, interval, _late_start(law, share))
    return definitions


def end_interval(ends: np.ndarray, end: float) -> Interval | None:
    """Return the 95 % interval of an end from draws (R,), widened to hold it; None without draws.

    The ends of some draws are infinite, but 1 / end is finite.
    """
    if not len(ends) or not math.isfinite(end):
        return None
    return inverted(percentile_interval(1 / ends, 1 / end))


def _by_theory(summary: CellSummary) -> float | None:
    """Return c1 / c2 of the theory's terms of a cell's K* trial."""
    if summary.best is None or summary.k_star is None:
        return None
    terms = terms_of(summary.best)
    law = None if terms is None else terms.law_to(summary.k_star)
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
