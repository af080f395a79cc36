"""The steps of a sparse network over those of a dense one, with intervals (the paper's Fig. 12)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import (
    PERCENTILES,
    REPLICATES,
    Interval,
    percentile_interval,
    resampling_rng,
)
from lit_dps.analysis.law_bootstrap import FEWEST_SEEDS, resample
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import base_of, columns_of, frame
from lit_dps.core.trial import Cell, Series


@dataclass(frozen=True)
class Ratio:
    """K* of a sparse cell over K* of the base cell at the same batch size.

    The interval is over repeats on fresh seeds where both cells have `FEWEST_SEEDS`, else over
    trials; widened to hold the value. None where neither cell has two trials to resample, or where
    one in 40 resamples or more has no complete trial, or a repeat that missed the goal, in one of
    the cells: what it would have needed might be any number.
    """

    cell: Cell  # the sparse one
    base: float  # sparsity of the base cell
    value: float
    interval: Interval | None


def ratios(
    cells: Iterable[CellSummary],
    seeds: Mapping[Series, Mapping[int, Sequence[float]]],
    replicates: int = REPLICATES,
) -> list[Ratio]:
    """Return the ratio of every cell above the smallest sparsity, the base, by series, batch size.

    Cells without a K*, or without one at the base, are left out; so are `ratio_bounds`.

    Args:
        cells: Of a study.
        seeds: Steps to result of repeats of the K* trials on fresh seeds, by series and batch size.
            Where there are enough, each K* is resampled as `bootstrap_law` does: times one of its
            repeats over their median.
        replicates: Of the resampling. Without repeats both cells' trials are resampled, where they
            have as many by the same points of the search, so that what these points have in common
            cancels.
    """
    found = []
    for sparse, base in _pairs(cells):
        if sparse.at_first_check or base.at_first_check:
            continue
        assert sparse.k_star is not None and base.k_star is not None
        value = sparse.k_star / base.k_star
        quotients = _resampled(sparse, base, value, seeds, replicates)
        # 0: of a repeat of the base that missed the goal
        known = quotients[np.isfinite(quotients) & (quotients > 0)]
        interval = None
        if len(known) > (1 - PERCENTILES[0] / 100) * len(quotients):
            interval = percentile_interval(known, value)
        found.append(Ratio(sparse.cell, base.cell.sparsity, value, interval))
    return found


def _resampled(
    sparse: CellSummary,
    base: CellSummary,
    value: float,
    seeds: Mapping[Series, Mapping[int, Sequence[float]]],
    replicates: int,
) -> np.ndarray:
    """Return ratios of resamples (R,), over seeds or trials; empty where neither has two."""
    batch_size = sparse.cell.batch_size
    repeats = [seeds.get(each.cell.series, {}).get(batch_size, ()) for each in (sparse, base)]
    if min(map(len, repeats)) >= FEWEST_SEEDS:
        over_median = []
        for i, steps in enumerate(repeats):
            random = resampling_rng(0, batch_size, 1, i)
            over_median.append(random.choice(steps, replicates) / np.median(steps))
        return value * np.divide(over_median[0], over_median[1])
    if max(len(sparse.trials), len(base.trials)) > 1:
        above = resample(sparse.steps, replicates, (0, batch_size))
        return np.divide(above, resample(base.steps, replicates, (0, batch_size)))
    return np.empty(0)


def ratio_bounds(cells: Iterable[CellSummary]) -> list[Cell]:
    """Return the cells whose ratio would be a bound, as a K* of it is at the first check."""
    bounds = []
    for sparse, base in _pairs(cells):
        if sparse.at_first_check or base.at_first_check:
            bounds.append(sparse.cell)
    return bounds


def _pairs(cells: Iterable[CellSummary]) -> Iterator[tuple[CellSummary, CellSummary]]:
    """Yield each cell above its base with the base cell at its batch size, if both have a K*."""
    summaries = {(summary.cell.batch_size, summary.cell.series): summary for summary in cells}
    all_series = {series for _, series in summaries}
    for (batch_size, series), sparse in summaries.items():
        base = summaries[batch_size, base_of(series, all_series)]
        if sparse is not base and sparse.k_star is not None and base.k_star is not None:
            yield sparse, base


def ratio_rows(ratios: Iterable[tuple[str, Ratio]]) -> pd.DataFrame:
    """Return one row a ratio.

    Columns: study, sparsity and further axes, base_sparsity, batch_size [examples], ratio, and its
    95 % limits ratio_low and ratio_high, missing where they are not known.

    Args:
        ratios: Each with the name of its study.
    """
    rows = []
    for study, ratio in ratios:
        low, high = ratio.interval or (None, None)
        rows.append(
            {
                "study": study,
                **columns_of(ratio.cell.series),
                "base_sparsity": ratio.base,
                "batch_size": ratio.cell.batch_size,
                "ratio": ratio.value,
                "ratio_low": low,
                "ratio_high": high,
            }
        )
    return frame(rows)
