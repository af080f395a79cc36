"""The goal of a trial: the one place that says what "reached" and "diverged" mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lit_dps.errors import ConfigError
from lit_dps.trial import Status

# A validation error arrives as a float32 mean, in which 840 mistakes of 6000 read 0.14000000060 and 720 read
# 0.12000000477. The tolerance, a share of the goal, is a few roundings of float32: it makes the comparison one of
# integers, mistakes <= error x N, for every N below a million, and of any other metric one of float32 numbers.
# The authors' TensorFlow code compares the rounded floats: there 720 mistakes of 6000 do *not* meet the goal 0.12.
TOLERANCE = 4e-7


@dataclass(frozen=True)
class Goal:
    """When a trial stops (Lee et al. 2021, Section 2).

    Attributes:
        error: Goal validation error, in (0, 1).
        check_interval: Optimizer steps between two checks of the entire validation split.
        max_steps: Step budget, a multiple of `check_interval`.

    Raises:
        ConfigError: for a value out of its range.
    """

    error: float
    check_interval: int = 16
    max_steps: int = 40_000

    def __post_init__(self):
        if not 0 < self.error < 1:
            raise ConfigError("goal.error", self.error, "a validation error strictly between 0 and 1")
        if self.check_interval < 1:
            raise ConfigError("goal.check_interval", self.check_interval, "at least 1 step")
        if self.max_steps < 1 or self.max_steps % self.check_interval:
            below = self.max_steps // self.check_interval * self.check_interval
            raise ConfigError(
                "goal.max_steps",
                self.max_steps,
                f"a positive multiple of goal.check_interval = {self.check_interval}, such as "
                f"{max(below, self.check_interval)}: a budget that ends between two checks ends unchecked",
            )

    def reached(self, error: float) -> bool:
        """Whether a validation error (fraction of the entire split) meets the goal."""
        return error <= self.error * (1 + TOLERANCE)

    def allowed(self, examples: int) -> int:
        """The most mistakes among so many examples that meet the goal."""
        mistakes = int(self.error * (1 + TOLERANCE) * examples)
        while self.reached((mistakes + 1) / examples):
            mistakes += 1
        while not self.reached(mistakes / examples):
            mistakes -= 1
        return mistakes

    def judge(self, step: int, error: float, loss: float, weights_finite: bool) -> Status | None:
        """How a trial ends at the check of this step, or None if it goes on.

        As in the authors' code the goal is asked first, then divergence.
        """
        if self.reached(error):
            return Status.COMPLETE
        if not (math.isfinite(error) and math.isfinite(loss) and weights_finite):
            return Status.INFEASIBLE
        return Status.INCOMPLETE if step >= self.max_steps else None
