"""The goal of a trial: the one place that says what "reached" and "diverged" mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial import Status

# A validation error arrives as a float32 mean, in which 840 mistakes of 6000 read 0.14000000060 and
# 720 read 0.12000000477. The tolerance, a share of the goal, is a few roundings of float32: it
# makes the comparison one of integers, mistakes <= error x N, for every N below a million, and of
# any other metric one of float32 numbers. The authors' TensorFlow code compares the rounded floats:
# there 720 mistakes of 6000 do *not* meet the goal 0.12. Shallue et al. (2019, batch_science) ask
# for a value strictly below the goal: at a goal of whole mistakes, theirs is met by one mistake
# fewer. Ties of steps they break by the trial's number, as `analysis.summary` does by the point.
TOLERANCE = 4e-7
ERROR = "val_error"  # what a goal is of where nothing else is said: a share of the validation split
TAKEN = ("step", "train_loss", "exact")  # what else stands in a run's curve


def value_given(
    error: float | None, at_most: float | None, at_least: float | None, metric: str | None
) -> float:
    """The value of a goal, which is given in one of three ways. Raises ConfigError if it is not.

    Args:
        error, at_most, at_least: The ways; None for those that are not taken.
        metric: What it is a value of, where that is no validation error: then it cannot be an
            `error`.
    """
    named = {"error": error, "at_most": at_most, "at_least": at_least}
    given = {key: value for key, value in named.items() if value is not None}
    if len(given) != 1:
        raise ConfigError("goal", given, "one of goal.error, goal.at_most and goal.at_least")
    if error is not None and metric not in (None, ERROR):
        allowed = (
            f"goal.at_most or goal.at_least of goal.metric {metric}; of an error of "
            "another name "
            "set goal.monitor"
        )
        raise ConfigError("goal.error", error, allowed)
    return next(iter(given.values()))


@dataclass(frozen=True)
class Goal:
    """When a trial stops (Lee et al. 2021, Section 2).

    Attributes:
        value: Value of the metric that ends a trial, finite.
        check_interval: Optimizer steps between two checks of the entire validation split.
        max_steps: Step budget, a multiple of `check_interval`.
        metric: What it is a value of.
        at_least: Whether the metric has to be at least so large; else at most.

    Raises:
        ConfigError: for a value out of its range.
    """

    value: float
    check_interval: int = 16
    max_steps: int = 40_000
    metric: str = ERROR
    at_least: bool = False

    def __post_init__(self):
        if self.metric == ERROR and not self.at_least and not 0 < self.value < 1:
            raise ConfigError(
                "goal.error", self.value, "a validation error strictly between 0 and 1"
            )
        if not math.isfinite(self.value):
            raise ConfigError(
                f"goal.{'at_least' if self.at_least else 'at_most'}", self.value, "a finite number"
            )
        if self.metric in TAKEN:
            raise ConfigError("goal.metric", self.metric, f"another name than {', '.join(TAKEN)}")
        if self.check_interval < 1:
            raise ConfigError("goal.check_interval", self.check_interval, "at least 1 step")
        if self.max_steps < 1 or self.max_steps % self.check_interval:
            below = self.max_steps // self.check_interval * self.check_interval
            raise ConfigError(
                "goal.max_steps",
                self.max_steps,
                f"a positive multiple of goal.check_interval = {self.check_interval}, such as "
                f"{max(below, self.check_interval)}: a budget that ends between two checks ends "
                "unchecked",
            )

    @classmethod
    def of_stored(cls, stored: Mapping[str, Any]) -> Goal:
        """The inverse of `stored`; the goals of earlier versions are validation errors."""
        plain = dict(stored)
        return cls(plain.pop("error"), **plain) if "error" in plain else cls(**plain)

    def stored(self) -> dict[str, Any]:
        """The goal as plain JSON."""
        steps = {"check_interval": self.check_interval, "max_steps": self.max_steps}
        if self.metric == ERROR and not self.at_least:
            return {"error": self.value, **steps}
        return {"value": self.value, **steps, "metric": self.metric, "at_least": self.at_least}

    def __str__(self) -> str:
        if self.metric == ERROR and not self.at_least:
            return f"goal error {self.value:g}"
        return f"goal {self.metric} {'>=' if self.at_least else '<='} {self.value:g}"

    def at(self, value: float) -> Goal:
        """The same at another value of the metric."""
        return replace(self, value=value)

    def easier(self, value: float) -> bool:
        """Whether another value is met sooner than this one by every run."""
        return value < self.value if self.at_least else value > self.value

    def reached(self, found: float) -> bool:
        """Whether a value of the metric (of the entire validation split) meets the goal; one not
        finite does not."""
        room = TOLERANCE * abs(self.value)
        return math.isfinite(found) and (
            found >= self.value - room if self.at_least else found <= self.value + room
        )

    def allowed(self, examples: int) -> int:
        """The most mistakes among so many examples that meet the goal, of one that is a validation
        error."""
        mistakes = min(int((self.value + TOLERANCE * abs(self.value)) * examples), examples)
        while mistakes < examples and self.reached((mistakes + 1) / examples):
            mistakes += 1
        while mistakes >= 0 and not self.reached(mistakes / examples):
            mistakes -= 1
        return mistakes

    def judge(
        self,
        step: int,
        found: float,
        loss: float,
        weights_finite: bool,
        run_on: bool = False,
        met: bool = False,
    ) -> Status | None:
        """How a trial ends at the check of this step, or None if it goes on.

        As in the authors' code the goal is asked first, then divergence. With `run_on` a trial that
        meets its goal ends as complete too, but goes on to the budget or its divergence; `met` says
        whether an earlier check met it.

        A trial diverges when its loss or its weights are not finite. A metric can lack a finite
        value without divergence, such as a correlation of equal predictions: that check does not
        meet the goal.
        """
        diverged = not (math.isfinite(loss) and weights_finite)
        goes_on = not diverged and step < self.max_steps
        if met or self.reached(found):
            return None if run_on and goes_on else Status.COMPLETE
        if diverged:
            return Status.INFEASIBLE
        return None if goes_on else Status.INCOMPLETE
