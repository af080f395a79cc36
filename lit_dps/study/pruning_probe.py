"""How long pruning takes on this machine, of the methods of a study, and how its runs are
checked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lit_dps.core.trial import Trial
from lit_dps.engines.engine import MAX_STORED_SCORES, network_is_shared
from lit_dps.pruning import Mask, Network, OneShot, prunable
from lit_dps.pruning.isometry import STEPS, restore_isometry
from lit_dps.study.setup import StudySetup
from lit_dps.training import PruningCallback
from lit_dps.training.early_check import EarlyCheck, min_evaluated_share
from lit_dps.training.stopwatch import now
from lit_dps.training.training_pass import TrainingPass

SECONDS = 1.0  # of pruning that are timed of each method
SHORTEST = 1e-9  # seconds: keeps ratios defined where something takes no time


class Looked(Exception):
    """The stopwatch has seen what it needs of a run."""


class PassStopwatch(Callback):
    """Times the pruning pass of a run, and finds out how it is checked; then ends the run."""

    def __init__(self, setup: StudySetup):
        self.setup, self.pruning, self.reused, self.refusal = setup, 0.0, False, 1.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        setup, run = self.setup, TrainingPass(trainer, pl_module, self.setup.pruning.batch_size)
        ways = {
            tuple(p for p in cell.axes if p[0].startswith("pruning.")): cell
            for cell in setup.study.cells
        }
        found = [setup.training().pruning_callback(Trial(cell, 0)) for cell in ways.values()]
        # as `Training.store_scores` decides it, of all the points of the study
        scores = (
            sum(p.numel() for p in prunable(pl_module, setup.pruning.biases).values())
            * setup.study.trials
        )
        fits = scores <= MAX_STORED_SCORES
        shared = run.key is not None and network_is_shared(setup.workload) and fits
        shared = (
            shared and setup.study.sampler == "sobol" and setup.study.best_of is None
        )  # else each cell has its own
        self.reused = shared and all(
            isinstance(p.pruner, OneShot) and p.init != "isometry" for p in found
        )
        if setup.goal.stops_checks_early and EarlyCheck.supports(trainer, pl_module):
            self.refusal = min_evaluated_share(
                setup.goal_of_trials, trainer.datamodule.validation_size
            )
        if max(setup.study.sparsities) > 0:
            self.pruning = float(np.mean([self._pruning(p, run, pl_module.device) for p in found]))
        raise Looked

    def _pruning(self, given: PruningCallback, run: TrainingPass, device: torch.device) -> float:
        """Seconds of the method's passes, from the first batches of each, and of the way to
        isometry."""
        pruner, batches, begin = given.pruner, 0, now(device)

        def first_batches():
            nonlocal batches
            for batch in run.batches():
                yield batch
                batches += 1
                if now(device) - begin > SECONDS:
                    return

        with run.without_side_effects(begin=True) as twin:
            weights = prunable(twin, given.biases, given.exclude)
            network = Network(
                twin, weights, given.batch_size, run.__len__, first_batches, partial(run.loss, twin)
            )
            mask = pruner.mask(
                network, max(self.setup.study.sparsities), torch.Generator().manual_seed(0)
            )
            seconds = now(device) - begin
            if pruner.passes and batches:
                seconds *= len(run) * pruner.passes / batches
            elif isinstance(pruner, OneShot):  # a number an element
                seconds = 0.0
            return seconds + (
                _descent(dict(twin.named_parameters()), mask, device)
                if given.init == "isometry"
                else 0
            )


def _descent(parameters: Mapping[str, nn.Parameter], mask: Mask, device: torch.device) -> float:
    """Seconds that a network takes to isometry: as timed where it gets there soon, else of all
    steps allowed."""
    begin = now(device)
    restore_isometry(parameters, mask, 10)
    each = max((now(device) - begin) / 10, SHORTEST)
    steps, begin = max(1, min(STEPS, int(2 * SECONDS / each))), now(device)
    restore_isometry(parameters, mask, steps)
    seconds = now(device) - begin
    return seconds if seconds < 0.8 * steps * each or steps == STEPS else each * STEPS
