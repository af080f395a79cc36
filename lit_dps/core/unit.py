"""The unit of K*: what a trial spends until it meets its goal (`goal.unit`).

The *cost* of a trial is this number: steps, counted examples, or seconds of training. Everything
that compares trials asks the unit for their costs: the statistic, racing, repeats and tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lit_dps.core.errors import ConfigError

Cost = int | float  # of a trial, in the unit of its study
Curve = Mapping[str, Sequence[float]]  # as `TrialResult.curve`

_STEP = "step"


def value_at(curve: Curve, column: str, step: float) -> float | None:
    """Return the value of a column of a curve at the check of a step; None if it has none."""
    if not curve.get(column) or step not in curve[_STEP]:
        return None
    return curve[column][list(curve[_STEP]).index(step)]


@dataclass(frozen=True)
class Unit:
    """A unit of K*.

    Attributes:
        name: In `goal.unit`.
        column: The column of a curve that has the cost up to each check.
        axis: The unit on an axis.
        head: K* with its unit, as the head of a column.
        law: K* by batch size, by the law of steps; empty if the law does not give it.
    """

    name: str
    column: str
    axis: str
    head: str
    law: str

    @property
    def has_law(self) -> bool:
        """Whether the law of steps gives K* in this unit."""
        return bool(self.law)

    def per_step(self, batch_size: float) -> float:
        """Return the cost of a step on a full batch; 1 if it is unknown.

        The law of steps gives K* in examples by this factor: K B = c1 + c2 B.
        """
        return batch_size if self.column == EXAMPLES.column else 1

    def cost_at(self, curve: Curve, step: int) -> Cost:
        """Return the cost of a trial up to one of its checks."""
        if self.column == _STEP:
            return step
        cost = value_at(curve, self.column, step)
        if cost is None:
            raise ValueError(f"the curve has no {self.column} at step {step}")
        return cost

    def step_of(self, curve: Curve, limit: float) -> float:
        """Return the step of the check at which a race with this limit stops a trial.

        It is the first check that costs as much. Then the trial counts as known up to the limit
        when it is cut again. If no check costs as much, it is the last one.
        """
        if not curve.get(_STEP):
            return limit
        for step, cost in zip(curve[_STEP], curve[self.column], strict=True):
            if cost >= limit:
                return step
        return curve[_STEP][-1]

    def last_interval(self, curve: Curve, step: int, check_interval: int) -> Cost:
        """Return the cost between a check of a trial and the check before it."""
        cost = self.cost_at(curve, step)
        if step > check_interval:
            cost -= self.cost_at(curve, step - check_interval)
        return cost


STEPS = Unit("steps", _STEP, "optimizer steps", "K*", "c1 / B + c2")
# Training examples of all steps. A step on a short batch counts less.
EXAMPLES = Unit("examples", "examples", "training examples", "K* [examples]", "c1 + c2 B")
# Of training steps with their data, without validation, over all processes.
SECONDS = Unit("seconds", "seconds", "seconds of training", "K* [s]", "")
UNITS = {unit.name: unit for unit in (STEPS, EXAMPLES, SECONDS)}


def cost_text(cost: Cost) -> str:
    """Return a cost as text: a whole number, or seconds with 3 digits."""
    return f"{cost:.3g}" if isinstance(cost, float) else str(cost)


def unit_named(name: str) -> Unit:
    """Return the unit that `goal.unit` names. Raise ConfigError for an unknown one."""
    if name not in UNITS:
        raise ConfigError("goal.unit", name, f"one of {', '.join(UNITS)}")
    return UNITS[name]
