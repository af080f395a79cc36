"""Measures how long the parts of a study's trials take on this machine, for its forecast.

The parts are the start, a step, a validation, the pruning and the gradient of a single example.
Nothing is stored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from scipy.optimize import nnls
from torch import nn

from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Cell, Trial
from lit_dps.engines.trial_settings import MAX_STORED_SCORES, network_is_shared
from lit_dps.pruning import Mask, Network, OneShot, prunable
from lit_dps.pruning.isometry import STEPS, restore_isometry
from lit_dps.readings import Moment, ReadingsCallback
from lit_dps.readings.lipschitz import Lipschitz
from lit_dps.readings.registry import ReadingSpec
from lit_dps.study.probe_run import (
    SHORTEST,
    EndProbe,
    local_workers,
    probe_run,
    steps_that_take,
    timed_run,
)
from lit_dps.study.setup import StudySetup
from lit_dps.training import PruningCallback
from lit_dps.training.early_validation import EarlyValidation, min_evaluated_share
from lit_dps.training.stopwatch import now
from lit_dps.training.training_pass import TrainingPass

# Of training at each batch size, and of each pruning method. A step that takes longer is not timed.
SECONDS = 1.0
MIN_STEPS = 2
MAX_SIZES = 3  # timed batch sizes
# If the grid gives no second batch size to time, one that is smaller by this factor is timed.
SMALLER_BY = 8
SINGLE_GRADIENTS = 64  # timed examples
ISOMETRY_STEPS = 10  # by which the seconds of a step to isometry are estimated
CONVERGED = 0.8  # a descent that takes less than this share of its expected time ended early


@dataclass(frozen=True)
class Measured:
    """Seconds at one batch size.

    Attributes:
        batch_size: Global batch size, in examples.
        start: Seconds to build a trial and begin to train.
        step: Seconds of an optimizer step, with its data.
        check: Seconds of a validation of the entire split.
        pruning: Seconds of pruning, the mean over the methods; 0 if none takes data.
        reuses_scores: Whether a worker uses the pruning scores of a point for all its cells.
        min_check_share: Least share of the validation examples that shows a missed goal.
    """

    batch_size: int
    start: float
    step: float
    check: float
    pruning: float
    reuses_scores: bool
    min_check_share: float = 1.0


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
        measured: The measurements, by batch size.
        start, reuses_scores, min_check_share: See `Measured`.
        step: Seconds of a step over the batch size B: an overhead and a cost of an example.
        check: Seconds of a validation over 1 / B: a cost of all examples and, if validation uses
            the training batch size, an overhead of a batch.
        pruning: Seconds of pruning over 1 / B, likewise.
    """

    measured: tuple[Measured, ...]
    start: float
    step: Line
    check: Line
    pruning: Line
    reuses_scores: bool
    min_check_share: float = 1.0

    @property
    def misfit(self) -> float:
        """The largest relative error of the line of steps at the timed batch sizes."""
        errors = []
        for each in self.measured:
            errors.append(self.step.at(each.batch_size) / max(each.step, SHORTEST) - 1)
        return max(map(abs, errors))

    def trial_seconds(self, batch_size: int, trials: int, steps: float, checks: float) -> float:
        """Return the seconds of trials of one batch size, without pruning and smoothness.

        Args:
            batch_size: The batch size.
            trials: The number of trials.
            steps: The steps of all trials.
            checks: The validations of all trials.
        """
        return (
            trials * self.start
            + steps * self.step.at(batch_size)
            + checks * self.check.at(1 / batch_size)
        )


def measure(setup: StudySetup) -> Timing:
    """Time trials of two or three batch sizes, as the study's engine runs them.

    The smallest batch size comes first. Then follow, up to `MAX_SIZES` in all, the largest ones
    whose step takes at most `SECONDS` if it grows in proportion. Masks have the highest sparsity,
    metaparameters are at the middle of their ranges, and validations are full. It takes a few
    validations and a few seconds.

    Raises:
        ConfigError: if a pruning pass is needed and the data have no finite one.
    """
    torch.set_num_threads(setup.study.threads)
    setup = setup.with_constant_batch()
    sizes = sorted(setup.study.batch_sizes)
    warm_up = _measure_trial(setup, sizes[0], 1)
    steps = steps_that_take(SECONDS, warm_up.step, MIN_STEPS)
    measured = [_measure_trial(setup, sizes[0], steps)]
    while len(measured) < MAX_SIZES:
        last = measured[-1]
        longest_steps = {}
        for size in sizes:
            seconds = last.step * size / last.batch_size
            if size > last.batch_size and seconds <= SECONDS:
                longest_steps[size] = seconds
        if not longest_steps:
            break
        largest = max(longest_steps)
        steps = steps_that_take(SECONDS, longest_steps[largest], MIN_STEPS)
        measured.append(_measure_trial(setup, largest, steps))
    if len(measured) == 1:
        workers = local_workers(setup, Trial(setup.study.cells[0], 0, setup.middle))
        smaller = max(workers, sizes[0] // SMALLER_BY // workers * workers)
        if smaller < sizes[0]:
            steps = steps_that_take(SECONDS, measured[0].step, MIN_STEPS)
            measured.insert(0, _measure_trial(setup, smaller, steps))
    return _timing_of(measured)


def _timing_of(measured: Sequence[Measured]) -> Timing:
    """Return the lines through measurements at several batch sizes."""
    batch_sizes = [each.batch_size for each in measured]
    inverse = [1 / size for size in batch_sizes]
    return Timing(
        measured=tuple(measured),
        start=float(np.mean([each.start for each in measured])),
        step=fit_line(batch_sizes, [each.step for each in measured]),
        check=fit_line(inverse, [each.check for each in measured]),
        pruning=fit_line(inverse, [each.pruning for each in measured]),
        reuses_scores=all(each.reuses_scores for each in measured),
        min_check_share=measured[0].min_check_share,
    )


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line:
    """Return the line with the least squares of relative errors, with a and b of at least 0.

    The errors are relative, since the steps of the smallest and the largest batch size may differ
    by a factor of thousands.
    """
    scale = np.maximum(y, SHORTEST)
    rows = np.column_stack([1 / scale, np.asarray(x) / scale])
    (a, b), _ = nnls(rows, np.asarray(y) / scale)
    return Line(float(a), float(b))


def _measure_trial(setup: StudySetup, batch_size: int, steps: int) -> Measured:
    """Time a trial at a batch size, and its pruning separately."""
    # The first values of the other axes represent all values.
    axes = tuple(pair for pair in setup.study.cells[0].axes if not pair[0].startswith("pruning."))
    cell = Cell(batch_size, max(setup.study.sparsities), axes)
    trial = Trial(cell, 0, setup.middle, setup.study.seed)
    pruning = _PruningStopwatch(setup)
    # This method takes no time.
    magnitude = dataclasses.replace(
        setup.pruning, method="magnitude", options=None, init="original"
    )
    setup = dataclasses.replace(setup, pruning=magnitude)
    probe_run(setup, Attempt(trial, setup.unreachable_goal(steps)), [pruning])
    times = timed_run(setup, trial, steps)
    return Measured(
        batch_size,
        times.start,
        times.step,
        times.check,
        pruning.seconds,
        pruning.reuses_scores,
        pruning.min_check_share,
    )


class _PruningStopwatch(Callback):
    """Times the pruning of a run and finds out how it is validated, then ends the run.

    Attributes:
        seconds, reuses_scores, min_check_share: See `Measured`.
    """

    def __init__(self, setup: StudySetup):
        self.study_setup = setup
        self.seconds = 0.0
        self.reuses_scores = False
        self.min_check_share = 1.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        setup = self.study_setup
        data_pass = TrainingPass(trainer, pl_module, setup.pruning.batch_size)
        cells = {}
        for cell in setup.study.cells:
            cells[tuple(pair for pair in cell.axes if pair[0].startswith("pruning."))] = cell
        callbacks = []
        for cell in cells.values():
            callbacks.append(setup.trial_settings().pruning_callback(Trial(cell, 0)))
        are_scores_general = all(
            isinstance(each.pruner, OneShot) and each.init != "isometry" for each in callbacks
        )
        self.reuses_scores = are_scores_general and self._scores_are_shared(data_pass, pl_module)
        if setup.goal.stops_validations_early and EarlyValidation.supports(trainer, pl_module):
            data: Any = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]
            self.min_check_share = min_evaluated_share(setup.built_goal, data.validation_size)
        if max(setup.study.sparsities) > 0:
            seconds = [self._time(each, data_pass, pl_module.device) for each in callbacks]
            self.seconds = float(np.mean(seconds))
        raise EndProbe

    def _scores_are_shared(self, data_pass: TrainingPass, module: LightningModule) -> bool:
        """Return True if all cells of a point have the same scores, and all scores can be kept.

        `TrialSettings.store_scores` decides in the same way.
        """
        setup = self.study_setup
        weights = prunable(module, setup.pruning.biases).values()
        scores = setup.study.trials * sum(weight.numel() for weight in weights)
        # With another sampler, cells have different points.
        cells_share_points = setup.study.sampler == "sobol" and setup.study.best_of is None
        return (
            data_pass.key is not None
            and network_is_shared(setup.workload)
            and scores <= MAX_STORED_SCORES
            and cells_share_points
        )

    def _time(
        self, pruning: PruningCallback, data_pass: TrainingPass, device: torch.device
    ) -> float:
        """Return the seconds of a method's passes, by their first batches, and of its isometry."""
        pruner = pruning.pruner
        batches = 0
        begin = now(device)

        def first_batches() -> Iterator[tuple[Any, int]]:
            nonlocal batches
            for batch in data_pass.batches():
                yield batch
                batches += 1
                if now(device) - begin > SECONDS:
                    return

        with data_pass.without_side_effects(begin=True) as twin:
            network = Network(
                twin,
                prunable(twin, pruning.biases, pruning.exclude),
                pruning.batch_size,
                data_pass.__len__,
                first_batches,
                partial(data_pass.loss, twin),
            )
            generator = torch.Generator().manual_seed(0)
            mask = pruner.mask(network, max(self.study_setup.study.sparsities), generator)
            seconds = now(device) - begin
            if pruner.passes and batches:
                seconds *= len(data_pass) * pruner.passes / batches
            elif isinstance(pruner, OneShot):
                # Scores without data take no noticeable time.
                seconds = 0.0
            if pruning.init == "isometry":
                seconds += _isometry_seconds(dict(twin.named_parameters()), mask, device)
            return seconds


def _isometry_seconds(
    parameters: Mapping[str, nn.Parameter], mask: Mask, device: torch.device
) -> float:
    """Return the seconds of the descent to isometry.

    They are measured if the descent ends within about 2 `SECONDS`. Otherwise they are extrapolated
    to all steps that are allowed.
    """
    begin = now(device)
    restore_isometry(parameters, mask, ISOMETRY_STEPS)
    step_seconds = max((now(device) - begin) / ISOMETRY_STEPS, SHORTEST)
    steps = max(1, min(STEPS, int(2 * SECONDS / step_seconds)))
    begin = now(device)
    restore_isometry(parameters, mask, steps)
    seconds = now(device) - begin
    if seconds < CONVERGED * steps * step_seconds or steps == STEPS:
        return seconds
    return step_seconds * STEPS


def single_gradient_seconds(setup: StudySetup) -> float:
    """Return the seconds of a single example's gradient; 0 if the noise is not measured.

    The noise of the gradient is measured with single gradients. On a CPU core they take 2.6 times
    as long as a pass in batches for Simple-CNN, and 110 times for a perceptron, whose batch is one
    product of matrices. So they are timed.
    """
    if setup.smoothness.interval is None or not setup.smoothness.noise:
        return 0.0
    cell = dataclasses.replace(setup.study.cells[0], sparsity=0.0)
    trial = Trial(cell, 0, setup.middle, setup.study.seed)
    seconds: list[float] = []
    spec = ReadingSpec(_GradientStopwatch, "", {"seconds": seconds})
    callback = ReadingsCallback([spec])
    probe_run(setup, Attempt(trial, setup.unreachable_goal(0)), [callback])
    return seconds[-1]


class _GradientStopwatch(Lipschitz):
    """Times single gradients of some examples, then ends the run.

    Args:
        seconds: Receives the seconds of an example.
    """

    def __init__(self, seconds: list[float]):
        super().__init__(interval=1, examples=SINGLE_GRADIENTS)
        self._seconds = seconds

    def start(self, moment: Moment) -> None:
        # The first time is the longest.
        super().start(moment)
        begin = now(moment.device)
        super().start(moment)
        self._seconds.append((now(moment.device) - begin) / SINGLE_GRADIENTS)
        raise EndProbe
