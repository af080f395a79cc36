"""What the paper's protocol costs: Lightning's own loop, a full check every 16 steps, every trial
to its end.

Too dear to be run whole: the seconds of a step and of a check are measured, and the steps follow
from what is known of each trial.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.numbers import Bounds, Sample
from benchmarks.setups import UNREACHABLE, run_trial
from lit_dps.core.trial import Status, Trial, TrialResult
from lit_dps.study.setup import StudySetup


@dataclass(frozen=True)
class Cost:
    """Seconds, one value a measured trial.

    Attributes:
        start: Of a trial beside its steps and checks.
        step: Of an optimizer step.
        check: Of a check of the entire validation split.
    """

    start: Sample
    step: Sample
    check: Sample

    @classmethod
    def of(cls, measured: Sequence[tuple[float, float, float]]) -> Cost:
        """From the (start, step, check) of each trial."""
        return cls(*(Sample(values) for values in zip(*measured, strict=True)))

    def seconds(self, trials: int, steps: float, check_interval: int, workers: int) -> float:
        """Seconds of so many trials with so many steps in all, by the medians, shared evenly by the
        workers."""
        checks = steps / check_interval
        work = trials * self.start.median + steps * self.step.median + checks * self.check.median
        return work / workers

    def bounds(self, trials: int, steps: Bounds, check_interval: int, workers: int) -> Bounds:
        """`seconds` of steps that are known within bounds."""
        rest = (check_interval, workers)
        estimate = None
        if steps.estimate is not None:
            estimate = self.seconds(trials, steps.estimate, *rest)
        lower = self.seconds(trials, steps.lower, *rest)
        return Bounds(lower, estimate, self.seconds(trials, steps.upper, *rest))


@dataclass(frozen=True)
class Paper:
    """The paper's protocol.

    Attributes:
        cost: Measured seconds of its parts, with as many workers at a time.
        seconds: Wall time that follows.
        ratio: That time over ours.
    """

    cost: Cost
    seconds: Bounds
    ratio: Bounds

    @classmethod
    def of(cls, cost: Cost, seconds: Bounds, ours: float) -> Paper:
        """From its cost and its time, and the seconds of ours."""
        return cls(cost, seconds, seconds.over(ours))


def paper_steps(
    results: Sequence[TrialResult], max_steps: int, calibrated: Sequence[TrialResult] = ()
) -> Bounds:
    """Steps of these trials, were none stopped by racing.

    The steps of complete, incomplete and infeasible trials are known. An outraced trial has at
    least the steps that it ran, and at most the budget; the estimate takes the mean of the
    calibrated ones for all of them.

    Args:
        results: The trials of a cell, as the race left them.
        max_steps: The step budget.
        calibrated: Outraced trials that were run to their end.
    """
    raced = [result.steps_run for result in results if result.status is Status.OUTRACED]
    known = sum(result.steps_run for result in results if result.status is not Status.OUTRACED)
    lower, upper = known + sum(raced), known + len(raced) * max_steps
    if not raced:
        return Bounds(lower, lower, upper)
    mean = fmean(result.steps_run for result in calibrated) if calibrated else None
    return Bounds(lower, None if mean is None else known + len(raced) * mean, upper)


def evenly(results: Sequence[TrialResult], count: int) -> list[TrialResult]:
    """So many of the results, or all where there are fewer, evenly spread over the points."""
    ordered = sorted(results, key=lambda result: result.trial.point)
    count = min(count, len(ordered))
    return [ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)]


class CheckWatch(Callback):
    """Keeps when each check began and ended."""

    def __init__(self):
        self.begun: list[float] = []
        self.ended: list[float] = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begun.append(time.perf_counter())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.ended.append(time.perf_counter())


def time_trial(setup: StudySetup, trial: Trial, checks: int) -> tuple[float, float, float]:
    """Seconds of (start, step, check) of a trial under the paper's protocol, over so many checks,
    at least 2.

    Steps and checks are those after the first check, which waits for what is needed once.
    """
    setup.workload.build(trial).data.setup("fit")  # a worker reads the data set once
    watch, interval = CheckWatch(), setup.goal.check_interval
    goal = dataclasses.replace(
        setup.goal,
        error=UNREACHABLE,
        max_steps=checks * interval,
        early_reject=False,
    )
    result = run_trial(setup, trial, goal, callbacks=(watch,))
    training = [
        begun - ended for begun, ended in zip(watch.begun[1:], watch.ended[:-1], strict=True)
    ]
    checking = [
        ended - begun for begun, ended in zip(watch.begun[1:], watch.ended[1:], strict=True)
    ]
    step, check = fmean(training) / interval, fmean(checking)
    return max(0.0, result.seconds - checks * (interval * step + check)), step, check


def run_as_paper(setup: StudySetup, trial: Trial, max_steps: int) -> TrialResult:
    """A trial under the paper's protocol, with that budget."""
    goal = dataclasses.replace(setup.goal, max_steps=max_steps, early_reject=False)
    return run_trial(setup, trial, goal, lean=False)


def run_to_end(setup: StudySetup, trial: Trial) -> TrialResult:
    """A trial to its goal or its budget by the quickest way that ends the same: no race, early
    checks, own loop."""
    return run_trial(setup, trial, dataclasses.replace(setup.goal, early_reject=True))


def same_end(raced: TrialResult, whole: TrialResult) -> bool:
    """Whether a trial ended as under the paper's protocol, run as far: an outraced one had not met
    its goal there."""
    if raced.status is Status.OUTRACED:
        return whole.status is Status.INCOMPLETE and whole.steps_run == raced.steps_run
    return (raced.status, raced.steps, raced.steps_run) == (
        whole.status,
        whole.steps,
        whole.steps_run,
    )
