"""Repeats: the best points of a cell run again on fresh seeds, which tells how much of K* is the
luck of one seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lit_dps.core.racing import last_step, needs_no_rerun
from lit_dps.core.trial import Status, TrialResult

Repeated = tuple[int, int]  # a point and the number of a repeat of it, from 1


@dataclass(frozen=True)
class RepeatPlan:
    """Which points of a cell are repeated, how often, and for how long.

    Attributes:
        count: Repeats of each of these points; 0 for none.
        points: How many of the cell's best points are repeated: those that needed the fewest steps.
        slack: A repeat that has not met the goal is stopped after so many times K* of its cell;
            None runs it to the step budget. Repeats do not race one another.
    """

    count: int = 0
    points: int = 1
    slack: float | None = 8.0

    def limit(self, k_star: int) -> float:
        """The step that repeats have to reach in a cell of this K*; infinite where that is the
        budget."""
        return last_step(k_star, self.slack)

    def best(self, complete: Iterable[tuple[int, int]]) -> list[int]:
        """The points to repeat, the best first, from (steps to result, point) of a cell's complete
        trials.

        The first is the point of K*: of least steps, the lowest among equals.
        """
        return [point for _, point in sorted(complete)[: self.points]]

    def left(
        self, complete: Iterable[tuple[int, int]], ran: Mapping[Repeated, float]
    ) -> list[Repeated]:
        """The repeats of a cell that have to be run: those of all points before a further one of
        any.

        Args:
            complete: (Steps to result, point) of the cell's complete trials; without one there is
                nothing to repeat.
            ran: Up to which step it is known how each repeat goes, infinite where it ended for good
                (`known_to`).
        """
        complete = sorted(complete)
        if not complete:
            return []
        limit = self.limit(complete[0][0])
        every = (
            (point, number) for number in range(1, self.count + 1) for point in self.best(complete)
        )
        return [each for each in every if ran.get(each, -math.inf) < limit]

    def extended(self, other: RepeatPlan) -> RepeatPlan:
        """The larger of both in each respect."""
        slack = None if None in (self.slack, other.slack) else max(self.slack, other.slack)
        return RepeatPlan(max(self.count, other.count), max(self.points, other.points), slack)


def known_to(result: TrialResult) -> float:
    """Up to which step a result tells how its trial goes: infinite if it ended for good, nothing if
    it failed."""
    if result.status is Status.FAILED:
        return -math.inf
    return (
        math.inf if needs_no_rerun(result.status, result.steps_run, math.inf) else result.steps_run
    )


def repeats_left(
    plan: RepeatPlan, results: Iterable[TrialResult], repeats: Iterable[TrialResult]
) -> list[Repeated]:
    """The repeats of a cell that have to be run, by its finished trials and repeats."""
    complete = [
        (result.steps, result.trial.point) for result in results if result.steps is not None
    ]
    return plan.left(complete, {(r.trial.point, r.trial.repeat): known_to(r) for r in repeats})
