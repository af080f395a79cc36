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
from lit_dps.training.example_count import examples_of, record_batches
from lit_dps.training.local_sgd_callback import LocalSGDCallback
from lit_dps.training.pruning_callback import masks_of


class AverageCallback(Callback):
    """Validate the average of the weights, whose half-life is in examples.

    See `lit_dps.optim.weight_average`. Training, readings, checkpoint files and the network after
    a fit have the trained weights; the average is in the state of this callback.
    In the trainer's list it follows `PruningCallback` and precedes `GoalErrorCallback`.

    Args:
        half_life: Half-life in examples; 0 checks the trained weights.

    Raises:
        ConfigError: for a half-life below 0. When training starts, with local SGD; at
            the first step, if the examples of a batch are unknown.
    """

    def __init__(self, half_life: float = 0.0):
        OptimConfig(average_half_life=half_life)  # checks
        self.half_life = half_life
        self.average: WeightAverage | None = None
        self._resumed: dict[str, Tensor] | None = None
        self._examples = 0
        self._steps = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.average = None
            record_batches(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._examples = 0
        self._steps = trainer.global_step
        if not self.half_life:
            return
        for callback in lightning_private.callbacks_of(trainer):
            if isinstance(callback, LocalSGDCallback) and callback.rounds.on:
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
            allowed = "0 where lit_dps does not know the number of examples of a batch"
            raise ConfigError(AVERAGE_KEY, self.half_life, allowed)
        self._examples += examples

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.average is None or trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self.average.update(self._examples)
        self.average.mask(masks_of(trainer, pl_module))
        self._examples = 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.average is not None and trainer.state.fn == "fit":
            self.average.swap()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.average is not None and trainer.state.fn == "fit":
            self.average.swap()

    def state_dict(self) -> dict[str, Any]:
        if self.average is None:
            return {}
        return {"average": dict(self.average.tensors)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = state_dict.get("average")


@contextmanager
def showing_average(trainer: Trainer) -> Iterator[None]:
    """Let the module of a trainer have the average that is checked, if there is one."""
    for callback in lightning_private.callbacks_of(trainer):
        if isinstance(callback, AverageCallback) and callback.average is not None:
            with callback.average.shown():
                yield
            return
    yield
