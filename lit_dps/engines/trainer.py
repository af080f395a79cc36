"""The Trainer engine: one run at a time, each by Lightning's `Trainer.fit`, of any module and data
module."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import UserError
from lit_dps.core.trial import LIGHTNING, RANKS, Trial, TrialResult
from lit_dps.engines.eligible import standard_data
from lit_dps.engines.engine import Training
from lit_dps.parallel import ranks
from lit_dps.readings import SmoothnessCallback
from lit_dps.training import GoalErrorCallback, PruningCallback, lightning_private
from lit_dps.training.checkpoint_callback import CheckpointCallback, Paused
from lit_dps.training.checkpoint_files import CheckpointFile
from lit_dps.training.rate_curve import rate_curve, schedule_shape
from lit_dps.training.rng_state import preserve_rng_state
from lit_dps.training.step_count import ExamplesCallback, refuse_too_large
from lit_dps.training.trainer_rules import filter_module_callbacks
from lit_dps.training.workload import Built


@dataclass(frozen=True)
class TrialFit:
    """The objects with which Lightning trains a trial.

    The dry run uses this class too, so that it calls the same hooks in the same order.

    Attributes:
        built: The module, the data module and the trainer's arguments.
        goal, pruning, smoothness, examples, schedule: Callbacks of the study.
        checkpoint: Saves the run; None if the run is not saved.
        callbacks: The callbacks of the study in their order; they are called after those of the
            user.
    """

    built: Built
    goal: GoalErrorCallback
    pruning: PruningCallback
    smoothness: SmoothnessCallback
    examples: ExamplesCallback
    schedule: ScheduleCallback
    checkpoint: CheckpointCallback | None
    callbacks: tuple[Callback, ...]

    @classmethod
    def of(
        cls,
        training: Training,
        run: Attempt,
        goal: GoalErrorCallback | None = None,
        file: CheckpointFile | None = None,
        at_check: Callable[[], None] = lambda: None,
    ) -> TrialFit:
        """Build the trial of a run.

        Args:
            training: What the trials of the study have in common.
            run: The attempt at the trial.
            goal: Validates the run instead of the study's callback.
            file: The file in which the run is saved; None saves nothing.
            at_check: See `TrainerEngine.train`.
        """
        trial = run.trial
        built = training.workload.build(trial)
        if goal is None:
            goal = GoalErrorCallback.of(training.goal)
            goal.budget = training.budget
        goal.record_in(run)
        goal.at_check, checkpoint = at_check, None
        if file is not None:
            checkpoint = CheckpointCallback(file, training.checkpoints.seconds, run, at_check)
            goal.at_check, goal.saves_pause = checkpoint.checked, lambda: checkpoint.can_save
        pruning = training.pruning_of(trial)
        smoothness = SmoothnessCallback.of(training.smoothness)
        examples = ExamplesCallback(trial.cell.batch_size, training.workload.batch_size_key)
        delay = training.delay_of(trial)
        local = training.local_of(trial)  # before the goal, which asks for the loss of all workers
        ours: list[Callback] = [_OwnSignals(), pruning]
        if delay.delay:
            ours.append(delay)
        if smoothness.interval:
            ours.append(smoothness)
        if local.rounds.on:
            ours.append(local)
        schedule = ScheduleCallback(training, trial, goal)
        ours += [goal, schedule]
        if not standard_data(built.data):
            ours.append(examples)
        if checkpoint is not None:
            ours.append(checkpoint)
        filter_module_callbacks(built.module)
        return cls(built, goal, pruning, smoothness, examples, schedule, checkpoint, tuple(ours))

    def trainer(self, further: Sequence[Callback] = (), last: Sequence[Callback] = ()) -> Trainer:
        """Return the trainer.

        Args:
            further: Callbacks between those of the user and those of the study.
            last: Callbacks after those of the study.
        """
        callbacks = [*self.built.trainer["callbacks"], *further, *self.callbacks, *last]
        trainer = Trainer(**{**self.built.trainer, "callbacks": callbacks})
        self.goal.before_fit(trainer, self.built.data)
        return trainer


@dataclass(frozen=True)
class TrainerEngine:
    """Runs trials of any LightningModule and LightningDataModule, one after another.

    What a module, its data or a callback raises ends their trial alone, as failed; of several ranks
    it ends them all.

    Attributes:
        training: What the trials have in common.
        callbacks: Further callbacks of every run, such as a stopwatch.
    """

    training: Training
    callbacks: tuple[Callback, ...] = ()

    def train(
        self, next_run: Callable[[], Attempt | None], at_check: Callable[[], None] = lambda: None
    ) -> Iterator[TrialResult]:
        while (run := next_run()) is not None:
            yield self.training.attempt(run, lambda run: self.train_one(run, at_check))

    def train_one(self, run: Attempt, at_check: Callable[[], None] = lambda: None) -> None:
        """Trains one run to its goal, budget or divergence, from its checkpoint if there is one.

        Raises:
            Exception: what the module, its data or a callback raises.
        """
        begin, checkpoints = time.perf_counter(), self.training.checkpoints
        file = self.training.file_of(run, "Trainer")
        saved = (
            None
            if file is None
            else ranks.on_rank_zero(lambda: checkpoints.find(run.trial, file.about))
        )
        anew = saved is None
        if not anew:
            try:
                self._train(run, at_check, file, saved)
            except UserError:
                raise
            # of a module that keeps more than it saves, say; a new run tells whose it is
            except Exception as error:
                if ranks.is_rank_loss(error):
                    raise
                checkpoints.remove(run.trial)
                if ranks.world() > 1:  # the others may be elsewhere
                    raise
                why = str(error).split("\n")[0]
                checkpoints.say(
                    f"{file.about['name']} restarts: it cannot resume from its checkpoint ({why})"
                )
                run.restart()
                anew = True
        if anew:
            self._train(run, at_check, file)
        run.seconds += time.perf_counter() - begin

    def _train(
        self,
        run: Attempt,
        at_check: Callable[[], None],
        file: CheckpointFile | None,
        saved: Path | None = None,
    ) -> None:
        training, trial = self.training, run.trial
        fit = TrialFit.of(training, run, file=file, at_check=at_check)
        if (known := training.known_scores(trial)) is not None:
            fit.pruning.reuse(*known)
        with preserve_rng_state(
            seed=trial.seed_for("order")
        ):  # what a loader, an augmentation or dropout draws is the point's
            trainer = fit.trainer(self.callbacks)
            with suppress(Paused):
                trainer.fit(
                    fit.built.module, datamodule=fit.built.data, ckpt_path=saved, weights_only=True
                )
        goal, pruning, smoothness, checkpoint = (
            fit.goal,
            fit.pruning,
            fit.smoothness,
            fit.checkpoint,
        )
        if run.status is None:
            if lightning_private.batches_of_epoch(trainer) == 0:
                refuse_too_large(
                    trainer, trial.cell.batch_size
                )  # Lightning has called no hook of training
            run.failure = f"the module or a callback stopped it after {goal.steps} steps"
        training.keep_scores(trial, pruning.key, pruning.scores)
        run.kept = pruning.mask.kept() if pruning.mask is not None else {}
        run.seconds = checkpoint.seconds if checkpoint is not None else 0.0
        run.timed = goal.stopwatch.timed
        run.smoothness, run.theory = (
            (smoothness.curve if smoothness.interval else {}),
            smoothness.terms,
        )
        run.engine = LIGHTNING
        together = {RANKS: ranks.world()} if ranks.world() > 1 else {}
        run.flags = {
            **pruning.flags,
            **fit.examples.flags,
            **fit.schedule.flags,
            **together,
        }


class ScheduleCallback(Callback):
    """Measures the shape of the learning rate's schedule over the budget.

    Attributes:
        flags: The shape, as in `TrialResult.flags`; empty if the rate is constant or unknown.
    """

    def __init__(self, training: Training, trial: Trial, goal: GoalErrorCallback):
        self.training, self.trial, self.goal = training, trial, goal
        self.flags: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (
            trainer.global_step
        ):  # a resumed run; its schedule has advanced, and the state has its shape
            return

        def evaluate() -> dict[str, float]:
            budget = trainer.max_steps
            return schedule_shape(
                rate_curve(trainer, pl_module, budget, self.goal.steps_of_epoch), budget
            )

        self.flags = self.training.schedule_of(self.trial, evaluate)

    def state_dict(self) -> dict[str, float]:
        return self.flags

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self.flags = state_dict


class _OwnSignals(Callback):
    """Leaves signals to whoever handles them outside of the run."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        lightning_private.leave_signals_alone(trainer)
