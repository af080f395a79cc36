"""The best of n drawn out of the N trials of a cell, and what doubling n brings.

K* is a minimum, so it falls as trials are added, at any batch size, by an amount that no single K*
tells. Here n of the N finished trials are drawn at random without replacement, with equal
probability, and the least steps to result among them is described exactly, by order statistics: of
N trials in ascending order the best of n is behind the i-th with probability C(N - i, n) / C(N, n).
Dodge et al. (2019, "Show Your Work") draw with replacement, which counts the best trial repeatedly
and is too optimistic near n = N; without replacement the estimate is unbiased (Tang et al. 2020,
"Showing Your Work Doesn't Always Work"). A trial that is not complete counts as infinite, also one
that racing stopped: it needs more steps than any that matters here. The first n points of a Sobol
sequence cover the space more evenly than n at random do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.record import StudyRecord, setting

# the table has the geometric mean up to this probability that none of the n trials is complete
RARE = 0.01


@dataclass(frozen=True)
class Best:
    """The best of n trials.

    Attributes:
        n: How many are drawn.
        median: The least steps that at least half of all choices do not exceed; infinite where more
            than half have no complete trial.
        mean: exp of the mean of log K over the choices that have a complete trial; None where there
            are none.
        none: Probability that no drawn trial is complete.
    """

    n: int
    median: float
    mean: float | None
    none: float


def best_of(steps: Sequence[int | None], n: int) -> Best:
    """Return the best of n of some trials, by their steps to result; None if not complete.

    Raises:
        ValueError: unless 1 <= n <= their number.
    """
    total = len(steps)
    if not 1 <= n <= total:
        raise ValueError(f"{n} of {total} trials")
    known = np.sort(np.array([k for k in steps if k is not None], float))
    if not len(known):
        return Best(n, math.inf, None, 1.0)
    i = np.arange(len(known))
    # beyond[i]: that the best is behind the first i + 1, so C(N - i - 1, n) / C(N, n).
    beyond = np.cumprod(np.maximum(total - n - i, 0) / (total - i))
    shares = -np.diff(beyond, prepend=1.0)
    none = float(beyond[-1])
    half = np.flatnonzero(beyond <= 0.5 + 1e-12)
    median = float(known[half[0]]) if len(half) else math.inf
    mean = float(np.exp(shares @ np.log(known) / (1 - none)))
    return Best(n, median, mean, none)


def why_no_draws(record: StudyRecord) -> str | None:
    """Return why the trials of a cell are not exchangeable; None if they are."""
    source = setting(record.config, "study.best_of")
    if source is not None:
        return f"all trials of a cell are the best point of {source}"
    sampler = setting(record.config, "study.sampler")
    if sampler not in (None, "sobol"):
        return f"the sampler {sampler} draws each trial from those before"
    return None


def draw_rows(record: StudyRecord, cells: Iterable[CellSummary]) -> pd.DataFrame:
    """Return one row a cell and n, by series, batch size, n = 1, 2, ... to its finished trials.

    Columns: sparsity and further axes, batch_size [examples], draws (n), and of the best of n:
    median [steps], inf where most choices have no complete trial; mean [steps], geometric, missing
    where that may well happen; none, its probability; floor, 1 where the median is an upper bound:
    at the first check, or where K* is one because of undetermined points.
    """
    rows = []
    if why_no_draws(record) is not None:
        cells = ()
    for summary in cells:
        for n in range(1, len(summary.steps) + 1):
            best = best_of(summary.steps, n)
            is_bound = best.median <= record.goal.check_interval or summary.may_be_lower
            rows.append(
                {
                    **columns_of(summary.cell.series),
                    "batch_size": summary.cell.batch_size,
                    "draws": best.n,
                    "median": best.median,
                    "mean": best.mean if best.none <= RARE else None,
                    "none": best.none,
                    "floor": int(is_bound),
                }
            )
    columns = [*columns_of(record.series[0]), "batch_size", "draws", "median", "mean", "none"]
    return frame(rows, [*columns, "floor"])


def halves(cells: Iterable[CellSummary]) -> list[tuple[int, Best]]:
    """Return K* and the best of half as many trials of each cell whose K* is no upper bound."""
    found = []
    for cell in cells:
        if cell.k_star is not None and not cell.is_upper_bound and len(cell.steps) > 1:
            found.append((cell.k_star, best_of(cell.steps, len(cell.steps) // 2)))
    return found


def last_doubling(cells: Iterable[CellSummary]) -> list[float]:
    """Return the best of half as many trials over K*, of each cell whose K* is no upper bound.

    The geometric mean over the halves; not the median, which is K* itself: a half holds the best
    trial as often as not. Left out are cells in which more than `RARE` halves have no complete
    trial: the steps of those are not known, and where trials stop at K*, all others are such trials
    by construction.
    """
    ratios = []
    for k_star, half in halves(cells):
        if half.mean is not None and half.none <= RARE:
            ratios.append(half.mean / k_star)
    return ratios
