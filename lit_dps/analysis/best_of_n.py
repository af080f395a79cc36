"""The best of n of the N trials of a cell, and what doubling n brings.

K* is a minimum, so it falls as trials are added. Here n of the N finished trials are drawn at
random without replacement. Order statistics describe the least steps to result among them exactly:
of N trials in ascending order, the best of n comes after the i-th with probability
C(N - i, n) / C(N, n). Another statistic (`study.statistic`) is computed of the first n trials of
`ORDERS` random orders.

Dodge et al. (2019, "Show Your Work") draw with replacement, which counts the best trial repeatedly
and is too optimistic near n = N. Without replacement the estimate is unbiased (Tang et al. 2020,
"Showing Your Work Doesn't Always Work"). A trial that is not complete counts as infinite, also if
racing stopped it: it needs more steps than the best ones. The first n points of a Sobol sequence
cover the space more evenly than n random ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import resampling_rng
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import columns_of, frame
from lit_dps.core.record import StudyRecord, setting
from lit_dps.core.statistic import MINIMUM, Statistic
from lit_dps.core.unit import Cost

# The table has the geometric mean up to this probability that no drawn trial is complete.
RARE = 0.01
# Random orders of the trials, for another statistic than the minimum. The spread of its logarithm
# is at most about one, so its mean is known to 2 %.
ORDERS = 2000


@dataclass(frozen=True)
class BestOfN:
    """K* of n trials, by default their best.

    Attributes:
        n: The number of drawn trials.
        median: The least steps that at least half of all choices do not exceed; infinite if more
            than half have no K*.
        mean: Geometric mean of K* over the choices that have one; None without any.
        none: Probability that the drawn trials have no K*, as too few are complete.
    """

    n: int
    median: float
    mean: float | None
    none: float


def best_of(
    steps: Sequence[Cost | None], numbers: Iterable[int], statistic: Statistic = MINIMUM
) -> list[BestOfN]:
    """Return K* of n of some trials, for some n.

    Args:
        steps: Steps to result of the trials; None for a trial that is not complete.
        numbers: The numbers n of drawn trials.
        statistic: What K* is.

    Raises:
        ValueError: unless 1 <= n <= the number of trials.
    """
    total = len(steps)
    drawn = list(numbers)
    for n in drawn:
        if not 1 <= n <= total:
            raise ValueError(f"n is {n}; it must be from 1 to {total}, the number of trials")
    if statistic.is_minimum:
        return [_minimum_of(steps, n) for n in drawn]
    random = resampling_rng(total, statistic.name)
    values = np.array([math.inf if k is None else k for k in steps], float)
    orders = random.permuted(np.tile(values, (ORDERS, 1)), axis=1)
    return [_estimated(statistic.of_draws(orders[:, :n]), n) for n in drawn]


def _estimated(k_star: np.ndarray, n: int) -> BestOfN:
    """Return K* of n trials by draws (R,) of it."""
    known = k_star[np.isfinite(k_star)]
    mean = None
    if len(known):
        mean = float(np.exp(np.log(known).mean()))
    median = float(np.sort(k_star)[(len(k_star) - 1) // 2])
    return BestOfN(n, median, mean, 1 - len(known) / len(k_star))


def _minimum_of(steps: Sequence[Cost | None], n: int) -> BestOfN:
    """Return the best of n of some trials, exactly."""
    total = len(steps)
    complete = np.sort(np.array([k for k in steps if k is not None], float))
    if not len(complete):
        return BestOfN(n, math.inf, None, 1.0)
    i = np.arange(len(complete))
    # beyond[i]: that the best comes after the first i + 1, so C(N - i - 1, n) / C(N, n).
    beyond = np.cumprod(np.maximum(total - n - i, 0) / (total - i))
    shares = -np.diff(beyond, prepend=1.0)
    none = float(beyond[-1])
    median = math.inf
    half = np.flatnonzero(beyond <= 0.5 + 1e-12)
    if len(half):
        median = float(complete[half[0]])
    mean = float(np.exp(shares @ np.log(complete) / (1 - none)))
    return BestOfN(n, median, mean, none)


def why_no_draws(record: StudyRecord) -> str | None:
    """Return why the trials of a cell are not exchangeable; None if they are."""
    source = setting(record.config, "study.best_of")
    if source is not None:
        return f"all trials of a cell are the best point of {source}"
    sampler = setting(record.config, "study.sampler")
    if sampler not in (None, "sobol"):
        return f"the sampler {sampler} chooses each trial by the results of earlier trials"
    return None


def draw_rows(record: StudyRecord, cells: Iterable[CellSummary]) -> pd.DataFrame:
    """Return one row a cell and n, by series, batch size, n = 1, 2, ... to its finished trials.

    Columns: sparsity and further axes, batch_size [examples], draws (n), and of K* of n trials, by
    default their best: median [steps], inf if most choices have no K*; none, the probability of no
    K*; mean [steps], geometric, missing if `none` exceeds `RARE`; floor, 1 if the median is an
    upper bound: at the first check, or because of undetermined points.
    """
    rows = []
    if why_no_draws(record) is not None:
        cells = ()
    for summary in cells:
        counts = range(1, len(summary.costs) + 1)
        for best in best_of(summary.costs, counts, record.statistic):
            mean = None
            if best.none <= RARE:
                mean = best.mean
            is_first = record.goal.is_at_first_check(best.median, summary.trials)
            is_bound = is_first or summary.may_be_lower
            rows.append(
                {
                    **columns_of(summary.cell.series),
                    "batch_size": summary.cell.batch_size,
                    "draws": best.n,
                    "median": best.median,
                    "mean": mean,
                    "none": best.none,
                    "floor": int(is_bound),
                }
            )
    columns = [*columns_of(record.series[0]), "batch_size", "draws", "median", "mean", "none"]
    columns.append("floor")
    return frame(rows, columns)


def halves(cells: Iterable[CellSummary], statistic: Statistic) -> list[tuple[Cost, BestOfN]]:
    """Return K* and K* of half of the trials, of each cell whose K* is no upper bound."""
    pairs = []
    for cell in cells:
        if cell.k_star is not None and not cell.is_upper_bound and len(cell.costs) > 1:
            half = best_of(cell.costs, [len(cell.costs) // 2], statistic)[0]
            pairs.append((cell.k_star, half))
    return pairs


def last_doubling(cells: Iterable[CellSummary], statistic: Statistic) -> list[float]:
    """Return K* of half of the trials over K*, of each cell whose K* is no upper bound.

    It is the geometric mean over the halves. For the minimum their median is K* itself, since every
    second half has the best trial. Cells in which more than a share of `RARE` of the halves has no
    K* are skipped: the steps of these halves are unknown. If trials stop at K*, that is so in every
    cell.
    """
    ratios = []
    for k_star, half in halves(cells, statistic):
        if half.mean is not None and half.none <= RARE:
            ratios.append(half.mean / k_star)
    return ratios
