"""StepCount: how many updates of the network a run has made."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer


class StepCount:
    """Counts optimizer steps as the paper does: one update of the network each.

    Of a module that steps its optimizers itself (manual optimization) a step is a batch in which one of them stepped,
    however many did, where Lightning's `global_step` counts each. A batch without a loss makes no step either.

    Attributes:
        steps: Steps so far; None before a run, unless it goes on from there.
    """

    def __init__(self):
        self.steps: int | None = None
        self._before, self._fired = 0, False

    def begin(self, trainer: Trainer) -> None:
        """To be called when training starts."""
        if self.steps is None:
            self.steps = trainer.global_step
        if not trainer.lightning_module.automatic_optimization:
            for optimizer in trainer.optimizers:
                optimizer.register_step_post_hook(self._fire)

    def before_batch(self, trainer: Trainer) -> None:
        self._before, self._fired = trainer.global_step, False

    def after_batch(self, trainer: Trainer, skipped: bool) -> bool:
        """Counts the steps of a batch.

        Args:
            trainer: The trainer.
            skipped: Whether the module gave no loss since the last step; not looked at in manual optimization.

        Returns:
            Whether there were any.
        """
        if trainer.lightning_module.automatic_optimization:
            made = 0 if skipped else trainer.global_step - self._before
        else:
            made = int(self._fired)
        self.steps += made
        if self.steps != trainer.global_step:  # Lightning's limits would end the run too soon
            trainer.fit_loop.epoch_loop.max_steps = trainer.fit_loop.max_epochs = -1
        return made > 0

    def _fire(self, *args: Any) -> None:
        self._fired = True
