"""Sets the length of training that modules, callbacks and schedules see, by the budget of steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError
from lit_dps.data.loaders import EndlessLoader
from lit_dps.parallel.ddp import whole


class Length:
    """Sets `trainer.max_epochs` to the epochs that `max_steps` need, unless epochs are limited.

    Module and callbacks see this value from the module's `setup` on. It depends on the length of
    the train dataloader. So the dataloader is made when the value is first read, and no later than
    the optimizers. Training still ends by steps: see `extend_max_epochs`.

    Args:
        trainer: The trainer of the fit.
        whole_epochs: Whether to ignore `trainer.limit_train_batches`.

    Raises:
        ConfigError: if the data module's `setup` or `train_dataloader` reads `trainer.max_epochs`.
    """

    def __init__(self, trainer: Trainer, whole_epochs: bool = False):
        self.trainer, self.whole_epochs = trainer, whole_epochs
        self.given = False
        self._computing = False
        self._limited: float | None = None

    def before_data(self, data: LightningDataModule, begin: Callable[[], None]) -> None:
        """Call `begin` before the data module's `setup` in the next fit.

        During this `setup`, reading the epochs raises ConfigError.
        """
        setup = data.setup

        @wraps(setup)
        def watched(stage: str) -> None:
            data.__dict__.pop("setup", None)
            if stage != "fit":
                setup(stage)
                return
            begin()
            self._computing = True
            try:
                setup(stage)
            finally:
                self._computing = False

        data.__dict__["setup"] = watched

    def begin(self) -> None:
        """Make `trainer.max_epochs` computed when it is read, unless epochs are limited."""
        if lightning_private.has_epoch_limit(self.trainer):
            return
        self.given = True
        lightning_private.compute_epochs(self.trainer, self._epochs)

    def until_optimizers(self, module: LightningModule, begun: Callable[[], int]) -> None:
        """Fix the value when the module configures its optimizers.

        Args:
            module: The module.
            begun: Returns the number of epochs that a resumed run had begun.
        """
        if not self.given:
            return
        configure = module.configure_optimizers

        @wraps(configure)
        def configure_optimizers() -> Any:
            module.__dict__.pop("configure_optimizers", None)
            epochs = self._epochs()
            lightning_private.set_epochs(self.trainer, epochs)
            configured = configure()
            if epochs != -1:
                # A schedule sees the same length after a resume. The run itself may need more
                # epochs.
                lightning_private.set_epochs(self.trainer, max(epochs, begun() + 1))
            return configured

        module.__dict__["configure_optimizers"] = configure_optimizers

    def end(self) -> None:
        """Apply `trainer.limit_train_batches` again. Call this when training starts."""
        if self._limited is not None:
            lightning_private.set_batches_of_epoch(self.trainer, self._limited)
            self._limited = None

    def _epochs(self) -> int:
        """Return the epochs that the trainer's steps need; -1 if an epoch has no length."""
        trainer = self.trainer
        if self._computing:
            name = type(trainer.datamodule).__name__
            raise ConfigError(
                "data",
                name,
                "setup() and train_dataloader() without trainer.max_epochs and "
                "trainer.estimated_stepping_batches, "
                "which follow from the length of the train dataloader: read trainer.max_steps",
            )
        self._computing = True
        try:
            lightning_private.set_up_data(trainer)
        finally:
            self._computing = False
        if self.whole_epochs and self._limited is None:
            self._limited = lightning_private.batches_of_epoch(trainer)
            whole_epoch = lightning_private.batches_of_whole_epoch(trainer)
            lightning_private.set_batches_of_epoch(trainer, whole_epoch)
        if isinstance(whole(trainer.train_dataloader), EndlessLoader):
            # To Lightning this is one endless epoch. The examples give the number of passes.
            size = getattr(trainer.datamodule, "training_size", None)
            if size is None:
                return -1
            examples = (
                trainer.max_steps * trainer.accumulate_grad_batches * trainer.datamodule.batch_size
            )
            return math.ceil(examples / size)
        steps = self.steps_of_epoch()
        return -1 if steps is None else max(1, math.ceil(trainer.max_steps / steps))

    def steps_of_epoch(self) -> int | None:
        """Return the optimizer steps of an epoch; None if an epoch has no length.

        The data have to be set up.
        """
        trainer = self.trainer
        batches = lightning_private.batches_of_epoch(trainer)
        if not 0 < batches < math.inf:
            return None
        return math.ceil(batches / trainer.accumulate_grad_batches)


def extend_max_epochs(trainer: Trainer) -> None:
    """Allow one more epoch, for a run whose epochs are shorter than expected.

    Call this at the end of an epoch, if `Length` set the limit.
    """
    limit = lightning_private.epochs(trainer)
    if limit != -1:
        lightning_private.set_epochs(
            trainer, max(limit, lightning_private.epochs_with_next(trainer))
        )
