"""Short trials for the dry run: a few optimizer steps, with the hooks of a trial in their order.

An epoch of a short trial has only the first and the last batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torchmetrics.metric import CompositionalMetric

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import (
    ConfigError,
    UserError,
    error_text,
    find_user_error,
    place_in_user_code,
)
from lit_dps.core.trial import Trial
from lit_dps.data.loaders import EndlessLoader
from lit_dps.engines.eligible import standard_data
from lit_dps.engines.lightning_loop import TrialFit
from lit_dps.engines.metric_objects import metric_objects
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.module import ImageClassifier
from lit_dps.report.notes import Level
from lit_dps.study.probe_run import train_fit
from lit_dps.training import GoalErrorCallback, lightning_private
from lit_dps.training.checkpoint_files import CheckpointFile
from lit_dps.training.rate_curve import rate_curve, rate_remarks
from lit_dps.training.step_count import refuse_too_large
from lit_dps.training.training_pass import ends_of, has_indices, loss_of_output
from lit_dps.training.unmasked import later_weights_note

NOISE = 0.1  # standard deviation of the noise on weights that are all zero
STEPS = 3  # of a short trial whose epochs do not end
MORE_REPEATS = 4  # further validations of one network, if its first two differ
MANUAL_BATCHES = 16  # of an epoch of a module that decides itself when its optimizer steps
MAX_BATCHES_WITHOUT_STEP = 64  # after which a module is refused
ERROR_LENGTH = 500  # characters of an error message


@dataclass(frozen=True)
class ShortTrial:
    """A short trial, before and after it is trained.

    Attributes:
        fit: The objects with which Lightning trains it.
        attempt: The attempt at the trial.
        epochs: What shortens its epochs, and validates the untrained network.
        notes: Notes on metrics, the learning rate and the mask, a line each, with their levels.
    """

    fit: TrialFit
    attempt: Attempt
    epochs: ShortEpochs
    notes: dict[str, Level] = field(default_factory=dict)

    @property
    def goal(self) -> ShortGoal:
        """The callback that judges the trial by the goal of the study."""
        return self.epochs.goal

    @property
    def data(self) -> LightningDataModule:
        return self.fit.built.data


def build_short(
    settings: TrialSettings,
    trial: Trial,
    file: CheckpointFile | None = None,
    raise_if_stopped: Callable[[], None] = lambda: None,
) -> ShortTrial:
    """Return a short trial that is ready to be trained.

    Args:
        settings: The settings of the study.
        trial: The trial.
        file, raise_if_stopped: As in `TrialFit.of`.
    """
    goal = ShortGoal.of(settings.goal)
    attempt = Attempt(
        trial,
        goal.goal,
        read_race_limit=lambda: goal.last_step,
        train_past_goal=True,
        metrics=settings.metrics,
    )
    fit = TrialFit.of(settings, attempt, goal, file, raise_if_stopped)
    fit.examples.waits = True
    fit.pruning.is_short = True
    fit.readings.is_short = True
    module = fit.built.module
    callbacks = fit.built.trainer["callbacks"]
    goal.is_ours = (
        not callbacks and standard_data(fit.built.data) and type(module) is ImageClassifier
    )
    is_manual = not module.automatic_optimization or is_overridden("optimizer_step", module)
    epochs = ShortEpochs(goal, settings.workload.parts_of(trial.cell), is_manual)
    return ShortTrial(fit, attempt, epochs)


def run_short(
    settings: TrialSettings, trial: Trial, watchers: Sequence[Callback] = ()
) -> ShortTrial:
    """Train a trial for a few optimizer steps, as `LightningLoop` does, and return the results.

    The order is: a pruning pass over the first and the last batch, the first and the last batches
    of an epoch, the end of the epoch, and a step of the next epoch. There are two validations. The
    first one precedes the end of the first epoch if it does so in the trial.

    Args:
        settings: The settings of the study.
        trial: The trial.
        watchers: Further callbacks, called after the callbacks of the study.

    Raises:
        UserError: if the trial fails, in one line. For errors of the user's code, with its place.
    """
    short = build_short(settings, trial)
    fit = short.fit
    epochs = short.epochs
    stale_metrics = StaleMetricObjects()
    trainer = _fit(fit, trial, [*watchers, stale_metrics, epochs], short.goal)
    _check_ended(fit, trial, short.goal, trainer)
    if trial.cell.sparsity and epochs.is_finite is False:
        name = type(fit.built.module).__name__
        raise ConfigError(
            "study.sparsities",
            trial.cell.sparsity,
            f"lower sparsities for {name}, because its loss is not finite after pruning",
        )
    for stale in stale_metrics.notes(type(fit.built.module).__name__):
        short.notes[stale] = Level.WRONG
    for remark in epochs.remarks:
        text = f"at B = {trial.cell.batch_size} {remark} steps of the budget"
        short.notes[text] = Level.WEAK
    if trial.cell.sparsity:
        note = later_weights_note(trainer, fit.pruning.flags)
        if note:
            # The report counts these weights itself.
            short.notes[f"{trial.cell}: {note}"] = Level.INFO
    return short


def _fit(fit: TrialFit, trial: Trial, callbacks: Sequence[Callback], goal: ShortGoal) -> Trainer:
    """Train a short trial and return its trainer.

    Raises:
        UserError: if a class or its arguments are refused, or if the user's code fails.
    """
    try:
        trainer = train_fit(fit, trial, callbacks)
        fit.examples.find_full_batch(trainer)
    except Exception as raised:
        error = lightning_private.error_of_fit(raised)
        user_error = find_user_error(error)
        if user_error is not None:
            raise user_error from error
        message = one_line_of(error, trial) + _metric_hint(error, goal)
        raise UserError(message, value=trial.cell) from error
    return trainer


def _check_ended(fit: TrialFit, trial: Trial, goal: ShortGoal, trainer: Trainer) -> None:
    """Raise UserError if a short trial ended before its last validation."""
    if goal.status is not None:
        return
    if lightning_private.batches_of_epoch(trainer) == 0:
        refuse_too_large(trainer, trial.cell.batch_size)
        raise ConfigError(
            "data", type(fit.built.data).__name__, "a train dataloader that gives batches"
        )
    raise ConfigError(
        "model",
        type(fit.built.module).__name__,
        f"a module that trains for {goal.steps + 1} steps. The module or a callback "
        "stopped the trainer earlier",
    )


def one_line_of(error: Exception, trial: Trial) -> str:
    """Return an error of a dry run in one line, with the last place in the user's code."""
    message = " ".join(error_text(error).split())[:ERROR_LENGTH]
    place = place_in_user_code(error)
    return f"a dry run of {trial.cell} failed: {type(error).__name__}: {message}{place}"


def _metric_hint(error: Exception, goal: GoalErrorCallback) -> str:
    """Return when a metric has a value, if an error names a metric; else ""."""
    if not isinstance(error, KeyError) or not error.args:
        return ""
    metric = error.args[0]
    if metric != goal.monitor and metric not in goal.attempt.metrics:
        return ""
    return (
        f"; {metric} has no value before the first check, after goal.check_interval optimizer steps"
    )


class StaleMetricObjects(Callback):
    """Finds objects of torchmetrics to which a validation adds its batches beside earlier ones.

    The earlier batches are of training, or of a validation after which the object was not reset.
    The metric then depends on them, in Lightning too.

    Attributes:
        paths: The objects, by their path in the module.
    """

    def __init__(self):
        self.paths: list[str] = []
        self._counts: dict[str, int] = {}

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        if batch_idx or dataloader_idx:
            return
        objects = metric_objects(pl_module)
        self._counts = {path: metric.update_count for path, metric in objects.items()}

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any
    ) -> None:
        for path, metric in metric_objects(pl_module).items():
            # `1 - accuracy` has no state, and does not reset its count of updates.
            if isinstance(metric, CompositionalMetric):
                continue
            before = self._counts.get(path, 0)
            if 0 < before < metric.update_count and path not in self.paths:
                self.paths.append(path)

    def notes(self, name: str) -> list[str]:
        """Return a note on the objects of a module of this name; none if there are none."""
        if not self.paths:
            return []
        return [
            f"{name} does not reset {', '.join(self.paths)} before a validation, so that its value "
            "also counts batches of training or of earlier validations. Use one object of "
            "torchmetrics for training and another for validation, and reset them."
        ]


class ShortGoal(GoalErrorCallback):
    """Validates a short trial twice: before and after the end of an epoch, or twice after it.

    Attributes:
        is_early: Whether the first validation of the trial precedes the end of its first epoch.
        is_endless: Whether the epochs have no end.
        is_ours: Whether module, data and callbacks are all ours. Then one validation is enough.
        epochs: Number of epochs that have ended.
        checks: Number of validations so far.
        last_step: The step of the last validation; infinity before it.
    """

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.is_early = False
        self.is_endless = False
        self.is_ours = False
        self.epochs = 0
        self.checks = 0
        self.last_step = math.inf

    def is_check(self, step: int) -> bool:
        is_first = self.is_early and not self.is_ours and self.checks == 0
        is_after_epoch = self.epochs > 0 or (self.is_endless and step >= STEPS)
        if not (is_first or is_after_epoch or step >= self.goal.max_steps):
            return False
        self.checks += 1
        if self.checks == 2 or self.is_ours:
            self.last_step = step
        return True

    def state_dict(self) -> dict[str, Any]:
        # A checkpoint between two epochs follows the end of an epoch.
        return {**super().state_dict(), "ended_epochs": self.epochs, "checks": self.checks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.epochs = state_dict["ended_epochs"]
        self.checks = state_dict["checks"]


class ShortEpochs(Callback):
    """Shortens the epochs of a short trial, and validates the untrained network at the end.

    Args:
        goal: The goal of the short trial.
        accumulated: Batches of an optimizer step.
        is_manual: Whether the module decides itself when to step.

    Attributes:
        first_batches: Number of first batches of an epoch that are kept.
        validates_untrained: Whether to validate the untrained network.
        is_finite: Whether the first training loss is finite; None before it, or without a loss.
        untrained: The metrics of the pruned network before its first step; None if validation fails
            without training.
        repeated: The metrics of each validation of one network, with noise on its weights: two
            validations, or more if these differ. Empty if validation fails, or if module and data
            are ours.
        remarks: Remarks on the learning rates over the budget.
    """

    def __init__(self, goal: ShortGoal, accumulated: int, is_manual: bool):
        self.goal = goal
        self.accumulated = accumulated
        self.is_manual = is_manual
        # A module that decides itself when to step may accumulate over batches.
        self.first_batches = MANUAL_BATCHES - 1 if is_manual else accumulated
        self.validates_untrained = True
        self.is_finite: bool | None = None
        self.untrained: dict[str, float] | None = None
        self.repeated: list[dict[str, float]] = []
        self.remarks: list[str] = []
        self._remaining_batches = MAX_BATCHES_WITHOUT_STEP * accumulated
        self._initial: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before the epochs are shortened, because a schedule by epochs depends on their length.
        epoch = self.goal.steps_of_epoch
        rates = rate_curve(trainer, pl_module, trainer.max_steps, epoch)
        if rates is not None:
            schedules = trainer.lr_scheduler_configs
            self.remarks = rate_remarks(rates, schedules, epoch, trainer.max_steps)
        batches = lightning_private.batches_of_epoch(trainer)
        self.goal.is_endless = batches == math.inf
        # In steps; infinity if epochs have no end, or if their length is unknown.
        length = math.inf
        if not self.goal.is_endless:
            length = math.ceil(batches / self.accumulated)
        self.goal.is_early = length >= self.goal.goal.check_interval
        lightning_private.replace_train_loaders(trainer, self._shortened)
        self._initial = copy.deepcopy(pl_module.state_dict())

    def _shortened(self, loader: Any) -> tuple[Any, float]:
        """Return a loader of the first and the last batches, and the most batches to take of it."""
        if isinstance(loader, EndlessLoader):
            return loader, math.inf
        batches = sized_len(loader)
        last_batches = 1
        if not self.is_manual:
            # The last step may have fewer batches.
            last_batches = (batches or 0) % self.accumulated or self.accumulated
        kept = self.first_batches + last_batches
        if batches is None:
            self.goal.is_endless = False
            return loader, kept
        if not has_indices(loader):
            self.goal.is_endless = False
            return loader, min(kept, batches)
        return ends_of(loader, self.first_batches, last_batches), min(kept, batches)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.goal.epochs += 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        loss = loss_of_output(outputs)
        if self.is_finite is None and loss is not None:
            self.is_finite = math.isfinite(float(loss))
        self._remaining_batches -= 1
        if not self._remaining_batches and not self.goal.steps:
            raise ConfigError(
                "model",
                type(pl_module).__name__,
                "a module that steps an optimizer, or returns a loss",
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.validates_untrained:
            return
        # Only now, because validation may change attributes that the first training step reads.
        try:
            pl_module.load_state_dict(self._initial)
            self.untrained = self.goal.validate_now(trainer)
        except Exception:  # some modules cannot validate before they are trained
            return
        if not self.goal.is_ours:
            perturb(pl_module)
            with suppress(Exception):
                first = self.goal.validate_now(trainer)
                second = self.goal.validate_now(trainer)
                self.repeated = [first, second]
                if first != second:
                    for _ in range(MORE_REPEATS):
                        self.repeated.append(self.goal.validate_now(trainer))


def goal_of(trainer: Trainer) -> GoalErrorCallback:
    """Return the callback of a trainer that judges its trial by the goal of the study."""
    return lightning_private.callbacks_of(trainer, GoalErrorCallback)[0]


def perturb(module: LightningModule) -> None:
    """Add noise to the weights of a module, always the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                # Large noise, because the outputs of an untrained network differ little.
                scale = NOISE + 2 * parameter.square().mean().sqrt()
                parameter += scale * noise
