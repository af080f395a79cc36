"""GoalErrorCallback: stops training at the first validation that meets the goal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.optim import Optimizer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.attempt import Attempt, Validation
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import SINGLE_CHECK, VALIDATION_ERROR
from lit_dps.core.trial import Status
from lit_dps.core.trial_config import GoalConfig
from lit_dps.core.unit import EXAMPLES, STEPS
from lit_dps.module import weights_finite
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.training.average_callback import refuse_later_average, showing_average
from lit_dps.training.early_validation import EarlyValidation
from lit_dps.training.example_count import SpentOfSteps, examples_of, record_batches
from lit_dps.training.inheritance import adopt_former_methods
from lit_dps.training.local_sgd_callback import show_mean
from lit_dps.training.step_count import StepCount
from lit_dps.training.stopwatch import Stopwatch
from lit_dps.training.trainer_rules import (
    TrainingLength,
    extend_max_epochs,
    follows_metric,
    forget_followed_metrics,
    prepare_schedules,
)
from lit_dps.training.training_pass import loss_of_output
from lit_dps.training.validation import (
    ValidationCount,
    logged_metric,
    refuse_drop_last,
)


class GoalErrorCallback(Callback):
    """Stop training at the first validation that meets the goal.

    The callback validates on the entire validation split after every `check_interval` optimizer
    steps, also across the ends of epochs. It works with any LightningModule that logs a validation
    metric. A run ends in one of these states (`lit_dps.core.goal.Goal.judge`):

    - complete: a validation met the goal;
    - incomplete: no validation met it within the budgets;
    - infeasible: the loss or a weight was not finite at a validation.

    A validation whose metric is not finite does not meet the goal. With several ranks, the metric
    covers the entire split, the loss covers the entire batch, and all ranks stop together.

    Modules, callbacks and schedules see `max_steps` as the length of training: in
    `trainer.max_steps`, in `trainer.estimated_stepping_batches`, and as epochs in
    `trainer.max_epochs`.
    `ReduceLROnPlateau` is stepped at the end of an epoch or step only if the metric has a new
    value.

    Args:
        error: The goal: a validation error of at most this share, in (0, 1), as the module logs it
            under `monitor`. Leave it out if `metric` is the goal.
        check_interval: Optimizer steps between two validations.
        max_steps: Optimizer steps after which the run ends without the goal, a multiple of
            `check_interval`.
        monitor: Name that the module logs the validation error under, such as
            `self.log("val_error", error)` in `validation_step`.
        early_reject: Stop a validation once the goal is certainly missed. The steps to the goal are
            the same; the curve then has lower bounds of the error. The module needs
            `per_example_error`, as `ImageClassifier` has it; otherwise all validations are full.
        metric: Another validation metric as the goal, by the name that the module logs, such as
            "val_loss" or "val_accuracy". Needs `at_most` or `at_least`.
        at_most: The largest value of the metric that meets the goal.
        at_least: The smallest value of the metric that meets the goal.
        rule: When the validations of the run meet the goal: "single", "mean_of_checks",
            "stays_below", or the class path of a `lit_dps.core.goal.GoalRule`.
        options: Arguments of the rule, such as `{"checks": 3}`.
        max_examples: Training examples after which the run ends without the goal.
        max_seconds: Seconds of training steps with their data, without validation, after which the
            run ends without the goal. With several ranks, the clock of the first rank decides.
        unit: The unit of K* in a study. In "examples" or "seconds", the curve counts them.

    Attributes:
        attempt: The attempt that records the validations and decides when the run ends.
        status: How the run ended; None while it trains.
        steps_to_result: Step of the validation at which the goal was first met; None if it was not.
        curve: Values of all validations of the run, by name.
        steps: Optimizer steps so far (`StepCount`).
        validated: Batches and examples of the validations.
        stopwatch: Seconds of steps and validations.
        after_check: Called after each validation that does not end the run; may raise, on all
            ranks. Set it before a run.
        saves_pause: Returns whether `after_check` saves and ends a paused run. Otherwise the
            trainer stops. Set it before a run.
        shown_steps: The `trainer.max_steps` to show in a run that ends earlier, such as a dry run.
            None shows the goal's `max_steps`. Set it before a run.
        steps_of_epoch: Optimizer steps of an epoch, set when training starts; None if an epoch has
            no length.

    Raises:
        ConfigError: if a value is out of its range, or if `at_most` is the goal of a metric that
            rises. In a fit: if the trainer would skip a part of the validation split, if it divides
            a batch among devices without `SharedBatchDDP`, or if the module does not log the metric
            at every validation, as the mean over the validation split.

    Example::

        goal = GoalErrorCallback(error=0.02, check_interval=16, max_steps=40_000)
        Trainer(callbacks=[goal], max_epochs=-1).fit(module, datamodule=data)
        print(goal.status, goal.steps_to_result)
        print(goal.curve["step"], goal.curve["val_error"])

        accuracy = GoalErrorCallback(metric="val_accuracy", at_least=0.95, max_steps=10_000)
        mean = GoalErrorCallback(error=0.02, rule="mean_of_checks", options={"checks": 3})
    """

    ends_at_goal = True  # of the class, for `trainer_rules.refuse_goals`

    def __init__(
        self,
        error: float | None = None,
        check_interval: int = 16,
        max_steps: int = 40_000,
        monitor: str = VALIDATION_ERROR,
        early_reject: bool = False,
        metric: str | None = None,
        at_most: float | None = None,
        at_least: float | None = None,
        rule: str = SINGLE_CHECK,
        options: dict[str, Any] | None = None,
        max_examples: int | None = None,
        max_seconds: float | None = None,
        unit: str = STEPS.name,
    ):
        config = GoalConfig(
            error=error,
            check_interval=check_interval,
            max_steps=max_steps,
            monitor=monitor,
            early_reject=early_reject,
            metric=metric,
            at_most=at_most,
            at_least=at_least,
            rule=rule,
            options=options,
            max_examples=max_examples,
            max_seconds=max_seconds,
            unit=unit,
        )
        self._config = config
        self.goal = config.build()
        self.monitor = config.monitored
        self.early_reject = config.stops_validations_early
        # Called after a validation if the run continues, or if it pauses and is saved.
        self.after_check: Callable[[], None] = lambda: None
        self.saves_pause: Callable[[], bool] = lambda: False
        self.shown_steps: int | None = None
        self.steps_of_epoch: int | None = None
        self._next_attempt: Attempt | None = None
        self._length: TrainingLength | None = None
        self._reset()

    @classmethod
    def of(cls, config: GoalConfig) -> Self:
        """Return the callback of a configuration."""
        return cls(**vars(config))

    @property
    def budget(self) -> int | None:
        raise AttributeError("GoalErrorCallback.budget is now shown_steps")

    @budget.setter
    def budget(self, steps: int | None) -> None:
        raise AttributeError("GoalErrorCallback.budget is now shown_steps")

    def _reset(self) -> None:
        self.attempt = self._next_attempt or Attempt(None, self.goal)
        self._next_attempt = None
        self.validated = ValidationCount()
        self.stopwatch = Stopwatch()
        self._count = StepCount()
        self._spent = SpentOfSteps()
        self._is_due = False  # whether a validation follows the last batch
        self._unrecorded: dict[str, float] | None = None  # receives the values of `validate_now`
        self._epochs = 0
        self._last_batch = -1
        self._early: EarlyValidation | None = None

    def record_in(self, attempt: Attempt) -> None:
        """Record the next fit in this attempt at a trial.

        With several ranks, the attempt of the first rank decides when the run ends.
        """
        self._next_attempt = attempt

    @property
    def status(self) -> Status | None:
        return self.attempt.status

    @property
    def steps_to_result(self) -> int | None:
        return self.attempt.steps_to_result

    @property
    def curve(self) -> dict[str, list[float]]:
        return self.attempt.curve

    @property
    def steps(self) -> int:
        return self._count.steps or 0

    def is_check(self, step: int) -> bool:
        """Return True if a validation follows this optimizer step. A dry run overrides this."""
        return step % self.goal.check_interval == 0

    def before_fit(self, trainer: Trainer, data: LightningDataModule | None) -> None:
        """Make the length of training visible to the data module and to earlier callbacks.

        Without this call, they see it only after this callback's `setup`. The dataloaders are made
        later, so that their batches are counted.
        """
        record_batches(trainer)
        self._length = TrainingLength(trainer)
        if data is not None:
            self._length.before_data(data, lambda: self._set_length(trainer))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or lightning_private.is_fast_dev_run(trainer):
            return
        refuse_later_average(trainer, self)
        # The integer 1 means one batch.
        is_count = isinstance(trainer.limit_val_batches, int)
        if is_count or trainer.limit_val_batches != 1.0:
            raise ConfigError(
                "trainer.limit_val_batches",
                trainer.limit_val_batches,
                "1.0, because the goal needs the entire validation split",
            )
        if trainer.world_size > 1 and not isinstance(trainer.strategy, SharedBatchDDP):
            raise ConfigError(
                "trainer.strategy",
                type(trainer.strategy).__name__,
                "SharedBatchDDP on several devices",
            )
        record_batches(trainer)
        self._reset()
        adopt_former_methods(pl_module)
        if self.early_reject and EarlyValidation.supports(trainer, pl_module, self.monitor):
            self.attempt.enable_early_validations()
            trainer.limit_val_batches = 0  # turns off Lightning's validation
        length = self._set_length(trainer)
        length.fix_at_optimizers(pl_module, lambda: self._epochs)

    def _set_length(self, trainer: Trainer) -> TrainingLength:
        """Make the trainer validate by steps, and set the length of training."""
        if self._length is None or self._length.trainer is not trainer:
            self._length = TrainingLength(trainer)
        trainer.val_check_interval = self.goal.check_interval
        trainer.check_val_every_n_epoch = None  # count steps across the ends of epochs
        trainer.num_sanity_val_steps = 0
        max_steps = self.shown_steps or self.goal.max_steps
        if trainer.max_steps >= 0:
            max_steps = min(max_steps, trainer.max_steps)
        lightning_private.set_max_steps(trainer, max_steps)
        self._length.set_max_epochs()
        return self._length

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._length is not None:
            self.steps_of_epoch = self._length.steps_of_epoch()
        if "exact" in self.curve:  # `EarlyValidation` validates, also in a run from a checkpoint
            self._begin_early_validations(trainer, pl_module)
        elif not trainer.enable_validation or not sum(trainer.num_val_batches):
            raise ConfigError(
                "data",
                type(pl_module).__name__,
                "a module and data with validation, because the goal is tested there",
            )
        else:
            refuse_drop_last(trainer)
        prepare_schedules(trainer, pl_module)
        self._count.begin(trainer)
        lightning_private.before_each_fetch(trainer, lambda: self._begin_loading(trainer))

    def _begin_loading(self, trainer: Trainer) -> None:
        # A resumed run first repeats the pass over its data, which is no part of a step.
        if self._last_batch >= 0 or not trainer.global_step:
            self.stopwatch.switch_to("training")

    def _begin_early_validations(self, trainer: Trainer, module: LightningModule) -> None:
        self._early = EarlyValidation(trainer, module)
        if follows_metric(trainer):
            raise ConfigError(
                "goal.early_reject",
                True,
                "false, because a schedule of the learning rate follows a validation metric",
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epochs = trainer.current_epoch + 1
        forget_followed_metrics(trainer, "epoch", trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._length is not None and self._length.sets_epochs and self.status is None:
            extend_max_epochs(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        forget_followed_metrics(trainer, "step", self._last_batch + 1)
        self._last_batch = batch_idx
        self.stopwatch.switch_to("training")
        if EXAMPLES.column in self.attempt.curve:
            self._spent.add_batch(examples_of(trainer, batch))
        self._count.before_batch(trainer)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        self._count.begin_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch is None:
            # Lightning does not train on such a batch, and does not call `on_train_batch_start`.
            self._schedule_validation(trainer, is_due=False)
            return
        loss = loss_of_output(outputs)
        if loss is not None:
            self._count.add_loss(trainer, loss)
        if lightning_private.is_fast_dev_run(trainer):
            return
        # Lightning counts batches until a validation. An epoch can end within an accumulation, so
        # batches do not determine steps.
        has_stepped = self._count.after_batch(trainer)
        if loss is None and pl_module.automatic_optimization:
            self._spent.skip_batch()
        if has_stepped:
            self._spent.step()
            self.attempt.on_step(pl_module.device)
        is_due = has_stepped and self.is_check(self.steps)
        self._schedule_validation(trainer, is_due)
        if not is_due:
            return
        self.stopwatch.switch_to("checking", pl_module.device)
        show_mean(trainer)
        if self._early is not None and self.status is None:
            with showing_average(trainer):
                count = self._early(self.attempt.max_mistakes(self._early.size))
            self._judge(trainer, pl_module, count.error(self._early.size), count.exact)

    def _schedule_validation(self, trainer: Trainer, is_due: bool) -> None:
        """Make Lightning validate after this batch, or not."""
        self._is_due = is_due
        trainer.val_check_batch = 1 if is_due else sys.maxsize

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            # A value may be of an earlier validation, or logged in training.
            for name in (self.monitor, *self.attempt.metrics):
                trainer.callback_metrics.pop(name, None)
            self.validated.begin()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if trainer.state.fn == "fit":
            self.validated.add(trainer, batch, dataloader_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        if not self._is_due and self._unrecorded is None:
            # Lightning also validates when a callback stops the trainer.
            return
        metrics = self._validated_metrics(trainer)
        if self._unrecorded is not None:
            self._unrecorded.update(metrics)
            return
        value = metrics.pop(self.monitor)
        # With `min_steps` or `min_epochs`, the trainer may continue after the run has ended.
        if self.status is None:
            self._judge(trainer, pl_module, value, exact=True, metrics=metrics)

    def _validated_metrics(self, trainer: Trainer) -> dict[str, float]:
        """Return the metrics of the validation that just ended, by name.

        Raises:
            ConfigError: if a metric is not logged, or is not the mean over the validation split.
        """
        keys = dict.fromkeys(self.attempt.metrics, "study.metrics")
        keys = {self.monitor: self._config.metric_key, **keys}
        metrics = {name: logged_metric(trainer, name, key) for name, key in keys.items()}
        self.validated.end(trainer)
        for name, key in keys.items():
            reason = self.validated.why_no_mean(trainer, name)
            if reason is not None:
                raise ConfigError(key, name, f"the mean over the validation split: {reason}")
        self.check_scale(metrics[self.monitor])
        return metrics

    def check_scale(self, value: float) -> None:
        """Raise ConfigError if a value of the goal's metric is no share, but the goal is one."""
        self._config.check_scale(value)

    def validate_now(self, trainer: Trainer) -> dict[str, float]:
        """Validate the network, and return the metrics of the goal and of the run by name.

        The run does not record these values. Call this during a fit, between two batches or at the
        end.
        """
        if self._early is not None:
            with showing_average(trainer):
                count = self._early(self._early.size)
            return {self.monitor: count.error(self._early.size)}
        self._unrecorded = {}
        metrics = self._unrecorded
        try:
            lightning_private.validate_now(trainer)
        finally:
            self._unrecorded = None
        return metrics

    def _judge(
        self,
        trainer: Trainer,
        module: LightningModule,
        value: float,
        exact: bool,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Record a validation, and stop the trainer if the run ends.

        Args:
            trainer: The trainer.
            module: The module, whose weights have to be finite.
            value: Value of the goal's metric.
            exact: Whether the value is exact; otherwise it is a lower bound.
            metrics: Values of the run's further metrics, by name.
        """
        self.stopwatch.add_validation(self.goal.check_interval)
        loss = self._count.mean_loss(trainer)
        is_broken = not weights_finite(module)
        sums = torch.tensor([loss or 0.0, float(is_broken)], dtype=torch.float64)
        total_loss, broken_ranks = ranks.all_reduce_sum(sums).tolist()
        validation = Validation(
            self.steps,
            value,
            exact,
            None if loss is None else total_loss,
            weights_finite=not broken_ranks,
            metrics=metrics or {},
            spent=self._spent.take(trainer, self.attempt, self.stopwatch),
        )
        status = self.attempt.record(validation)
        # Only the first rank knows about the race.
        self.attempt.status = ranks.broadcast(status)
        is_saved_pause = self.status is Status.PAUSED and self.saves_pause()
        if self.status is None or is_saved_pause:
            self.after_check()
        else:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {
            "curve": self.curve,
            "steps": self._count.steps,
            "epochs": self._epochs,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.attempt.curve = state_dict["curve"]
        self._count.steps = state_dict.get("steps")
        self._epochs = state_dict.get("epochs", 0)
