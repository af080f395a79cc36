"""The savings of a growing batch: its steps and examples over those of a constant batch size.

A series whose batch grows is compared with the series of constant batches whose other axes are
equal. The comparison uses the constant batch size with the most similar number of examples to the
goal, so the remaining difference is in steps. Both have the same search space and, with Sobol's
sequence, the same points.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from lit_dps.analysis.answer import K_STAR, MEDIAN, MIN_SEEDS
from lit_dps.analysis.intervals import (
    PERCENTILES,
    REPLICATES,
    Interval,
    percentile_interval,
    resampling_rng,
)
from lit_dps.analysis.repeats import RepeatSummary
from lit_dps.analysis.summary import CellSummary, by_series
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.batch_schedule import NAME_KEY, OPTIONS_KEY, RATE_KEY
from lit_dps.core.record import StudyRecord
from lit_dps.core.trial import Cell, Series

_COLUMNS = (
    *("batch_size", "steps", "examples"),
    *("constant_batch_size", "constant_steps", "constant_examples"),
    *("steps_ratio", "steps_low", "steps_high"),
    *("examples_ratio", "examples_low", "examples_high", "steps_of"),
)


class Measured(NamedTuple):
    """The steps of a cell to the goal.

    Attributes:
        cell: The cell.
        steps: K* in steps, or the median over the repeats.
        examples: The examples of these steps.
        seeds: The steps of each repeat, infinite for one that missed the goal; empty for K*.
    """

    cell: Cell
    steps: float
    examples: float
    seeds: Sequence[float]


def ramp_rows(
    record: StudyRecord, cells: Iterable[CellSummary], repeats: Mapping[Cell, RepeatSummary]
) -> pd.DataFrame:
    """Return one row per cell whose batch grows, if a constant batch can be compared with it.

    Columns: sparsity and further axes, batch_size [examples], steps and examples to the goal,
    constant_batch_size with its constant_steps and constant_examples, steps_ratio and
    examples_ratio (of the growing batch to the constant one) with 95 % limits (steps_low,
    steps_high, examples_low, examples_high; missing for K*), and steps_of: "K*", or the median over
    seeds where both cells have at least `MIN_SEEDS` repeats whose median is no upper bound. Cells
    whose K* is an upper bound are left out.

    Args:
        record: The study.
        cells: Its cells.
        repeats: The repeats of the point of K* of each cell that has some.
    """
    measured = by_series(summary for summary in cells if summary.has_exact_k_star)
    rows = []
    for series, summaries in measured.items():
        if record.batch_schedule(series).is_constant:
            continue
        of_constant = constant_series(record, series)
        if of_constant not in measured:
            continue
        for summary in summaries:
            rows.append(_row(record, summary, measured[of_constant], repeats))
    return frame(rows, [*columns_of(record.series[0]), *_COLUMNS])


def point_rows(
    record: StudyRecord, cells: Iterable[CellSummary], repeats: Mapping[Cell, RepeatSummary]
) -> pd.DataFrame:
    """Return one row per cell with a K*, if a growing and a constant batch are compared.

    Columns: sparsity and further axes, batch_size [examples], constant (1 if every step has it,
    else 0), steps and examples to the goal, floor (1 if they are upper bounds), and steps_of: "K*",
    or the median over seeds if the cell has at least `MIN_SEEDS` repeats.
    """
    columns = [*columns_of(record.series[0]), "batch_size", "constant", "steps", "examples"]
    columns += ["floor", "steps_of"]
    kinds = {record.batch_schedule(series).is_constant for series in record.series}
    rows = []
    for summary in cells:
        if summary.k_star_steps is None or len(kinds) < 2:
            continue
        repeated = repeats.get(summary.cell)
        use_seeds = _has_seeds(repeated)
        is_bound = summary.is_upper_bound
        if use_seeds and repeated is not None:
            is_bound = repeated.is_upper_bound(0.5)
        measured = _measured(record, summary, repeats, use_seeds)
        row: dict[str, object] = {**columns_of(summary.cell.series)}
        row |= {
            "batch_size": summary.cell.batch_size,
            "constant": int(record.has_constant_batch(summary.cell)),
            "steps": measured.steps,
            "examples": measured.examples,
            "floor": int(is_bound),
            "steps_of": MEDIAN if use_seeds else K_STAR,
        }
        rows.append(row)
    return frame(rows, columns)


def constant_series(record: StudyRecord, series: Series) -> Series | None:
    """Return the series of the constant batch with the other values of a series; None without."""
    without = _without_batch(series)
    for other in record.series:
        if record.batch_schedule(other).is_constant and _without_batch(other) == without:
            return other
    return None


def _without_batch(series: Series) -> Series:
    """Return a series without the axes of its batch schedule."""
    keys = [key for key, _ in series.axes if key.startswith(f"{OPTIONS_KEY}.")]
    return series.without(NAME_KEY, RATE_KEY, *keys)


def _row(
    record: StudyRecord,
    summary: CellSummary,
    constants: Sequence[CellSummary],
    repeats: Mapping[Cell, RepeatSummary],
) -> dict[str, object]:
    """Return the row of `ramp_rows` of a cell."""
    cells = [summary, *constants]
    with_seeds = [each.cell for each in cells if _has_exact_median(repeats.get(each.cell))]
    use_seeds = summary.cell in with_seeds and len(with_seeds) > 1
    if use_seeds:
        constants = [each for each in constants if each.cell in with_seeds]
    ramp = _measured(record, summary, repeats, use_seeds)
    others = [_measured(record, each, repeats, use_seeds) for each in constants]
    constant = min(others, key=lambda other: abs(math.log(other.examples / ramp.examples)))
    row: dict[str, object] = {
        **columns_of(summary.cell.series),
        "batch_size": ramp.cell.batch_size,
        "steps": ramp.steps,
        "examples": ramp.examples,
        "constant_batch_size": constant.cell.batch_size,
        "constant_steps": constant.steps,
        "constant_examples": constant.examples,
        "steps_ratio": ramp.steps / constant.steps,
        "examples_ratio": ramp.examples / constant.examples,
        "steps_of": MEDIAN if use_seeds else K_STAR,
    }
    if use_seeds:
        row |= _limits(record, ramp, constant)
    return row


def _has_seeds(repeated: RepeatSummary | None) -> bool:
    """Return True if the median over the repeats of a cell is known."""
    if repeated is None or len(repeated.results) < MIN_SEEDS:
        return False
    return repeated.finite_median is not None


def _has_exact_median(repeated: RepeatSummary | None) -> bool:
    """Return True if the median over the repeats of a cell is known and no upper bound."""
    return repeated is not None and _has_seeds(repeated) and not repeated.is_upper_bound(0.5)


def _measured(
    record: StudyRecord,
    summary: CellSummary,
    repeats: Mapping[Cell, RepeatSummary],
    use_seeds: bool,
) -> Measured:
    """Return the steps and examples of a cell by its repeats, or by K*."""
    if not use_seeds:
        steps = float(summary.k_star_steps or 0)
        examples = record.examples_of(summary.cell, steps, summary.best)
        return Measured(summary.cell, steps, examples, ())
    seeds = []
    for result in repeats[summary.cell].results:
        seeds.append(math.inf if result.steps is None else float(result.steps))
    median = float(np.median(seeds))
    return Measured(summary.cell, median, record.examples_of(summary.cell, median), seeds)


def _limits(record: StudyRecord, ramp: Measured, constant: Measured) -> dict[str, float]:
    """Return the 95 % limits of both ratios, by resampled repeats of both cells.

    The choice of the constant batch size is not resampled. A median is infinite where most of the
    resampled repeats miss the goal.
    """
    medians = []
    for measured in (ramp, constant):
        rng = resampling_rng(0, measured.cell.batch_size, measured.cell.series.stored_name)
        chosen = rng.integers(len(measured.seeds), size=(REPLICATES, len(measured.seeds)))
        medians.append(np.median(np.array(measured.seeds)[chosen], axis=1))
    ramp_medians, constant_medians = medians
    ramp_examples = _examples_of(record, ramp.cell, ramp_medians)
    constant_examples = _examples_of(record, constant.cell, constant_medians)
    of_steps = _ratio_interval(ramp_medians, constant_medians, ramp.steps / constant.steps)
    of_examples = _ratio_interval(
        ramp_examples, constant_examples, ramp.examples / constant.examples
    )
    return {
        "steps_low": of_steps.low,
        "steps_high": of_steps.high,
        "examples_low": of_examples.low,
        "examples_high": of_examples.high,
    }


def _examples_of(record: StudyRecord, cell: Cell, steps: np.ndarray) -> np.ndarray:
    """Return the examples of numbers of steps; infinite for an infinite number."""
    examples = []
    for each in steps:
        if math.isfinite(each):
            examples.append(record.examples_of(cell, float(each)))
        else:
            examples.append(math.inf)
    return np.array(examples, dtype=float)


def _ratio_interval(tops: np.ndarray, bottoms: np.ndarray, estimate: float) -> Interval:
    """Return the 95 % interval of resampled ratios, of which some terms may be infinite."""
    is_unknown = np.isinf(tops) & np.isinf(bottoms)
    ratios = np.divide(tops, bottoms, where=~is_unknown, out=np.zeros_like(tops))
    if np.isfinite(ratios).all() and not is_unknown.any():
        return percentile_interval(ratios, estimate)
    # No interpolation, whose result between infinite ratios is nan. An unknown ratio, of two
    # infinite medians, widens both limits.
    low_percentile, high_percentile = PERCENTILES
    low = np.percentile(np.where(is_unknown, 0.0, ratios), low_percentile, method="inverted_cdf")
    ratios[is_unknown] = math.inf
    high = np.percentile(ratios, high_percentile, method="inverted_cdf")
    return Interval(float(min(low, estimate)), float(max(high, estimate)))
