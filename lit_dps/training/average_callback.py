"""AverageCallback: validates the exponential average of the weights in place of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError
from lit_dps.core.trial_config import AVERAGE_KEY, OptimConfig
from lit_dps.optim.weight_average import WeightAverage
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.training.example_count import examples_of, record_batches
from lit_dps.training.local_sgd_callback import LocalSGDCallback
from lit_dps.training.pruning_callback import PruningCallback, masks_of
from lit_dps.training.training_pass import loss_of_output


class AverageCallback(Callback):
    """Validate the average of the weights, whose half-life is in examples.

    See `lit_dps.optim.weight_average`. Training, readings, checkpoint files and the network after
    a fit have the trained weights; the average is in the state of this callback. `validate` and
    `test` of a checkpoint with this state use its average.
    In the trainer's list it follows `PruningCallback` and precedes `GoalErrorCallback`.

    Args:
        half_life: Half-life in examples; 0 validates the trained weights.

    Raises:
        ConfigError: for a half-life below 0. When a fit begins, for another order in the trainer's
            list, and for a checkpoint of another half-life. When training starts, with local SGD;
            at the first step, if the examples of a batch are unknown.
    """

    def __init__(self, half_life: float = 0.0):
        OptimConfig(average_half_life=half_life)  # checks
        self.half_life = half_life
        self.average: WeightAverage | None = None
        self._resumed: dict[str, Tensor] | None = None
        self._examples = 0  # of the batches with a loss since the last step
        self._batch_examples = 0
        self._step_before_batch = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.average = None
            self._resumed = None
            if self.half_life:
                self._check_order(trainer)
            record_batches(trainer)

    def _check_order(self, trainer: Trainer) -> None:
        """Raise ConfigError if pruning follows the average."""
        for callback in _callbacks_after(trainer, self):
            if isinstance(callback, PruningCallback):
                name = type(callback).__name__
                raise ConfigError("callbacks", name, f"{name} before {type(self).__name__}")

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # Lightning calls `load_state_dict` only if the checkpoint has a state.
        self._resumed = None
        state = checkpoint.get("callbacks", {}).get(self.state_key, {})
        if trainer.state.fn != "fit" and (not state or not self.half_life):
            return  # the weights of the file are evaluated
        saved = state.get("half_life", 0.0)
        if "average" in state and "half_life" not in state:
            saved = "unknown"
        if saved != self.half_life:
            allowed = f"{saved}, because the checkpoint was saved with it"
            raise ConfigError(AVERAGE_KEY, self.half_life, allowed)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._examples = 0
        if not self.half_life:
            return
        for callback in lightning_private.callbacks_of(trainer, LocalSGDCallback):
            if callback.schedule.on:
                raise ConfigError(AVERAGE_KEY, self.half_life, "0 with local SGD")
        self.average = WeightAverage(pl_module, self.half_life)
        if self._resumed is None:
            self.average.begin()
        else:
            self.average.load(self._resumed)
            self._resumed = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.average is None:
            return
        examples = examples_of(trainer, batch)
        if examples is None:
            allowed = "0, because the number of examples of a batch is unknown"
            raise ConfigError(AVERAGE_KEY, self.half_life, allowed)
        self._batch_examples = examples
        self._step_before_batch = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning does not train on a batch of None, and does not call `on_train_batch_start`.
        if self.average is None or batch is None:
            return
        has_loss = loss_of_output(outputs) is not None
        if has_loss or not pl_module.automatic_optimization:
            self._examples += self._batch_examples
        # Lightning counts a step of a batch without a loss too; `StepCount` corrects it later.
        has_stepped = trainer.global_step > self._step_before_batch and self._examples > 0
        if not has_stepped:
            return
        self.average.update(self._examples_of_step(trainer))
        self.average.mask(masks_of(trainer, pl_module))
        self._examples = 0

    def _examples_of_step(self, trainer: Trainer) -> int:
        """Return the examples of the step on all ranks."""
        if isinstance(trainer.strategy, SharedBatchDDP):
            return self._examples
        return sum(ranks.all_gather(self._examples))  # each rank has different batches

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.average is not None and trainer.state.fn == "fit":
            self.average.show()
        elif trainer.state.fn != "fit":
            self._show_average_of_checkpoint(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_average_of_checkpoint(pl_module)

    def _show_average_of_checkpoint(self, module: LightningModule) -> None:
        """Let a module have the average of the checkpoint that it was loaded from."""
        if self._resumed is None or not self.half_life:
            return
        self.average = WeightAverage(module, self.half_life)
        self.average.load(self._resumed)
        self._resumed = None
        self.average.show()

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hide_average()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hide_average()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # Lightning does not end the validation then, and calls no `teardown`.
        self._hide_average()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._hide_average()

    def _hide_average(self) -> None:
        """Give the module its weights back after a validation."""
        if self.average is not None:
            self.average.hide()

    def state_dict(self) -> dict[str, Any]:
        if self.average is None:
            return {}
        return {"average": dict(self.average.tensors), "half_life": self.half_life}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict.get("average")


def refuse_later_average(trainer: Trainer, goal: Callback) -> None:
    """Raise ConfigError if an average follows the goal, which would not validate it."""
    for callback in _callbacks_after(trainer, goal):
        if isinstance(callback, AverageCallback) and callback.half_life:
            name = type(goal).__name__
            raise ConfigError("callbacks", name, f"{name} after {type(callback).__name__}")


def _callbacks_after(trainer: Trainer, callback: Callback) -> list[Callback]:
    """Return the callbacks that follow one in the list of a trainer."""
    callbacks = lightning_private.callbacks_of(trainer)
    return callbacks[callbacks.index(callback) + 1 :]


@contextmanager
def showing_average(trainer: Trainer) -> Iterator[None]:
    """Let the module of a trainer have the average that is validated, if there is one."""
    for callback in lightning_private.callbacks_of(trainer, AverageCallback):
        if callback.average is not None:
            with callback.average.shown():
                yield
            return
    yield
