"""PredictionCallback: keeps what was predicted of a run beside what became of it."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_dps.core.atomic_write import not_written
from lit_dps.core.errors import StorageError
from lit_dps.parallel import ranks
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.training import GoalErrorCallback
from lit_dps.training.example_count import full_batch_size, record_batches
from lit_dps.training.stopwatch import stopwatch_of


class PredictionCallback(Callback):
    """Logs predicted and real steps and hours of a run to goal, and stores the pair where
    `calibration` finds it.

    Times are of steps with their data and of checks, as advice predicts them. What `fit` does
    beside, to begin, to log and to save, is kept apart. A run whose steps have another batch size
    is none of the prediction's, which is said and not stored; one on another number of devices is
    stored with that number, and its hours count for nothing.

    Args:
        storage: Optuna storage URL of the study whose advice this is.
        study: Its name.
        batch_size: Examples of an optimizer step.
        devices: Number of devices.
        steps, hours: Lower 95 % limit, value and upper limit of the prediction.
    """

    def __init__(
        self,
        storage: str,
        study: str,
        batch_size: int,
        devices: int,
        steps: list[float],
        hours: list[float],
    ):
        self.storage, self.study, self.batch_size, self.devices = (
            storage,
            study,
            batch_size,
            devices,
        )
        self.steps, self.hours, self._began, self._size = steps, hours, time.monotonic(), 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._began, self._size = time.monotonic(), 0
        if stage == "fit":
            record_batches(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._size and trainer.world_size == 1:  # of several ranks each has a part
            self._size = full_batch_size(trainer, batch) * trainer.accumulate_grad_batches

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        stopwatch_of(trainer).switch_to(None, pl_module.device)  # loggers are told next

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if ranks.rank():
            return
        if self._size not in (0, self.batch_size):
            said = (
                f"the prediction is of B = {self.batch_size}, this run has B = {self._size}: "
                "no "
                "pair of them is kept"
            )
            print(f"note: {said}", file=sys.stderr)
            return
        goal = next((c for c in trainer.callbacks if isinstance(c, GoalErrorCallback)), None)
        took, timed = time.monotonic() - self._began, stopwatch_of(trainer).timed
        trained = timed["training"] + timed["checking"] if timed else took
        real: dict[str, Any] = {
            "reached": goal is not None and goal.steps_to_result is not None,
            "steps": trainer.global_step,
            "hours": trained / 3600,
            "other_hours": (took - trained) / 3600,
            "real_devices": trainer.world_size,
        }
        given = {"batch_size": self.batch_size, "devices": self.devices}
        predicted = {"predicted_steps": self.steps, "predicted_hours": self.hours}
        for logger in trainer.loggers:
            shown = {f"real/{key}": float(value) for key, value in real.items()}
            shown |= {"predicted/steps": self.steps[1], "predicted/hours": self.hours[1]}
            logger.log_metrics(shown, step=trainer.global_step)
        outcome = {**given, **predicted, **real, "ended": time.time()}
        try:
            AdviceStore(self.storage, self.study).append("outcomes", outcome)
        except StorageError as error:  # the run is over, and its weights and outcome count more
            print(
                f"note: {not_written('the outcome, for lit-dps calibration', error)}",
                file=sys.stderr,
            )
