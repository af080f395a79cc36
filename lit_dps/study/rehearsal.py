"""The rehearsal: a short run of a trial that finds what does not fit together before a study creates anything."""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_dps.engines.eligible import standard_data
from lit_dps.engines.engine import Training
from lit_dps.errors import ConfigError, UserError, user_error_in
from lit_dps.runs import Run
from lit_dps.training import GoalErrorCallback, SmoothnessCallback, lightning_private
from lit_dps.training.generators import isolated
from lit_dps.training.protocol import screen_callbacks_of
from lit_dps.training.steps import ExamplesCallback, refuse_too_large
from lit_dps.trial import Trial

STEPS = 2  # an epoch ends before the first check, and one after it
BATCHES = 16  # of an epoch of a module that steps its optimizer itself
PASS = 2  # batches of the pruning pass
PATIENCE = 64  # batches without an optimizer step
_LIBRARIES = tuple(str(Path(package.__file__).parent) for package in (lightning, torch)) + (
    str(Path(__file__).parents[1]),
)


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal found.

    Attributes:
        data: The data module, set up for training.
        validated: Examples of a check by data loader; None where checks may stop early.
    """

    data: LightningDataModule
    validated: dict[int, int] | None


def rehearse(training: Training, trial: Trial, look_first: bool = True, steps: int = STEPS) -> Rehearsed:
    """Runs a trial as `TrainerEngine` does, but each step is an epoch, and after the first check it ends.

    So there are a check of the untrained network, a pruning pass over the first batches, optimizer steps, ends of
    epochs and a check. No trace is left in the global generators.

    Args:
        training: What the trials have in common.
        trial: The trial.
        look_first: Whether to check the untrained network.
        steps: Optimizer steps before the check.

    Raises:
        UserError: for what does not serve, in one line; what the user's module raised says where.
    """
    built = training.workload.build(trial)
    budget = GoalErrorCallback(**training.goal).goal.max_steps
    lasts = {"check_interval": steps, "max_steps": max(steps, budget - budget % steps)}
    goal, first = GoalErrorCallback(**{**training.goal, **lasts}), _FirstLoss()
    goal.look_first = look_first
    goal.follow(Run(trial, goal.goal, stop_at=lambda: 0))
    pruning = training.pruning_of(trial)
    pruning.examples = PASS * pruning.batch_size
    ours = [pruning, goal, first, _Patience(goal, PATIENCE * training.workload.accumulated)]
    if training.smoothness["interval"] is not None:
        ours.insert(1, SmoothnessCallback(**{**training.smoothness, "interval": 1, "examples": 2}))
    screen_callbacks_of(built.module)
    own = not built.module.automatic_optimization or is_overridden("optimizer_step", built.module)
    # a module that says when to step may accumulate over batches
    epoch = {"limit_train_batches": BATCHES if own else training.workload.accumulated}
    with isolated(seed=trial.seed_for("order")):
        try:
            if not standard_data(built.data):
                ours.append(ExamplesCallback(trial.cell.batch_size, training.workload.batch_size_key))
            callbacks = [*built.trainer["callbacks"], *ours]
            trainer = _trainer({**built.trainer, **epoch, "callbacks": callbacks})
            trainer.fit(built.module, datamodule=built.data)
        except Exception as error:
            raise user_error_in(error) or UserError(_told(error, trial)) from error
    if goal.status is None:
        name = type(built.module).__name__
        if lightning_private.batches_of_epoch(trainer) == 0:
            refuse_too_large(trainer, trial.cell.batch_size)
            raise ConfigError("data", type(built.data).__name__, "a train dataloader that gives batches")
        raise ConfigError(
            "model", name, f"a module that trains for {steps} steps: it or a callback stopped the trainer"
        )
    _refuse_met(goal)
    if trial.cell.sparsity and first.finite is False:
        what = f"lower sparsities for {type(built.module).__name__}: its loss is not finite once it is pruned"
        raise ConfigError("study.sparsities", trial.cell.sparsity, what)
    return Rehearsed(built.data, goal.validated.first)


def _trainer(arguments: dict[str, Any]) -> Trainer:
    try:
        return Trainer(**arguments)
    except (ValueError, TypeError, MisconfigurationException) as error:
        raise UserError(f"trainer: {error}") from error


def _refuse_met(goal: GoalErrorCallback) -> None:
    found = goal.untrained
    if found is not None and goal.goal.reached(found):
        side = "above" if goal.goal.at_least else "below"
        other = "" if goal.goal.at_least else "; of a metric that is to be maximised set goal.at_least"
        raise ConfigError(
            "goal.error" if str(goal.goal).startswith("goal error") else "goal.metric",
            goal.goal.value,
            f"{side} {found:.4g}, the {goal.monitor} of the untrained network{other}",
        )


def _told(error: Exception, trial: Trial) -> str:
    """An error of somebody else's code in one line, with the last place in it that is neither ours nor a library's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_LIBRARIES)]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    said = " ".join(str(error).split())[:500]
    return f"a rehearsal of {trial.cell} failed: {type(error).__name__}: {said}{where}"


class _FirstLoss(Callback):
    """Notes whether the first training loss is finite; None before, or without one."""

    finite: bool | None = None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.finite is None and loss is not None:
            self.finite = math.isfinite(float(loss))


class _Patience(Callback):
    """Ends a run after so many batches without an optimizer step, and no run by its epochs."""

    def __init__(self, goal: GoalErrorCallback, batches: int):
        self.goal, self.left = goal, batches

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        lightning_private.set_epochs(trainer, -1)  # they are as short as a step here

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.left -= 1
        if not self.left and not self.goal.steps:
            raise ConfigError("model", type(pl_module).__name__, "a module that steps an optimizer, or returns a loss")
