"""How many times the steps of the least sparse network a sparser one needs, and how certain that is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lit_dps.analysis.scaling import REPLICATES, Interval, percentile_interval, resample
from lit_dps.analysis.summary import at_first_check
from lit_dps.racing import best_steps
from lit_dps.record import StudyRecord
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


class _Pair(NamedTuple):
    """A cell and the base cell at its batch size, both with a K*: steps to result of their trials, and both K*."""

    cell: Cell
    above: list[int | None]
    below: list[int | None]
    k_star: tuple[int, int]


def ratios(record: StudyRecord, replicates: int = REPLICATES, seed: int = 0) -> list[Ratio]:
    """The ratio of every cell above the smallest sparsity of a study, by sparsity, then batch size.

    The smallest sparsity is the base: 0, where a study has dense cells. Cells without a K*, or without one at the base,
    are left out; so are those where one of the two is at the first check (`bounds`). Both cells are resampled as
    `scaling.scale` does, but as K* is observed; where they have as many trials, by the same points of the search, so
    that what these points have in common cancels. Resamples in which either has no K* drop out.
    """
    found = []
    for pair in _pairs(record):
        if _is_bound(record, pair):
            continue
        cell, above, below, k_star = pair
        value = k_star[0] / k_star[1]
        interval = None
        if max(len(above), len(below)) > 1:
            drawn = [resample(steps, replicates, (seed, cell.batch_size)) for steps in (above, below)]
            quotients = np.divide(*drawn)
            quotients = quotients[np.isfinite(quotients)]
            interval = percentile_interval(quotients, value) if len(quotients) else None
        found.append(Ratio(cell, min(record.sparsities), value, interval))
    return found


def bounds(record: StudyRecord) -> list[Cell]:
    """The cells whose ratio would only be a bound, as its K* or that of the base cell is (`summary.at_first_check`)."""
    return [pair.cell for pair in _pairs(record) if _is_bound(record, pair)]


def _pairs(record: StudyRecord) -> Iterator[_Pair]:
    base = min(record.sparsities)
    for cell in record.cells:
        both = [record.resolved_results(c) for c in (cell, Cell(cell.batch_size, base))]
        k_star = tuple(map(best_steps, both))
        if cell.sparsity != base and None not in k_star:
            yield _Pair(cell, *([result.steps for result in results] for results in both), k_star)


def _is_bound(record: StudyRecord, pair: _Pair) -> bool:
    return any(at_first_check(k, record.goal.check_interval) for k in pair.k_star)
