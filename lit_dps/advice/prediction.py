"""PredictionCallback: stores what was predicted for a run, and its real steps and hours."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.atomic_write import not_written
from lit_dps.core.errors import StorageError
from lit_dps.parallel import ranks
from lit_dps.storage.advice_store import AdviceStore
from lit_dps.training import GoalErrorCallback
from lit_dps.training.example_count import full_batch_size, record_batches
from lit_dps.training.stopwatch import stopwatch_of


class PredictionCallback(Callback):
    """Logs predicted and real steps and hours of a run to the goal, and stores them.

    `lit-dps calibration` reads the stored pairs. Like the predictions, hours are of steps with
    their data and of validations; the time to start, to log and to save is stored separately.
    A run with another batch size gets a note and is not stored. A run on another number of devices
    is stored with that number, and its hours are not compared.

    Args:
        storage: Optuna storage URL of the study that the advice is for.
        study: The name of the study.
        batch_size: Examples of an optimizer step.
        devices: The number of devices.
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
        self.storage = storage
        self.study = study
        self.batch_size = batch_size
        self.devices = devices
        self.steps = steps
        self.hours = hours
        self._began = time.monotonic()
        self._real_batch_size = 0  # 0 until it is known

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._began = time.monotonic()
        self._real_batch_size = 0
        if stage == "fit":
            record_batches(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Each of several ranks has a part of the batch.
        if not self._real_batch_size and trainer.world_size == 1:
            size = full_batch_size(trainer, batch) * trainer.accumulate_grad_batches
            self._real_batch_size = size

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Loggers run next, and their time is not predicted.
        stopwatch_of(trainer).switch_to(None, pl_module.device)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if ranks.rank():
            return
        if self._real_batch_size not in (0, self.batch_size):
            print(
                f"note: The prediction is for B = {self.batch_size}, but this run has B = "
                f"{self._real_batch_size}. It is not stored.",
                file=sys.stderr,
            )
            return
        real = self._real_values(trainer)
        for logger in trainer.loggers:
            metrics = {f"real/{key}": float(value) for key, value in real.items()}
            metrics["predicted/steps"] = self.steps[1]
            metrics["predicted/hours"] = self.hours[1]
            logger.log_metrics(metrics, step=trainer.global_step)
        outcome = {
            "batch_size": self.batch_size,
            "devices": self.devices,
            "predicted_steps": self.steps,
            "predicted_hours": self.hours,
            **real,
            "ended": time.time(),
        }
        try:
            AdviceStore(self.storage, self.study).append("outcomes", outcome)
        except StorageError as error:
            # The run has ended, and its weights and results matter more.
            message = not_written("the outcome, for lit-dps calibration", error)
            print(f"note: {message}", file=sys.stderr)

    def _real_values(self, trainer: Trainer) -> dict[str, Any]:
        """Return the real values of a run, by the names that are stored and logged."""
        seconds = time.monotonic() - self._began
        timed = stopwatch_of(trainer).timed
        predicted_part = seconds
        if timed:
            predicted_part = timed["training"] + timed["checking"]
        reached = False
        for callback in lightning_private.callbacks_of(trainer):
            if isinstance(callback, GoalErrorCallback):
                reached = callback.steps_to_result is not None
                break
        return {
            "reached": reached,
            "steps": trainer.global_step,
            "hours": predicted_part / 3600,
            "other_hours": (seconds - predicted_part) / 3600,
            "real_devices": trainer.world_size,
        }
