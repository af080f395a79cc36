"""Measures how long the parts of a study's trials take on this machine, for its forecast.

The parts are the start, a step, a validation and the pruning. Nothing is stored.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls

from lit_dps.core.trial import Cell, Trial
from lit_dps.study.probe_run import SHORTEST, RunTimes, steps_that_take, timed_run
from lit_dps.study.setup import StudySetup

SECONDS = 1.0  # of training at each batch size; a step that takes longer is not timed
MIN_STEPS = 2
MAX_SIZES = 3  # timed batch sizes


@dataclass(frozen=True)
class Line:
    """y = a + b x, with a and b of at least 0."""

    a: float
    b: float

    def at(self, x: float) -> float:
        return self.a + self.b * x


@dataclass(frozen=True)
class Timing:
    """What was measured, and the lines through it for all other batch sizes.

    Attributes:
        measured: The seconds of start, step and validation, by batch size.
        start: Seconds to build a trial and begin to train, without pruning.
        step: Seconds of a step over the batch size B: an overhead and a cost of an example. With
            one timed size, an upper bound: all of it is a cost of an example.
        check: Seconds of a validation over 1 / B: a cost of all examples and, if validation uses
            the training batch size, an overhead of a batch. With one timed size, an upper bound:
            all of it is a cost of all examples.
        pruning: Seconds to prune a network, at the smallest batch size.
    """

    measured: dict[int, RunTimes]
    start: float
    step: Line
    check: Line
    pruning: float = 0.0

    @property
    def misfit(self) -> float:
        """The largest relative error of the line of steps at the timed batch sizes."""
        errors = []
        for batch_size, times in self.measured.items():
            errors.append(abs(self.step.at(batch_size) / max(times.step, SHORTEST) - 1))
        return max(errors)

    def least_step(self, batch_size: int) -> float:
        """Return the seconds that a step takes at least; 0 if they are unknown.

        A step takes at least as long as each timed step of the same or a smaller batch size.
        """
        seconds = [times.step for size, times in self.measured.items() if size <= batch_size]
        return max(seconds, default=0.0)

    def step_seconds(self, batch_size: int) -> float:
        """Return the seconds of a step by the line, but at least `least_step`.

        The line may be below the timed steps, because its parts are not negative.
        """
        return max(self.step.at(batch_size), self.least_step(batch_size))

    def check_seconds(self, batch_size: int) -> float:
        """Return the seconds of a validation by the line, but at least those timed at this size."""
        seconds = self.check.at(1 / batch_size)
        if batch_size in self.measured:
            seconds = max(seconds, self.measured[batch_size].check)
        return seconds


def measure(setup: StudySetup) -> Timing:
    """Time trials of one to three batch sizes, as the study's engine runs them.

    The smallest batch size comes first. Then follow, up to `MAX_SIZES` in all, the largest ones
    whose step takes at most `SECONDS` if it grows in proportion. Masks have the highest sparsity,
    metaparameters are at the middle of their ranges, and validations are full. It takes a few
    seconds, a few validations and one pruning.

    Raises:
        CannotTime: If a trial fails.
    """
    torch.set_num_threads(setup.study.threads)
    setup = setup.with_constant_batch().without_readings()
    sizes = sorted(setup.study.batch_sizes)
    warm_up = _timed_trial(setup, sizes[0], 1)
    steps = steps_that_take(SECONDS, warm_up.step, MIN_STEPS)
    measured = {sizes[0]: _timed_trial(setup, sizes[0], steps)}
    while len(measured) < MAX_SIZES:
        last = max(measured)
        step_seconds = {size: measured[last].step * size / last for size in sizes if size > last}
        short = [size for size, seconds in step_seconds.items() if seconds <= SECONDS]
        if not short:
            break
        largest = max(short)
        steps = steps_that_take(SECONDS, step_seconds[largest], MIN_STEPS)
        measured[largest] = _timed_trial(setup, largest, steps)
    start = measured[sizes[0]].start
    pruning = 0.0
    checks = [warm_up.check, measured[sizes[0]].check]
    if max(setup.study.sparsities) > 0:
        pruned = _timed_trial(setup, sizes[0], 1, prunes=True)
        pruning = max(pruned.start - start, 0.0)
        checks.append(pruned.check)
    # Of two validations the first one may be slow.
    median = statistics.median_low(checks)
    measured[sizes[0]] = measured[sizes[0]]._replace(check=median)
    step, check = _lines_through(measured)
    return Timing(
        measured=measured,
        start=float(np.mean([times.start for times in measured.values()])),
        step=step,
        check=check,
        pruning=pruning,
    )


def _lines_through(measured: Mapping[int, RunTimes]) -> tuple[Line, Line]:
    """Return the lines of steps and of validations.

    With one timed size they are upper bounds of the seconds of larger batches.
    """
    steps = [times.step for times in measured.values()]
    checks = [times.check for times in measured.values()]
    if len(measured) == 1:
        (batch_size,) = measured
        return Line(0.0, steps[0] / batch_size), Line(checks[0], 0.0)
    inverse = [1 / size for size in measured]
    return fit_line(list(measured), steps), fit_line(inverse, checks)


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Return the line with the least squares of relative errors, with a and b of at least 0.

    The errors are relative, since the steps of the smallest and the largest batch size may differ
    by a factor of thousands. It needs at least two points.
    """
    scale = np.maximum(y, SHORTEST)
    rows = np.column_stack([1 / scale, np.asarray(x) / scale])
    (a, b), _ = nnls(rows, np.asarray(y) / scale)
    return Line(float(a), float(b))


def _timed_trial(setup: StudySetup, batch_size: int, steps: int, prunes: bool = False) -> RunTimes:
    """Time a trial at a batch size; without `prunes`, its mask takes no time to find."""
    axes = setup.study.cells[0].axes
    if not prunes:
        magnitude = dataclasses.replace(
            setup.pruning, method="magnitude", options=None, init="original"
        )
        setup = dataclasses.replace(setup, pruning=magnitude)
        axes = tuple(pair for pair in axes if not pair[0].startswith("pruning."))
    cell = Cell(batch_size, max(setup.study.sparsities), axes)
    return timed_run(setup, Trial(cell, 0, setup.middle, setup.study.seed), steps)
