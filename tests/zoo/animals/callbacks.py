"""A user's own callbacks."""

from __future__ import annotations

from typing import ClassVar

from lightning.pytorch import Callback


class Counter(Callback):
    """Counts the training batches of all runs and keeps their step after each validation."""

    batches: ClassVar[int] = 0
    checks: ClassVar[list[int]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        Counter.batches += 1

    def on_validation_end(self, trainer, pl_module):
        Counter.checks.append(trainer.global_step)


class Impatient(Callback):
    """Stops a run after so many steps."""

    def __init__(self, steps: int = 7):
        self.steps = steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step >= self.steps:
            trainer.should_stop = True
