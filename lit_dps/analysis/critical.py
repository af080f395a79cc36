"""The critical batch sizes of a study by each definition in use, with intervals.

- law: c1 / c2 of K* = c1 / B + c2. A run at this batch size needs twice the examples of a small
  batch (McCandlish et al. 2018; Lee et al. 2021, Section 4). Interval: the posterior
  (`law.fit_law`).
- overhead: the batch size at which the law needs 20 % more examples than at the smallest measured
  batch size (Zhang et al. 2024, "How Does Critical Batch Size Scale in Pre-training?";
  `law_fit.overhead_batch_size`). The same interval.
- linear_20, linear_50: the measured end of linear scaling, without a law. At this batch size, the
  examples B K* exceed the examples at the smallest batch size by 20 % or 50 %. Shallue et al.
  (2019) read it from figures by eye. Here isotonic regression first makes log(B K*) monotone in B,
  so that the noise of a single cell is not taken for an end. The end is interpolated in log B.
  Interval: draws of each K* (`observations.Observation.draws`).
- theory: eta L beta / (mu epsilon), which is c1 / c2 by the terms of each K* trial (Lee et al.
  2021, Section 4).
- noise_scale: tr(Sigma) / |G|^2 (McCandlish et al. 2018, Section 2.2). Both parts are averaged over
  the measurements of each K* trial and over these trials, then divided. Interval: Fieller's limits
  (`lit_dps.core.noise_scale.noise_scale`). If the trials have no measurements, the value comes from
  the run before the study, which trains the dense network of one series.
- noise_law: M + sigma^2 / epsilon, from the line through the noise of each K* trial
  (`gradient_noise.noise_law`). SGD does not slow down at batch sizes up to this order of magnitude
  (Stich, Mohtashami, Jaggi 2021). Epsilon is the squared gradient at the last measurement before
  the goal. With the mean over the run, the value would equal the noise scale.

Theory and noise law are geometric means over the K* trials of the batch sizes. Their 95 % limits
(Student's t) show how well the batch sizes agree. Both are orders of magnitude, because their
constants are unknown. Measurements after the goal do not count. A run with varying rates that
continued past its goal has no theory.
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
from lit_dps.analysis.intervals import Interval, estimate, inverted, percentile_interval
from lit_dps.analysis.law import Law
from lit_dps.analysis.law_fit import MIN_BATCH_SIZES, LawConstants, overhead_batch_size
from lit_dps.analysis.summary import CellSummary, by_series
from lit_dps.analysis.tables import columns_of, frame, three_digits
from lit_dps.analysis.theory import terms_of
from lit_dps.core.noise_scale import LEVEL, NoiseScale, noise_scale
from lit_dps.core.progress_line import with_progress
from lit_dps.core.racing import to_goal
from lit_dps.core.trial import Series, Value

# Definitions and their headings in a report.
DEFINITIONS = {
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
ONE_TRIAL = "from one trial"
# The run before the study has a constant batch, one worker and no mask, whatever these axes say.
_UNUSED_BEFORE = ("pruning.", "local.", "batch.")


@dataclass(frozen=True)
class Critical:
    """A critical batch size by one definition, in examples.

    Attributes:
        value: The critical batch size; None if it is unknown.
        interval: Its 95 % interval; None if it is unknown.
        note: Why there is no value, or the limitation of the value; else empty.
        bound: A lower bound, the lower 95 % limit, if only a lower bound is known; else None.
    """

    value: float | None = None
    interval: Interval | None = None
    note: str = ""
    bound: float | None = None

    def __str__(self) -> str:
        if self.value is not None:
            text = estimate(self.value, self.interval)
            return f"{text} *" if self.note else text
        if self.bound is not None:
            return f"> {three_digits(self.bound)}"
        return "-"


def critical_batch_sizes(
    cells: Iterable[CellSummary],
    laws: Mapping[Series, Law],
    replicates: int,
    noise: NoiseScale | None = None,
) -> dict[Series, dict[str, Critical]]:
    """Return each definition's critical batch size in each series, in the order of `DEFINITIONS`.

    Args:
        cells: The cells of a study.
        laws: The law of each series.
        replicates: Number of draws of K* for the ends of linear scaling.
        noise: The noise scale of the run before the study; None if it was not measured.
    """
    table = {}
    cells_of = by_series(cells)
    for series in with_progress("critical batch sizes", sorted(laws)):
        law = laws[series]
        definitions = _by_law(law)
        draws = law.draw_observations(replicates, series.stored_name)
        definitions |= _by_measurement(law, draws)
        definitions["theory"] = _geometric_mean(map(_by_theory, cells_of[series]))
        definitions["noise_scale"] = _noise_scale(cells_of[series])
        if noise is not None and definitions["noise_scale"].note == NOT_MEASURED:
            is_of_series = _is_trained_before(noise, series, min(laws))
            definitions["noise_scale"] = _before_study(noise, is_of_series)
        definitions["noise_law"] = _geometric_mean(map(_by_noise, cells_of[series]))
        table[series] = definitions
    return table


def _by_law(law: Law) -> dict[str, Critical]:
    """Return the definitions that use the law of K*: law and overhead."""
    is_known = law.is_b_crit_known or law.verdict.bound is not None
    if law.fit is None or law.b_crit_interval is None or not is_known:
        return dict.fromkeys(("law", "overhead"), Critical(note=law.describe()))
    smallest = min(law.exact_k)

    def overhead(critical: float) -> float:
        return overhead_batch_size(LawConstants(critical, 1.0), OVERHEAD, smallest)

    if law.verdict.bound is not None:
        bound = law.verdict.bound
        return {"law": _above(bound), "overhead": _above(overhead(bound))}
    value = law.fit.critical_batch_size
    below = ""
    if value < smallest:
        below = f"below the smallest batch size, {smallest}"
    low, high = law.b_crit_interval
    interval = Interval(overhead(low), overhead(high))
    return {
        "law": Critical(value, law.b_crit_interval, below),
        "overhead": Critical(overhead(value), interval, _late_start(law, OVERHEAD)),
    }


def _above(bound: float) -> Critical:
    """Return a critical batch size that is only known to exceed a bound."""
    return Critical(note=f"only a lower bound is known: > {three_digits(bound)}", bound=bound)


def _late_start(law: Law, share: float) -> str:
    """Return a note if the law already has a share of overhead at the smallest batch size."""
    assert law.fit is not None
    smallest = min(law.exact_k)
    overhead = smallest / law.fit.critical_batch_size
    if overhead < share:
        return ""
    return f"relative to B = {smallest}, where the law already has {overhead:.0%} overhead"


class PooledExamples(NamedTuple):
    """Examples B K of one curve, made monotone in B by isotonic regression.

    Attributes:
        log_b: (n,), logarithms of the batch sizes, ascending.
        excess: (n,), log(B K) minus log(B K) at the smallest batch size, ascending.
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
        """Return the end of linear scaling; infinite if there is no end.

        Args:
            share: Share by which the examples at the end exceed the examples at the smallest batch
                size.
        """
        excess = self.excess - math.log1p(share)
        above = int(np.argmax(excess > 0))
        if excess[above] <= 0:
            return math.inf
        low, high = excess[above - 1], excess[above]
        distance = self.log_b[above] - self.log_b[above - 1]
        return float(np.exp(self.log_b[above - 1] - low / (high - low) * distance))


def _by_measurement(law: Law, draws: np.ndarray) -> dict[str, Critical]:
    """Return the definitions that use K* without a law.

    Args:
        law: The law of a series.
        draws: (R, batch sizes of `law.exact_k`), draws of K*, in steps.
    """
    if law.fit is None:
        note = f"needs K* at {MIN_BATCH_SIZES} batch sizes; the series has {len(law.exact_k)}"
        if len(law.exact_k) >= MIN_BATCH_SIZES or not law.is_applicable:
            note = str(law.verdict)
        return dict.fromkeys(LINEAR_ENDS, Critical(note=note))
    batch_sizes = np.array(list(law.exact_k), float)
    measured = PooledExamples.of(batch_sizes, np.array(list(law.exact_k.values()), float))
    drawn = [PooledExamples.of(batch_sizes, steps) for steps in draws]
    definitions = {}
    for name, share in LINEAR_ENDS.items():
        end = measured.end(share)
        interval = None
        if drawn:
            # The ends of some draws are infinite, but 1 / end is finite.
            inverse_ends = 1 / np.array([each.end(share) for each in drawn])
            interval = inverted(percentile_interval(inverse_ends, 1 / end))
        if math.isinf(end):
            largest = max(law.exact_k)
            bound = float(largest)
            if interval is not None:
                bound = min(bound, interval.low)
            note = f"linear scaling does not end up to B = {largest}, the largest with a K*"
            definitions[name] = Critical(note=note, bound=bound)
            continue
        definitions[name] = Critical(end, interval, _late_start(law, share))
    return definitions


def _by_theory(summary: CellSummary) -> float | None:
    """Return c1 / c2 of the theory's terms of a cell's K* trial."""
    if summary.best is None or summary.best.steps is None:
        return None
    terms = terms_of(summary.best)
    if terms is None:
        return None
    law = terms.law_to(summary.best.steps)
    if law is None:
        return None
    return law.critical_batch_size


def _readings_to_goal(summary: CellSummary) -> Readings | None:
    """Return the gradient noise of a cell's K* trial up to its goal."""
    if summary.best is None:
        return None
    return readings_of(to_goal(summary.best))


def _by_noise(summary: CellSummary) -> float | None:
    """Return the noise over the squared gradient of a cell's K* trial at its goal."""
    readings = _readings_to_goal(summary)
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
    squared_gradients = []
    variances = []
    for summary in cells:
        readings = _readings_to_goal(summary)
        if readings is not None:
            squared_gradients.append(readings[0].mean())
            variances.append(readings[1].mean())
    if not variances:
        return Critical(note=NOT_MEASURED)
    if len(variances) == 1:
        return Critical(float(variances[0] / squared_gradients[0]), note=ONE_TRIAL)
    scale: Any = noise_scale({"squared_gradient": squared_gradients, "variance": variances}, 0)
    return _of_scale(scale)


def _of_scale(scale: NoiseScale, note: str = "") -> Critical:
    """Return a noise scale as a critical batch size; only a lower bound if it is not resolved."""
    if not scale.resolved:
        unresolved = f"only a lower bound is resolved: > {three_digits(scale.low)}"
        return Critical(note="; ".join(filter(None, [unresolved, note])), bound=scale.low)
    return Critical(scale.value, Interval(scale.low, scale.high), note)


def _is_trained_before(noise: NoiseScale, series: Series, first: Series) -> bool:
    """Return True if the run before the study trained the dense network of a series.

    Args:
        noise: Its noise scale.
        series: The series.
        first: The series that it trained if its axes are unknown.
    """
    if series.sparsity:
        return False
    if noise.axes is None:
        return series == first
    return _axes_of_network(noise.axes) == _axes_of_network(dict(series.axes))


def _axes_of_network(axes: Mapping[str, Value]) -> dict[str, Value]:
    """Return the axes that change the run before the study."""
    return {key: value for key, value in axes.items() if not key.startswith(_UNUSED_BEFORE)}


def _before_study(noise: NoiseScale, is_of_series: bool) -> Critical:
    """Return the noise scale of the run before the study, for a series without measurements.

    Args:
        noise: The noise scale.
        is_of_series: Whether the run before the study trained the network of the series.
    """
    readings = f"{noise.readings} measurements before the study at B = {noise.batch_size}"
    if is_of_series:
        return _of_scale(noise, f"from {readings}")
    return Critical(
        note=f"not measured in this series; the dense network has {noise}, from {readings}"
    )


def _geometric_mean(values: Iterable[float | None]) -> Critical:
    """Return the geometric mean of the known values, with a Student's t interval."""
    logs = np.log([value for value in values if value is not None])
    if not len(logs):
        return Critical(note=NOT_MEASURED)
    mean = float(logs.mean())
    if len(logs) == 1:
        return Critical(math.exp(mean), note=ONE_TRIAL)
    quantile = special.stdtrit(len(logs) - 1, 0.5 + LEVEL / 2)
    half_width = float(quantile * logs.std(ddof=1) / math.sqrt(len(logs)))
    interval = Interval(math.exp(mean - half_width), math.exp(mean + half_width))
    return Critical(math.exp(mean), interval)


def critical_rows(table: Mapping[Series, Mapping[str, Critical]]) -> pd.DataFrame:
    """Return one row per series and definition.

    Columns: sparsity and further axes, definition (see the docstring of the module), critical
    [examples], low and high (its 95 % limits), bound [examples] (set if only a lower bound is
    known) and verdict (the note).
    """
    rows = []
    for series, definitions in table.items():
        for name, critical in definitions.items():
            low, high = critical.interval or (None, None)
            row = {**columns_of(series), "definition": name, "critical": critical.value}
            row |= {"low": low, "high": high}
            rows.append(row | {"bound": critical.bound, "verdict": critical.note})
    return frame(rows)
