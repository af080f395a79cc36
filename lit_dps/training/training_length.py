"""TrainingLength: sets the length of training that modules, callbacks and schedules see."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError
from lit_dps.data.loaders import EndlessLoader
from lit_dps.parallel.ddp import unsharded


class TrainingLength:
    """Sets `trainer.max_epochs` to the epochs that `max_steps` need, unless epochs are limited.

    Module and callbacks see this value from the module's `setup` on. It depends on the length of
    the train dataloader. So the dataloader is made when the value is first read, and no later than
    the optimizers. Training still ends by steps: see `extend_max_epochs`.

    Args:
        trainer: The trainer of the fit.
        whole_epochs: Whether to ignore `trainer.limit_train_batches`.

    Attributes:
        sets_epochs: Whether `set_max_epochs` has set `trainer.max_epochs`.

    Raises:
        ConfigError: if the data module's `setup` or `train_dataloader` reads `trainer.max_epochs`.
    """

    def __init__(self, trainer: Trainer, whole_epochs: bool = False):
        self.trainer = trainer
        self.whole_epochs = whole_epochs
        self.sets_epochs = False
        self._is_making_data = False
        self._limited_batches: float | None = None

    def before_data(self, data: LightningDataModule, begin: Callable[[], Any]) -> None:
        """Call `begin` before the data module's `setup` in the next fit.

        During this `setup`, reading the epochs raises ConfigError.
        """
        setup = data.setup

        @wraps(setup)
        def watched_setup(stage: str) -> None:
            vars(data).pop("setup", None)
            if stage != "fit":
                setup(stage)
                return
            begin()
            self._is_making_data = True
            try:
                setup(stage)
            finally:
                self._is_making_data = False

        vars(data)["setup"] = watched_setup

    def set_max_epochs(self) -> None:
        """Make `trainer.max_epochs` computed when it is read, unless epochs are limited."""
        if lightning_private.has_epoch_limit(self.trainer):
            return
        self.sets_epochs = True
        lightning_private.compute_max_epochs(self.trainer, self._epochs)

    def fix_at_optimizers(self, module: LightningModule, epochs_begun: Callable[[], int]) -> None:
        """Fix `trainer.max_epochs` when the module configures its optimizers.

        Args:
            module: The module.
            epochs_begun: Returns the number of epochs that a resumed run had begun.
        """
        if not self.sets_epochs:
            return
        configure = module.configure_optimizers

        @wraps(configure)
        def configure_optimizers() -> Any:
            vars(module).pop("configure_optimizers", None)
            epochs = self._epochs()
            lightning_private.set_max_epochs(self.trainer, epochs)
            configured = configure()
            if epochs != -1:
                # A schedule sees the same length after a resume. The run itself may need more
                # epochs.
                lightning_private.set_max_epochs(self.trainer, max(epochs, epochs_begun() + 1))
            return configured

        vars(module)["configure_optimizers"] = configure_optimizers

    def restore_limit(self) -> None:
        """Apply `trainer.limit_train_batches` again. Call this when training starts."""
        if self._limited_batches is not None:
            lightning_private.set_batches_of_epoch(self.trainer, self._limited_batches)
            self._limited_batches = None

    def _epochs(self) -> int:
        """Return the epochs that the trainer's steps need; -1 if an epoch has no length."""
        trainer = self.trainer
        self._make_data()
        if self.whole_epochs and self._limited_batches is None:
            self._limited_batches = lightning_private.batches_of_epoch(trainer)
            whole_epoch = lightning_private.batches_of_whole_epoch(trainer)
            lightning_private.set_batches_of_epoch(trainer, whole_epoch)
        if isinstance(unsharded(trainer.train_dataloader), EndlessLoader):
            # To Lightning this is one endless epoch. The examples give the number of passes.
            data = lightning_private.data_module_of(trainer)
            size = getattr(data, "training_size", None)
            if size is None:
                return -1
            batches = trainer.max_steps * trainer.accumulate_grad_batches
            return math.ceil(batches * data.batch_size / size)
        steps = self.steps_of_epoch()
        if steps is None:
            return -1
        return max(1, math.ceil(trainer.max_steps / steps))

    def _make_data(self) -> None:
        """Make the train dataloader.

        Raises:
            ConfigError: if the data module reads the number of epochs for this.
        """
        if self._is_making_data:
            raise ConfigError(
                "data",
                type(lightning_private.data_module_of(self.trainer)).__name__,
                "a class with setup() and train_dataloader() without trainer.max_epochs and "
                "trainer.estimated_stepping_batches, which follow from the length of the train "
                "dataloader: read trainer.max_steps",
            )
        self._is_making_data = True
        try:
            lightning_private.set_up_data(self.trainer)
        finally:
            self._is_making_data = False

    def steps_of_epoch(self) -> int | None:
        """Return the optimizer steps of an epoch; None if an epoch has no length.

        The data have to be set up.
        """
        batches = lightning_private.batches_of_epoch(self.trainer)
        if not 0 < batches < math.inf:
            return None
        return math.ceil(batches / self.trainer.accumulate_grad_batches)


def extend_max_epochs(trainer: Trainer) -> None:
    """Allow one more epoch, for a run whose epochs are shorter than expected.

    Call this at the end of an epoch, if `TrainingLength` set the limit.
    """
    limit = lightning_private.max_epochs(trainer)
    if limit is not None and limit != -1:
        epochs = max(limit, lightning_private.epochs_with_next(trainer))
        lightning_private.set_max_epochs(trainer, epochs)
