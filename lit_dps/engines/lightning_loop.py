"""LightningLoop: trains any module and data module by Lightning's `Trainer.fit`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import UserError
from lit_dps.core.trial import LIGHTNING, NOISE_SCALE, RANKS, Trial
from lit_dps.core.unit import EXAMPLES
from lit_dps.engines.eligible import standard_data
from lit_dps.engines.trial_settings import RaiseIfStopped, TrialSettings
from lit_dps.parallel import ranks
from lit_dps.readings.callback import ReadingsCallback
from lit_dps.readings.gradient_noise import NoiseScaleCallback
from lit_dps.training import (
    AverageCallback,
    BatchScheduleCallback,
    DelayCallback,
    GoalErrorCallback,
    LocalSGDCallback,
    PruningCallback,
    lightning_private,
)
from lit_dps.training.checkpoint_callback import CheckpointCallback, Paused
from lit_dps.training.checkpoint_files import CheckpointFile
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.rate_curve import rate_curve, schedule_shape
from lit_dps.training.step_count import ExamplesCallback, refuse_too_large
from lit_dps.training.trainer_rules import filter_module_callbacks
from lit_dps.training.workload import Built


@dataclass(frozen=True)
class TrialFit:
    """The objects with which Lightning trains a trial.

    The dry run uses this class too, so that it calls the same hooks in the same order.

    Attributes:
        built: The module, the data module and the trainer's arguments.
        goal_callback: Validates the run and ends it.
        pruning, examples, schedule, delay, local, average, readings, batch: Further callbacks of
            the study.
        checkpoint: Stops and saves the run.
    """

    built: Built
    goal_callback: GoalErrorCallback
    pruning: PruningCallback
    examples: ExamplesCallback
    schedule: ScheduleCallback
    delay: DelayCallback
    local: LocalSGDCallback
    average: AverageCallback
    readings: ReadingsCallback
    batch: BatchScheduleCallback
    checkpoint: CheckpointCallback

    @classmethod
    def of(
        cls,
        settings: TrialSettings,
        attempt: Attempt,
        goal_callback: GoalErrorCallback | None = None,
        file: CheckpointFile | None = None,
        raise_if_stopped: RaiseIfStopped = lambda: None,
    ) -> TrialFit:
        """Build the trial of an attempt.

        Args:
            settings: The settings that the trials of the study share.
            attempt: The attempt at the trial.
            goal_callback: Validates the run instead of the study's callback.
            file: The file in which the run is saved; None saves nothing.
            raise_if_stopped: See `TrialEngine.train`.
        """
        trial = attempt.study_trial
        built = settings.workload.build(trial)
        filter_module_callbacks(built.module)
        if goal_callback is None:
            goal_callback = GoalErrorCallback.of(settings.goal)
            goal_callback.shown_steps = settings.shown_steps
        goal_callback.record_in(attempt)
        config = settings.resolve(trial)
        batch = BatchScheduleCallback.of(config.batch)
        if not batch.schedule.is_constant:
            attempt.count(EXAMPLES.column)
        checkpoint = CheckpointCallback(attempt, file, raise_if_stopped)
        goal_callback.after_check = checkpoint.after_validation
        goal_callback.saves_pause = lambda: checkpoint.can_save
        return cls(
            built=built,
            goal_callback=goal_callback,
            pruning=settings.pruning_callback(trial),
            examples=ExamplesCallback(
                trial.cell.batch_size, settings.workload.batch_size_key, batch.schedule
            ),
            batch=batch,
            schedule=ScheduleCallback(settings, trial, goal_callback),
            delay=DelayCallback(config.optim.delay),
            local=LocalSGDCallback.of(config.local),
            average=AverageCallback(config.optim.average_half_life),
            readings=ReadingsCallback(settings.readings),
            checkpoint=checkpoint,
        )

    def callbacks(self) -> list[Callback]:
        """Return the callbacks of the study, in the order in which Lightning calls them."""
        callbacks: list[Callback] = [StudySignals(), self.batch, self.pruning]
        if self.delay.delay:
            callbacks.append(self.delay)
        if self.local.schedule.on:
            callbacks.append(self.local)  # before the goal, which reads the loss of all workers
        if self.average.half_life:
            callbacks.append(self.average)  # before the goal, which validates the average
        callbacks += [self.goal_callback, self.schedule]
        if not standard_data(self.built.data):
            callbacks.append(self.examples)
        if self.readings.has_readings:
            callbacks.append(self.readings)
        callbacks.append(self.checkpoint)
        return callbacks

    def trainer(self, further: Sequence[Callback] = (), last: Sequence[Callback] = ()) -> Trainer:
        """Return the trainer.

        Args:
            further: Callbacks that follow the user's callbacks and precede the study's.
            last: Callbacks that follow the study's callbacks.
        """
        callbacks = [*self.built.trainer["callbacks"], *further, *self.callbacks(), *last]
        arguments = {**self.built.trainer, "callbacks": callbacks}
        trainer = lightning_private.make_trainer(arguments)
        self.goal_callback.before_fit(trainer, self.built.data)
        return trainer


@dataclass(frozen=True)
class LightningLoop:
    """Trains attempts of any LightningModule and LightningDataModule.

    Attributes:
        settings: The settings that the trials share.
        callbacks: Further callbacks of every run, such as a stopwatch.
        reason: Why no faster loop trains the attempts, for `TrialResult.engine_reason`.
    """

    settings: TrialSettings
    callbacks: tuple[Callback, ...] = ()
    reason: str = ""

    def train(self, attempt: Attempt, raise_if_stopped: RaiseIfStopped = lambda: None) -> None:
        """Train an attempt until it ends or pauses, from its checkpoint if there is one.

        Raises:
            Exception: An error of the module, its data or a callback.
        """
        start = time.perf_counter()
        attempt.set_engine(LIGHTNING, self.reason)
        file = self.settings.checkpoint_file(attempt, "Trainer")
        has_resumed = file is not None and self._resume(attempt, raise_if_stopped, file)
        if not has_resumed:
            self._train(attempt, raise_if_stopped, file)
        attempt.seconds += time.perf_counter() - start

    def _resume(
        self, attempt: Attempt, raise_if_stopped: RaiseIfStopped, file: CheckpointFile
    ) -> bool:
        """Train an attempt from its checkpoint; return False if it must begin from the start."""
        saved = ranks.on_rank_zero(file.find)
        if saved is None:
            return False
        try:
            self._train(attempt, raise_if_stopped, file, saved)
        except UserError:
            raise
        except Exception as error:
            # The module may keep a state that it does not save. If the error has another cause, the
            # run from the start shows it.
            if ranks.is_rank_loss(error):
                raise
            if ranks.world() > 1:  # the other ranks may be elsewhere in the code
                file.remove()
                raise
            file.reject(error)
            attempt.restart()
            return False
        return True

    def _train(
        self,
        attempt: Attempt,
        raise_if_stopped: RaiseIfStopped,
        file: CheckpointFile | None,
        saved: Path | None = None,
    ) -> None:
        """Train an attempt by `Trainer.fit`, and collect what the callbacks measured."""
        settings = self.settings
        trial = attempt.study_trial
        fit = TrialFit.of(settings, attempt, file=file, raise_if_stopped=raise_if_stopped)
        stored = settings.stored_scores(trial)
        if stored is not None:
            fit.pruning.reuse(*stored)
        # Loaders, augmentations and dropout draw from the seed of the point.
        with preserve_rng_state(seed=trial.seed_for("order")):
            trainer = fit.trainer(self.callbacks)
            with suppress(Paused):
                trainer.fit(
                    fit.built.module, datamodule=fit.built.data, ckpt_path=saved, weights_only=True
                )
        if attempt.status is None:
            if lightning_private.batches_of_epoch(trainer) == 0:
                # Lightning has called no hook of training.
                refuse_too_large(trainer, trial.cell.batch_size)
            attempt.failure = (
                f"the module or a callback stopped the fit after {fit.goal_callback.steps} steps; "
                "only the goal and the budget may end a trial"
            )
        settings.store_scores(trial, fit.pruning.key, fit.pruning.scores)
        _collect(fit, attempt)
        for callback in lightning_private.callbacks_of(trainer, NoiseScaleCallback):
            attempt.readings[NOISE_SCALE] = callback.columns


def _collect(fit: TrialFit, attempt: Attempt) -> None:
    """Store in an attempt what the callbacks of its fit measured."""
    if fit.pruning.mask is not None:
        attempt.kept = fit.pruning.mask.kept()
    attempt.seconds = fit.checkpoint.seconds
    attempt.timed = fit.goal_callback.stopwatch.timed
    attempt.flags = {**fit.pruning.flags, **fit.examples.flags, **fit.schedule.flags}
    attempt.flags |= fit.readings.flags
    if ranks.world() > 1:
        attempt.flags[RANKS] = ranks.world()


class ScheduleCallback(Callback):
    """Measures the shape of the learning rate's schedule over the budget.

    Attributes:
        flags: The shape, as in `TrialResult.flags`; empty if the rate is constant or unknown.
    """

    def __init__(self, settings: TrialSettings, trial: Trial, goal_callback: GoalErrorCallback):
        self.settings = settings
        self.trial = trial
        self.goal_callback = goal_callback
        self.flags: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step:
            # The schedule of a resumed run has advanced. The checkpoint has its shape.
            return

        def measure() -> dict[str, float]:
            budget = trainer.max_steps
            rates = rate_curve(trainer, pl_module, budget, self.goal_callback.steps_of_epoch)
            return schedule_shape(rates, budget)

        self.flags = self.settings.schedule_shape(self.trial, measure)

    def state_dict(self) -> dict[str, float]:
        return self.flags

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.flags = state_dict


class StudySignals(Callback):
    """Keeps Lightning from handling signals, because the study handles them."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        lightning_private.leave_signals_alone(trainer)
