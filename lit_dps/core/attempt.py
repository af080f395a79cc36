"""Run: one attempt at a trial, what its checks have found so far and what they decide. No torch, no
database."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lit_dps.core.goal import Goal
from lit_dps.core.trial import Status, Trial, TrialResult


@dataclass(eq=False)
class Attempt:
    """A network on the way to its goal. Every engine asks this at each check how its run goes on.

    Attributes:
        trial: What is run; None outside of a study.
        goal: The goal, its check interval and its budget.
        further: Further values of the goal's metric, easier to meet, whose checks must be exact
            too.
        stop_at: Racing: a run that is not complete by this step cannot beat the cell's best. Asked
            at each check.
        rung: This attempt pauses here while its cell has no complete trial
            (`lit_dps.core.racing.rungs`).
        run_on: Whether it goes on to the budget after its goal.
        metrics: Further metrics of validation that its curve keeps.
        watch: Is given the run after each check.
        status: How the run ended; None while it goes on.
        curve: As `lit_dps.core.trial.TrialResult.curve`; with "exact" once `stop_early` was called.
        kept, seconds, timed, smoothness, theory, observed, failure, traceback, engine: As in
            `TrialResult`; engines
            fill them.
    """

    trial: Trial | None
    goal: Goal
    further: Sequence[float] = ()
    stop_at: Callable[[], float] = lambda: math.inf
    rung: float = math.inf
    run_on: bool = False
    metrics: Sequence[str] = ()
    watch: Callable[[Attempt], None] = lambda run: None
    status: Status | None = None
    curve: dict[str, list[float]] = field(default_factory=dict)
    kept: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    timed: dict[str, float] = field(default_factory=dict)
    smoothness: dict[str, list[float]] = field(default_factory=dict)
    theory: dict[str, float] = field(default_factory=dict)
    observed: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    traceback: str = ""
    engine: str = ""

    def __post_init__(self):
        self.curve = self.curve or {
            key: [] for key in ("step", self.goal.metric, "train_loss", *self.metrics)
        }

    def stop_early(self) -> None:
        """To be called before the first check if checks may stop early: the curve then says which
        points are exact."""
        self.curve["exact"] = []

    @property
    def steps_to_result(self) -> int | None:
        """The step of the first check that met the goal, of a run that is complete; else None."""
        return self._met if self.status is Status.COMPLETE else None

    @property
    def _met(self) -> int | None:
        """The step of the first check that met the goal: known from the curve, so that nothing else
        is saved of it."""
        pairs = zip(self.curve["step"], self.curve[self.goal.metric], strict=True)
        return next((int(step) for step, found in pairs if self.goal.reached(found)), None)

    def allowed(self, size: int) -> int:
        """The mistakes among so many examples after which the next check may stop: those of the
        highest unmet goal."""
        errors = self.curve[self.goal.metric]
        exact = [
            e
            for e, known in zip(errors, self.curve.get("exact", [1] * len(errors)), strict=True)
            if known
        ]
        exact = [error for error in exact if math.isfinite(error)]
        goals = [self.goal, *map(self.goal.at, self.further)]
        unmet = [goal for goal in goals if not exact or not goal.reached(min(exact))]
        return max(unmet, key=lambda goal: goal.value).allowed(size)

    def record(
        self,
        step: int,
        found: float,
        exact: bool,
        loss: float | None,
        finite: bool,
        metrics: Mapping[str, float] | None = None,
    ) -> Status | None:
        """Takes in a check and decides: the run ends, pauses or goes on.

        Args:
            step: Optimizer steps so far.
            found: The goal's metric over the entire validation split, or a lower bound of an error.
            exact: Whether it is no bound.
            loss: Training loss of that step's batch before its update; None if the run knows none.
            finite: Whether every parameter is finite.
            metrics: Values of the further metrics of the run.

        Returns:
            The new status; None if the run goes on.
        """
        met = self.run_on and self._met is not None
        point: dict[str, Any] = {
            **(metrics or {}),
            "step": step,
            self.goal.metric: found,
            "exact": int(exact),
        }
        point["train_loss"] = math.nan if loss is None else loss
        for key, values in self.curve.items():
            values.append(point[key])
        self.status = self.goal.judge(
            step, found, 0.0 if loss is None else loss, finite, self.run_on, met
        )
        if self.status is None and step >= (limit := self.stop_at()):
            self.status = Status.OUTRACED
        elif self.status is None and step >= self.rung and limit == math.inf:
            self.status = Status.PAUSED
        self.watch(self)
        return self.status

    @property
    def last(self) -> str:
        """What the last check found, in words; empty before the first."""
        return self._found(-1) if self.curve["step"] else ""

    def _found(self, i: int) -> str:
        curve, metric = self.curve, self.goal.metric
        bounds = not curve.get("exact", curve["step"])[i] and math.isfinite(curve[metric][i])
        bound = "at least " * bounds
        return f"{metric} {bound}{curve[metric][i]:.4f} at step {int(curve['step'][i])}"

    @property
    def outcome(self) -> str:
        """How the attempt ended, in a line that begins with its status."""
        steps = int(self.curve["step"][-1]) if self.curve["step"] else 0
        if self.status is Status.COMPLETE:
            at = self.curve["step"].index(self._met)
            on = f"; then it ran on to step {steps}, {self.last}" if steps > self._met else ""
            return f"complete after {self._met} steps: the goal is met, {self._found(at)}{on}"
        if self.status is Status.INCOMPLETE:
            return f"incomplete: the budget of {self.goal.max_steps} steps is spent, {self.last}"
        if self.status is Status.INFEASIBLE:
            return f"infeasible: diverged after {steps} steps, {self.last}"
        how = "interrupted" if self.status is None else str(self.status)
        why = [why for why in (self.failure, self.last or "before its first check") if why]
        return f"{how}: {'; '.join(why)}"

    def restart(self) -> None:
        """Forgets all checks: the attempt begins anew, by another engine."""
        fresh = Attempt(
            self.trial,
            self.goal,
            self.further,
            self.stop_at,
            self.rung,
            self.run_on,
            self.metrics,
            self.watch,
        )
        vars(self).update(vars(fresh))

    def result(self) -> TrialResult:
        """What is kept of the attempt. One that was stopped after it had met its goal is
        complete."""
        if self.status is None:
            self.status = Status.STOPPED if self._met is None else Status.COMPLETE
        return TrialResult(
            trial=self.trial,
            status=self.status,
            steps=self.steps_to_result,
            curve=self.curve,
            kept=self.kept,
            seconds=self.seconds,
            timed=self.timed,
            smoothness=self.smoothness,
            theory=self.theory,
            observed=self.observed,
            failure=self.failure,
            traceback=self.traceback,
            engine=self.engine,
        )
