"""The end of linear scaling as measured, without a law: where the examples B K* begin to rise, and
how certain that is.

It is the end of perfect scaling of Shallue et al. (2019), who read it off by eye, by a rule. log(B
K*) is made monotone in B first, neighbours that fall being pooled
(`scipy.optimize.isotonic_regression`), so that one lucky or unlucky cell is no end; then it is
interpolated in log B.

All critical batch sizes of a study in one table: what each paper calls so, in examples, each
with its interval.

- law: c1 / c2 of K* = c1 / B + c2, where a run needs 2 x the examples of a small batch (McCandlish
  et al. 2018; Lee et al. 2021, Section 4). Interval of the bootstrap over trials, or seeds where
  all is repeated (`scaling.scale`).
- overhead: where the law needs 20 % more examples than at the smallest batch size measured (Zhang
  et al. 2024, "How Does Critical Batch Size Scale in Pre-training?"; `fit.overhead_batch_size`).
  The same bootstrap.
- linear_20, linear_50: the end of linear scaling as measured, without a law: where the examples B
  K* exceed those at the smallest batch size by 20 % and by 50 % (`linear_end`: the end of perfect
  scaling of Shallue et al. 2019, by a rule). Resamples of the same kind, each read anew; without
  limits where too many lack a cell that it hangs on.
- theory: eta L beta / (mu epsilon) (Lee et al. 2021, Section 4), c1 / c2 of the terms of each K*
  trial.
- noise_scale: tr(Sigma) / |G|^2 (McCandlish et al. 2018, Section 2.2). Both parts are averaged over
  the measurements of each K* trial, then over these trials, then divided; Fieller's limits
  (`lit_dps.core.noise_scale.noise_scale`).
- noise_law: M + sigma^2 / epsilon (Stich, Mohtashami, Jaggi 2021: batch sizes up to its order do
  not slow SGD down), of the line through the noise of each K* trial (`gradient_noise.noise_law`),
  with epsilon its squared gradient at the last measurement before the goal. With the mean over the
  run in its place it would be the noise scale again.

Theory and noise law are geometric means over the K* trials of the batch sizes, with 95 % limits of
Student's t: how far the batch sizes agree. Both are orders of magnitude, not predictions: their
constants are not known. What was measured after the goal, of runs that went on, counts in none of
them; where their rates changed there is no theory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import special
from scipy.optimize import isotonic_regression

from lit_dps.analysis.gradient_noise import noise_law, readings_of
from lit_dps.analysis.law_bootstrap import (
    PERCENTILES,
    Interval,
    Scaling,
    estimate,
    percentile_interval,
    resample,
)
from lit_dps.analysis.law_fit import MIN_BATCH_SIZES, Fit, overhead_batch_size
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import aligned, columns_of, frame, short_columns, three_digits
from lit_dps.analysis.theory import terms_of
from lit_dps.core.noise_scale import LEVEL, noise_scale
from lit_dps.core.progress_line import with_progress
from lit_dps.core.racing import to_goal
from lit_dps.core.trial import Series


def linear_end(batch_sizes: np.ndarray, steps: np.ndarray, share: float) -> float:
    """The batch size where the examples B K exceed those at the smallest one by a share
    (`PooledExamples.end`)."""
    return PooledExamples.of(batch_sizes, steps).end(share)


class PooledExamples(NamedTuple):
    """Examples B K of one curve, made monotone in B.

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
        """Pool the examples of neighbours that fall.

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
        """Return the batch size where the examples exceed those at the smallest one by a share
        above 0.

        Infinite if they never do. Nan where it is not known: where the steps of fewer than 2 batch
        sizes are, or not those of the smallest, which it counts from, or of another up to the first
        one beyond the end. What is missing further up needs more examples yet.
        """
        if not len(self.excess):
            return math.nan
        log_b, excess = self.log_b, self.excess - math.log1p(share)
        above = int(np.argmax(excess > 0))
        ends = excess[above] > 0
        if not self.known[: np.flatnonzero(self.known)[above] if ends else len(self.known)].all():
            return math.nan
        if not ends:
            return math.inf
        low, high = excess[above - 1], excess[above]
        return float(
            np.exp(log_b[above - 1] - low / (high - low) * (log_b[above] - log_b[above - 1]))
        )


def resampled(
    scaling: Scaling,
    cells: Iterable[CellSummary],
    seeds: Mapping[int, Sequence[float]],
    check_interval: int,
    replicates: int,
) -> np.ndarray:
    """K* of resamples of the cells of a law, (replicates, batch sizes), over what its own intervals
    are (`scale`).

    Nan where none of the drawn trials is complete. Without a row where a cell has one trial and too
    few repeats.

    Args:
        scaling: The law of a series.
        cells: The cells of the series, by batch size.
        seeds: Steps to result of repeats of the K* trials on fresh seeds, by batch size.
        check_interval, replicates: As in `scale`.
    """
    drawn = []
    for cell in cells:
        if (b := cell.cell.batch_size) not in scaling.resolved:
            continue
        u = np.random.default_rng((0, b, 2)).random(replicates)
        if scaling.over == "seeds":
            luck = np.random.default_rng((0, b, 1)).choice(seeds[b], replicates) / np.median(
                seeds[b]
            )
            drawn.append((cell.k_star - check_interval * u) * luck)
        elif len(cell.trials) > 1:
            drawn.append(resample(cell.steps, replicates, (0, b)) - check_interval * u)
    whole = drawn and len(drawn) == len(scaling.resolved)
    return np.stack(drawn, axis=1) if whole else np.empty((0, len(scaling.resolved)))


def end_interval(ends: np.ndarray, own: float) -> tuple[Interval | None, str]:
    """The 95 % interval of an end from those of resamples (R,), widened to hold it, and why there
    is none; else empty.

    None where one in 40 resamples or more is nan, as of ratios (`sparse_ratios.Ratio`): a cell
    without a complete trial would have needed nobody knows how many steps.
    """
    known = ends[~np.isnan(ends)]
    if not len(ends) or not math.isfinite(own):
        return None, ""
    if len(known) <= (1 - PERCENTILES[0] / 100) * len(ends):
        lack = f"{1 - len(known) / len(ends):.0%} of the resamples of its trials"
        return None, f"no limits: {lack} have no complete one at a batch size that it hangs on"
    inverse = percentile_interval(1 / known, 1 / own)  # finite where a resample has no end
    return Interval(*(1 / x if x > 0 else math.inf for x in reversed(inverse))), ""


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


NOT_MEASURED = "not measured"


FOOTNOTE = (
    "* below the smallest batch size, counted from one beyond linear scaling, of one trial, or "
    "without limits: "
    "critical.csv says which"
)


@dataclass(frozen=True)
class Critical:
    """A critical batch size by one definition, in examples.

    Attributes:
        value: None where there is none.
        interval: 95 %; None where there is none.
        verdict: Why there is no value, or what to know of it; else empty.
        bound: What it exceeds where it is not identifiable.
    """

    value: float | None = None
    interval: Interval | None = None
    verdict: str = NOT_MEASURED
    bound: float | None = None

    def __str__(self) -> str:
        if self.value is None:
            return "-" if self.bound is None else f"> {three_digits(self.bound)}"
        return estimate(self.value, self.interval) + " *" * bool(self.verdict)


def critical_batch_sizes(
    cells: Iterable[CellSummary],
    scalings: Mapping[Series, Scaling],
    seeds: Mapping[Series, Mapping[int, Sequence[float]]],
    check_interval: int,
    replicates: int,
) -> dict[Series, dict[str, Critical]]:
    """Each definition's critical batch size in each series, in the order of `DEFINITIONS`.

    Args:
        cells, scalings: Of a study, and the law of each series (`scaling.scale`).
        seeds: Steps to result of repeats of the K* trials on fresh seeds, by series and batch size.
        check_interval, replicates: As in `scaling.scale`.
    """
    by_series: dict[Series, list[CellSummary]] = {series: [] for series in sorted(scalings)}
    for summary in cells:
        by_series[summary.cell.series].append(summary)
    found = {}
    for series in with_progress("critical batch sizes", list(by_series)):
        own, scaling = by_series[series], scalings[series]
        drawn = resampled(scaling, own, seeds.get(series, {}), check_interval, replicates)
        found[series] = {
            **_by_law(scaling),
            **_by_measurement(scaling, drawn),
            "theory": _mean([_of_terms(summary) for summary in own]),
            "noise_scale": _noise_scale(own),
            "noise_law": _mean([_of_noise(summary) for summary in own]),
        }
    return found


def _by_law(scaling: Scaling) -> dict[str, Critical]:
    if scaling.fit is None:
        return dict.fromkeys(("law", "overhead"), Critical(verdict=scaling.describe()))
    smallest = min(scaling.resolved)

    def overhead(critical: float) -> float:
        return overhead_batch_size(Fit(critical, 1.0), OVERHEAD, smallest)

    if not scaling.identifiable:
        bounds = {"law": scaling.bound, "overhead": overhead(scaling.bound)}
        return {
            k: Critical(verdict=f"not identifiable: > {three_digits(x)}", bound=x)
            for k, x in bounds.items()
        }
    own, limits = scaling.fit.critical_batch_size, scaling.critical
    shifted = None if limits is None else Interval(*map(overhead, limits))
    below = f"below the smallest batch size, {smallest}" if own < smallest else ""
    return {
        "law": Critical(own, limits, below),
        "overhead": Critical(overhead(own), shifted, _late_start(scaling, OVERHEAD)),
    }


def _by_measurement(scaling: Scaling, steps: np.ndarray) -> dict[str, Critical]:
    shares = {"linear_20": 0.2, "linear_50": 0.5}
    sizes = list(scaling.resolved)
    if scaling.fit is None:
        return dict.fromkeys(
            shares, Critical(verdict=f"needs K* at {MIN_BATCH_SIZES} batch sizes; has {len(sizes)}")
        )
    batch, found = np.array(sizes, float), {}
    measured = PooledExamples.of(batch, np.array(list(scaling.resolved.values()), float))
    drawn = [PooledExamples.of(batch, row) for row in steps]
    for name, share in shares.items():
        own = measured.end(share)
        if math.isinf(own):
            found[name] = Critical(None, None, f"not identifiable: > {sizes[-1]}", sizes[-1])
            continue
        interval, why = end_interval(np.array([each.end(share) for each in drawn]), own)
        found[name] = Critical(
            own, interval, "; ".join(filter(None, (_late_start(scaling, share), why)))
        )
    return found


def _late_start(scaling: Scaling, share: float) -> str:
    """What to know where the smallest batch size is beyond linear scaling already."""
    smallest = min(scaling.resolved)
    own = smallest / scaling.fit.critical_batch_size
    return (
        f"counted from B = {smallest}, where the law has {own:.0%} overhead already"
        if own >= share
        else ""
    )


def _of_terms(summary: CellSummary) -> float | None:
    terms = None if summary.best is None else terms_of(summary.best)
    law = None if terms is None else terms.law_of(summary.k_star)
    return None if law is None else law.critical_batch_size


def _of_noise(summary: CellSummary) -> float | None:
    readings = None if summary.best is None else readings_of(to_goal(summary.best))
    law = None if readings is None else noise_law([readings])
    if law is None:
        return None
    found = law.at(last := float(readings[0][-1])) / last
    return found if found > 0 else None


def _noise_scale(cells: Iterable[CellSummary]) -> Critical:
    best = (to_goal(summary.best) for summary in cells if summary.best is not None)
    trials = [found for result in best if (found := readings_of(result)) is not None]
    if not trials:
        return Critical()
    means = {
        "squared_gradient": [x.mean() for x, _ in trials],
        "variance": [y.mean() for _, y in trials],
    }
    if len(trials) == 1:
        return Critical(
            float(means["variance"][0] / means["squared_gradient"][0]), None, "of one trial"
        )
    found = noise_scale(means, 0)
    if not found.resolved:
        return Critical(None, None, f"not resolved: > {three_digits(found.low)}", found.low)
    return Critical(found.value, Interval(found.low, found.high), "")


def _mean(values: Iterable[float | None]) -> Critical:
    """The geometric mean of the values there are."""
    logs = np.log([value for value in values if value is not None])
    if not len(logs):
        return Critical()
    mean = float(logs.mean())
    if len(logs) == 1:
        return Critical(math.exp(mean), None, "of one trial")
    half = float(
        special.stdtrit(len(logs) - 1, 0.5 + LEVEL / 2) * logs.std(ddof=1) / math.sqrt(len(logs))
    )
    return Critical(math.exp(mean), Interval(math.exp(mean - half), math.exp(mean + half)), "")


def critical_rows(found: Mapping[Series, Mapping[str, Critical]]) -> pd.DataFrame:
    """One row a series and definition.

    Columns: sparsity and further axes, definition (those of the module's docstring), critical
    [examples], low and high, its 95 % limits, bound [examples], what it exceeds where it is not
    identifiable, and verdict.
    """
    return frame(
        {
            **columns_of(series),
            "definition": name,
            "critical": critical.value,
            **dict(zip(("low", "high"), critical.interval or (None, None), strict=True)),
            "bound": critical.bound,
            "verdict": critical.verdict,
        }
        for series, by_name in found.items()
        for name, critical in by_name.items()
    )


def critical_text(found: Mapping[Series, Mapping[str, Critical]]) -> str:
    """The section of a report: a line a series, of the definitions that say something; empty of
    fewer than two."""
    said = [
        name for name in DEFINITIONS if any(str(by_name[name]) != "-" for by_name in found.values())
    ]
    if len(said) < 2:
        return ""
    rows = (
        {**short_columns(series), **{DEFINITIONS[n]: str(c[n]) for n in said}}
        for series, c in found.items()
    )
    lines = ["critical batch sizes in examples, by definition", *aligned(rows)]
    if any(
        by_name[name].value is not None and by_name[name].verdict
        for by_name in found.values()
        for name in said
    ):
        lines.append(FOOTNOTE)
    return "\n".join(lines) + "\n"
