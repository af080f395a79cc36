"""GoalErrorCallback: stops a run at the first check that meets the goal error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import ERROR, Goal, value_given
from lit_dps.core.trial import Status
from lit_dps.module import weights_finite
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.training.early_check import EarlyCheck
from lit_dps.training.example_count import record_batches
from lit_dps.training.local_sgd_callback import show_mean
from lit_dps.training.step_count import StepCount
from lit_dps.training.stopwatch import Stopwatch
from lit_dps.training.trainer_rules import forget_followed_metrics, prepare_schedules
from lit_dps.training.training_length import Length, extend_max_epochs
from lit_dps.training.validation_count import ValidationCount, logged, refuse_dropped, rises


class GoalErrorCallback(Callback):
    """Checks the entire validation split every `check_interval` optimizer steps and stops at the
    goal, at that step.

    It works on any LightningModule that logs a validation error, and sets the trainer so that
    validation runs by optimizer steps, across the ends of epochs. A run that meets the goal is
    complete; one that spends the budget is incomplete; one whose loss or weights are not finite at
    a check is infeasible (`lit_dps.core.goal.Goal.judge`). A check whose metric is not finite does
    not meet the goal. Several ranks count the error of the entire split and the loss of the entire
    batch together, and all stop.

    Schedules see a training as long as the budget: `trainer.max_steps`,
    `trainer.estimated_stepping_batches`, and as `trainer.max_epochs` the epochs that the budget
    comes to. `ReduceLROnPlateau` is stepped at the end of an epoch, or after a step, where a check
    has given it a new value since.

    Args:
        error: Goal validation error, in (0, 1): short for `at_most` of `monitor`. Not of another
            `metric`.
        check_interval: Optimizer steps between checks.
        max_steps: Step budget, a multiple of `check_interval`.
        monitor: Name that the module logs its validation error under, as a fraction.
        early_reject: Whether a check may stop as soon as the goal is missed for certain
            (`EarlyCheck`), where module and data allow that. No result changes; errors in the curve
            become lower bounds, and nothing is logged.
        metric: Name of any other metric that the module logs in validation, such as "val/accuracy".
        at_most: The metric is to fall to this value.
        at_least: The metric is to rise to this value.

    Attributes:
        steps: Optimizer steps so far (`StepCount`).
        validated, watch: What the checks looked at; how long steps and checks took.
        run: What the checks found, and how the run ended. A study gives its own, by `follow`.
        status, steps_to_result, curve: Of the run.
        at_check: Called after each check that the run goes on from; may raise, on all ranks. Set
            before a run.
        budget: The trainer's `max_steps` as module, callbacks and schedules see it, for a run that
            ends earlier, such as a dry run; None for the goal's `max_steps`. Set it before a run.
        steps_of_epoch: Optimizer steps of an epoch, set when training starts; None if an epoch has
            no length.
        saved: Whether a run that pauses is saved and left by `at_check`; else it just stops. Set
            before a run.

    Raises:
        ConfigError: for a value out of its range, a trainer that would skip part of the validation
            split or divide a batch among devices in another way than `SharedBatchDDP`, an `at_most`
            of a metric that rises, and a module that does not log it, as the mean over the
            validation split, at every check.
    """

    def __init__(
        self,
        error: float | None = None,
        check_interval: int = 16,
        max_steps: int = 40_000,
        monitor: str = ERROR,
        early_reject: bool = False,
        metric: str | None = None,
        at_most: float | None = None,
        at_least: float | None = None,
    ):
        value = value_given(error, at_most, at_least, metric)
        self.monitor, steps = metric or monitor, (check_interval, max_steps)
        self._key = "goal.monitor" if metric is None else "goal.metric"
        if rises(self.monitor) and at_least is None:
            raise ConfigError(
                self._key, self.monitor, "a metric that falls; of one that rises set goal.at_least"
            )
        of = ERROR if error is not None else self.monitor
        self.goal = Goal(value, *steps, of, at_least is not None)
        self.early_reject = early_reject and at_least is None
        self.at_check: Callable[[], None] = lambda: None
        self.saved: Callable[[], bool] = lambda: False
        self.budget: int | None = None
        self.steps_of_epoch: int | None = None
        self._given: Attempt | None = None
        self._length: Length | None = None
        self._begin()

    def follow(self, run: Attempt) -> None:
        """Lets the next fit be this attempt at a trial; of several ranks the first one's run
        decides."""
        self._given = run

    def _begin(self, early: bool = False) -> None:
        self.run, self._given = self._given or Attempt(None, self.goal), None
        if early:
            self.run.stop_early()
        self._looking: dict[str, float] | None = None  # the metrics of `look`, while it runs
        self._losses: list[
            tuple[Any, float]
        ] = []  # each with the share of its batch that it is the mean over
        self._count, self._due, self._stepped = StepCount(), False, False
        self._epochs, self._last_batch = 0, -1
        self.validated, self.watch = ValidationCount(), Stopwatch()
        self._early: EarlyCheck | None = None
        self._priority: torch.Tensor | None = None

    @property
    def status(self) -> Status | None:
        return self.run.status

    @property
    def steps_to_result(self) -> int | None:
        return self.run.steps_to_result

    @property
    def curve(self) -> dict[str, list[float]]:
        return self.run.curve

    @property
    def steps(self) -> int:
        return self._count.steps

    def is_check(self, step: int) -> bool:
        """Return True if the network is validated after this optimizer step."""
        return step % self.goal.check_interval == 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run:
            return
        if trainer.limit_val_batches != 1.0 or isinstance(
            trainer.limit_val_batches, int
        ):  # 1 is one batch
            raise ConfigError(
                "trainer.limit_val_batches",
                trainer.limit_val_batches,
                "1.0: the goal is asked of all",
            )
        if trainer.world_size > 1 and not isinstance(trainer.strategy, SharedBatchDDP):
            raise ConfigError(
                "trainer.strategy",
                type(trainer.strategy).__name__,
                "SharedBatchDDP on several devices",
            )
        record_batches(trainer)
        early = self.early_reject and EarlyCheck.supports(trainer, pl_module, self.monitor)
        self._begin(early)
        if early:
            trainer.limit_val_batches = 0  # turns off Lightning's validation
        self._set_length(trainer)
        self._length.until_optimizers(pl_module, lambda: self._epochs)

    def before_fit(self, trainer: Trainer, data: LightningDataModule | None) -> None:
        """Make the budget visible to the data module and to callbacks before this one.

        Without this call, they see the budget only after this callback's `setup`. Dataloaders are
        made after this `setup`, so that their batches are counted.
        """
        record_batches(trainer)
        self._length = Length(trainer, self.budget is not None)
        if data is not None:
            self._length.before_data(data, lambda: self._set_length(trainer))

    def _set_length(self, trainer: Trainer) -> None:
        """Make the trainer validate by steps, and show the budget."""
        if self._length is None or self._length.trainer is not trainer:
            self._length = Length(trainer, self.budget is not None)
        trainer.val_check_interval = self.goal.check_interval
        trainer.check_val_every_n_epoch = None  # count steps across the ends of epochs
        trainer.num_sanity_val_steps = 0
        budget = self.budget or self.goal.max_steps
        lightning_private.set_budget(
            trainer, budget if trainer.max_steps < 0 else min(budget, trainer.max_steps)
        )
        self._length.begin()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._length is not None:
            self.steps_of_epoch = self._length.steps_of_epoch()
            self._length.end()
        if "exact" in self.curve:
            self._early = EarlyCheck(trainer, pl_module, self._priority)
            if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
                raise ConfigError(
                    "goal.early_reject", True, "false where a schedule follows a validation metric"
                )
        elif not trainer.enable_validation or not sum(trainer.num_val_batches):
            raise ConfigError(
                "data",
                type(pl_module).__name__,
                "the goal needs validation data and a validation_step",
            )
        else:
            refuse_dropped(trainer)
        prepare_schedules(trainer, pl_module)
        self._count.begin(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._epochs = trainer.current_epoch + 1
        forget_followed_metrics(trainer, "epoch", trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._length is not None and self._length.given and self.status is None:
            extend_max_epochs(trainer)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self._stepped:  # the last batch ended a step
            self._losses = []
        forget_followed_metrics(trainer, "step", self._last_batch + 1)
        self._last_batch = batch_idx
        self.watch.turn("training")
        self._count.before_batch(trainer)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if batch is None:  # Lightning trains on nothing then, and calls no `on_train_batch_start`
            self._due = False
            trainer.val_check_batch = sys.maxsize
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._losses.append(
                (loss, getattr(trainer.strategy, "share", 1.0))
            )  # a tensor: no synchronization
        if trainer.fast_dev_run:
            return
        # Lightning counts batches; an epoch that ends within an accumulation makes them no measure
        # of steps
        self._stepped = self._count.after_batch(trainer, skipped=not self._losses)
        self._due = self._stepped and self.is_check(self.steps)
        trainer.val_check_batch = 1 if self._due else sys.maxsize
        if self._due:
            self.watch.turn("checking", pl_module.device)
            show_mean(trainer)
        if self._due and self._early is not None and self.status is None:
            check = self._early(self.run.allowed(self._early.size))
            self._judge(trainer, pl_module, check.error(self._early.size), check.exact)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            for name in (
                self.monitor,
                *self.run.metrics,
            ):  # of an earlier check, or logged in training
                trainer.callback_metrics.pop(name, None)
            self.validated.begin()

    def on_validation_batch_start(
        self, trainer, pl_module, batch, batch_idx, dataloader_idx=0
    ) -> None:
        if trainer.state.fn == "fit":
            self.validated.add(trainer, batch, dataloader_idx)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            return
        if not self._due and self._looking is None:  # whoever stops the trainer gets a validation
            return
        keys = {self.monitor: self._key, **dict.fromkeys(self.run.metrics, "study.metrics")}
        found = {name: logged(trainer, name, key) for name, key in keys.items()}
        self.validated.end(trainer)
        for name, key in keys.items():
            if why := self.validated.why_no_mean(trainer, name):
                raise ConfigError(key, name, f"the mean over the validation split: {why}")
        if self._looking is not None:
            self._looking.update(found)
            return
        error = found.pop(self.monitor)
        if self.status is None:  # otherwise min_steps or min_epochs keep the trainer running
            self._judge(trainer, pl_module, error, exact=True, metrics=found)

    def look(self, trainer: Trainer) -> dict[str, float]:
        """Validate the network now, and return the metrics of the goal and of the run by name.

        The run does not record these values. Call this while the trainer fits, between two batches
        or at the end.
        """
        if self._early is not None:
            return {self.monitor: self._early(self._early.size).error(self._early.size)}
        self._looking = found = {}
        try:
            lightning_private.validate_now(trainer)
        finally:
            self._looking = None
        return found

    def _judge(
        self,
        trainer: Trainer,
        module: LightningModule,
        error: float,
        exact: bool,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self.watch.checked(self.goal.check_interval)
        losses, divisor = (
            self._losses,
            trainer.accumulate_grad_batches,
        )  # Lightning divides each by this
        own = (
            divisor * sum(share * float(loss) for loss, share in losses) / len(losses)
            if losses
            else 0.0
        )
        finite = weights_finite(module)
        total, broken = ranks.all_reduce_sum(
            torch.tensor([own, float(not finite)], dtype=torch.float64)
        ).tolist()
        verdict = self.run.record(
            self.steps, error, exact, total if losses else None, not broken, metrics
        )
        self.run.status = ranks.broadcast(verdict)  # the first one alone knows of the race
        if self.status is None or (self.status is Status.PAUSED and self.saved()):
            self.at_check()
        else:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        priority = self._early.priority if self._early is not None else None
        return {
            "curve": self.curve,
            "priority": priority,
            "steps": self.steps,
            "epochs": self._epochs,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.run.curve, self._priority = state_dict["curve"], state_dict.get("priority")
        self._count.steps, self._epochs = state_dict.get("steps"), state_dict.get("epochs", 0)
