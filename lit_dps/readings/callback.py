"""ReadingsCallback: takes the readings of an attempt in Lightning's loop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor

from lit_dps.readings.attempt_readings import AttemptReadings
from lit_dps.readings.reading import LossPass
from lit_dps.training.goal_callback import GoalErrorCallback
from lit_dps.training.pruning_callback import masks_of
from lit_dps.training.training_pass import TrainingPass

# Examples of a batch of the pass that makes the copy. No batch is taken of it.
_ANY_BATCH_SIZE = 1


class ReadingsCallback(Callback):
    """Takes the readings of an attempt, after the steps and at the end.

    A reading at a check precedes the validation: user's hooks may put other weights in place there.

    Args:
        readings: The readings of the attempt.
        goal: The callback that counts the steps. It precedes this callback in the trainer.

    Attributes:
        readings: As above.
    """

    def __init__(self, readings: AttemptReadings, goal: GoalErrorCallback):
        self.readings = readings
        self._goal = goal

    @property
    def measures_one_network(self) -> bool:
        """Whether anything is read. Local SGD trains several networks and refuses then."""
        return bool(self.readings)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch is None or not self._goal.has_stepped:
            return
        if self.readings.is_due(self._goal.steps):
            with self._goal.stopwatch.paused(pl_module.device):
                self.readings.read(self._goal.steps, _FitRun(trainer, pl_module))
        self._read_end(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # With `min_steps`, the trainer continues after the attempt has ended.
        self._read_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read_end(trainer, pl_module)

    def _read_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not self.readings.is_end_due:
            return
        with self._goal.stopwatch.paused(module.device):
            self.readings.read_end(self._goal.steps, _FitRun(trainer, module))

    def state_dict(self) -> dict[str, Any]:
        return self.readings.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.readings.load_state_dict(state_dict)


class _FitRun:
    """A run in Lightning's loop, as readings look at it."""

    def __init__(self, trainer: Trainer, module: LightningModule):
        self._trainer = trainer
        self.module = module

    @property
    def data(self) -> LightningDataModule:
        return self._trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def masks(self) -> Mapping[str, Tensor]:
        return masks_of(self._trainer, self.module)

    def copied(self) -> AbstractContextManager[LightningModule]:
        run = TrainingPass(self._trainer, self.module, _ANY_BATCH_SIZE)
        return run.without_side_effects()

    def training_pass(self, batch_size: int, examples: int | None) -> LossPass:
        return TrainingPass(self._trainer, self.module, batch_size, examples)
