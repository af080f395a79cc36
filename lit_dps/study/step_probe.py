"""How long a step, a check and a pruning pass take on this machine: a short timing of trials,
whoever trains them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch.optim.optimizer import register_optimizer_step_post_hook

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import UserError
from lit_dps.core.trial import Cell, Status, Trial
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.study.pruning_probe import SHORTEST, Looked, PassStopwatch
from lit_dps.study.setup import StudySetup
from lit_dps.study.workers import first_of_ranks
from lit_dps.training.stopwatch import now

SECONDS = 1.0  # of training that are timed at each batch size; also the longest step that is
SIZES = 3  # batch sizes that are timed
SMALLER_BY = 8  # where the grid gives no second batch size to time, one smaller by this factor is
PLAIN = {"method": "magnitude", "options": None, "init": "original"}  # pruning that takes no time
_START = "local.start"


class CannotTime(UserError):
    """A trial that cannot be timed.

    Attributes:
        above_split: Whether the batch size is above the size of the training split.
    """

    def __init__(self, why: str, above_split: bool = False):
        super().__init__(f"cannot time a trial: {why}")
        self.why, self.above_split = why, above_split


@dataclass(frozen=True)
class Measured:
    """Seconds at one batch size.

    Attributes:
        batch_size: Global batch size, in examples.
        start: Seconds to build a trial and begin to train.
        step: Seconds an optimizer step, with its data.
        check: Seconds a check of the entire validation split.
        pruning: Seconds that pruning takes, the mean over its methods; 0 without any that takes
            data.
        reused: Whether a worker takes the scores of a point for all its cells.
        refusal: Share of a check's examples that are looked at, at least, to find that the goal is
            missed.
    """

    batch_size: int
    start: float
    step: float
    check: float
    pruning: float
    reused: bool
    refusal: float = 1.0


@dataclass(frozen=True)
class Line:
    """y = a + b x, neither below 0."""

    a: float
    b: float

    def at(self, x: float) -> float:
        return self.a + self.b * x


@dataclass(frozen=True)
class Timing:
    """What was measured, and what follows for every other batch size.

    Attributes:
        measured: The measurements, by batch size.
        step: Seconds a step, over the batch size B: an overhead and a cost an example.
        check: Seconds a check, over 1 / B: a cost for all examples and, where the validation loader
            takes batches of the training's size, an overhead a batch.
        pruning: Seconds that pruning takes, over 1 / B, likewise.
        start, reused, refusal: As in `Measured`.
    """

    measured: tuple[Measured, ...]
    start: float
    step: Line
    check: Line
    pruning: Line
    reused: bool
    refusal: float = 1.0

    @property
    def misfit(self) -> float:
        """Largest relative error of the line of steps where steps were timed."""
        return max(
            abs(self.step.at(m.batch_size) / max(m.step, SHORTEST) - 1) for m in self.measured
        )

    def trial_seconds(self, batch_size: int, trials: int, steps: float, checks: float) -> float:
        """Seconds of so many trials of one batch size, with so many steps and checks in all, but
        without pruning.

        Measurements of smoothness are not counted either: a forecast tells them by themselves.
        """
        return (
            trials * self.start
            + steps * self.step.at(batch_size)
            + checks * self.check.at(1 / batch_size)
        )


def measure(setup: StudySetup) -> Timing:
    """Times trials of two or three batch sizes, as the study's own engine runs them; stores
    nothing.

    The smallest batch size comes first; then, up to three in all, the largest whose step takes no
    longer than a second, should it grow in proportion. Masks are on at the highest sparsity,
    metaparameters at the middle of their ranges, and checks are full. It takes a few checks and a
    few seconds.

    Raises:
        ConfigError: if a pruning pass is needed and the data have no finite one.
    """
    torch.set_num_threads(setup.study.threads)
    sizes = sorted(setup.study.batch_sizes)
    warm = _measure_trial(setup, sizes[0], 1)
    found = [_measure_trial(setup, sizes[0], _steps(warm.step))]
    while len(found) < SIZES:
        last = found[-1]
        bounds = {
            size: last.step * size / last.batch_size for size in sizes if size > last.batch_size
        }
        fitting = [size for size, seconds in bounds.items() if seconds <= SECONDS]
        if not fitting:
            break
        found.append(_measure_trial(setup, fitting[-1], _steps(bounds[fitting[-1]])))
    if len(found) == 1 and sizes[0] > 1:
        n = _workers(setup, Trial(setup.study.cells[0], 0, setup.middle))
        smaller = max(n, sizes[0] // SMALLER_BY // n * n)
        found[:0] = (
            [_measure_trial(setup, smaller, _steps(found[0].step))] if smaller < sizes[0] else []
        )
    batch_sizes = [m.batch_size for m in found]
    inverse = [1 / size for size in batch_sizes]
    return Timing(
        measured=tuple(found),
        start=float(np.mean([m.start for m in found])),
        step=fit_line(batch_sizes, [m.step for m in found]),
        check=fit_line(inverse, [m.check for m in found]),
        pruning=fit_line(inverse, [m.pruning for m in found]),
        reused=all(m.reused for m in found),
        refusal=found[0].refusal,
    )


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """The line of least squares of the relative errors, with neither part below 0.

    Relative, since the steps of the smallest and of the largest batch size may differ by a factor
    of thousands.
    """
    scale = np.maximum(y, SHORTEST)
    rows = np.column_stack([1 / scale, np.asarray(x) / scale])
    (a, b), _ = nnls(rows, np.asarray(y) / scale)
    return Line(float(a), float(b))


def _steps(seconds: float) -> int:
    """How many steps of so many seconds to time."""
    return max(2, round(SECONDS / max(seconds, SHORTEST)))


def _measure_trial(setup: StudySetup, batch_size: int, steps: int) -> Measured:
    # the first values of further axes stand for all; pruning is timed by itself
    others = tuple(pair for pair in setup.study.cells[0].axes if not pair[0].startswith("pruning."))
    trial = Trial(
        Cell(batch_size, max(setup.study.sparsities), others), 0, setup.middle, setup.study.seed
    )
    run = Attempt(trial, setup.unreached(steps))
    passes, pruning = PassStopwatch(setup), dataclasses.replace(setup.pruning, **PLAIN)
    with suppress(Looked), setup.workload.without_side_effects() as workload:
        TrainerEngine(
            dataclasses.replace(setup.training(), workload=workload, pruning=pruning), (passes,)
        ).train_one(run)

    start, step, check = timed_run(dataclasses.replace(setup, pruning=pruning), trial, steps)
    return Measured(batch_size, start, step, check, passes.pruning, passes.reused, passes.refusal)


def timed_run(
    setup: StudySetup, trial: Trial, steps: int, together: bool = False, warm_up: int = 1
) -> tuple[float, float, float]:
    """Time some steps of a trial and a full validation, as the study's engine runs them.

    Module and schedules see the budget of the study. The steps must fit into this budget; further
    steps are left out.

    Args:
        setup: The study.
        trial: The trial.
        steps: The number of steps to time.
        together: Whether all ranks of the trainer train the trial; otherwise only this process
            does.
        warm_up: The number of first steps that are not timed, at least 1.

    Returns:
        Seconds to build it and begin, of a step, of the check.

    Raises:
        UserError: if it fails.
    """
    budget = max(setup.goal_of_trials.max_steps, 2)
    warm_up = min(warm_up, budget - 1)
    steps = min(steps, budget - warm_up)
    total = warm_up + steps
    goal = dataclasses.replace(
        setup.goal, check_interval=total, max_steps=total, early_reject=False
    )
    # the other ranks would wait for a checkpoint, of which this one knows nothing
    study = dataclasses.replace(setup.study, engine="lightning", checkpoint_minutes=None)
    timed, trial = _apart(dataclasses.replace(setup, goal=goal, study=study, budget=budget), trial)
    clock = _StepStopwatch(trial, setup.unreached(total - 1))
    clock.each = max(1, _workers(timed, trial) // (setup.ranks if together else 1))
    clock.warm_up = warm_up
    with ExitStack() as group:
        timed = dataclasses.replace(
            timed, workload=group.enter_context(timed.workload.without_side_effects())
        )
        train = (
            group.enter_context(first_of_ranks(timed)) if together else type(timed.engine()).train
        )
        hook, begin = register_optimizer_step_post_hook(clock.on_update), time.perf_counter()
        try:
            for result in train(timed.engine(), iter([clock, None]).__next__, lambda: None):
                if result.status is Status.FAILED:
                    # `refuse_too_large` and data modules of the package name this key
                    raise CannotTime(
                        result.failure, result.failure.startswith("study.batch_sizes: ")
                    )
        finally:
            hook.remove()
    if clock.updates < total * clock.each:
        taken = f"{clock.updates // clock.each} of {total} steps"
        raise CannotTime(f"{taken} at {trial.cell}: is it above the split?", not clock.updates)
    step, check = (clock.last - clock.first) / steps, clock.checked - clock.last
    return max(clock.first - begin - warm_up * step, 0.0), step, check


def _apart(setup: StudySetup, trial: Trial) -> tuple[StudySetup, Trial]:
    """The same, but workers of local SGD part before the first step: their steps take longer than
    synchronous ones."""
    others = tuple(pair for pair in trial.cell.axes if pair[0] != _START)
    params = {key: value for key, value in trial.params.items() if key != _START}
    cell = dataclasses.replace(trial.cell, axes=others)
    local = dataclasses.replace(setup, local=dataclasses.replace(setup.local, start=0))
    return local, dataclasses.replace(trial, cell=cell, params=params)


def _workers(setup: StudySetup, trial: Trial) -> int:
    """The updates of a step of a trial; its batch is divisible by them."""
    rounds = setup.training().local_sgd_callback(trial).rounds
    return rounds.workers if rounds.on else 1


class _StepStopwatch(Attempt):
    """A run that is timed, whoever trains it: from its first step to its last, and to the end of
    its only check."""

    first = last = checked = 0.0
    updates = 0
    each = 1  # updates of a step
    warm_up = 1  # steps that are not timed

    def on_update(self, optimizer: torch.optim.Optimizer, *args: object) -> None:
        """To be called after every update."""
        self.updates += 1
        begins = self.updates == self.each * self.warm_up
        ends = self.updates == self.each * self.goal.max_steps
        if begins or ends:
            seconds = now(optimizer.param_groups[0]["params"][0].device)
            if begins:
                self.first = seconds
            else:
                self.last = seconds

    def record(self, *found: Any) -> Status | None:
        self.checked = time.perf_counter()
        return super().record(*found)
