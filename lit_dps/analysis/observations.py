"""Observations of K at some batch sizes: a number or a bound, its noise, and draws of it.

Three sources: the trials of a cell (K*, their minimum), the repeats of its best point (their
median), and runs of several seeds in a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from lit_dps.analysis.intervals import NORMAL_95, Interval, resampling_rng
from lit_dps.analysis.law_fit import AT_LEAST, AT_MOST
from lit_dps.analysis.repeats import RepeatSummary
from lit_dps.analysis.summary import CellSummary, is_at_first_check
from lit_dps.analysis.tables import listed_numbers
from lit_dps.core.record import StudyRecord
from lit_dps.core.search_space import short_names
from lit_dps.core.trial import Status, TrialResult

# The standard error of the median of n normal values is this times their standard deviation over
# sqrt(n), for large n: sqrt(pi / 2).
_MEDIAN_FACTOR = 1.2533
# Trials behind the best one whose distances tell the noise of K*. Farther ones belong to another
# part of the search space.
NEAREST_TRIALS = 3
# The noise of K* between searches of n points in d = 1 or 2 metaparameters: n^(-1 / d), and that of
# seeds. Blocks of 4, 8, 16, 25 and 32 of the 100 points of the stored studies (d = 2) have 0.41,
# 0.34, 0.24, 0.20 and 0.18; blocks of 4 and 8 points of one learning rate 0.30 and 0.14.
# Then the 80 % intervals of 25 of these 100 points hold 80 to 83 %; those of a bootstrap of the
# minimum hold 33 to 70 %.
MAX_DIMENSIONS = 2
SEED_NOISE = 0.1
# This noise counts as so many distances.
PRIOR_DISTANCES = 3
# Fewer trials are single points that somebody chose, not a search.
MIN_SEARCHED_TRIALS = 4


@dataclass(frozen=True, order=True)
class Observation:
    """Steps to result at one batch size.

    Attributes:
        batch_size: B, in examples.
        steps: K, in optimizer steps, or the bound of it.
        noise: Standard error of log K between repetitions, which are seeds or searches; 0 where it
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

    @property
    def is_lower_bound(self) -> bool:
        """Whether the goal was not met by these steps."""
        return self.bound == AT_LEAST

    @property
    def limits(self) -> Interval | None:
        """95 % limits of K; None for a bound, and where the noise is not known."""
        if self.bound or not self.noise:
            return None
        half_width = NORMAL_95 * math.sqrt(self.variance)
        return Interval(self.steps * math.exp(-half_width), self.steps * math.exp(half_width))

    def draws(self, count: int, name: str) -> np.ndarray:
        """Return draws (count,) of K, in steps: log-normal noise, less a part of a check interval.

        Args:
            count: Number of draws.
            name: Of the series and its study. Draws of different names or batch sizes are
                independent. Cells of one batch size that were searched at the same points are in
                fact correlated: by 0.2 for 25 points of the stored studies, by 0.5 for 8.
        """
        random = resampling_rng(int(self.batch_size), name)
        steps = self.steps * np.exp(self.noise * random.standard_normal(count))
        return steps * (1 - self.check / self.steps * random.random(count))


def exact(observations: Iterable[Observation]) -> list[Observation]:
    """Return the observations that are K itself, no bound."""
    return [o for o in observations if not o.bound]


def observations_of_cells(record: StudyRecord, cells: Iterable[CellSummary]) -> list[Observation]:
    """Return the observations of K by the trials of some cells (`observation_of_cell`)."""
    observations = []
    for cell in cells:
        observation = observation_of_cell(record, cell)
        if observation is not None:
            observations.append(observation)
    return observations


def observation_of_cell(record: StudyRecord, cell: CellSummary) -> Observation | None:
    """Return the observation of K by the trials of a cell, maybe a bound; None if they say nothing.

    Where no trial met the goal, max steps is a lower bound of K if every trial ran that far. Where
    more than half of the trials were not run, K* is an upper bound, since a search proceeds to
    better rates.
    """
    goal = record.goal
    size = float(cell.cell.batch_size)
    missing = cell.pending + len(cell.undetermined_points)
    if cell.k_star is None:
        if cell.trials and not missing and all(map(_ran_to_max_steps, cell.trials)):
            return Observation(size, float(goal.max_steps), bound=AT_LEAST)
        return None
    if cell.is_upper_bound or 2 * missing > record.trials:
        return Observation(size, float(cell.k_star), bound=AT_MOST)
    noise = noise_of_minimum(cell.steps, len(record.space))
    names = short_names(list(record.space))
    edge = ", ".join(f"{names[key]} {end}" for key, end in cell.boundary.items())
    return Observation(size, float(cell.k_star), noise, float(goal.check_interval), edge=edge)


def _ran_to_max_steps(result: TrialResult) -> bool:
    """Return True if a trial without a K shows that its K is above max steps."""
    return result.status in (Status.INCOMPLETE, Status.INFEASIBLE)


def noise_of_minimum(steps: Sequence[int | None], dimensions: int) -> float:
    """Return the standard error of log K*, the least steps of the trials of a cell; 0 if unknown.

    With exponential distances from the best possible K, n - i times the distance of the i-th best
    of n trials to the next one has a mean of n times the standard deviation of the minimum (Renyi
    1953). The mean of the nearest ones is shrunk towards the noise of other searches. Trials that a
    race stopped count as later ones.

    Args:
        steps: Steps to result of each trial; None for one that is not complete.
        dimensions: Number of searched metaparameters; without any, trials are seeds.
    """
    count = len(steps)
    best = sorted(k for k in steps if k is not None)[: NEAREST_TRIALS + 1]
    distances = np.diff(np.log(best)) * (count - np.arange(1, len(best)))
    total = float(distances.sum()) / count
    weight = len(distances)
    if dimensions and count >= MIN_SEARCHED_TRIALS:
        total += PRIOR_DISTANCES * math.hypot(noise_of_search(count, dimensions), SEED_NOISE)
        weight += PRIOR_DISTANCES
    if not weight:
        return 0.0
    return total / weight


def noise_of_search(trials: int, dimensions: int) -> float:
    """Return the standard deviation of log K between searches for the best point, without seeds."""
    if not dimensions or not trials:
        return 0.0
    return trials ** (-1 / min(dimensions, MAX_DIMENSIONS))


def observations_of_repeats(
    repeats: Iterable[RepeatSummary], search_noise: float
) -> list[Observation]:
    """Return the median over seeds of the best point of each cell that has repeats.

    A median at the first check is an upper bound.

    Args:
        repeats: Of the best points of one series.
        search_noise: Standard deviation of log K between searches, which would repeat other points
            (`noise_of_search`).
    """
    rows = []
    for repeated in repeats:
        if repeated.rank != 1:
            continue
        for k, limit in zip(repeated.steps_over_seeds, repeated.steps_or_limit, strict=True):
            rows.append(
                {
                    "batch_size": repeated.cell.batch_size,
                    "steps": limit,
                    "censored": math.isinf(k),
                    "check": repeated.check_interval,
                }
            )
    if not rows:
        return []
    observations = medians(pd.DataFrame(rows))
    for i, o in enumerate(observations):
        if not o.bound and is_at_first_check(o.steps, o.check):
            observations[i] = replace(o, bound=AT_MOST, check=0.0)
    return [replace(o, noise=math.hypot(o.noise, search_noise)) for o in observations]


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
