"""Attempt: one attempt at a trial, its validations and what they decide. No torch, no database."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_dps.core.goal import Goal
from lit_dps.core.trial import Status, Trial, TrialResult
from lit_dps.core.unit import EXAMPLES, SECONDS


@dataclass(frozen=True)
class Validation:
    """A validation of the network of an attempt.

    Attributes:
        step: Optimizer steps so far.
        value: The goal's metric over the entire validation split, or a lower bound of an error.
        is_exact: Whether the value is no bound.
        loss: Training loss of that step's batch before its update; None if unknown.
        weights_finite: Whether every parameter is finite.
        metrics: Values of the attempt's further metrics, by name.
        spent: Examples and seconds of the steps since the last validation, by `Unit.column`. Units
            that the curve does not count are ignored.
    """

    step: int
    value: float
    is_exact: bool = True
    loss: float | None = None
    weights_finite: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AttemptRules:
    """The rules that all attempts of a study share.

    Attributes:
        goal: The goal, its check interval and its step budget.
        other_goals: Easier values of the goal's metric. Validations must be exact for them too.
        train_past_goal: Whether attempts continue to `max_steps` after the goal. Repeats do not.
        metrics: Further validation metrics that the curves keep.
    """

    goal: Goal
    other_goals: Sequence[float] = ()
    train_past_goal: bool = False
    metrics: Sequence[str] = ()

    def attempt(
        self,
        trial: Trial,
        read_race_limit: Callable[[], float] = lambda: math.inf,
        pause_at: float = math.inf,
    ) -> Attempt:
        """Return an attempt at a trial. Arguments as in `Attempt`."""
        return Attempt(
            trial,
            self.goal,
            self.other_goals,
            read_race_limit,
            pause_at,
            self.train_past_goal and not trial.repeat,
            self.metrics,
        )


@dataclass(eq=False)
class Attempt:
    """One network on the way to its goal. Every engine reports each validation to it, by `record`.

    Attributes:
        trial: The trial; None outside of a study.
        goal: The goal, its check interval and its step budget.
        other_goals: Easier values of the goal's metric. Validations must be exact for them too.
        read_race_limit: Returns the cost at which the race stops the attempt, in the unit of K*: a
            trial that costs more cannot improve K*. It is called at each validation.
        pause_at: The attempt pauses at this step if the race of its cell has no limit
            (`lit_dps.core.racing.default_rungs`).
        train_past_goal: Whether the attempt continues to `max_steps` after it has met the goal.
        metrics: Further validation metrics that the curve keeps.
        on_validation: Called with the attempt after each validation.
        on_step: Called with the device after each step of a network that trains alone. A step may
            have several updates, of several optimizers or workers.
        curve_readers: Called after each validation, before `on_validation`: readings of the curve.
        status: How the attempt ended; None while it runs.
        curve: As `TrialResult.curve`; with "exact" after `enable_early_validations`.
        kept, seconds, timed, readings, end_readings, flags, failure, traceback, engine,
            engine_reason: As in `TrialResult`. Engines set them.
    """

    trial: Trial | None
    goal: Goal
    other_goals: Sequence[float] = ()
    read_race_limit: Callable[[], float] = lambda: math.inf
    pause_at: float = math.inf
    train_past_goal: bool = False
    metrics: Sequence[str] = ()
    on_validation: Callable[[Attempt], None] = lambda attempt: None
    on_step: Callable[[Any], None] = lambda device: None
    curve_readers: list[Callable[[], None]] = field(default_factory=list)
    status: Status | None = None
    curve: dict[str, list[float]] = field(default_factory=dict)
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    timed: dict[str, float] = field(default_factory=dict)
    readings: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    end_readings: dict[str, float] = field(default_factory=dict)
    flags: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    traceback: str = ""
    engine: str = ""
    engine_reason: str = ""

    def __post_init__(self):
        if not self.curve:
            for key in ("step", self.goal.metric, "train_loss", *self.metrics, *self.goal.counted):
                self.curve[key] = []

    def enable_early_validations(self) -> None:
        """Record whether each validation is exact. Call this before the first one.

        A validation that stops early yields a bound of the metric instead of its value.
        """
        self.curve["exact"] = []

    def count(self, column: str) -> None:
        """Record the examples or seconds of training up to each validation, by `Unit.column`.

        Call this before the first validation.
        """
        self.curve.setdefault(column, [])

    @property
    def steps_to_result(self) -> int | None:
        """The step of the validation that met the goal; None unless the attempt is complete."""
        if self.status is not Status.COMPLETE:
            return None
        return self._first_met_step

    @property
    def _first_met_step(self) -> int | None:
        # The curve alone decides, so that a checkpoint needs no other state.
        i = self.goal.first_met(self.curve)
        if i is None:
            return None
        return int(self.curve["step"][i])

    def max_mistakes(self, examples: int) -> int:
        """Return the most mistakes with which the next validation meets the easiest unmet goal.

        The validation may stop early once it has made more mistakes.

        Args:
            examples: Size of the validation split.
        """
        easiest = self.goal
        for value in self.other_goals:
            goal = self.goal.with_value(value)
            if goal.value > easiest.value and goal.first_met(self.curve) is None:
                easiest = goal
        return easiest.max_mistakes(examples)

    def record(self, validation: Validation) -> Status | None:
        """Record a validation and decide whether the attempt ends, pauses or continues.

        The curve has nan instead of the value if a weight is not finite.

        Returns:
            The new status; None if the attempt continues.
        """
        value = validation.value
        is_exact = validation.is_exact
        loss = validation.loss
        if not validation.weights_finite:
            # Such a network has no metric. Comparisons with nan are false, so a share of errors may
            # be 0, and the curve would have the best value of the cell.
            value = math.nan
            is_exact = True
        point: dict[str, Any] = {
            **validation.metrics,
            "step": validation.step,
            self.goal.metric: value,
            "exact": int(is_exact),
            "train_loss": math.nan if loss is None else loss,
        }
        for column in (EXAMPLES.column, SECONDS.column):
            if column in self.curve:
                point[column] = validation.spent[column] + sum(self.curve[column][-1:])
        for key, values in self.curve.items():
            values.append(point[key])
        self.status = self.goal.judge(
            self.curve, loss or 0.0, validation.weights_finite, self.train_past_goal
        )
        if self.status is None:
            self.status = self._stop_or_pause(validation.step)
        for read in self.curve_readers:
            read()
        self.on_validation(self)
        return self.status

    def _stop_or_pause(self, step: int) -> Status | None:
        """Return OUTRACED or PAUSED if the race stops the attempt at a step; else None."""
        limit = self.read_race_limit()
        if self.curve[self.goal.cost_unit.column][-1] >= limit:
            return Status.OUTRACED
        has_race_limit = limit < math.inf
        if step >= self.pause_at and not has_race_limit:
            return Status.PAUSED
        return None

    @property
    def read_columns(self) -> list[str]:
        """The columns of all readings so far."""
        columns = list(self.end_readings)
        for read in self.readings.values():
            columns += [name for name in read if name != "step"]
        return columns

    @property
    def last_validation(self) -> str:
        """The last validation in words; empty before the first one."""
        if not self.curve["step"]:
            return ""
        return self._validation_text(-1)

    def _validation_text(self, i: int) -> str:
        """Return the i-th validation in words, such as "val_error at least 0.2500 at step 8"."""
        step = int(self.curve["step"][i])
        value = self.curve[self.goal.metric][i]
        is_bound = "exact" in self.curve and not self.curve["exact"][i]
        bound = ""
        if is_bound and math.isfinite(value):
            bound = "at least "
        return f"{self.goal.metric} {bound}{value:.4f} at step {step}"

    @property
    def outcome(self) -> str:
        """How the attempt ended, in a line that begins with its status."""
        steps = 0
        if self.curve["step"]:
            steps = int(self.curve["step"][-1])
        if self.status is Status.COMPLETE:
            return self._complete_text(steps)
        if self.status is Status.INCOMPLETE:
            budget = self.goal.budget_text
            return f"incomplete: the budget of {budget} is spent, {self.last_validation}"
        if self.status is Status.INFEASIBLE:
            return f"infeasible: diverged after {steps} steps, {self.last_validation}"
        text = str(self.status or "interrupted")
        last_validation = self.last_validation or "before its first check"
        if self.failure:
            return f"{text}: {self.failure}; {last_validation}"
        return f"{text}: {last_validation}"

    def _complete_text(self, last_step: int) -> str:
        met_step = self._first_met_step
        assert met_step is not None
        at_goal = self._validation_text(self.curve["step"].index(met_step))
        text = f"complete after {met_step} steps: the goal is met, {at_goal}"
        if last_step > met_step:
            text += f"; then it ran on to step {last_step}, {self.last_validation}"
        return text

    @property
    def study_trial(self) -> Trial:
        """The trial of an attempt in a study."""
        assert self.trial is not None, "an attempt outside of a study has no trial"
        return self.trial

    def set_engine(self, engine: str, reason: str = "") -> None:
        """Set the loop that trains the attempt, and why it is not a faster one."""
        self.engine = engine
        self.engine_reason = reason

    def restart(self) -> None:
        """Forget all validations, so that another engine can begin the attempt again."""
        fresh = Attempt(
            trial=self.trial,
            goal=self.goal,
            other_goals=self.other_goals,
            read_race_limit=self.read_race_limit,
            pause_at=self.pause_at,
            train_past_goal=self.train_past_goal,
            metrics=self.metrics,
            on_validation=self.on_validation,
            on_step=self.on_step,
            engine=self.engine,
            engine_reason=self.engine_reason,
        )
        vars(self).update(vars(fresh))

    def result(self) -> TrialResult:
        """Return what is stored of the attempt, and end it if it still runs.

        An attempt that is stopped after it has met its goal is complete.
        """
        if self.status is None:
            self.status = Status.STOPPED
            if self._first_met_step is not None:
                self.status = Status.COMPLETE
        return TrialResult(
            trial=self.study_trial,
            status=self.status,
            steps=self.steps_to_result,
            curve=self.curve,
            kept=self.kept,
            seconds=self.seconds,
            timed=self.timed,
            readings=self.readings,
            end_readings=self.end_readings,
            flags=self.flags,
            failure=self.failure,
            traceback=self.traceback,
            engine=self.engine,
            engine_reason=self.engine_reason,
            unit=self.goal.cost_unit,
        )
