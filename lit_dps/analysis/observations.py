"""Observations of K at some batch sizes: a number or a bound, its noise, and draws of it.

Three sources: the trials of a cell (K*, by default their minimum), the repeats of its best point
(their median), and runs of several seeds in a table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from lit_dps.analysis.intervals import NORMAL_95, Interval, resampling_rng
from lit_dps.analysis.repeats import RepeatSummary
from lit_dps.analysis.summary import CellSummary, boundary_texts
from lit_dps.analysis.tables import listed_numbers, numbers
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.record import StudyRecord
from lit_dps.core.statistic import Statistic
from lit_dps.core.trial import Status, TrialResult
from lit_dps.core.unit import Cost, Unit

# Standard error of log K where it is unknown: of the best of some tens of trials, as the loss scale
# of the fit (`law_fit.LOSS_SCALE`).
UNKNOWN_NOISE = 0.1

# Kinds of bounds of K*. The sign is the side on which a residual counts.
AT_LEAST = 1
AT_MOST = -1

# The noise of K* follows from the distances of this many trials next to the best. Farther trials
# belong to another part of the search space.
NEAREST_TRIALS = 3
# The noise of K* between searches of n points in d = 1 or 2 metaparameters is n^(-1 / d), plus that
# of seeds. Blocks of 4, 8, 16, 25 and 32 of the 100 points of the stored studies (d = 2) have 0.41,
# 0.34, 0.24, 0.20 and 0.18; blocks of 4 and 8 points of one learning rate 0.30 and 0.14. Then the
# 80 % intervals of 25 of these 100 points hold 80 to 83 %; intervals of a bootstrap of the
# minimum hold 33 to 70 %.
MAX_DIMENSIONS = 2
SEED_NOISE = 0.1
# This prior counts as this number of distances.
PRIOR_DISTANCES = 3
# Cells that are drawn for the noise of another statistic than the minimum. The noise is then known
# to 2 %.
DRAWS = 2000
FARTHEST = 100.0
# Fewer trials are points that the user chose. They are no search.
MIN_SEARCHED_TRIALS = 4


@dataclass(frozen=True, order=True)
class Observation:
    """K at one batch size: steps to result, or another cost of it (`goal.unit`).

    Attributes:
        batch_size: B, in examples.
        k: K, or the bound of it, in the unit of K*. `Law.observations` has steps instead of
            examples. Tables and figures show it.
        noise: Standard error of log K between repetitions, which are seeds or searches; 0 if it is
            unknown.
        resolution: Cost between two validations, in the unit of K. The goal was met in
            (k - resolution, k]; 0 if K is exact.
        bound: 0 if K is exact; `AT_LEAST` if the goal was not met by then; `AT_MOST` if it was met
            by then or long before, as at the first check.
        boundary: Metaparameters with their best value at an end of the range, such as
            "learning_rate low"; else empty. K may be smaller beyond that end.
        luck: Expected log K of a further run less log k, as k is the least of several runs.
    """

    batch_size: float
    k: float
    noise: float = 0.0
    resolution: float = 0.0
    bound: int = 0
    boundary: str = ""
    luck: float = 0.0

    def __post_init__(self):
        if not (0 < self.batch_size < math.inf and 0 < self.k < math.inf):
            raise ValueError(
                f"batch_size is {self.batch_size} and k is {self.k}; both must be positive and "
                "finite"
            )
        if self.bound not in (0, AT_LEAST, AT_MOST):
            raise ValueError(f"bound is {self.bound}; it must be 0, {AT_LEAST} or {AT_MOST}")

    @property
    def expected_k(self) -> float:
        """K of a further run, without the luck of the least of several; laws are fitted to it."""
        return self.k * math.exp(self.luck)

    @property
    def variance(self) -> float:
        """Variance of log K: of the repetitions, and of the unknown place between two validations.

        A uniform place between two validations adds (resolution / K)^2 / 12.
        """
        return self.noise**2 + (self.resolution / self.k) ** 2 / 12

    @property
    def assumed_variance(self) -> float:
        """Variance of log K; unknown noise counts as `UNKNOWN_NOISE`."""
        if self.noise:
            return self.variance
        return UNKNOWN_NOISE**2 + self.variance

    @property
    def is_lower_bound(self) -> bool:
        """Whether the goal was not met by this K."""
        return self.bound == AT_LEAST

    @property
    def limits(self) -> Interval | None:
        """95 % limits of `expected_k`; None for a bound, or if the noise is unknown."""
        if self.bound or not self.noise:
            return None
        return self.interval(self.variance)

    def interval(self, variance: float) -> Interval:
        """Return 95 % limits of K by a variance of log K, about `expected_k`."""
        factor = math.exp(NORMAL_95 * math.sqrt(variance))
        return Interval(self.expected_k / factor, self.expected_k * factor)

    def in_steps(self, unit: Unit) -> Observation:
        """Return the observation in steps on full batches, by K in a unit."""
        per_step = unit.per_step(self.batch_size)
        return replace(self, k=self.k / per_step, resolution=self.resolution / per_step)

    def draws(self, count: int, name: str) -> np.ndarray:
        """Return draws (count,) of K: log-normal noise, less a part of the resolution.

        Args:
            count: Number of draws.
            name: Seeds the draws, which are independent for different names or batch sizes. It is
                the series in tables of one study; comparisons of several studies add the study
                (`Analysis.name_of`). Cells of one batch size that were searched at the same points
                are in fact correlated: by 0.2 for 25 points of the stored studies, by 0.5 for 8.
        """
        random = resampling_rng(int(self.batch_size), name)
        draws = self.expected_k * np.exp(self.noise * random.standard_normal(count))
        return draws * (1 - self.resolution / self.k * random.random(count))


def exact(observations: Iterable[Observation]) -> list[Observation]:
    """Return the observations that are K itself, not a bound."""
    return [o for o in observations if not o.bound]


def observations_of_cells(record: StudyRecord, cells: Iterable[CellSummary]) -> list[Observation]:
    """Return the observations of K by the trials of some cells.

    If too few trials of a cell met the goal, K* has a lower bound, provided that every other trial
    spent max steps or diverged: max steps if no trial met the goal. K* may be an upper bound
    (`CellSummary.is_upper_bound`).
    """
    observations = []
    for cell in cells:
        observation = _observation_of_cell(record, cell)
        if observation is not None:
            observations.append(observation)
    return observations


def _observation_of_cell(record: StudyRecord, cell: CellSummary) -> Observation | None:
    """Return the observation of K by the trials of a cell, maybe a bound; None if undetermined."""
    goal = record.goal
    size = float(cell.cell.batch_size)
    if cell.k_star is None:
        if not has_missed(cell):
            return None
        unmet = _cost_without_goal(goal, cell)
        if not unmet:
            return None
        # A trial that missed the goal costs at least this.
        least = record.statistic.k_star(k or unmet for k in cell.costs)
        if least is None:
            return None
        return Observation(size, float(least), bound=AT_LEAST)
    if cell.is_upper_bound:
        return Observation(size, float(cell.k_star), bound=AT_MOST)
    return Observation(
        size,
        float(cell.k_star),
        noise=noise_of_k_star(cell.costs, len(record.space), record.statistic),
        resolution=float(cell.check_cost),
        boundary=", ".join(boundary_texts(record, cell.best)),
    )


def _cost_without_goal(goal: Goal, cell: CellSummary) -> Cost:
    """Return what each trial of a cell without K* spent; 0 if unknown.

    In steps without a further budget these are max steps, else the lowest cost of a trial within
    its budgets.
    """
    if not goal.counted:
        return goal.max_steps
    costs = []
    for result in cell.trials:
        step = goal.last_step_within(result.curve)
        if result.status is Status.INCOMPLETE and step:
            costs.append(result.unit.cost_at(result.curve, step))
        elif result.status is Status.INCOMPLETE:
            return 0
    return min(costs, default=0)


def has_missed(cell: CellSummary) -> bool:
    """Return True if every trial of a cell without K* ended, so that none can meet the goal."""
    missing = cell.pending + len(cell.undetermined_points) + cell.counts[Status.FAILED]
    return not missing and all(map(_has_ended, cell.trials))


def _has_ended(result: TrialResult) -> bool:
    """Return True if a trial met the goal, spent max steps without it, or diverged."""
    return result.status in (Status.COMPLETE, Status.INCOMPLETE, Status.INFEASIBLE)


def noise_of_k_star(costs: Sequence[Cost | None], dimensions: int, statistic: Statistic) -> float:
    """Return the standard error of log K* of a cell; 0 if it is unknown.

    For another statistic than the minimum it is a parametric bootstrap: the statistic of cells
    whose trials have the exponential distances of `noise_of_minimum`.

    Args:
        costs, dimensions: As of `noise_of_minimum`.
        statistic: What K* is.
    """
    noise = noise_of_minimum(costs, dimensions)
    if statistic.is_minimum or not noise:
        return noise
    distances = resampling_rng(len(costs), statistic.name).exponential(size=(DRAWS, len(costs)))
    # Farther trials never decide, and their costs may be infinite.
    distances = np.minimum(noise * len(costs) * distances, FARTHEST)
    # The statistic of a user may be in whole steps, so the draws have the scale of the costs.
    least = min(k for k in costs if k is not None)
    logs = np.log(statistic.of_draws(least * np.exp(distances)))
    return float(logs.std())


def noise_of_minimum(costs: Sequence[Cost | None], dimensions: int) -> float:
    """Return the standard error of log K*, the least cost of the trials of a cell; 0 if unknown.

    Suppose that distances from the best possible K are exponential. Then n - i times the distance
    of the i-th best of n trials to the next one has a mean of n times the standard deviation of the
    minimum (Renyi 1953). The mean of the nearest distances is shrunk towards the noise of other
    searches. Trials that a race stopped count as later ones.

    Args:
        costs: Cost to result of each trial; None for one that is not complete.
        dimensions: Number of searched metaparameters; without any, trials are seeds.
    """
    count = len(costs)
    complete = [k for k in costs if k is not None]
    best = sorted(complete)[: NEAREST_TRIALS + 1]
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
    """Return the standard deviation of log K between searches, without the noise of seeds."""
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
    by_batch_size = {}
    for repeated in repeats:
        if repeated.rank == 1 and repeated.results:
            by_batch_size[float(repeated.cell.batch_size)] = repeated
    runs_of_cells = []
    for batch_size, repeated in sorted(by_batch_size.items()):
        steps = np.array(repeated.costs_or_limits, float)
        missed = np.array([result.cost is None for result in repeated.results])
        runs_of_cells.append(_Runs(batch_size, steps, missed, repeated.check_cost))
    observations = []
    for o in _median_observations(runs_of_cells):
        noise = math.hypot(o.noise, search_noise)
        if not o.bound and by_batch_size[o.batch_size].is_at_first_check(o.k):
            observations.append(replace(o, noise=noise, bound=AT_MOST, resolution=0.0))
        else:
            observations.append(replace(o, noise=noise))
    return observations


class _Runs(NamedTuple):
    """The runs of several seeds at one batch size."""

    batch_size: float
    steps: np.ndarray  # (n,), K, or the limit of a run that missed the goal; nan or inf without
    missed: np.ndarray  # (n,), whether a run missed the goal
    resolution: float  # cost between two validations, in the unit of K*; 0 if unknown


def check_interval(runs: pd.DataFrame) -> float:
    """Return the median steps between two validations of some runs; 0 if they are unknown."""
    if "check" not in runs:
        return 0.0
    return float(np.nan_to_num(runs["check"].median()))


def _runs_of(group: pd.DataFrame) -> _Runs:
    """Return the runs of one batch size; columns as in `medians`."""
    missed = np.zeros(len(group), bool)
    if "censored" in group:
        missed = is_censored(group["censored"])
    has_no_steps = ~missed & group["steps"].isna().to_numpy(bool)
    if has_no_steps.any():
        allowed = "a number in the row of each run that met the goal"
        hint = "If a run missed the goal, give its last step, and censored 1."
        raise ConfigError("runs.steps", None, allowed, hint)
    batch_size = float(group["batch_size"].iloc[0])
    return _Runs(batch_size, group["steps"].to_numpy(float), missed, check_interval(group))


def is_censored(column: Any) -> np.ndarray:
    """Return (n,) whether runs missed the goal, by the column censored of a data frame.

    A missing value means that the run met the goal, as 0.

    Raises:
        ConfigError: for texts.
    """
    try:
        return np.nan_to_num(numbers(column)) != 0
    except (TypeError, ValueError):
        allowed = "1 in the row of each run that missed the goal, else 0"
        raise ConfigError("runs.censored", column.tolist(), allowed) from None


def medians(runs: pd.DataFrame) -> list[Observation]:
    """Return one observation a batch size from runs of several seeds: the median of K.

    Its standard error is from the spread of log K, pooled over the batch sizes with several runs,
    and grows with the share of runs that missed the goal (`_error_of_median`). A run that missed
    the goal may have met it at any step beyond its limit. So the median is between the median with
    limits and the median with infinity in place of these runs. If the two differ it is an upper
    bound, or a lower bound if half of the runs missed the goal. A median at the first check is an
    upper bound.

    Args:
        runs: Columns batch_size [examples] and steps; optional: censored, 1 for a run that missed
            the goal (its steps are its limit; missing if it would never meet it), else 0 or
            missing; check, the spacing of checks [steps].

    Raises:
        ConfigError: for a run that met the goal without steps.
    """
    return _median_observations([_runs_of(group) for _, group in runs.groupby("batch_size")])


def _median_observations(groups: Sequence[_Runs]) -> list[Observation]:
    """Return the observation of each group of runs, as `medians`; none for undetermined groups."""
    deviation = _pooled_deviation(groups)
    observations = []
    for group in groups:
        observation = _median_observation(group, deviation)
        if observation is not None:
            observations.append(observation)
    return observations


def _pooled_deviation(groups: Iterable[_Runs]) -> float:
    """Return the standard deviation of log K over seeds, pooled over batch sizes; 0 if unknown."""
    squares = 0.0
    degrees = 0
    for group in groups:
        logs = np.log(group.steps[~group.missed])
        if logs.size > 1:
            squares += float(((logs - logs.mean()) ** 2).sum())
            degrees += logs.size - 1
    if not degrees:
        return 0.0
    return math.sqrt(squares / degrees)


def _error_of_median(count: int, missed: int = 0) -> float:
    """Return the standard error of a median, in standard deviations of the runs that met the goal.

    It is 1 / (2 f sqrt(n)), where f is the density at the median (Cramer 1946, Section 28.5). The
    log K of the runs that met the goal are assumed to be normal. The median of all runs is then
    their quantile q = n / (2 (n - missed)), and f is (n - missed) / n times their density there.
    Runs that would meet the goal later, and runs that would never meet it, have about the same
    error: the standard deviation is smaller if the budget cut the slow runs off.

    Args:
        count: n, the number of runs.
        missed: The number of runs that missed the goal, less than half of all.
    """
    if count <= 2:
        return 1 / math.sqrt(count)
    share = 1 - missed / count
    density = math.exp(-(special.ndtri(0.5 / share) ** 2) / 2) / math.sqrt(2 * math.pi)
    return 1 / (2 * share * density * math.sqrt(count))


def _median_observation(runs: _Runs, deviation: float) -> Observation | None:
    """Return the median of the runs of one batch size, or its bound; None if neither is finite.

    Args:
        runs: The runs.
        deviation: Standard deviation of log K over seeds.
    """
    count = len(runs.steps)
    missed = int(runs.missed.sum())
    limits = np.where(runs.missed & np.isnan(runs.steps), np.inf, runs.steps)
    least = float(np.median(limits))
    most = float(np.median(np.where(runs.missed, np.inf, runs.steps)))
    if most < math.inf:
        noise = deviation * _error_of_median(count, missed)
        if least == most and runs.resolution < most:
            return Observation(runs.batch_size, most, noise, runs.resolution)
        return Observation(runs.batch_size, most, noise, bound=AT_MOST)
    finite = limits[np.isfinite(limits)]
    if not finite.size:
        return None
    # Few runs that met the goal are as good evidence of a lower bound as few misses of a median.
    noise = deviation * _error_of_median(count, min(count - missed, (count - 1) // 2))
    return Observation(runs.batch_size, min(least, float(finite.max())), noise, bound=AT_LEAST)


def note_on_boundaries(observations: Sequence[Observation]) -> str | None:
    """Return a note on best metaparameters at an end of their range; None without any."""
    sizes = []
    boundaries = []
    for o in observations:
        if o.boundary:
            sizes.append(o.batch_size)
            boundaries.append(o.boundary)
    if not boundaries:
        return None
    different = "; ".join(dict.fromkeys(boundaries))
    return (
        f"The best metaparameters are at an end of their range at B = {listed_numbers(sizes)} "
        f"({different}). Widen the range: K may be smaller beyond it."
    )
