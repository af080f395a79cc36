"""Observations of K at some batch sizes: a number or a bound, and its standard error."""

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
from lit_dps.core.trial import Status, TrialResult

# The standard error of the median of n normal values is this times their standard deviation over
# sqrt(n), for large n: sqrt(pi / 2).
_MEDIAN_FACTOR = 1.2533
# Resamples of the standard error of log K*.
_REPLICATES = 200


@dataclass(frozen=True, order=True)
class Observation:
    """Steps to result at one batch size.

    Attributes:
        batch_size: B, in examples.
        steps: K, in optimizer steps, or the bound of it.
        noise: Standard error of log K between repetitions: seeds, or resampled trials; 0 where it
            is not known.
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
            raise ValueError(f"bound is {self.bound}; it must be 0, {AT_LEAST} or {AT_MOST}")

    @property
    def variance(self) -> float:
        """Variance of log K: of the repetitions, and of the unknown place between two checks.

        A uniform place between two checks adds (check / K)^2 / 12.
        """
        return self.noise**2 + (self.check / self.steps) ** 2 / 12


def exact(observations: Iterable[Observation]) -> list[Observation]:
    """Return the observations that are K itself, no bound."""
    return [o for o in observations if not o.bound]


def observation_of_cell(record: StudyRecord, cell: CellSummary) -> Observation | None:
    """Return the observation of K by the trials of a cell, maybe a bound; None if they say nothing.

    The noise of log K* is the bootstrap standard error of a minimum over as many trials. Where no
    trial met the goal, max steps is a lower bound of K if every trial ran that far. Where more than
    half of the trials were not run, K* is an upper bound, since a search proceeds to better rates.
    """
    goal = record.goal
    size = float(cell.cell.batch_size)
    missing = cell.pending + len(cell.undetermined_points)
    if cell.k_star is None:
        if cell.trials and not missing and all(map(_ran_to_max_steps, cell.trials)):
            return Observation(size, float(goal.max_steps), bound=AT_LEAST)
        return None
    if cell.at_first_check or 2 * missing > record.trials:
        return Observation(size, float(cell.k_star), bound=AT_MOST)
    resampled = np.asarray(resample(cell.steps, _REPLICATES, (0, int(size))), float)
    resampled = resampled[np.isfinite(resampled) & (resampled > 0)]
    noise = 0.0
    if len(resampled) > 1:
        noise = float(np.log(resampled).std())
    names = short_names(list(record.space))
    edge = ", ".join(f"{names[key]} {end}" for key, end in cell.boundary.items())
    return Observation(size, float(cell.k_star), noise, float(goal.check_interval), edge=edge)


def _ran_to_max_steps(result: TrialResult) -> bool:
    """Return True if a trial without a K shows that its K is above max steps."""
    return result.status in (Status.INCOMPLETE, Status.INFEASIBLE)


def medians(runs: pd.DataFrame) -> list[Observation]:
    """Return one observation a batch size from runs of several seeds: the median of K.

    Its standard error takes the spread of log K pooled over all batch sizes that have several runs.
    A run that did not meet the goal may have met it at any step beyond its limit. So the median
    lies between the median with limits and the median with infinity in place of these runs: where
    the two differ it is an upper bound, and a lower one where half of the runs did not meet it.

    Args:
        runs: Columns batch_size [examples] and steps; censored, if there, is 1 for a run that did
            not meet the goal (its steps are its limit; missing where it would never have met it);
            check, if there, is the spacing of checks [steps].
    """
    groups = []
    squares, degrees = 0.0, 0
    for _, group in runs.groupby("batch_size"):
        batch_size = float(group["batch_size"].iloc[0])
        missed = np.zeros(len(group), bool)
        if "censored" in group:
            missed = group["censored"].to_numpy(bool)
        steps = group["steps"].to_numpy(float)
        check = 0.0
        if "check" in group:
            check = float(np.nan_to_num(group["check"].median()))
        groups.append((batch_size, steps, missed, check))
        logs = np.log(steps[~missed])
        if logs.size > 1:
            squares += float(((logs - logs.mean()) ** 2).sum())
            degrees += logs.size - 1
    deviation = math.sqrt(squares / degrees) if degrees else 0.0
    observations = []
    for batch_size, steps, missed, check in groups:
        noise = deviation * _error_of_median(len(steps))
        observation = _median_observation(batch_size, steps, missed, noise, check)
        if observation is not None:
            observations.append(observation)
    return observations


def _error_of_median(count: int) -> float:
    """Return the standard error of the median of some values, in standard deviations of one."""
    if count > 2:
        return _MEDIAN_FACTOR / math.sqrt(count)
    return 1 / math.sqrt(count)


def _median_observation(
    batch_size: float, steps: np.ndarray, missed: np.ndarray, noise: float, check: float
) -> Observation | None:
    """Return the median of the runs of one batch size, or its bound; None if neither is finite."""
    limits = np.where(missed & np.isnan(steps), np.inf, steps)
    least = _median(limits)
    most = _median(np.where(missed, np.inf, steps))
    if least == most < math.inf:
        return Observation(batch_size, most, noise, check)
    if most < math.inf:
        return Observation(batch_size, most, noise, 0.0, AT_MOST)
    finite = limits[np.isfinite(limits)]
    if not finite.size:
        return None
    return Observation(batch_size, min(least, float(finite.max())), noise, 0.0, AT_LEAST)


def _median(steps: np.ndarray) -> float:
    """Return the median of some steps, which may be infinite."""
    order = np.sort(steps)
    return float(order[(len(order) - 1) // 2] + order[len(order) // 2]) / 2


def note_on_edges(observations: Sequence[Observation]) -> str | None:
    """Return a note if best metaparameters lie on an end of their ranges; None if none does."""
    on_edge = [o for o in observations if o.edge]
    if not on_edge:
        return None
    sizes = listed_numbers(o.batch_size for o in on_edge)
    edges = "; ".join(dict.fromkeys(o.edge for o in on_edge))
    return (
        f"the best metaparameters lie on an end of their range at B = {sizes} ({edges}): K may be "
        "smaller there, widen it first"
    )
