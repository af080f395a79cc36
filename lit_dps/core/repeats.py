"""Repeats: the best points of a cell run again with other seeds.

They measure how much of K* is the luck of one seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lit_dps.core.racing import reruns_above, results_at_limit, truncate_at
from lit_dps.core.statistic import Statistic
from lit_dps.core.trial import RepeatId, Status, TrialResult
from lit_dps.core.unit import Cost


@dataclass(frozen=True)
class RepeatPlan:
    """Which points of a cell are repeated, how often, and for how long.

    Attributes:
        count: Repeats of each of these points; 0 for none.
        points: How many of the cell's best points are repeated, in the order of
            `Statistic.ranking`.
        slack: A repeat without the goal stops after this multiple of its cell's K*; None runs it to
            the step budget. Repeats do not race one another.
    """

    count: int = 0
    points: int = 1
    slack: float | None = 8.0

    def limit(self, k_star: Cost | None) -> float:
        """Return the cost that repeats must reach; infinity if that is the step budget.

        Args:
            k_star: K* of the cell; None without a K*.
        """
        if self.slack is None or k_star is None:
            return math.inf
        return self.slack * k_star

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
        reruns_above: Mapping[RepeatId, float],
        statistic: Statistic,
    ) -> list[RepeatId]:
        """Return the repeats of a cell that must still run: each point once, then each twice, ...

        Args:
            complete: (Cost, point) of the cell's complete trials. Without a K*, there is nothing to
                repeat.
            reruns_above: The limit above which each repeat runs again (`racing.reruns_above`).
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
                if reruns_above.get((point, number), -math.inf) < limit:
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
    limits = {}
    for repeat in repeats:
        # Failed repeats run again.
        limit = -math.inf
        if repeat.status is not Status.FAILED:
            limit = reruns_above(repeat.status, repeat.cost_run)
        limits[repeat.trial.repeat_id] = limit
    return plan.missing(complete, limits, statistic)


def truncate_repeats(
    plan: RepeatPlan,
    results: Iterable[TrialResult],
    attempts: Sequence[TrialResult],
    statistic: Statistic,
) -> list[TrialResult]:
    """Return the repeats of a cell truncated at their limit, whenever they ran.

    K* may fall after a repeat has ended. The repeat then counts as stopped at the new limit, as if
    it had run later. The list includes repeats that must run again.

    Args:
        plan: What is repeated.
        results: The results of the cell's trials.
        attempts: The attempts at its repeats, of each repeat in their order.
        statistic: What K* is.
    """
    k_star = statistic.k_star(result.cost for result in results)
    limit = plan.limit(k_star)
    return [truncate_at(repeat, limit) for repeat in results_at_limit(attempts, limit)]
