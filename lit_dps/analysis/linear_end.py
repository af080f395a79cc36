"""The end of linear scaling as measured, without a law: where the examples B K* begin to rise, and
how certain that is.

It is the end of perfect scaling of Shallue et al. (2019), who read it off by eye, by a rule. log(B
K*) is made monotone in B first, neighbours that fall being pooled
(`scipy.optimize.isotonic_regression`), so that one lucky or unlucky cell is no end; then it is
interpolated in log B.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import isotonic_regression

from lit_dps.analysis.scaling import PERCENTILES, Interval, Scaling, percentile_interval, resample
from lit_dps.analysis.summary import CellSummary


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
