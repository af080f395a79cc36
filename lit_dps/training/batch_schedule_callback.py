"""BatchScheduleCallback: trains each optimizer step on a batch of the size that a schedule sets.

The learning rate follows the size by `batch.rate`. It is changed for the call of `Optimizer.step`
alone, so that schedules of the module and checkpoints see the rate without the factor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch.optim import Optimizer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.batch_schedule import (
    CONSTANT,
    CONSTANT_BATCH,
    NAME_KEY,
    NO_RATE_RULE,
    RATE_KEY,
    BatchSchedule,
    RateFactors,
)
from lit_dps.core.errors import ConfigError
from lit_dps.core.trial_config import BatchConfig
from lit_dps.data import ImageData
from lit_dps.training.inheritance import inherits


class BatchScheduleCallback(Callback):
    """Train each optimizer step on a batch of the size that a schedule sets.

    With accumulated gradients, all batches of a step have the same size.

    Args:
        schedule, options, rate:
            Keys of the section `batch` (`lit_dps.core.trial_config.BatchConfig`).

    Raises:
        ConfigError: as `BatchConfig`. When a fit begins, for data that do not support a schedule.
            For a rate that follows the batch, also with manual optimization, for optimizers without
            hooks, and for data without `batch_size`.
    """

    def __init__(
        self,
        schedule: str = CONSTANT,
        options: dict[str, Any] | None = None,
        rate: str = NO_RATE_RULE,
    ):
        self.name = schedule
        self.rate = rate
        self._config = BatchConfig(schedule, options, rate)
        self.schedule: BatchSchedule = self._config.build()
        self._step = 0
        self._hooks: list[Any] = []
        self._factors: RateFactors | None = None
        self._is_stepping = False

    @classmethod
    def of(cls, config: BatchConfig) -> Self:
        """Return the callback of a configuration."""
        return cls(**vars(config))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            data = lightning_private.data_module_of(trainer)
            apply_batch_schedule(self._config, data, trainer.accumulate_grad_batches)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._remove_hooks()
        self._factors = None
        self._is_stepping = False
        data: Any = lightning_private.data_module_of(trainer)
        batch_size = getattr(data, "batch_size", None)
        if self._config.rate_factors(1).are_one:
            return
        if not isinstance(batch_size, int):
            raise self._rate_error(f"for {type(data).__name__}, which has no batch_size")
        factors = self._config.rate_factors(batch_size * trainer.accumulate_grad_batches)
        if not pl_module.automatic_optimization:
            raise self._rate_error("with manual optimization, whose steps are not known before")
        for optimizer in trainer.optimizers:
            if not hasattr(optimizer, "register_step_pre_hook"):
                raise self._rate_error(f"for {type(optimizer).__name__}, which has no hooks")
            self._hook(optimizer, factors)
        self._factors = factors

    @property
    def missing_factor(self) -> float:
        """The factor of this step that the learning rates of the optimizers do not have yet.

        `on_before_optimizer_step` is called within `Optimizer.step`, whose rates have the factor.
        With a scaled loss, as in 16-mixed, it is called before.
        """
        if self._factors is None or self._is_stepping:
            return 1.0
        return self._factors.at(self._step)

    def _rate_error(self, reason: str) -> ConfigError:
        """Return the refusal of a rate that changes along the run, by the key that changes it."""
        if self.rate == NO_RATE_RULE:
            allowed = f"a schedule that does not change the learning rate {reason}"
            return ConfigError(NAME_KEY, self.name, allowed)
        return ConfigError(RATE_KEY, self.rate, f"{NO_RATE_RULE} {reason}")

    def _hook(self, optimizer: Optimizer, factors: RateFactors) -> None:
        """Let an optimizer scale its rates in each step."""
        scope = ExitStack()

        def scale(*args: Any) -> None:
            scope.enter_context(scaled_rates(optimizer, factors.at(self._step)))
            self._is_stepping = True

        def restore(*args: Any) -> None:
            scope.close()
            self._is_stepping = False

        self._hooks.append(optimizer.register_step_pre_hook(scale))
        self._hooks.append(optimizer.register_step_post_hook(restore))

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step = trainer.global_step

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
        self._remove_hooks()
        data: Any = lightning_private.data_module_of(trainer)
        if not self.schedule.is_constant and hasattr(data, "schedule_batches"):
            data.schedule_batches(CONSTANT_BATCH, 1)

    def _remove_hooks(self) -> None:
        """Remove the hooks of the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def apply_batch_schedule(
    config: BatchConfig, data: LightningDataModule | None, parts: int = 1
) -> None:
    """Let a data module make batches of the sizes that a schedule sets.

    Args:
        config: The schedule.
        data: The data module.
        parts: Batches of an optimizer step.

    Raises:
        ConfigError: If the data module makes batches of one size only.
    """
    schedule = config.build()
    if schedule.is_constant:
        return
    schedule_batches: Any = getattr(data, "schedule_batches", None)
    if schedule_batches is None or is_ignored(data):
        allowed = (
            f"{CONSTANT}, because {type(data).__name__} makes batches of one size. Use "
            "ImageData, or a data module with a method schedule_batches(schedule, parts)"
        )
        raise ConfigError(NAME_KEY, config.schedule, allowed)
    schedule_batches(schedule, parts)


@contextmanager
def scaled_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates of an optimizer by a factor within a block."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = factor * rate
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def missing_rate_factor(trainer: Trainer) -> float:
    """Return the `missing_factor` of a trainer's batch schedule; 1 without one."""
    factor = 1.0
    for callback in lightning_private.callbacks_of(trainer, BatchScheduleCallback):
        factor *= callback.missing_factor
    return factor


def schedule_name(trainer: Trainer) -> str:
    """Return the name of a trainer's batch schedule that is not constant, else "constant"."""
    for callback in lightning_private.callbacks_of(trainer, BatchScheduleCallback):
        if not callback.schedule.is_constant:
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
