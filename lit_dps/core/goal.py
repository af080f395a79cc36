"""Goal: the one place that decides when a trial has reached its goal and when it has diverged."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from lit_dps.core.batch_schedule import CONSTANT_BATCH, BatchSchedule
from lit_dps.core.errors import ConfigError, check_whole
from lit_dps.core.registry import Described, instance_of, named_class
from lit_dps.core.trial import Status, TrialResult
from lit_dps.core.unit import EXAMPLES, SECONDS, STEPS, Cost, Curve, Unit, unit_named

# A share of the goal's value, a few roundings of float32. A validation error arrives as a float32
# mean: 840 mistakes of 6000 read 0.14000000060, and 720 read 0.12000000477. With the tolerance the
# comparison is one of integers, mistakes <= error x N, for every N below a million. Other metrics
# are compared as float32 numbers.
#
# The authors' TensorFlow code compares the rounded floats: there 720 mistakes of 6000 do *not* meet
# the goal 0.12. Shallue et al. (2019, batch_science) require a value strictly below the goal: if
# the goal is a whole number of mistakes, they require one mistake fewer.
TOLERANCE = 4e-7

VALIDATION_ERROR = "val_error"  # default metric: share of the validation split that is wrong
RESERVED_NAMES = ("step", "train_loss", "exact")  # keys of a curve that no metric can have


def resolve_value(
    error: float | None, at_most: float | None, at_least: float | None, metric: str | None
) -> float:
    """Return the value of a goal, which the user sets in exactly one of three ways.

    Args:
        error: A validation error; only if the metric is one.
        at_most: An upper limit of the metric.
        at_least: A lower limit of the metric.
        metric: Name of the metric; None for the validation error.

    Raises:
        ConfigError: if not exactly one way is used, or an error is set for another metric.
    """
    ways = {"error": error, "at_most": at_most, "at_least": at_least}
    values = {key: value for key, value in ways.items() if value is not None}
    if len(values) != 1:
        raise ConfigError("goal", values, "one of goal.error, goal.at_most and goal.at_least")
    if error is not None and metric not in (None, VALIDATION_ERROR):
        raise ConfigError(
            "goal.error",
            error,
            f"goal.at_most or goal.at_least, because goal.metric is {metric}. For an "
            "error of another name set goal.monitor",
        )
    (value,) = values.values()
    return value


def is_value_reached(value: float, goal_value: float, at_least: bool) -> bool:
    """Return True if a metric of the entire validation split meets the value of a goal.

    A value that is not finite meets no goal.
    """
    if not math.isfinite(value):
        return False
    tolerance = TOLERANCE * abs(goal_value)
    if at_least:
        return value >= goal_value - tolerance
    return value <= goal_value + tolerance


class GoalRule(Described, ABC):
    """Decides at which validation a run meets its goal, from the values of its validations.

    A rule decides at each validation from this one and the earlier ones alone. So a run that
    resumes, and a stored curve, give the same decision as the run itself. An easier value of the
    goal must be met at the same validation or an earlier one. Texts of the goal have `describe` in
    brackets.

    Attributes:
        window: Number of last validations that the rule reads; None for all.
        min_checks: The first validation at which the rule can be met, counted from 1.
        pointwise: Whether the rule only asks if each validation reaches the goal. Then a
            validation may stop early once it misses the goal.
    """

    window: int | None = None
    min_checks: int = 1
    pointwise: bool = False

    @abstractmethod
    def is_met(self, values: Sequence[float], goal: Goal) -> bool:
        """Return True if a run meets its goal at its last validation.

        Args:
            values: The goal's metric at the last `window` validations, the last one at the end;
                fewer at the first validations of a run. A value may be nan or infinite.
            goal: The goal. `goal.is_reached` compares a number with its value.
        """


class SingleCheck(GoalRule):
    """Meets the goal at the first validation that reaches it (Lee et al. 2021, Section 2)."""

    window = 1
    pointwise = True

    def is_met(self, values: Sequence[float], goal: Goal) -> bool:
        return goal.is_reached(values[-1])

    def describe(self) -> str:
        return "a single check"


class _SeveralChecks(GoalRule):
    """A rule over a number of last validations."""

    def __init__(self, checks: int):
        check_whole("goal.options.checks", checks, 1, "checks")
        self.checks = checks
        self.window = checks
        self.min_checks = checks


class MeanOfChecks(_SeveralChecks):
    """Meets the goal at the first validation where the mean of the last validations reaches it.

    The goal cannot be met before the run has that number of validations. A value that is not finite
    misses the goal at every validation whose mean contains it.

    Args:
        checks: Number of validations of a mean, at least 1.
    """

    def is_met(self, values: Sequence[float], goal: Goal) -> bool:
        try:
            return len(values) == self.checks and goal.is_reached(fmean(values))
        except (OverflowError, ValueError):  # too large a sum, or a sum of inf and -inf
            return False

    def describe(self) -> str:
        return f"mean of {self.checks} checks"


class StaysBelow(_SeveralChecks):
    """Meets the goal at the first validation where each of the last validations reaches it.

    For a metric that rises, the validations stay above the goal.

    Args:
        checks: Number of validations in a row, at least 1.
    """

    pointwise = True

    def is_met(self, values: Sequence[float], goal: Goal) -> bool:
        return len(values) == self.checks and all(map(goal.is_reached, values))

    def describe(self) -> str:
        return f"{self.checks} checks in a row"


SINGLE_CHECK = "single"
RULES: dict[str, type[GoalRule]] = {
    SINGLE_CHECK: SingleCheck,
    "mean_of_checks": MeanOfChecks,
    "stays_below": StaysBelow,
}


def rule_of(name: str, options: Mapping[str, Any] | None = None) -> GoalRule:
    """Return the rule of a goal.

    Args:
        name: One of `RULES`, or the class path of a `GoalRule`.
        options: Arguments of its constructor.

    Raises:
        ConfigError: if there is no such rule, or if it does not take the options.
    """
    kind = named_class("goal.rule", name, RULES, GoalRule)
    return instance_of(kind, "goal.options", name, options)


@dataclass(frozen=True)
class Goal:
    """When a trial stops (Lee et al. 2021, Section 2).

    The step to result is the step of the validation at which `rule` is first met. So the mean of n
    validations, or n validations in a row, cannot be met before the n-th validation.

    Attributes:
        value: Value of the metric that ends a trial, finite.
        check_interval: Optimizer steps between two validations of the entire validation split.
        max_steps: Step budget, a multiple of `check_interval`.
        metric: Name of the metric.
        at_least: Whether the metric must be at least `value`; otherwise at most.
        rule: Decides from the validations of a run when it meets the goal: one of `RULES`, or the
            class path of a `GoalRule`.
        options: Arguments of the rule.
        max_examples: Budget in training examples; None without one.
        max_seconds: Budget in seconds of training, without validation; None without one. A
            validation beyond one of these budgets does not meet the goal, and ends the trial.
        unit: The unit of K*, one of `lit_dps.core.unit.UNITS`.

    Raises:
        ConfigError: for a value out of its range.
    """

    value: float
    check_interval: int = 16
    max_steps: int = 40_000
    metric: str = VALIDATION_ERROR
    at_least: bool = False
    rule: str = SINGLE_CHECK
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    max_examples: int | None = None
    max_seconds: float | None = None
    unit: str = STEPS.name

    def __post_init__(self):
        self._check_value()
        rule_of(self.rule, self.options)
        self._check_budgets()
        if self.metric in RESERVED_NAMES:
            names = ", ".join(RESERVED_NAMES)
            raise ConfigError("goal.metric", self.metric, f"another name than {names}")
        if self.check_interval < 1:
            raise ConfigError("goal.check_interval", self.check_interval, "at least 1 step")
        if self.max_steps < 1 or self.max_steps % self.check_interval != 0:
            below = self.max_steps // self.check_interval * self.check_interval
            example = max(below, self.check_interval)
            raise ConfigError(
                "goal.max_steps",
                self.max_steps,
                f"a positive multiple of goal.check_interval = {self.check_interval}, such as "
                f"{example}. Otherwise the last steps are never validated",
            )

    def _check_value(self) -> None:
        if self.is_validation_error and not 0 < self.value < 1:
            allowed = "a validation error strictly between 0 and 1"
            raise ConfigError("goal.error", self.value, allowed)
        if not math.isfinite(self.value):
            key = "goal.at_least" if self.at_least else "goal.at_most"
            raise ConfigError(key, self.value, "a finite number")

    def _check_budgets(self) -> None:
        for column, limit in self.limits.items():
            if not (limit > 0 and math.isfinite(limit)):
                raise ConfigError(f"goal.max_{column}", limit, "a positive number")
        unit_named(self.unit)  # refuses an unknown one
        if self.metric in (EXAMPLES.column, SECONDS.column):
            allowed = "another name, because a curve counts what a trial spends under this one"
            raise ConfigError("goal.metric", self.metric, allowed)

    @cached_property
    def limits(self) -> dict[str, float]:
        """The budgets in other units than steps, by the column of the curve that they limit."""
        limits = {EXAMPLES.column: self.max_examples, SECONDS.column: self.max_seconds}
        return {column: limit for column, limit in limits.items() if limit is not None}

    @cached_property
    def cost_unit(self) -> Unit:
        """The unit of K*."""
        return unit_named(self.unit)

    @cached_property
    def counted(self) -> tuple[str, ...]:
        """The columns of the curve that count what a trial spends, beside its steps."""
        columns = list(self.limits)
        if self.cost_unit is not STEPS and self.cost_unit.column not in columns:
            columns.append(self.cost_unit.column)
        return tuple(columns)

    @property
    def counts_seconds(self) -> bool:
        """Whether a clock decides when trials end, so that results are not reproducible."""
        return SECONDS.column in self.counted

    @property
    def budget_text(self) -> str:
        """The budget of a trial, such as "400 steps or 10,000 examples"."""
        text = f"{self.max_steps} steps"
        if self.max_examples is not None:
            text += f" or {self.max_examples:,} examples"
        if self.max_seconds is not None:
            text += f" or {self.max_seconds:g} s of training"
        return text

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Goal:
        """Return the goal that `to_dict` stored."""
        values = dict(stored)
        if "error" in values:
            values["value"] = values.pop("error")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the goal as plain JSON."""
        stored = self.to_stored()
        if self.is_validation_error:
            del stored["metric"], stored["at_least"]
            return {"error": stored.pop("value"), **stored}
        return stored

    def to_stored(self) -> dict[str, Any]:
        """Return the fields as plain JSON; fields that came later only if they are set."""
        stored = asdict(self)
        default = asdict(Goal(0.5))
        for name in _LATER_FIELDS:
            if stored[name] == default[name]:
                del stored[name]
        return stored

    def __str__(self) -> str:
        if self.is_validation_error:
            text = f"goal error {self.value:g}"
        else:
            sign = ">=" if self.at_least else "<="
            text = f"goal {self.metric} {sign} {self.value:g}"
        if self.rule != SINGLE_CHECK:
            # A study that an earlier version stored may have a description of several lines.
            text += f" ({' '.join(self._rule.describe().split())})"
        if self.cost_unit is not STEPS:
            text += f", K* in {self.cost_unit.axis}"
        return text

    @cached_property
    def _rule(self) -> GoalRule:
        return rule_of(self.rule, self.options)

    def __getstate__(self) -> dict[str, Any]:
        # Without cached values, since equal goals have to be pickled alike.
        return asdict(self)

    @property
    def is_pointwise(self) -> bool:
        """Whether a validation may stop early once its value misses the goal; see `GoalRule`."""
        return self._rule.pointwise

    @property
    def first_possible_step(self) -> int:
        """The step of the first validation at which a run can meet the goal."""
        return self._rule.min_checks * self.check_interval

    def is_at_first_check(self, cost: Cost | None, runs: Iterable[TrialResult]) -> bool:
        """Return True if a cost is at the first validation that can meet the goal: an upper bound.

        Any other cost is exact up to an interval: the validation before it missed the goal. The run
        of a cost decides by its steps, since runs spend different seconds up to one validation. If
        a statistic such as a median is between two runs, its run is the one that costs more.

        Args:
            cost: A statistic of the costs of the runs; None without one.
            runs: Complete or not.
        """
        complete = sorted((run.cost or 0, run.steps) for run in runs if run.steps is not None)
        if cost is None or math.isinf(cost) or not complete:
            return False
        index = bisect_left([run_cost for run_cost, _ in complete], cost)
        _, steps = complete[min(index, len(complete) - 1)]
        return steps <= self.first_possible_step

    def first_met(self, curve: Curve) -> int | None:
        """Return the index of the validation at which a run meets the goal; None if it does not.

        Args:
            curve: The values of the run's validations, as `TrialResult.curve`.
        """
        for i in range(len(curve.get(self.metric, ()))):
            if self.is_met_at(curve, i):
                return i
        return None

    def is_met_at(self, curve: Curve, i: int) -> bool:
        """Return True if the rule is met at the i-th validation of a run, counted from 0."""
        return self._is_within_budget(curve, i) and self._rule.is_met(
            curve[self.metric][self._window(i)], self
        )

    def _is_within_budget(self, curve: Curve, i: int) -> bool:
        return all(curve[unit][i] <= limit for unit, limit in self.limits.items() if unit in curve)

    def is_exact_at(self, curve: Curve, i: int) -> bool:
        """Return True if the rule reads no bound of a value at the i-th validation of a run."""
        return "exact" not in curve or all(curve["exact"][self._window(i)])

    def _window(self, i: int) -> slice:
        """Return the validations that the rule reads at the i-th validation."""
        if self._rule.window is None:
            return slice(0, i + 1)
        return slice(max(0, i + 1 - self._rule.window), i + 1)

    @property
    def is_validation_error(self) -> bool:
        """Whether the goal is a validation error, which must be small enough."""
        return self.metric == VALIDATION_ERROR and not self.at_least

    def with_value(self, value: float) -> Goal:
        """Return the same goal at another value of the metric."""
        return replace(self, value=value)

    def is_easier(self, value: float) -> bool:
        """Return True if every run meets another value of the metric before this goal."""
        if self.at_least:
            return value < self.value
        return value > self.value

    def is_reached(self, value: float) -> bool:
        """Return True if a value of the metric meets the goal (`is_value_reached`)."""
        return is_value_reached(value, self.value, self.at_least)

    def max_mistakes(self, examples: int) -> int:
        """Return the most mistakes among `examples` that meet the goal; -1 if even 0 miss it."""
        limit = (self.value + TOLERANCE * abs(self.value)) * examples
        mistakes = min(int(limit), examples)
        # `is_reached` decides, because the product above may be rounded across an integer.
        while mistakes < examples and self.is_reached((mistakes + 1) / examples):
            mistakes += 1
        while mistakes >= 0 and not self.is_reached(mistakes / examples):
            mistakes -= 1
        return mistakes

    def judge(
        self, curve: Curve, loss: float, weights_finite: bool, train_past_goal: bool = False
    ) -> Status | None:
        """Return how a trial ends at its last validation; None if the trial continues.

        A trial diverges if its loss or its weights are not finite. Weights that are not finite miss
        the goal at this validation: some metrics are perfect for predictions of nan. If only the
        loss is not finite, the goal is judged before divergence, as in the authors' code. An
        undefined metric, such as a correlation of equal predictions, misses the goal without
        divergence.

        Args:
            curve: The values of the trial's validations so far.
            loss: Training loss of the last step's batch.
            weights_finite: Whether all weights are finite.
            train_past_goal: Whether the trial continues to `max_steps` after it has met the goal.
        """
        has_diverged = not (math.isfinite(loss) and weights_finite)
        can_continue = not has_diverged and not self.is_spent(curve)
        last = len(curve["step"]) - 1
        if train_past_goal:
            met = self.first_met(curve)
            is_met = met is not None and (met < last or weights_finite)
        else:
            is_met = weights_finite and self.is_met_at(curve, last)
        if is_met:
            if train_past_goal and can_continue:
                return None
            return Status.COMPLETE
        if has_diverged:
            return Status.INFEASIBLE
        if can_continue:
            return None
        return Status.INCOMPLETE

    def most_steps(
        self, batch_size: int, step_seconds: float, schedule: BatchSchedule = CONSTANT_BATCH
    ) -> int:
        """Return the step of the validation at which the budgets of a trial are spent.

        Args:
            batch_size: The cell's batch size.
            step_seconds: Seconds of a training step; 0 if they are unknown.
            schedule: The batch size as a function of the step.
        """
        steps: float = self.max_steps
        examples = self.max_examples
        # A budget that is larger than all examples of the trial would need a long sum.
        if examples is not None and examples < schedule.examples_of(steps, batch_size):
            steps = schedule.steps_within(examples - 1, batch_size) + 1
        if self.max_seconds is not None and step_seconds:
            steps = min(steps, self.max_seconds / step_seconds)
        intervals = math.ceil(steps / self.check_interval)
        return min(self.max_steps, intervals * self.check_interval)

    def is_spent(self, curve: Curve) -> bool:
        """Return True if a budget of a run is spent at its last validation."""
        limits = {"step": self.max_steps, **self.limits}
        return any(curve[unit][-1] >= limit for unit, limit in limits.items() if curve.get(unit))

    def last_step_within(self, curve: Curve) -> int:
        """Return the step of the last validation within all budgets; 0 without one."""
        last = 0
        for i, step in enumerate(curve.get("step", ())):
            if self._is_within_budget(curve, i):
                last = int(step)
        return last


# Fields of a goal that stored studies of earlier versions lack.
_LATER_FIELDS = ("rule", "options", "max_examples", "max_seconds", "unit")
