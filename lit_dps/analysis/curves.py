"""What is known of a trial at a step: the best value of the goal's metric up to there, or only that
it is a bound.

A curve ends where its trial stopped: at the goal (without `study.run_on`), outraced, or at the
budget. What it would have found later is not known, unless it had diverged: then there is no later.
And a check that stopped early leaves a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lit_dps.core.goal import ERROR, Goal
from lit_dps.core.trial import Status, TrialResult


class Seen:
    """The curve of a trial.

    Args:
        result: The trial.
        goal: What its metric is, whether it falls, and how often it was checked.

    Attributes:
        steps: (n,), of its checks, ascending.
        values: (n,), of the metric; nan where it was not finite or is only a bound.
        until: The last step up to which the best value is known: that before the first check that
            was not made; infinite for a trial that diverged.
    """

    def __init__(self, result: TrialResult, goal: Goal):
        self.result, self._sign = result, -1 if goal.at_least else 1
        curve = result.curve
        self.steps = np.array(curve.get("step", ()), float)
        found = np.array(curve.get(goal.metric, ()), float)
        exact = np.array(curve.get("exact") or [1] * len(found), bool)
        self.values = np.where(exact & np.isfinite(found), found, np.nan)
        self._bounds = np.where(exact, np.inf, self._sign * found)
        went_on = (
            result.steps is not None
            and result.steps_run > result.steps
            and result.steps_run < goal.max_steps
        )
        diverged = result.status is Status.INFEASIBLE or (
            went_on and not result.failure
        )  # nothing else ends it there
        last = int(self.steps[-1]) if len(self.steps) else 0
        self.until = math.inf if diverged else last + goal.check_interval - 1

    def best(self, step: float) -> tuple[float, int] | None:
        """The best value up to a step, and the step of the first check that found it; None before
        any."""
        until = self.steps <= step
        cost = np.where(until & np.isfinite(self.values), self._sign * self.values, np.inf)
        if not np.isfinite(cost).any():
            return None
        i = int(np.argmin(cost))
        return float(self.values[i]), int(self.steps[i])

    def floor(self, step: float) -> float:
        """What `best` may be below, its sign turned where the metric rises: infinite where it is
        exact."""
        if step > self.until:
            return -math.inf
        return float(np.min(self._bounds[self.steps <= step], initial=math.inf))


@dataclass(frozen=True)
class Best:
    """The best value that any trial of a cell found up to a step.

    Attributes:
        value: Of the goal's metric.
        step: Of the first check that found it.
        result: The trial, the lowest point among equals.
        exact: Whether no other trial can have a better one there: else the true best is this one or
            a better one.
        ended: Trials of which it is not known how they stood at that step.
    """

    value: float
    step: int
    result: TrialResult
    exact: bool
    ended: int


def best_within(seen: Iterable[Seen], goal: Goal, step: float) -> Best | None:
    """The best value of some trials up to a step; None where none has an exact one yet."""
    seen = list(seen)
    found = [(of.best(step), of.result) for of in seen]
    known = [(best, result) for best, result in found if best is not None]
    if not known:
        return None
    sign = -1 if goal.at_least else 1
    (value, at), result = min(known, key=lambda one: (sign * one[0][0], one[1].trial.point))
    lowest = min(of.floor(step) for of in seen)
    perfect = goal.metric == ERROR and not goal.at_least and value <= 0  # no error is below 0
    return Best(
        value, at, result, perfect or sign * value <= lowest, sum(step > of.until for of in seen)
    )
