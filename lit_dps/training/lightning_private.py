"""What lit_dps uses of Lightning beyond its documented interface: all of it, in one place.

Written for and tested with Lightning 2.6 (`VERSION`). `tests/unit/test_lightning_private.py` fails by name where a
part is gone, or does something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from lightning.fabric.utilities import data as fabric_data
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop

VERSION = "2.6"


def set_budget(trainer: Trainer, steps: int) -> None:
    """Sets `trainer.max_steps` after the trainer was made."""
    trainer.fit_loop.epoch_loop.max_steps = steps


def put_steps_right(trainer: Trainer, steps: int) -> None:
    """Sets `trainer.global_step`."""
    loop = trainer.fit_loop.epoch_loop
    automatic = trainer.lightning_module.automatic_optimization
    progress = loop.automatic_optimization.optim_progress.optimizer.step if automatic else None
    total = (progress or loop.manual_optimization.optim_step_progress).total
    total.ready = total.completed = steps


def set_up_data(trainer: Trainer) -> float:
    """Asks the data module for its train dataloader now. Returns the batches of an epoch, which may be infinite."""
    trainer.fit_loop.setup_data()
    return batches_of_epoch(trainer)


def batches_of_epoch(trainer: Trainer) -> float:
    """The batches of an epoch, once the data are there; may be infinite."""
    return trainer.fit_loop.max_batches


def batches_of_whole_epoch(trainer: Trainer) -> float:
    """The batches of an epoch without `limit_train_batches`, once the data are there; may be infinite."""
    combined = trainer.fit_loop._combined_loader
    if combined is None:
        return math.inf
    lengths = []
    for loader in combined.flattened:
        length = fabric_data.sized_len(loader)
        lengths.append(math.inf if length is None else length)
    return _OF_LENGTHS[combined._mode](lengths)


def set_batches_of_epoch(trainer: Trainer, number: float) -> None:
    """Sets `trainer.num_training_batches`, once the data are there."""
    trainer.fit_loop.max_batches = number


# of several train dataloaders, by the mode of Lightning's CombinedLoader
_OF_LENGTHS = {"max_size_cycle": max, "max_size": max, "min_size": min, "sequential": sum}


def epochs(trainer: Trainer) -> int | None:
    """The limit of epochs that stops training; -1 without one."""
    return trainer.fit_loop.max_epochs


def has_epoch_limit(trainer: Trainer) -> bool:
    """Return whether epochs are limited, or `compute_epochs` was called; computes nothing."""
    return trainer.fit_loop.__dict__.get("max_epochs") != -1 or type(trainer.fit_loop) is not _FitLoop


def compute_epochs(trainer: Trainer, compute: Callable[[], int]) -> None:
    """Lets `compute` give the limit of epochs whenever it is read, until `set_epochs` sets it."""
    loop = trainer.fit_loop
    plain = type(loop)

    class ComputedEpochs(plain):
        @property
        def max_epochs(self) -> int:
            return compute()

        @max_epochs.setter
        def max_epochs(self, number: int) -> None:
            self.__class__ = plain
            self.max_epochs = number

    loop.__class__ = ComputedEpochs


def set_epochs(trainer: Trainer, number: int) -> None:
    """Sets that limit."""
    trainer.fit_loop.max_epochs = number


def epochs_with_next(trainer: Trainer) -> int:
    """The epochs that have ended, and one more; to be asked where one ends."""
    return trainer.fit_loop.epoch_progress.current.processed + 1


def replace_dataloader(trainer: Trainer, wrap: Callable[[Any], Any]) -> None:
    """Lets the train dataloader be wrapped when it is made."""
    source = trainer.fit_loop._data_source
    make = source.dataloader
    source.dataloader = lambda: wrap(make())


def replace_train_loaders(trainer: Trainer, replace: Callable[[Any], tuple[Any, float]]) -> None:
    """Replaces each train dataloader of a fit by another one and the most batches to take of it.

    To be called when training starts (`on_train_start`): what was made before knows the epochs as they were.
    """
    loop = trainer.fit_loop
    combined = loop._combined_loader
    loaders, limits = zip(*map(replace, combined.flattened), strict=True)
    combined.flattened, combined.limits = list(loaders), list(limits)
    loop._data_fetcher.setup(combined)
    iter(loop._data_fetcher)
    length = fabric_data.sized_len(combined)
    loop.max_batches = math.inf if length is None else length


def train_loaders(trainer: Trainer) -> tuple[Any, int]:
    """The train dataloaders together, and the batches that were fetched beyond the current one."""
    loop = trainer.fit_loop
    return loop._combined_loader, len(getattr(loop._data_fetcher, "batches", ()))


def validation_loaders(trainer: Trainer) -> tuple[Any, int]:
    """The same of the validation of a fit."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return loop._combined_loader, len(getattr(loop._data_fetcher, "batches", ()))


def batches_trained(trainer: Trainer) -> tuple[int, int]:
    """Batches of this epoch that were begun, and that were completed."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return batches.ready, batches.completed


def validate_now(trainer: Trainer) -> None:
    """Runs the validation of a fit, as Lightning's own loop does it between two batches."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True


def logged_metrics(trainer: Trainer) -> Iterable[Any]:
    """What was logged in the running loop, each with its `meta` and its counts of updates and examples."""
    return (trainer._results or {}).values()


def before_transfer(module: LightningModule, batch: Any) -> Any:
    """A batch as the hooks before its transfer leave it."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


def owners_of(module: LightningModule) -> tuple[Any, Any]:
    """The trainer and the fabric that a module is attached to, or None each."""
    return module._trainer, module._fabric


def detects_anomalies(trainer: Trainer) -> bool:
    """Whether the trainer was made with `detect_anomaly`."""
    return trainer._detect_anomaly


def leave_signals_alone(trainer: Trainer) -> None:
    """Keeps Lightning from registering signal handlers; to be called in `on_fit_start`, before it does.

    Its handler of SIGTERM ends the process at the next batch, with exit code 0, whatever ours would do. Of several
    ranks the one that gets it would wait in a broadcast that no other takes part in, for ever.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
