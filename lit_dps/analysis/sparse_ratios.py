"""Ratios of K*, sparse over dense, with intervals (Lee et al. 2021, Figure 12)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import REPLICATES, Interval, interval_columns, percentile_interval
from lit_dps.analysis.law import Law
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import base_of, cell_of, columns_of, frame
from lit_dps.core.trial import Cell, Series


@dataclass(frozen=True)
class Ratio:
    """K* of a sparse cell over K* of the base cell at the same batch size.

    Attributes:
        cell: The sparse cell.
        base: Sparsity of the base cell.
        value: The ratio.
        interval: 95 %, of independent draws of both K* (`Observation.draws`), widened to hold the
            value; None if the noise of one is unknown.
    """

    cell: Cell
    base: float
    value: float
    interval: Interval | None


def ratios(
    cells: Iterable[CellSummary], laws: Mapping[Series, Law], replicates: int = REPLICATES
) -> list[Ratio]:
    """Return the ratio of every cell above the smallest sparsity, the base, by series, batch size.

    Cells that have no K*, or whose base has none, are skipped; so are `ratio_bounds`.

    Args:
        cells: Of a study.
        laws: The law of each series, whose observations have the noise of each K*.
        replicates: Number of draws.
    """
    ratios = []
    for sparse, base in _pairs(cells):
        assert sparse.k_star is not None and base.k_star is not None
        if _is_bound(sparse, laws) or _is_bound(base, laws):
            continue
        value = sparse.k_star / base.k_star
        above = _draws(sparse, laws, replicates)
        below = _draws(base, laws, replicates)
        interval = None
        if len(above) and len(below):
            interval = percentile_interval(above / below, value)
        ratios.append(Ratio(sparse.cell, base.cell.sparsity, value, interval))
    return ratios


def _is_bound(summary: CellSummary, laws: Mapping[Series, Law]) -> bool:
    """Return True if the K* of a cell is only an upper bound."""
    return summary.cell.batch_size in laws[summary.cell.series].upper_bounds


def _draws(summary: CellSummary, laws: Mapping[Series, Law], replicates: int) -> np.ndarray:
    """Return draws (R,) of the K* of a cell; empty if its noise is unknown."""
    observation = laws[summary.cell.series].observation(summary.cell.batch_size)
    if observation is None or not observation.noise:
        return np.empty(0)
    return observation.draws(replicates, summary.cell.series.stored_name)


def ratio_bounds(cells: Iterable[CellSummary], laws: Mapping[Series, Law]) -> list[Cell]:
    """Return the cells whose ratio would be a bound, because one of its K* is an upper bound."""
    bounds = []
    for sparse, base in _pairs(cells):
        if _is_bound(sparse, laws) or _is_bound(base, laws):
            bounds.append(sparse.cell)
    return bounds


def _pairs(cells: Iterable[CellSummary]) -> Iterator[tuple[CellSummary, CellSummary]]:
    """Yield each cell above its base with the base cell at its batch size, if both have a K*."""
    by_cell = {}
    all_series = set()
    for summary in cells:
        by_cell[summary.cell] = summary
        all_series.add(summary.cell.series)
    for cell, sparse in by_cell.items():
        base = by_cell[cell_of(base_of(cell.series, all_series), cell.batch_size)]
        if sparse is not base and sparse.k_star is not None and base.k_star is not None:
            yield sparse, base


def ratio_rows(ratios: Iterable[tuple[str, Ratio]]) -> pd.DataFrame:
    """Return one row a ratio.

    Columns: study, sparsity and further axes, base_sparsity, batch_size [examples], ratio, and its
    95 % limits ratio_low and ratio_high, missing if they are unknown.

    Args:
        ratios: Each with the name of its study.
    """
    rows = []
    for study, ratio in ratios:
        row = {
            "study": study,
            **columns_of(ratio.cell.series),
            "base_sparsity": ratio.base,
            "batch_size": ratio.cell.batch_size,
        }
        rows.append(row | interval_columns("ratio", ratio.value, ratio.interval))
    return frame(rows)
