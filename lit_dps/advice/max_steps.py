"""Proposes goal.max_steps, the step budget of a trial, if the configuration has none."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.advice.options import Options
from lit_dps.advice.step_probe import of_one_device, time_briefly
from lit_dps.advice.user_workload import prepare_pilot, probe_setup, user_batch_size
from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import ConfigError, first_line, place_in_user_code
from lit_dps.core.goal import Goal
from lit_dps.core.text import number_text
from lit_dps.core.trial import Cell, Trial
from lit_dps.parallel.process import StopRequest, interruptible
from lit_dps.study.display import LEAVING
from lit_dps.study.preflight.check import check_study
from lit_dps.study.probe_run import EndProbe, probe_run
from lit_dps.study.setup import StudySetup

# The share of --budget that the short run takes, and that one training of the proposed length takes
# by the method "branch", at most.
BUDGET_SHARE = 0.05
# Proposed steps over those to the goal at the user's batch size. The last fork of a run is at half
# of its budget.
STEPS_RATIO = 2
MAX_SECONDS = 60.0  # of the short run
MAX_TRAININGS = 3.0  # that --budget pays at most, by the method "pilot"
# Most steps to the goal over those of the short run, without a --budget. Beyond, the second half of
# the run made less than 3 % of the rest of the way. Validations alone may differ by as much.
MAX_EXTRAPOLATION = 20
MIN_CHECKS = 3  # validations from which the progress of a run is extrapolated


@dataclass(frozen=True)
class ShortRun:
    """The result of a short run at the user's batch size.

    Attributes:
        batch_size: Examples of an optimizer step.
        step_seconds: Seconds of a step, with its share of the validations.
        steps: Steps of the run.
        checks: The step of each validation.
        values: The goal's metric at each validation.
    """

    batch_size: int
    step_seconds: float
    steps: int
    checks: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Proposal:
    """A step budget, a multiple of the check interval, and a note with its reason."""

    max_steps: int
    note: str


def settle_max_steps(
    setup: StudySetup, options: Options, stored: Mapping[str, Any], stop: StopRequest
) -> Proposal | None:
    """Return the stored proposal or a new one.

    Args:
        setup: The user's configuration, without a goal.max_steps.
        options: Options of the command.
        stored: The stored advice.
        stop: Whether the user asked to stop.

    Returns:
        None if the stored advice has the number of its configuration.

    Raises:
        UserError: if no short run is possible; nothing is stored yet.
        Interrupted: if the user asked to stop.
    """
    if "max_steps" in stored:
        steps = stored["max_steps"]
        note = (
            f"goal.max_steps is not set; {steps} is used, as in an earlier run of this command. "
            f"Another --budget keeps it. Set goal.max_steps: {steps} to fix it; another number "
            "needs another study.name."
        )
        return Proposal(steps, note)
    if "configuration" in stored:
        return None
    seconds = min(BUDGET_SHARE * options.budget, MAX_SECONDS)
    if options.method == "pilot":
        probes = prepare_pilot(setup).setup
    else:
        probes = probe_setup(setup, adaptive=None)
    try:
        with interruptible(stop, f"\n{LEAVING}\n"):
            run = run_short(probes, seconds, stop)
    except Exception as error:
        # If the module cannot be trained, the checks of the study refuse it in their words.
        check_study(probes)
        why = f"{type(error).__name__}: {first_line(error)}{place_in_user_code(error)}"
        allowed = f"a number of steps, because the short run that proposes one failed: {why}"
        raise ConfigError("goal.max_steps", None, allowed) from error
    share = BUDGET_SHARE
    if options.method == "pilot":
        share = 1 / MAX_TRAININGS
    return propose(run, probes.built_goal, options.budget, share)


def propose(run: ShortRun, goal: Goal, budget: float, share: float) -> Proposal:
    """Return a budget that reaches the goal and that the time can pay, whichever is less.

    Args:
        run: The short run.
        goal: Its metric, value and check interval.
        budget: Seconds of `--budget`; infinite without one.
        share: The share of them that one training of the proposed length may take.
    """
    # Without a --budget, the time pays any number of steps.
    affordable = math.inf
    if budget < math.inf:
        affordable = int(share * budget / run.step_seconds)
    expected = expected_steps(run, goal)
    is_too_far = False
    if expected is not None and budget == math.inf:
        is_too_far = expected > MAX_EXTRAPOLATION * run.steps
    if expected is None or is_too_far:
        # The short run may have taken more steps than the default without meeting the goal.
        plausible = max(Goal.max_steps, STEPS_RATIO * run.steps)
    else:
        plausible = STEPS_RATIO * expected
    steps = int(min(plausible, affordable)) // goal.check_interval * goal.check_interval
    steps = max(steps, goal.check_interval)
    if expected is not None and expected <= run.steps:
        steps = max(steps, int(expected))
    limit = f"{steps} is {STEPS_RATIO} times as many."
    if expected is None:
        reason = (
            f"A short run of {run.steps} steps at B = {run.batch_size} does not show how far the "
            "goal is."
        )
    elif expected <= run.steps:
        reason = f"A short run at B = {run.batch_size} met the goal at step {expected:g}."
    else:
        reason = (
            f"A short run of {run.steps} steps at B = {run.batch_size} did not meet the goal; at "
            f"its pace it would after about {number_text(expected)} steps."
        )
    if expected is None or is_too_far:
        limit = f"{steps} is the default."
        if plausible > Goal.max_steps:
            limit = f"{steps} is {STEPS_RATIO} times the short run."
    if is_too_far:
        reason += f" That is more than {MAX_EXTRAPOLATION} times its steps, too far to extrapolate."
        limit += " A longer training needs a larger goal.max_steps."
    if affordable < plausible:
        real_share = steps * run.step_seconds / budget
        limit = f"A training of {steps} steps takes about {real_share:.0%} of --budget."
        if expected is not None and expected > steps:
            limit += " A larger --budget allows more."
    note = (
        f"goal.max_steps is not set; {steps} is used. {reason} {limit} Set goal.max_steps: {steps} "
        "to fix it; another number needs another study.name."
    )
    return Proposal(steps, note)


def expected_steps(run: ShortRun, goal: Goal) -> float | None:
    """Return the step at which a run meets the goal, extrapolated if it has not.

    The extrapolation is a line through the best values so far, in the middle of the run and at its
    end.

    Returns:
        None if the run makes no measurable progress, or has too few validations.
    """
    met = goal.first_met({goal.metric: run.values})
    if met is not None:
        return run.checks[met]
    checks, best_values = [], []
    best = -math.inf if goal.at_least else math.inf
    for step, value in zip(run.checks, run.values, strict=True):
        if not math.isfinite(value):
            continue
        best = max(best, value) if goal.at_least else min(best, value)
        checks.append(step)
        best_values.append(best)
    if len(checks) < MIN_CHECKS:
        return None
    middle = (len(checks) - 1) // 2
    slope = (best_values[-1] - best_values[middle]) / (checks[-1] - checks[middle])
    if slope == 0:
        return None
    steps = checks[-1] + (goal.value - best_values[-1]) / slope
    return steps if math.isfinite(steps) else None


def run_short(setup: StudySetup, seconds: float, stop: StopRequest) -> ShortRun:
    """Train at the user's batch size and metaparameters until the goal, or for some seconds.

    Schedules see a budget that the time can pay, by the seconds of a few steps. Nothing is stored.

    Raises:
        Interrupted: if the user asked to stop.
        Exception: An error of the module, its data or a callback.
    """
    one_device = of_one_device(setup)
    batch_size = user_batch_size(setup.workload)
    times = time_briefly(one_device, batch_size)
    if times is None:
        raise MemoryError(f"no step at B = {batch_size} is possible on one device")
    stop.raise_if_requested()
    interval = setup.built_goal.check_interval
    affordable = int(seconds / (times.step + times.check / interval))
    max_steps = max(affordable // interval, 1) * interval
    goal = dataclasses.replace(setup.goal, max_steps=max_steps, early_reject=False)
    short = dataclasses.replace(one_device, goal=goal)
    trial = Trial(Cell(batch_size), 0, setup.middle, setup.study.seed)
    attempt = Attempt(trial, short.built_goal)
    limit = _TimeLimit(seconds, stop)
    probe_run(short, attempt, [limit])
    values = attempt.curve[short.built_goal.metric]
    checks = tuple(attempt.curve["step"])
    return ShortRun(batch_size, limit.step_seconds, limit.steps, checks, tuple(values))


class _TimeLimit(Callback):
    """Ends a run after some seconds of training, or when the user asks to stop.

    Attributes:
        steps: Optimizer steps so far.
        step_seconds: Seconds of a step, with its share of the validations.
    """

    def __init__(self, seconds: float, stop: StopRequest):
        self.seconds = seconds
        self.stop = stop
        self.steps = 0
        self.step_seconds = math.inf
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: object
    ) -> None:
        self.stop.raise_if_requested()
        self._count(trainer)
        if self.steps and time.monotonic() - self._began > self.seconds:
            raise EndProbe

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count(trainer)

    def _count(self, trainer: Trainer) -> None:
        self.steps = trainer.global_step
        if self.steps:
            self.step_seconds = (time.monotonic() - self._began) / self.steps
