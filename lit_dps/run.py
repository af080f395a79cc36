"""GoalRun: what the checks of one run have found so far, and how it ends. Every engine keeps its runs by this."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lit_dps.goal import Goal
from lit_dps.trial import Status


class GoalRun:
    """A run on the way to its goal.

    Args:
        goal: The goal, its check interval and its budget.
        further: Further goal errors, above the goal's, whose checks must be exact too.
        limit: The step that the run has to reach: beyond it it cannot matter any more.
        early: Whether checks may stop early, so that the curve says which of its points are exact.

    Attributes:
        status: How the run ended; None while it goes on.
        steps_to_result: The step of the check that met the goal, or None.
        curve: As `lit_dps.trial.TrialResult.curve`.
    """

    def __init__(
        self,
        goal: Goal,
        further: Sequence[float] = (),
        limit: Callable[[], float] = lambda: math.inf,
        early: bool = False,
    ):
        self.goal, self.further, self.limit = goal, further, limit
        self.status: Status | None = None
        self.steps_to_result: int | None = None
        self.curve: dict[str, list[float]] = {"step": [], "val_error": [], "train_loss": []}
        if early:
            self.curve["exact"] = []

    def next_goal(self) -> Goal:
        """The highest goal that the run has not met yet; only exact errors can have met one."""
        errors = [e for e, exact in zip(self.curve["val_error"], self.curve["exact"], strict=True) if exact]
        goals = [self.goal, *(replace(self.goal, error=error) for error in self.further)]
        unmet = [goal for goal in goals if not errors or not goal.reached(min(errors))]
        return max(unmet, key=lambda goal: goal.error)

    def record(self, step: int, error: float, exact: bool, loss: float | None, weights_finite: bool) -> None:
        """Takes in a check, and ends the run if that ends it.

        Args:
            step: Optimizer steps so far.
            error: Validation error: a fraction of the entire split, or a lower bound of it.
            exact: Whether it is no bound.
            loss: Training loss of that step's batch before its update; None if the run knows none.
            weights_finite: Whether every parameter is finite.
        """
        point: dict[str, Any] = {"step": step, "val_error": error, "exact": int(exact)}
        point["train_loss"] = math.nan if loss is None else loss
        for key, values in self.curve.items():
            values.append(point[key])
        self.status = self.goal.judge(step, error, 0.0 if loss is None else loss, weights_finite)
        if self.status is None and step >= self.limit():
            self.status = Status.OUTRACED
        self.steps_to_result = step if self.status is Status.COMPLETE else None
