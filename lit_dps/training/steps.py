"""StepCount: how many updates of the network a run has made."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

import lit_dps.training.lightning_private as lightning_private


class StepCount:
    """Counts optimizer steps as the paper does: one update of the network each, and lets Lightning count so too.

    Of a module that steps its optimizers itself (manual optimization) a step is a batch in which one of them stepped,
    however many did, where Lightning counts each. A batch without a loss, or whose optimizer was not called, makes no
    step. `trainer.global_step` is put right after each batch, so that limits, schedules and checkpoints go by it.

    Attributes:
        steps: Steps so far; None before a run, unless it goes on from there.
    """

    def __init__(self):
        self.steps: int | None = None
        self._before = self._fired = 0
        self._hooked = False

    def begin(self, trainer: Trainer) -> None:
        """To be called when training starts."""
        if self.steps is None:
            self.steps = trainer.global_step
        self._hooked = all(hasattr(optimizer, "register_step_post_hook") for optimizer in trainer.optimizers)
        for optimizer in trainer.optimizers if self._hooked else ():
            optimizer.register_step_post_hook(self._fire)

    def before_batch(self, trainer: Trainer) -> None:
        self._before, self._fired = trainer.global_step, 0

    def after_batch(self, trainer: Trainer, skipped: bool) -> bool:
        """Counts the steps of a batch.

        Args:
            trainer: The trainer.
            skipped: Whether the module gave no loss since the last step; not looked at in manual optimization.

        Returns:
            Whether there were any.
        """
        lightnings = trainer.global_step - self._before
        fired = self._fired if self._hooked else lightnings
        if trainer.lightning_module.automatic_optimization:
            made = 0 if skipped else min(fired, lightnings)
        else:
            made = min(fired, 1)
        self.steps += made
        if trainer.global_step != self.steps:
            lightning_private.put_steps_right(trainer, self.steps)
        return made > 0

    def _fire(self, *args: Any) -> None:
        self._fired += 1
