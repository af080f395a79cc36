"""Stopwatches: how long a step, a check and a pruning pass of a trial take, whoever trains it."""

from __future__ import annotations

import dataclasses
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lit_dps.engines.engine import SCORES_KEPT, network_is_shared
from lit_dps.engines.trainer import TrainerEngine
from lit_dps.errors import UserError
from lit_dps.goal import Goal
from lit_dps.pruning import Network, OneShot, prunable, pruner_of
from lit_dps.runs import Run
from lit_dps.study.setup import StudySetup
from lit_dps.training import GoalErrorCallback
from lit_dps.training.early_check import EarlyCheck, fewest
from lit_dps.training.training_pass import TrainingPass
from lit_dps.trial import Cell, Status, Trial

SECONDS = 1.0  # of training and of pruning that are timed at each batch size; also the longest step that is
UNREACHED = 1e300  # of any metric: where trials that are timed are not to end


@dataclass(frozen=True)
class Measured:
    """Seconds at one batch size.

    Attributes:
        batch_size: Global batch size, in examples.
        start: Seconds to build a trial and begin to train.
        step: Seconds an optimizer step, with its data.
        check: Seconds a check of the entire validation split.
        pruning: Seconds that pruning takes; 0 if the study does not prune, or its method takes no data.
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


class _Looked(Exception):
    """The stopwatch has seen what it needs of a run."""


class PassStopwatch(Callback):
    """Times the pruning pass of a run, and finds out how it is checked; then ends the run.

    Args:
        setup: The study.

    Attributes:
        pruning: Seconds that pruning takes; 0 if the study does not prune, or its method takes no data.
        reused: As in `Measured`.
        refusal: As in `Measured`.
    """

    def __init__(self, setup: StudySetup):
        self.setup, self.pruning, self.reused, self.refusal = setup, 0.0, False, 1.0
        self._pruner = pruner_of(setup.pruning["method"], setup.pruning.get("options"))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.reused = self._scores_are_reused(trainer, pl_module)
        if GoalErrorCallback(**self.setup.goal).early_reject and EarlyCheck.supports(trainer, pl_module):
            self.refusal = fewest(self.setup.goal_of_trials, trainer.datamodule.validation_size)
        if max(self.setup.study.sparsities) > 0:
            self.pruning = self._pruning_pass(trainer, pl_module)
        raise _Looked

    def _pruning_pass(self, trainer: Trainer, module: LightningModule) -> float:
        """Seconds of the method's passes, from the first batches of each."""
        biases, batch_size = (self.setup.pruning[key] for key in ("biases", "batch_size"))
        exclude = self.setup.pruning.get("exclude", ())
        run, batches, begin = TrainingPass(trainer, module, batch_size), 0, _now(module.device)

        def first_batches():
            nonlocal batches
            for batch in run.batches():
                yield batch
                batches += 1
                if _now(module.device) - begin > SECONDS:
                    return

        with run.traceless() as twin:
            named = prunable(twin, biases, exclude)
            network = Network(twin, named, batch_size, first_batches, partial(run.loss, twin))
            self._pruner.mask(network, max(self.setup.study.sparsities), torch.Generator().manual_seed(0))
        if batches == 0:  # the method takes no data
            return 0.0
        seconds = _now(module.device) - begin
        return seconds / batches * len(run) * self._pruner.passes

    def _scores_are_reused(self, trainer: Trainer, module: LightningModule) -> bool:
        """As `Training.keep_scores` decides it, of all the points of the study."""
        scores = sum(p.numel() for p in prunable(module, self.setup.pruning["biases"]).values())
        run = TrainingPass(trainer, module, self.setup.pruning["batch_size"])
        shared = run.key is not None and network_is_shared(self.setup.workload) and isinstance(self._pruner, OneShot)
        return shared and scores * self.setup.study.trials <= SCORES_KEPT


class StepStopwatch(Run):
    """A run that is timed, whoever trains it: from the first update to the last one, and from there to its check's end.

    Args:
        run: The run; its only check is its last step.
    """

    def __init__(self, run: Run):
        super().__init__(run.trial, run.goal)
        self.updates, self.first, self.last, self.checked = 0, 0.0, 0.0, 0.0

    def on_update(self, optimizer: torch.optim.Optimizer, *args: object) -> None:
        """To be called after every update."""
        self.updates += 1
        if self.updates in (1, self.goal.max_steps):
            seconds = _now(optimizer.param_groups[0]["params"][0].device)
            self.first, self.last = (seconds, 0.0) if self.updates == 1 else (self.first, seconds)

    def record(self, *found: Any) -> Status | None:
        self.checked = time.perf_counter()
        return super().record(*found)


def measure_trial(setup: StudySetup, batch_size: int, steps: int) -> Measured:
    watch, run = PassStopwatch(setup), _run(setup, batch_size, 1 + steps)
    pruning = {
        **setup.pruning,
        "method": "magnitude",
        "options": None,
    }  # masks without a pass, which the stopwatch times by itself
    with suppress(_Looked):
        training = dataclasses.replace(setup.training(), pruning=pruning)
        TrainerEngine(training, (watch,)).train_one(run)
    goal = {**setup.goal, "check_interval": 1 + steps, "max_steps": 1 + steps, "early_reject": False}
    timed = dataclasses.replace(
        setup, goal=goal, pruning=pruning, study=dataclasses.replace(setup.study, engine="lightning")
    )
    clock, begin = StepStopwatch(run), time.perf_counter()
    hook = register_optimizer_step_post_hook(clock.on_update)
    try:
        for result in timed.engine().train(iter([clock, None]).__next__):
            if result.status is Status.FAILED:
                raise UserError(f"cannot time a trial: {result.failure}")
    finally:
        hook.remove()
    step, check = (clock.last - clock.first) / steps, clock.checked - clock.last
    start = max(clock.first - begin - step, 0.0)
    return Measured(batch_size, start, step, check, watch.pruning, watch.reused, watch.refusal)


def _run(setup: StudySetup, batch_size: int, steps: int) -> Run:
    params = {key: box.at(0.5) for key, box in setup.study.space.items()}
    others = setup.study.cells[0].others  # the first values of further axes stand for all
    trial = Trial(Cell(batch_size, max(setup.study.sparsities), others), 0, params, setup.study.seed)
    return Run(trial, Goal(UNREACHED, steps, steps, setup.goal_of_trials.metric, at_least=True))


def _now(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize()  # what was called there is done
    return time.perf_counter()
