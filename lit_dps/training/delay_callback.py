"""DelayCallback: trains a module with stale gradients."""

from __future__ import annotations

import inspect
from typing import Self

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lit_dps.core.errors import ConfigError
from lit_dps.core.trial_config import OptimConfig
from lit_dps.optim.delay import delay_gradients


class DelayCallback(Callback):
    """Update with the gradient of `delay` optimizer steps ago (`lit_dps.optim.delay`).

    A gradient is clipped when it is applied, after the delay.

    Args:
        delay:
            Keys of the section `optim` (`lit_dps.core.trial_config.OptimConfig`).

    Raises:
        ConfigError: if the delay is no whole number of at least 0. When training starts: for manual
            optimization, for optimizers that evaluate their closure themselves, such as LBFGS, and
            for a precision that scales the loss, such as 16-mixed.
    """

    def __init__(self, delay: int = 0):
        OptimConfig(delay)  # checks
        self.delay = delay

    @classmethod
    def of(cls, config: OptimConfig) -> Self:
        """Return the callback of a configuration."""
        return cls(config.delay)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.delay == 0:
            return
        if not pl_module.automatic_optimization:
            raise self._error(f"because {type(pl_module).__name__} uses manual optimization")
        if getattr(trainer.precision_plugin, "scaler", None) is not None:
            raise self._error(
                f"or trainer.precision = bf16-mixed: {trainer.precision} scales the loss, and "
                "the present gradient would decide whether a delayed update is skipped"
            )
        for optimizer in trainer.optimizers:
            if requires_closure(optimizer):
                name = type(optimizer).__name__
                raise self._error(f"because {name} evaluates the loss during its step")

    def _error(self, reason: str) -> ConfigError:
        return ConfigError("optim.delay", self.delay, f"0, {reason}")

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        delay_gradients(optimizer, self.delay)


def requires_closure(optimizer: Optimizer) -> bool:
    """Return True if the step of an optimizer needs a closure, as in LBFGS."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
