"""Proposes goal.max_steps, the step budget of a trial, where the configuration has none."""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.advice.options import Options
from lit_dps.advice.step_probe import first_look, of_one_device
from lit_dps.advice.user_workload import own_batch_size, probing
from lit_dps.core.attempt import Attempt
from lit_dps.core.error_origin import place_in_user_code
from lit_dps.core.errors import ConfigError
from lit_dps.core.format import number_text
from lit_dps.core.goal import Goal
from lit_dps.core.trial import Cell, Trial
from lit_dps.parallel.process import StopRequest, interruptible
from lit_dps.study.probe_run import EndProbe, probe_run
from lit_dps.study.run import LEAVING, check_study
from lit_dps.study.setup import StudySetup

# Share of --budget that one training of the proposed length takes, at most. An answer needs three
# probes of several trials, and the first trials of a probe may be hopeless and spend all their
# steps.
SHARE = 0.05
# Proposed steps over those to the goal at the user's batch size. The smallest batch of the first
# two probes is 8 times smaller (`plan.APART`), and takes at most 8 times as many steps. The last
# fork of a run is at half of its budget.
REACH = {"law": 8, "branch": 2}
MIN_CHECKS = 3  # of the run, from which its progress is extrapolated


@dataclass(frozen=True)
class ShortRun:
    """What a short run at the user's batch size found.

    Attributes:
        batch_size: Examples of an optimizer step.
        step_seconds: Seconds of a step, with its share of the checks.
        steps: Steps of the run.
        checks: The step of each check.
        values: The goal's metric at each check.
    """

    batch_size: int
    step_seconds: float
    steps: int
    checks: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Proposal:
    """A budget of steps and the note on it.

    Attributes:
        max_steps: The budget, a multiple of the check interval.
        note: The number, its reason, and how to set it.
    """

    max_steps: int
    note: str


def settle_max_steps(
    setup: StudySetup, options: Options, known: Mapping[str, Any], stop: StopRequest
) -> Proposal | None:
    """Return the stored or a new proposal; None if stored advice has the number of its
    configuration.

    Args:
        setup: The user's configuration, without a goal.max_steps of its own.
        options: Of the command.
        known: What is stored of the advice.
        stop: Whether the user asked to leave.

    Raises:
        UserError: if no short run is possible; nothing is stored yet.
        Interrupted: if the user asked to leave.
    """
    if "max_steps" in known:
        steps = known["max_steps"]
        note = (
            f"goal.max_steps is not set, {steps} is used, as by an earlier run of this command: "
            "another --budget keeps "
            f"it. goal.max_steps: {steps} sets it, and another number needs another study.name"
        )
        return Proposal(steps, note)
    if "configuration" in known:
        return None
    seconds = SHARE * options.budget
    plain = probing(setup, options.trials, adaptive=None)
    try:
        with interruptible(stop, f"\n{LEAVING}\n"):
            run = run_short(plain, seconds, stop)
    except Exception as error:
        # What does not train is refused by the checks of the study, in their words.
        check_study(plain)
        line = next(iter(str(error).splitlines()), "")
        why = f"{type(error).__name__}: {line}{place_in_user_code(error)}"
        what = f"a number of steps, since the short run that proposes one failed: {why}"
        raise ConfigError("goal.max_steps", None, what) from error
    return propose(run, plain.goal_of_trials, seconds, REACH[options.method])


def propose(run: ShortRun, goal: Goal, seconds: float, reach: int) -> Proposal:
    """Return the steps that the goal makes plausible and the time can pay, whichever are fewer.

    Args:
        run: The short run.
        goal: Its metric, value and check interval.
        seconds: What one training of the proposed length may take.
        reach: Plausible steps over those to the goal at the user's batch size.
    """
    affordable = int(seconds / run.step_seconds)
    expected = expected_steps(run, goal)
    plausible = Goal.max_steps if expected is None else reach * expected
    steps = int(min(plausible, affordable)) // goal.check_interval * goal.check_interval
    steps = max(steps, goal.check_interval)
    where = f"at B = {run.batch_size}"
    if expected is None:
        reason = f"a short run of {run.steps} steps {where} does not show how far the goal is"
        limit = f"{steps} is the default"
    elif expected <= run.steps:
        steps = max(steps, int(expected))
        reason = f"a short run {where} met the goal at step {expected:g}"
        limit = f"{steps} is {reach} times as many"
    else:
        pace = f"at its pace would after about {number_text(expected)}"
        reason = f"a short run of {run.steps} steps {where} did not meet the goal, and {pace}"
        limit = f"{steps} is {reach} times as many"
    if affordable < plausible:
        limit = f"a training of {steps} steps takes {SHARE:.0%} of --budget"
        if expected is not None and expected > steps:
            limit += ", and a larger one has room for more"
    note = (
        f"goal.max_steps is not set, {steps} is used: {reason}; {limit}. goal.max_steps: {steps} "
        "sets it, and another number needs another study.name"
    )
    return Proposal(steps, note)


def expected_steps(run: ShortRun, goal: Goal) -> float | None:
    """Return the step at which a run meets the goal, extrapolated if need be; None if there is no
    progress.

    The extrapolation is a line through the best values so far in the middle of the run and at its
    end.
    """
    checks = [
        (step, value)
        for step, value in zip(run.checks, run.values, strict=True)
        if math.isfinite(value)
    ]
    for step, value in checks:
        if goal.is_reached(value):
            return step
    if len(checks) < MIN_CHECKS:
        return None
    best = list(itertools.accumulate((value for _, value in checks), max if goal.at_least else min))
    middle = (len(checks) - 1) // 2
    slope = (best[-1] - best[middle]) / (checks[-1][0] - checks[middle][0])
    if slope == 0:
        return None
    return checks[-1][0] + (goal.value - best[-1]) / slope


def run_short(setup: StudySetup, seconds: float, stop: StopRequest) -> ShortRun:
    """Train at the user's batch size and metaparameters to the goal, or until the time is over;
    store nothing.

    Schedules see the budget that the time pays, by the seconds of a few steps.

    Raises:
        Interrupted: if the user asked to leave.
        Exception: what the module, its data or a callback raises.
    """
    one, size = of_one_device(setup), own_batch_size(setup.workload)
    look = first_look(one, size)
    if look is None:
        raise MemoryError(f"no step at B = {size} is possible on one device")
    stop.check()
    interval = setup.goal_of_trials.check_interval
    step, check = look
    most = max(int(seconds / (step + check / interval)) // interval, 1) * interval
    goal = dataclasses.replace(setup.goal, max_steps=most, early_reject=False)
    timed = dataclasses.replace(one, goal=goal)
    run = Attempt(Trial(Cell(size), 0, setup.middle, setup.study.seed), timed.goal_of_trials)
    watch = _TimeLimit(seconds, stop)
    probe_run(timed, run, [watch])
    values = run.curve[timed.goal_of_trials.metric]
    return ShortRun(size, watch.step_seconds, watch.steps, tuple(run.curve["step"]), tuple(values))


class _TimeLimit(Callback):
    """Ends a run after so many seconds of training, or when the user asks to leave.

    Attributes:
        steps: Optimizer steps so far.
        step_seconds: Seconds of each, with the checks between them.
    """

    def __init__(self, seconds: float, stop: StopRequest):
        self.seconds, self.stop = seconds, stop
        self.steps, self.step_seconds = 0, math.inf
        self._began = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.stop.check()
        self._count(trainer)
        if self.steps and time.monotonic() - self._began > self.seconds:
            raise EndProbe

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._count(trainer)

    def _count(self, trainer: Trainer) -> None:
        self.steps = trainer.global_step
        if self.steps:
            self.step_seconds = (time.monotonic() - self._began) / self.steps
