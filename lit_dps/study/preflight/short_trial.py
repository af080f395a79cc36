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
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from lit_dps.core.attempt import Attempt
from lit_dps.core.error_origin import error_text, find_user_error, place_in_user_code
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.core.trial import Trial
from lit_dps.data.loaders import EndlessLoader
from lit_dps.engines.eligible import standard_data
from lit_dps.engines.engine import Training
from lit_dps.engines.trainer import TrialFit
from lit_dps.module import ImageClassifier
from lit_dps.training import GoalErrorCallback, lightning_private
from lit_dps.training.checkpoint_files import CheckpointFile
from lit_dps.training.rate_curve import rate_curve, rate_remarks
from lit_dps.training.rng_state import preserve_rng_state
from lit_dps.training.step_count import ExamplesCallback, refuse_too_large
from lit_dps.training.training_pass import ends_of, has_indices
from lit_dps.training.unmasked import later_weights_note
from lit_dps.training.workload import Built

PERTURBATION = 0.1  # standard deviation of the noise on weights that are all zero
STEPS = 3  # of a short trial whose epochs do not end
BATCHES = 16  # of an epoch of a module that decides itself when its optimizer steps
PATIENCE = 64  # batches without an optimizer step after which a module is refused


@dataclass
class Short:
    """The results of a short trial.

    Attributes:
        built: The module, the data module and the trainer's arguments.
        goal: The callback that judged the trial by the goal of the study.
        untrained: The metrics of the pruned network before its first step; None if validation fails
            without training.
        repeated: The metrics of two validations of one network, with noise on its weights; None if
            validation fails, or if module and data are ours.
        examples: Examples of a validation by data loader; None if validation may stop early.
        batches: Batches of a validation by data loader.
        counted: The callback that counted the examples of the steps.
        notes: Notes on the learning rate and on the mask, a line each.
    """

    built: Built
    goal: GoalErrorCallback
    untrained: dict[str, float] | None
    repeated: tuple[dict[str, float], dict[str, float]] | None
    examples: dict[int, int] | None
    batches: dict[int, int]
    counted: ExamplesCallback
    notes: list[str] = field(default_factory=list)

    @property
    def data(self) -> LightningDataModule:
        return self.built.data


def build_short(
    training: Training,
    trial: Trial,
    file: CheckpointFile | None = None,
    at_check: Callable[[], None] = lambda: None,
) -> tuple[TrialFit, Attempt, ShortEpochs]:
    """Return the fit and the run of a short trial, and the callback that shortens its epochs.

    Args:
        training: What the trials have in common.
        trial: The trial.
        file, at_check: As in `TrialFit.of`.
    """
    goal = ShortGoal.of(training.goal)
    run = Attempt(
        trial,
        goal.goal,
        stop_at=lambda: goal.last_step,
        train_past_goal=True,
        metrics=training.metrics,
    )
    fit = TrialFit.of(training, run, goal, file, at_check)
    fit.examples.waits = True
    fit.pruning.is_short = True
    if fit.smoothness.interval:
        fit.smoothness.interval, fit.smoothness.examples = 1, 2
    module = fit.built.module
    callbacks = fit.built.trainer["callbacks"]
    goal.is_known = not callbacks and standard_data(fit.built.data) and _is_ours(module)
    by_hand = not module.automatic_optimization or is_overridden("optimizer_step", module)
    return fit, run, ShortEpochs(goal, training.workload.accumulated, by_hand)


def run_short(training: Training, trial: Trial, watchers: Sequence[Callback] = ()) -> Short:
    """Train a trial for a few optimizer steps, as `TrainerEngine` does, and return the results.

    The order is: a pruning pass over the first and the last batch, the first and the last batches
    of an epoch, the end of the epoch, and a step of the next epoch. There are two validations. The
    first one precedes the end of the first epoch if it does so in the trial.

    Args:
        training: What the trials have in common.
        trial: The trial.
        watchers: Further callbacks, called after those of the study.

    Raises:
        UserError: if the trial fails, in one line. For errors of the user's code, with its place.
    """
    fit, _, epochs = build_short(training, trial)
    goal, module = epochs.goal, fit.built.module
    trainer = None
    with preserve_rng_state(seed=trial.seed_for("order")):
        try:
            try:
                trainer = fit.trainer(last=[*watchers, epochs])
            except (ValueError, TypeError, MisconfigurationException) as error:
                raise UserError(f"trainer: {error}") from error
            trainer.fit(module, datamodule=fit.built.data)
            fit.examples.find_full_batch(trainer)
        except Exception as raised:
            error = lightning_private.error_of_fit(raised)
            hint = _hint(error, goal)
            raise find_user_error(error) or UserError(one_line_of(error, trial) + hint) from error
    if goal.status is None:
        if lightning_private.batches_of_epoch(trainer) == 0:
            refuse_too_large(trainer, trial.cell.batch_size)
            raise ConfigError(
                "data", type(fit.built.data).__name__, "a train dataloader that gives batches"
            )
        what = (
            f"a module that trains for {goal.steps + 1} steps: it or a callback stopped the trainer"
        )
        raise ConfigError("model", type(module).__name__, what)
    if trial.cell.sparsity and epochs.finite is False:
        what = (
            f"lower sparsities for {type(module).__name__}: its loss is not finite once it is "
            "pruned"
        )
        raise ConfigError("study.sparsities", trial.cell.sparsity, what)
    validated = goal.validated
    short = Short(
        fit.built,
        goal,
        epochs.untrained,
        epochs.repeated,
        validated.first,
        validated.batches,
        fit.examples,
    )
    for remark in epochs.remarks:
        short.notes.append(f"at B = {trial.cell.batch_size} {remark} steps of the budget")
    later = later_weights_note(trainer, fit.pruning.flags) if trial.cell.sparsity else ""
    if later:
        short.notes.append(f"{trial.cell}: {later}")
    return short


def _is_ours(module: LightningModule) -> bool:
    """Return True if no hook of a module is code of the user."""
    return type(module) is ImageClassifier


def one_line_of(error: Exception, trial: Trial) -> str:
    """Return an error of a dry run in one line, with the last place in the user's code."""
    message = " ".join(error_text(error).split())[:500]
    return (
        f"a dry run of {trial.cell} failed: {type(error).__name__}: "
        f"{message}{place_in_user_code(error)}"
    )


def _hint(error: Exception, goal: GoalErrorCallback) -> str:
    """Return when a metric has a value, if an error names a metric; else ""."""
    if (
        isinstance(error, KeyError)
        and error.args
        and error.args[0] in (goal.monitor, *goal.run.metrics)
    ):
        return (
            f"; {error.args[0]} has no value before the first check, after goal.check_interval "
            "optimizer steps"
        )
    return ""


class ShortGoal(GoalErrorCallback):
    """Validates a short trial twice: before and after the end of an epoch, or twice after it.

    Attributes:
        is_early: Whether the first validation of the trial precedes the end of its first epoch.
        is_endless: Whether the epochs have no end.
        is_known: Whether module, data and callbacks are all ours. Then one validation is enough.
        epochs: Number of epochs that have ended.
        checks: Number of validations so far.
        last_step: The step of the last validation; infinity before it.
    """

    def __init__(self, **arguments: Any):
        super().__init__(**arguments)
        self.is_early = self.is_endless = self.is_known = False
        self.epochs = self.checks = 0
        self.last_step = math.inf

    def is_check(self, step: int) -> bool:
        is_first = self.is_early and not self.is_known and self.checks == 0
        is_after_epoch = self.epochs > 0 or (self.is_endless and step >= STEPS)
        if not (is_first or is_after_epoch or step >= self.goal.max_steps):
            return False
        self.checks += 1
        if self.checks == 2 or self.is_known:
            self.last_step = step
        return True


class ShortEpochs(Callback):
    """Shortens the epochs of a short trial, and validates the untrained network at the end.

    Attributes:
        first: Number of first batches of an epoch that are kept.
        looks: Whether to validate the untrained network.
        finite: Whether the first training loss is finite; None before it, or without a loss.
        untrained, repeated: Metrics, as in `Short`.
        remarks: Remarks on the learning rates over the budget.
    """

    def __init__(self, goal: ShortGoal, accumulated: int, by_hand: bool):
        self.goal, self.accumulated = goal, accumulated
        # A module that decides itself when to step may accumulate over batches.
        self.first = BATCHES - 1 if by_hand else accumulated
        self.by_hand = by_hand
        self.looks = True
        self.batches_left = PATIENCE * accumulated
        self.finite: bool | None = None
        self.untrained: dict[str, float] | None = None
        self.repeated: tuple[dict[str, float], dict[str, float]] | None = None
        self.remarks: list[str] = []
        self._initial: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before the epochs are shortened, because a schedule by epochs depends on their length.
        epoch = self.goal.steps_of_epoch
        rates = rate_curve(trainer, pl_module, trainer.max_steps, epoch)
        if rates is not None:
            self.remarks = rate_remarks(
                rates, trainer.lr_scheduler_configs, epoch, trainer.max_steps
            )
        batches = lightning_private.batches_of_epoch(trainer)
        self.goal.is_endless = batches == math.inf
        # In steps; infinity if epochs have no end, or if their length is unknown.
        length = batches if self.goal.is_endless else math.ceil(batches / self.accumulated)
        self.goal.is_early = length >= self.goal.goal.check_interval
        lightning_private.replace_train_loaders(trainer, self._shortened)
        self._initial = copy.deepcopy(pl_module.state_dict())

    def _shortened(self, loader: Any) -> tuple[Any, float]:
        """Return a loader of the first and the last batches, and the most batches to take of it."""
        if isinstance(loader, EndlessLoader):
            return loader, math.inf
        batches = sized_len(loader)
        last = 1 if self.by_hand else (batches or 0) % self.accumulated or self.accumulated
        kept = self.first + last
        if batches is None or not has_indices(loader):
            self.goal.is_endless = False
            limit = kept if batches is None else min(kept, batches)
            return loader, limit
        return ends_of(loader, self.first, last), min(kept, batches)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.goal.epochs += 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.finite is None and loss is not None:
            self.finite = math.isfinite(float(loss))
        self.batches_left -= 1
        if not self.batches_left and not self.goal.steps:
            raise ConfigError(
                "model",
                type(pl_module).__name__,
                "a module that steps an optimizer, or returns a loss",
            )

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.looks:
            return
        # Only now, because validation may change attributes that the first training step reads.
        try:
            pl_module.load_state_dict(self._initial)
            self.untrained = self.goal.validate_now(trainer)
        except Exception:  # some modules cannot validate before they are trained
            return
        if not self.goal.is_known:
            perturb(pl_module)
            with suppress(Exception):
                self.repeated = self.goal.validate_now(trainer), self.goal.validate_now(trainer)


def goal_of(trainer: Trainer) -> GoalErrorCallback:
    """Return the callback of a trainer that judges its trial by the goal of the study."""
    callbacks = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    return next(each for each in callbacks if isinstance(each, GoalErrorCallback))


def perturb(module: LightningModule) -> None:
    """Add noise to the weights of a module, always the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                # Large noise, because the outputs of an untrained network differ little.
                scale = PERTURBATION + 2 * parameter.square().mean().sqrt()
                parameter += scale * noise
