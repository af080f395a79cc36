"""How many times the steps of a dense network a sparse one needs, and how certain that is (the
paper's Figure 12)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lit_dps.analysis.law_bootstrap import (
    FEWEST_SEEDS,
    PERCENTILES,
    REPLICATES,
    Interval,
    percentile_interval,
    resample,
)
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import base_of
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
    """The ratio of every cell above the smallest sparsity, the base, by series, then batch size.

    Cells without a K*, or without one at the base, are left out; so are `ratio_bounds`.

    Args:
        cells: Of a study.
        seeds: Steps to result of repeats of the K* trials on fresh seeds, by series and batch size.
            Where there are enough, each K* is resampled as `scale` does: times one of its repeats
            over their median.
        replicates: Of the resampling. Without repeats both cells' trials are resampled, where they
            have as many by the same points of the search, so that what these points have in common
            cancels.
    """
    found = []
    for sparse, base in _pairs(cells):
        if sparse.at_first_check or base.at_first_check:
            continue
        value, interval, b = sparse.k_star / base.k_star, None, sparse.cell.batch_size
        repeats = [seeds.get(each.cell.series, {}).get(b, ()) for each in (sparse, base)]
        quotients = np.empty(0)
        if min(map(len, repeats)) >= FEWEST_SEEDS:
            luck = [
                np.random.default_rng((0, b, 1, i)).choice(steps, replicates) / np.median(steps)
                for i, steps in enumerate(repeats)
            ]
            quotients = value * np.divide(*luck)
        elif max(len(sparse.trials), len(base.trials)) > 1:
            quotients = np.divide(
                *(resample(cell.steps, replicates, (0, b)) for cell in (sparse, base))
            )
        known = quotients[
            np.isfinite(quotients) & (quotients > 0)
        ]  # 0: of a repeat of the base that missed the goal
        if len(known) > (1 - PERCENTILES[0] / 100) * len(quotients):
            interval = percentile_interval(known, value)
        found.append(Ratio(sparse.cell, base.cell.sparsity, value, interval))
    return found


def ratio_bounds(cells: Iterable[CellSummary]) -> list[Cell]:
    """The cells whose ratio would only be a bound, as its K* or that of the base cell is at the
    first check."""
    return [
        sparse.cell
        for sparse, base in _pairs(cells)
        if sparse.at_first_check or base.at_first_check
    ]


def _pairs(cells: Iterable[CellSummary]) -> Iterator[tuple[CellSummary, CellSummary]]:
    """Each cell above its base with the base cell at its batch size, where both have a K*."""
    at = {(summary.cell.batch_size, summary.cell.series): summary for summary in cells}
    every = {series for _, series in at}
    for (batch_size, series), sparse in at.items():
        base = at[batch_size, base_of(series, every)]
        if sparse is not base and None not in (sparse.k_star, base.k_star):
            yield sparse, base
