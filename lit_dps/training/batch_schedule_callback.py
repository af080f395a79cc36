"""BatchScheduleCallback: trains each optimizer step on a batch of the size that a schedule sets."""

from __future__ import annotations

from typing import Any, Self

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.batch_schedule import CONSTANT, CONSTANT_BATCH, NAME_KEY, BatchSchedule
from lit_dps.core.errors import ConfigError
from lit_dps.core.trial_config import BatchConfig
from lit_dps.data import ImageData
from lit_dps.training.inheritance import inherits


class BatchScheduleCallback(Callback):
    """Train each optimizer step on a batch of the size that a schedule sets.

    With accumulated gradients, all batches of a step have the same size.

    Args:
        schedule, options:
            Keys of the section `batch` (`lit_dps.core.trial_config.BatchConfig`).

    Raises:
        ConfigError: as `BatchConfig`. When a fit begins, for data that do not support a schedule.
    """

    def __init__(self, schedule: str = CONSTANT, options: dict[str, Any] | None = None):
        self.name = schedule
        self.schedule: BatchSchedule = BatchConfig(schedule, options).build()

    @classmethod
    def of(cls, config: BatchConfig) -> Self:
        """Return the callback of a configuration."""
        return cls(**vars(config))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            data = lightning_private.data_module_of(trainer)
            self.apply_to(data, trainer.accumulate_grad_batches)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._reset(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # Lightning calls no `teardown` then.
        self._reset(trainer)

    def _reset(self, trainer: Trainer) -> None:
        """Give the data module constant batches again: the next fit may have no schedule."""
        data: Any = lightning_private.data_module_of(trainer)
        if not self.schedule.is_constant and hasattr(data, "schedule_batches"):
            data.schedule_batches(CONSTANT_BATCH, 1)

    def apply_to(self, data: LightningDataModule | None, parts: int = 1) -> None:
        """Let a data module make batches of the sizes that the schedule sets.

        Args:
            data: The data module.
            parts: Batches of an optimizer step.
        """
        if self.schedule.is_constant:
            return
        schedule_batches: Any = getattr(data, "schedule_batches", None)
        if schedule_batches is None or is_ignored(data):
            allowed = (
                f"{CONSTANT} for {type(data).__name__}: only ImageData, and a data module with a "
                "method schedule_batches(schedule, parts), make batches of several sizes"
            )
            raise ConfigError(NAME_KEY, self.name, allowed)
        schedule_batches(self.schedule, parts)


def schedule_name(trainer: Trainer) -> str:
    """Return the name of a trainer's batch schedule that is not constant, else "constant"."""
    for callback in lightning_private.callbacks_of(trainer):
        if isinstance(callback, BatchScheduleCallback) and not callback.schedule.is_constant:
            return callback.name
    return CONSTANT


def refuse_batch_schedule(trainer: Trainer, user: str) -> None:
    """Raise ConfigError if a trainer's batch size changes along the fit.

    Args:
        trainer: The trainer.
        user: What needs a constant batch size.
    """
    name = schedule_name(trainer)
    if name != CONSTANT:
        raise ConfigError(NAME_KEY, name, f"{CONSTANT} with {user}")


def is_ignored(data: LightningDataModule | None) -> bool:
    """Return True if a data module inherits `schedule_batches` but makes its batches itself."""
    if not isinstance(data, ImageData) or not inherits(data, ImageData, ("schedule_batches",)):
        return False
    return not inherits(data, ImageData, ("train_dataloader",))
