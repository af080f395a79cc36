"""How long a step, a check and a pruning pass take on this machine: a short timing of real trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls

from lit_dps.study.setup import StudySetup
from lit_dps.study.stopwatch import SECONDS, Measured, measure_trial

SIZES = 3  # batch sizes that are timed
SMALLER_BY = 8  # where the grid gives no second batch size to time, one smaller by this factor is
SHORTEST = 1e-9  # seconds: keeps the fit defined where something takes no time


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
        start: Seconds to build a trial and begin to train.
        step: Seconds a step, over the batch size B: an overhead and a cost an example.
        check: Seconds a check, over 1 / B: a cost for all examples and, where the validation loader takes batches of
            the training's size, an overhead a batch.
        pruning: Seconds a pass of pruning, over 1 / B, likewise.
        reused: Whether a worker takes the scores of a point for all its cells.
        refusal: As in `Measured`.
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
        return max(abs(self.step.at(m.batch_size) / max(m.step, SHORTEST) - 1) for m in self.measured)

    def trial_seconds(self, batch_size: int, trials: int, steps: float, checks: float) -> float:
        """Seconds of so many trials of one batch size, with so many steps and checks in all, but without pruning.

        What else a trial costs, such as measurements of smoothness, belongs here.
        """
        return trials * self.start + steps * self.step.at(batch_size) + checks * self.check.at(1 / batch_size)


def measure(setup: StudySetup) -> Timing:
    """Times trials of two or three batch sizes, as the study's own engine runs them; stores nothing.

    The smallest batch size comes first; then, up to three in all, the largest whose step takes no longer than a second,
    should it grow in proportion. Masks are on at the highest sparsity, metaparameters at the middle of their ranges,
    and checks are full. It takes a few checks and a few seconds.

    Raises:
        ConfigError: if a pruning pass is needed and the data have no finite one.
    """
    torch.set_num_threads(setup.study.threads)
    sizes = sorted(setup.study.batch_sizes)
    warm = measure_trial(setup, sizes[0], 1)
    found = [measure_trial(setup, sizes[0], _steps(warm.step))]
    while len(found) < SIZES:
        last = found[-1]
        bounds = {size: last.step * size / last.batch_size for size in sizes if size > last.batch_size}
        fitting = [size for size, seconds in bounds.items() if seconds <= SECONDS]
        if not fitting:
            break
        found.append(measure_trial(setup, fitting[-1], _steps(bounds[fitting[-1]])))
    if len(found) == 1 and sizes[0] > 1:
        found.insert(0, measure_trial(setup, max(1, sizes[0] // SMALLER_BY), _steps(found[0].step)))
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

    Relative, since the steps of the smallest and of the largest batch size may differ by a factor of thousands.
    """
    scale = np.maximum(y, SHORTEST)
    rows = np.column_stack([1 / scale, np.asarray(x) / scale])
    (a, b), _ = nnls(rows, np.asarray(y) / scale)
    return Line(float(a), float(b))


def _steps(seconds: float) -> int:
    """How many steps of so many seconds to time."""
    return max(2, round(SECONDS / max(seconds, SHORTEST)))
