"""DelayCallback: trains a module with stale gradients."""

from __future__ import annotations

import inspect

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lit_dps.core.errors import ConfigError
from lit_dps.optim.delay import check_delay, delay_gradients


class DelayCallback(Callback):
    """Updates with the gradient of `delay` optimizer steps ago (`lit_dps.optim.delay`); it is
    clipped as it is taken.

    Args:
        delay: tau, in optimizer steps; 0 is the usual update.

    Raises:
        ConfigError: for a delay that is none; when training starts, for an optimizer that evaluates
            its closure itself, as second-order ones do, and for a module that steps its optimizers
            itself.
    """

    def __init__(self, delay: int = 0):
        check_delay(delay)
        self.delay = delay

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.delay == 0:
            return
        name = type(pl_module).__name__
        if not pl_module.automatic_optimization:
            raise ConfigError(
                "optim.delay", self.delay, f"0 for {name}, which steps its optimizers itself"
            )
        for optimizer in trainer.optimizers:
            if asks_for_a_closure(optimizer):
                kind = type(optimizer).__name__
                raise ConfigError(
                    "optim.delay",
                    self.delay,
                    f"0 for {kind}, which evaluates the loss itself in a step",
                )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        delay_gradients(optimizer, self.delay)


def asks_for_a_closure(optimizer: Optimizer) -> bool:
    """Whether the step of an optimizer needs a closure, as that of a second-order one does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
