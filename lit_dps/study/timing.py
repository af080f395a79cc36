"""How long a step, a check and a pruning pass take on this machine: a short timing of real trials."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from scipy.optimize import nnls

from lit_dps.engines.scores import SCORES_KEPT, network_is_shared
from lit_dps.engines.trainer import LightningEngine
from lit_dps.pruning.mask import prunable
from lit_dps.pruning.scores import SCORES
from lit_dps.study.setup import StudySetup
from lit_dps.training import GoalErrorCallback
from lit_dps.training.early_check import EarlyCheck, fewest
from lit_dps.training.training_pass import TrainingPass
from lit_dps.training.workload import Built, Workload
from lit_dps.trial import Cell, Trial

SECONDS = 1.0  # of training and of pruning that are timed at each batch size; also the longest step that is
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
class Measured:
    """Seconds at one batch size.

    Attributes:
        batch_size: Global batch size, in examples.
        start: Seconds to build a trial and begin to train.
        step: Seconds an optimizer step, with its data.
        check: Seconds a check of the entire validation split.
        pruning: Seconds a pass of pruning; 0 if the study does not prune, or its score takes no data.
        reused: Whether a worker takes the scores of a point for all its cells.
        refusal: Share of a check's examples that are looked at, at least, to find that the goal is missed.
    """

    batch_size: int
    start: float
    step: float
    check: float
    pruning: float
    reused: bool
    refusal: float = 1.0


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
    warm = _measure(setup, sizes[0], 1)
    found = [_measure(setup, sizes[0], _steps(warm.step))]
    while len(found) < SIZES:
        last = found[-1]
        bounds = {size: last.step * size / last.batch_size for size in sizes if size > last.batch_size}
        fitting = [size for size, seconds in bounds.items() if seconds <= SECONDS]
        if not fitting:
            break
        found.append(_measure(setup, fitting[-1], _steps(bounds[fitting[-1]])))
    if len(found) == 1 and sizes[0] > 1:
        found.insert(0, _measure(setup, max(1, sizes[0] // SMALLER_BY), _steps(found[0].step)))
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


class Stopwatch(Callback):
    """Times the start, `steps` steps from one update to another, and the check after a run of steps + 1 steps.

    Args:
        setup: The study.
        steps: Optimizer steps to time.
    """

    def __init__(self, setup: StudySetup, steps: int):
        self.setup, self.steps = setup, steps
        self._within: dict[int, float] = {}
        self._pruning = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started = time.perf_counter()
        self._reused = self._scores_are_reused(trainer, pl_module)
        self._refusal = 1.0
        if GoalErrorCallback(**self.setup.goal).early_reject and EarlyCheck.supports(trainer, pl_module):
            self._refusal = fewest(self.setup.goal_of_trials, trainer.datamodule.validation_size)
        if max(self.setup.study.sparsities) > 0:
            self._pruning = self._pruning_pass(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *args) -> None:
        if trainer.global_step in (0, self.steps):  # the same point of the first step and of the last
            self._within[trainer.global_step] = _now(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trained = _now(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._checked = _now(pl_module)

    def read(self, batch_size: int, begin: float) -> Measured:
        """The measurement of a run that was called at `begin`, in seconds of `time.perf_counter`."""
        step, check = (self._within[self.steps] - self._within[0]) / self.steps, self._checked - self._trained
        start = self._started - begin
        return Measured(batch_size, start, step, check, self._pruning, self._reused, self._refusal)

    def _pruning_pass(self, trainer: Trainer, module: LightningModule) -> float:
        """Seconds of the pass, from its first batches."""
        method, biases, batch_size = (self.setup.pruning[key] for key in ("method", "biases", "batch_size"))
        exclude = self.setup.pruning.get("exclude", ())
        run, batches, begin = TrainingPass(trainer, module, batch_size), 0, _now(module)

        def first_losses():
            nonlocal batches
            for loss, size in run.losses(twin):
                yield loss, size / batch_size
                batches += 1
                if _now(module) - begin > SECONDS:
                    return

        with run.traceless() as twin:
            SCORES[method](prunable(twin, biases, exclude), first_losses(), torch.Generator().manual_seed(0))
        if batches == 0:  # the score takes no data
            return 0.0
        seconds = _now(module) - begin
        return seconds / batches * len(run)

    def _scores_are_reused(self, trainer: Trainer, module: LightningModule) -> bool:
        """As `LightningEngine` decides it, of all the points of the study."""
        scores = sum(p.numel() for p in prunable(module, self.setup.pruning["biases"]).values())
        run = TrainingPass(trainer, module, self.setup.pruning["batch_size"])
        shared = run.key is not None and network_is_shared(self.setup.workload)
        return shared and scores * self.setup.study.trials <= SCORES_KEPT


@dataclass(frozen=True)
class Watched(Workload):
    """A workload whose trials carry a callback."""

    watch: Callback | None = None

    def build(self, trial: Trial) -> Built:
        built = super().build(trial)
        callbacks = [*(built.trainer.get("callbacks") or []), self.watch]
        return Built(built.module, built.data, {**built.trainer, "callbacks": callbacks})


def _measure(setup: StudySetup, batch_size: int, steps: int) -> Measured:
    params = {key: box.at(0.5) for key, box in setup.study.space.items()}
    trial = Trial(Cell(batch_size, max(setup.study.sparsities)), 0, params, setup.study.seed)
    watch = Stopwatch(setup, steps)
    goal = {**setup.goal, "check_interval": steps + 1, "max_steps": steps + 1, "early_reject": False}
    pruning = {**setup.pruning, "method": "magnitude"}  # masks without a pass, which the stopwatch times by itself
    begin = time.perf_counter()
    LightningEngine(Watched(**vars(setup.workload), watch=watch), goal, pruning, lean=setup.study.lean).train(trial)
    return watch.read(batch_size, begin)


def _steps(seconds: float) -> int:
    """How many steps of so many seconds to time."""
    return max(2, round(SECONDS / max(seconds, SHORTEST)))


def _now(module: LightningModule) -> float:
    if module.device.type != "cpu":
        torch.accelerator.synchronize()  # what was called there is done
    return time.perf_counter()
