"""What was measured of K at some batch sizes: a number, or a bound of it, and how certain each
is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lit_dps.analysis.law_bootstrap import resample
from lit_dps.analysis.law_fit import AT_LEAST, AT_MOST
from lit_dps.analysis.summary import CellSummary
from lit_dps.analysis.tables import listed_numbers
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import short_names
from lit_dps.core.trial import Status

# The standard error of a median of n normal draws is this over sqrt(n) of their standard deviation
# (n large).
_OF_MEDIAN = 1.2533


@dataclass(frozen=True, order=True)
class Observation:
    """Steps to result at one batch size.

    Attributes:
        batch_size: B, in examples.
        steps: K, in optimizer steps, or the bound of it.
        noise: Standard error of log K between repetitions: seeds, or resampled trials; 0 where
            nothing is known.
        check: Steps between two checks; the goal was met somewhere in (steps - check, steps]. 0
            where K is exact.
        bound: 0; `AT_LEAST`, where the goal was not met by then; `AT_MOST`, where it was, maybe
            long before, as at the first check.
        edge: Metaparameters whose best value lies on an end of its range, as "learning_rate low";
            else empty. K could be smaller beyond it.
    """

    batch_size: float
    steps: float
    noise: float = 0.0
    check: float = 0.0
    bound: int = 0
    edge: str = ""

    def __post_init__(self):
        if not (0 < self.batch_size < math.inf and 0 < self.steps < math.inf):
            raise ValueError(
                f"batch size {self.batch_size} and steps {self.steps} must be positive and finite"
            )
        if self.bound not in (0, AT_LEAST, AT_MOST):
            raise ValueError(f"bound {self.bound} is none of 0, {AT_LEAST}, {AT_MOST}")

    @property
    def variance(self) -> float:
        """Of log K: of the repetitions, and of a goal met anywhere between two checks, (check /
        K)^2 / 12."""
        return self.noise**2 + (self.check / self.steps) ** 2 / 12


def exact(observations: Iterable[Observation]) -> list[Observation]:
    """Those that say K itself, not a bound."""
    return [o for o in observations if not o.bound]


def medians(runs: pd.DataFrame) -> list[Observation]:
    """One observation a batch size from runs of several seeds, by batch size: the median of K.

    Its standard error takes the spread of log K pooled over all batch sizes that have several runs.
    A run that did not meet the goal may have met it at any step beyond its limit. So the median
    lies between those with its limit and with infinity in its place: where they differ it is an
    upper bound, and a lower one where half of the runs did not.

    Args:
        runs: Columns batch_size [examples] and steps; censored, if there, is 1 for a run that did
            not meet the goal (its steps are its limit; missing where it would never have met it);
            check, if there, is the spacing of checks [steps].
    """
    groups, spread, free = [], 0.0, 0
    for batch_size, group in runs.groupby("batch_size"):
        missed = (
            group["censored"].to_numpy(bool) if "censored" in group else np.zeros(len(group), bool)
        )
        steps = group["steps"].to_numpy(float)
        groups.append((float(batch_size), group, missed, steps))
        if (met := np.log(steps[~missed])).size > 1:
            spread, free = spread + float(((met - met.mean()) ** 2).sum()), free + met.size - 1
    deviation = math.sqrt(spread / free) if free else 0.0
    found = []
    for batch_size, group, missed, steps in groups:
        check = float(np.nan_to_num(group["check"].median())) if "check" in group else 0.0
        limits = np.where(missed & np.isnan(steps), np.inf, steps)
        least, most = _median(limits), _median(np.where(missed, np.inf, steps))
        noise = deviation * (
            _OF_MEDIAN / math.sqrt(len(steps)) if len(steps) > 2 else 1 / math.sqrt(len(steps))
        )
        if least == most < math.inf:
            found.append(Observation(batch_size, most, noise, check))
        elif most < math.inf:
            found.append(Observation(batch_size, most, noise, 0.0, AT_MOST))
        elif (known := limits[np.isfinite(limits)]).size:
            found.append(
                Observation(batch_size, min(least, float(known.max())), noise, 0.0, AT_LEAST)
            )
    return found


def _median(steps: np.ndarray) -> float:
    """Of some steps, which may be infinite."""
    order = np.sort(steps)
    return float(order[(len(order) - 1) // 2] + order[len(order) // 2]) / 2


def edges(observations: Sequence[Observation]) -> str | None:
    """What to know where best metaparameters lie on an end of their ranges; None if none does."""
    if not (on := [o for o in observations if o.edge]):
        return None
    where = (
        f"at B = {listed_numbers(o.batch_size for o in on)} "
        f"({'; '.join(dict.fromkeys(o.edge for o in on))})"
    )
    return (
        f"the best metaparameters lie on an end of their range {where}: K may be smaller "
        "there, "
        "widen it first"
    )


REPLICATES = 200


def observed(record: StudyRecord, cell: CellSummary) -> Observation | None:
    """What the trials of a cell say of K, maybe a bound.

    The noise of log K* is that of the best of as many trials, resampled. Where no trial met the
    goal, the budget is a lower bound of K as far as every one of them spent it. Where more than
    half of the trials were not run, K* is an upper bound: a search goes on to better rates.
    """
    goal, size = record.goal, float(cell.cell.batch_size)
    if cell.k_star is None:
        spent = [r for r in cell.trials if r.status in (Status.INCOMPLETE, Status.INFEASIBLE)]
        whole = (
            bool(cell.trials)
            and not (cell.pending or cell.undetermined_points)
            and len(spent) == len(cell.trials)
        )
        return Observation(size, float(goal.max_steps), bound=AT_LEAST) if whole else None
    if cell.at_first_check or 2 * (cell.pending + len(cell.undetermined_points)) > record.trials:
        return Observation(size, float(cell.k_star), bound=AT_MOST)
    found = np.asarray(resample(cell.steps, REPLICATES, (0, int(size))), float)
    found = found[np.isfinite(found) & (found > 0)]
    noise = float(np.log(found).std()) if len(found) > 1 else 0.0
    names = short_names(list(record.space))
    edge = ", ".join(f"{names[key]} {end}" for key, end in cell.boundary.items())
    return Observation(size, float(cell.k_star), noise, float(goal.check_interval), edge=edge)
