"""ReadingsCallback: takes the readings of an attempt in Lightning's loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.optim import Optimizer

from lit_dps.core.attempt import Attempt
from lit_dps.core.errors import ConfigError
from lit_dps.core.goal import Goal
from lit_dps.core.trial_config import SmoothnessConfig
from lit_dps.readings.attempt_readings import AttemptReadings
from lit_dps.readings.reading import KEY, LossPass
from lit_dps.readings.registry import resolve_readings
from lit_dps.training import lightning_private
from lit_dps.training.batch_schedule_callback import missing_rate_factor
from lit_dps.training.example_count import full_batch_size, record_batches
from lit_dps.training.goal_callback import GoalErrorCallback
from lit_dps.training.local_sgd_callback import show_mean
from lit_dps.training.masked_tensors import gradient_scale, gradients_of
from lit_dps.training.pruning_callback import masks_of, trained_ids_of
from lit_dps.training.stopwatch import stopwatch_of
from lit_dps.training.training_pass import TrainingPass, batch_on_device, loss_of

# Examples of a batch of the pass that makes the copy. No batch is taken of it.
_ANY_BATCH_SIZE = 1


class ReadingsCallback(Callback):
    """Takes readings along a fit, and at the end if there is a `GoalErrorCallback` before it.

    Training itself is not changed. A reading at a check precedes the validation: user's hooks may
    put other weights in place there. Loggers get the values of readings along the fit.

    Args:
        readings: Entries as in `study.readings`: names such as "lipschitz", class paths, or
            {class_path, init_args}.

    Attributes:
        columns: The values along the fit by reading, as in `TrialResult.readings`.
        ends: The values at the end, as in `TrialResult.end_readings`.
        flags: Numbers of the whole fit, as in `TrialResult.flags`.
        is_short: As in `AttemptReadings`. Set it before a fit.

    Raises:
        ConfigError: for an entry that is no reading. In a fit without `GoalErrorCallback`: for a
            reading at checks or at the end.

    Example::

        lipschitz = {"class_path": "lipschitz", "init_args": {"interval": 50}}
        measured = ReadingsCallback([lipschitz])
        Trainer(callbacks=[measured], max_steps=200).fit(module, datamodule=data)
        print(measured.columns["lipschitz"])
    """

    def __init__(self, readings: Sequence[Any] = ()):
        self._specs = resolve_readings(readings)
        self.is_short = False
        self._begin(Attempt(None, Goal(0.5)))

    @classmethod
    def of(cls, config: SmoothnessConfig) -> Self:
        """Return the callback of the section `smoothness`."""
        return cls(resolve_readings([], config))

    @property
    def has_readings(self) -> bool:
        """Whether anything is read."""
        return bool(self._specs)

    @property
    def measures_one_network(self) -> bool:
        """Whether a reading follows single steps. Local SGD refuses it: each worker has others."""
        return any(spec.build().follows_steps for spec in self._specs)

    @property
    def columns(self) -> dict[str, dict[str, list[float]]]:
        return self._attempt.readings

    @property
    def ends(self) -> dict[str, float]:
        return self._attempt.end_readings

    @property
    def flags(self) -> dict[str, float]:
        return self._readings.flags

    def _begin(self, attempt: Attempt) -> None:
        self._attempt = attempt
        readings = [spec.build() for spec in self._specs]
        self._readings = AttemptReadings(readings, attempt, self.is_short)
        self._steps_before_batch = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning loads the state of a checkpoint after this hook.
        if stage != "fit" or not self._specs:
            return
        for callback in lightning_private.callbacks_of(trainer):
            if isinstance(callback, GoalErrorCallback):
                self._begin(callback.attempt)
                return
            if callback is self:
                break
        record_batches(trainer)
        for spec in self._specs:
            if spec.build().when != "step":
                allowed = (
                    "a reading after steps. Readings at validations or at the end need a "
                    "GoalErrorCallback in the trainer"
                )
                raise ConfigError(KEY, spec.class_path, allowed)
        self._begin(Attempt(None, Goal(0.5)))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._specs:
            return
        step = trainer.global_step
        self._steps_before_batch = step
        run = _FitRun(self._attempt, trainer, pl_module, batch)
        if self._readings.is_due_before(step + 1):
            with stopwatch_of(trainer).paused(pl_module.device):
                self._readings.before(step + 1, run)
        # With `min_steps`, the trainer continues after the attempt has ended.
        self._read_end(trainer, run)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        rate = missing_rate_factor(trainer) * float(optimizer.param_groups[0]["lr"])
        self._readings.count(rate)
        step = self._steps_before_batch + 1
        scale = gradient_scale(trainer, optimizer)
        self._readings.see_gradients(step, partial(gradients_of, pl_module, optimizer, scale))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # Lightning does not train on a batch that is None.
        if batch is None or not self._specs or step == self._steps_before_batch:
            return
        run = _FitRun(self._attempt, trainer, pl_module, batch)
        if self._readings.is_due(step):
            with stopwatch_of(trainer).paused(pl_module.device):
                show_mean(trainer)
                values = self._readings.read(step, run)
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)
        self._read_end(trainer, run)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_end(trainer, _FitRun(self._attempt, trainer, pl_module))

    def _read_end(self, trainer: Trainer, run: _FitRun) -> None:
        if not self._readings.is_end_due:
            return
        with stopwatch_of(trainer).paused(run.module.device):
            show_mean(trainer)
            self._readings.read_end(trainer.global_step, run)

    def state_dict(self) -> dict[str, Any]:
        return self._readings.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._readings.load_state_dict(state_dict)


@dataclass(eq=False)
class _FitRun:
    """A run in Lightning's loop, as readings look at it."""

    attempt: Attempt
    trainer: Trainer
    module: LightningModule
    batch: Any = None

    @property
    def data_module(self) -> LightningDataModule:
        return self.trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def masks(self) -> Mapping[str, Tensor]:
        return masks_of(self.trainer, self.module)

    @property
    def trained(self) -> set[int]:
        return trained_ids_of(self.trainer)

    @property
    def batch_size(self) -> int:
        if self.attempt.trial is not None:
            return self.attempt.trial.cell.batch_size
        return full_batch_size(self.trainer, self.batch) * self.trainer.accumulate_grad_batches

    def copied(self) -> AbstractContextManager[LightningModule]:
        run = TrainingPass(self.trainer, self.module, _ANY_BATCH_SIZE)
        return run.without_side_effects()

    def training_pass(self, batch_size: int, examples: int | None) -> LossPass:
        return TrainingPass(self.trainer, self.module, batch_size, examples)

    def validation_batches(self) -> Iterator[Any]:
        # In this mode, batches of several dataloaders follow one another, with their number.
        loaders = CombinedLoader(self.data_module.val_dataloader(), "sequential")
        for batch, _, number in loaders:
            yield batch_on_device(self.trainer, self.module, batch, number)

    def loss_of(self, module: LightningModule, batch: Any) -> Tensor | None:
        return loss_of(module, batch, 0)
