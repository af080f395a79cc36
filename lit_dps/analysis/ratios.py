"""How many times the steps of the least sparse network a sparser one needs, and how certain that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from lit_dps.analysis.scaling import REPLICATES, Interval, percentile_interval, resample
from lit_dps.analysis.series import base_of
from lit_dps.analysis.summary import CellSummary
from lit_dps.trial import Cell


@dataclass(frozen=True)
class Ratio:
    """K* of a sparse cell over K* of the base cell at the same batch size (Lee et al. 2021, Figure 12).

    Attributes:
        cell: The sparse cell.
        base: Sparsity of the base cell.
        value: The ratio.
        interval: Its 95 % bootstrap interval over trials, widened to hold the value; None where neither cell has two
            trials to resample.
    """

    cell: Cell
    base: float
    value: float
    interval: Interval | None


def ratios(cells: Iterable[CellSummary], replicates: int = REPLICATES, seed: int = 0) -> list[Ratio]:
    """The ratio of every cell above the smallest sparsity of a study, by series, then batch size.

    The smallest sparsity is the base: 0, where a study has dense cells; the two agree on all further axes. Cells
    without a K*, or without one at the base, are left out; so are those where one of the two is at the first check
    (`bounds`). Both cells are resampled as `scaling.scale` does, but as K* is observed; where they have as many trials,
    by the same points of the search, so that what these points have in common cancels. Resamples in which either has
    no K* drop out.
    """
    found = []
    for sparse, base in _pairs(cells):
        if sparse.at_first_check or base.at_first_check:
            continue
        value, interval = sparse.k_star / base.k_star, None
        if max(len(sparse.trials), len(base.trials)) > 1:
            drawn = [resample(cell.steps, replicates, (seed, cell.cell.batch_size)) for cell in (sparse, base)]
            quotients = np.divide(*drawn)
            quotients = quotients[np.isfinite(quotients)]
            interval = percentile_interval(quotients, value) if len(quotients) else None
        found.append(Ratio(sparse.cell, base.cell.sparsity, value, interval))
    return found


def bounds(cells: Iterable[CellSummary]) -> list[Cell]:
    """The cells whose ratio would only be a bound, as its K* or that of the base cell is (`summary.at_first_check`)."""
    return [sparse.cell for sparse, base in _pairs(cells) if sparse.at_first_check or base.at_first_check]


def _pairs(cells: Iterable[CellSummary]) -> Iterator[tuple[CellSummary, CellSummary]]:
    """Each cell above its base with the base cell at its batch size, where both have a K*."""
    at = {(summary.cell.batch_size, summary.cell.series): summary for summary in cells}
    every = {series for _, series in at}
    for (batch_size, series), sparse in at.items():
        base = at[batch_size, base_of(series, every)]
        if sparse is not base and None not in (sparse.k_star, base.k_star):
            yield sparse, base
