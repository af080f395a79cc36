"""How many times the steps of the least sparse network a sparser one needs, and how certain that is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lit_dps.analysis.results import StudyRecord
from lit_dps.analysis.scaling import REPLICATES, Interval, percentile_interval, resample
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


def ratios(record: StudyRecord, replicates: int = REPLICATES, seed: int = 0) -> list[Ratio]:
    """The ratio of every cell above the smallest sparsity of a study, by sparsity, then batch size.

    The smallest sparsity is the base: 0, where a study has dense cells. Cells without a K*, or without one at the base,
    are left out. Both cells are resampled as `scaling.scale` does; where they have as many trials, by the same points
    of the search, so that what these points have in common cancels. Resamples in which either has no K* drop out.
    """
    base = min(record.sparsities)
    found = []
    for cell in record.cells:
        above, below = ([r.steps for r in record.told(c)] for c in (cell, Cell(cell.batch_size, base)))
        if cell.sparsity == base or not any(above) or not any(below):
            continue
        value = min(filter(None, above)) / min(filter(None, below))
        interval = None
        if max(len(above), len(below)) > 1:
            drawn = [resample(steps, replicates, (seed, cell.batch_size)) for steps in (above, below)]
            quotients = np.divide(*drawn)
            quotients = quotients[np.isfinite(quotients)]
            interval = percentile_interval(quotients, value) if len(quotients) else None
        found.append(Ratio(cell, base, value, interval))
    return found
