"""Repeats: the best points of a cell run again with other seeds.

They measure how much of K* is the luck of one seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lit_dps.core.racing import covered_up_to, covering_attempt, truncate_at
from lit_dps.core.statistic import Statistic
from lit_dps.core.trial import Status, TrialResult
from lit_dps.core.unit import Cost

RepeatId = tuple[int, int]  # a point and the number of its repeat, from 1


@dataclass(frozen=True)
class RepeatPlan:
    """Which points of a cell are repeated, how often, and for how long.

    Attributes:
        count: Repeats of each of these points; 0 for none.
        points: How many of the cell's best points are repeated, in the order of
            `Statistic.ranking`.
        race_factor: A repeat without the goal stops after this multiple of its cell's K*; None runs
            it to the step budget. Repeats do not race one another.
    """

    count: int = 0
    points: int = 1
    race_factor: float | None = 8.0

    def limit(self, k_star: Cost) -> float:
        """Return the cost that repeats must reach; infinity if that is the step budget.

        Args:
            k_star: K* of the cell.
        """
        if self.race_factor is None:
            return math.inf
        return self.race_factor * k_star

    def best_points(self, complete: Iterable[tuple[Cost, int]], statistic: Statistic) -> list[int]:
        """Return the points to repeat, first the point of K*; none without a K*.

        Args:
            complete: (Cost, point) of the cell's complete trials.
            statistic: What K* is.
        """
        return [point for _, point in statistic.ranking(complete)[: self.points]]

    def missing(
        self,
        complete: Iterable[tuple[Cost, int]],
        covered: Mapping[RepeatId, float],
        statistic: Statistic,
    ) -> list[RepeatId]:
        """Return the repeats of a cell that must still run: each point once, then each twice, ...

        Args:
            complete: (Cost, point) of the cell's complete trials. Without a K*, there is nothing to
                repeat.
            covered: The cost up to which each repeat need not run again (`racing.covered_up_to`).
            statistic: What K* is.
        """
        pairs = list(complete)
        k_star = statistic.k_star(cost for cost, _ in pairs)
        if k_star is None:
            return []
        limit = self.limit(k_star)
        points = self.best_points(pairs, statistic)
        missing = []
        for number in range(1, self.count + 1):
            for point in points:
                if covered.get((point, number), -math.inf) < limit:
                    missing.append((point, number))
        return missing


def missing_repeats(
    plan: RepeatPlan,
    results: Iterable[TrialResult],
    repeats: Iterable[TrialResult],
    statistic: Statistic,
) -> list[RepeatId]:
    """Return the repeats of a cell that must still run, by its finished trials and repeats."""
    complete = []
    for result in results:
        if result.cost is not None:
            complete.append((result.cost, result.trial.point))
    covered = {}
    for repeat in repeats:
        # Failed repeats run again.
        cost = -math.inf
        if repeat.status is not Status.FAILED:
            cost = covered_up_to(repeat.status, repeat.cost_run)
        covered[repeat.trial.point, repeat.trial.repeat] = cost
    return plan.missing(complete, covered, statistic)


def truncate_repeats(
    plan: RepeatPlan,
    results: Iterable[TrialResult],
    repeats: Iterable[TrialResult],
    statistic: Statistic,
    earlier: Mapping[RepeatId, TrialResult] = {},
) -> list[TrialResult]:
    """Return the repeats of a cell truncated at their limit, whenever they ran.

    K* may fall after a repeat has ended. The repeat then counts as stopped at the new limit, as if
    it had run later. The list includes repeats that must run again.

    Args:
        plan: What is repeated.
        results: The results of the cell's trials.
        repeats: The results of its repeats.
        statistic: What K* is.
        earlier: As in `racing.truncate_at_race_limit`.
    """
    k_star = statistic.k_star(result.cost for result in results)
    if k_star is None:
        return list(repeats)
    limit = plan.limit(k_star)
    truncated = []
    for repeat in repeats:
        shorter = earlier.get((repeat.trial.point, repeat.trial.repeat))
        truncated.append(truncate_at(covering_attempt(repeat, shorter, limit), limit))
    return truncated
