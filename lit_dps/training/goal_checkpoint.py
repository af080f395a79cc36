"""GoalCheckpointCallback: keeps the checkpoint of a run that met its goal."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.training.goal_callback import GoalErrorCallback


class GoalCheckpointCallback(Callback):
    """Save a Lightning checkpoint at the end of a run that met its goal.

    A run without a goal that was met writes no file.

    Args:
        path: The file. It replaces an earlier one.
    """

    def __init__(self, path: str):
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for callback in lightning_private.callbacks_of(trainer, GoalErrorCallback):
            if callback.steps_to_result is not None:
                Path(self.path).parent.mkdir(parents=True, exist_ok=True)
                trainer.save_checkpoint(self.path)
