"""All uses of Lightning's undocumented interface, in one place.

Written for and tested with Lightning 2.6 (`VERSION`). If a part is missing or has changed,
`tests/unit/training/test_lightning_private.py` fails and names it.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any, TypeVar

from lightning.fabric.utilities import data as fabric_data
from lightning.fabric.utilities import registry
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.fit_loop import _FitLoop

VERSION = "2.6"
CallbackT = TypeVar("CallbackT", bound=Callback)

_entry_points = functools.cache(metadata.entry_points)


def make_trainer(arguments: Mapping[str, Any]) -> Trainer:
    """Return a `Trainer`. The process looks up the installed callbacks of Lightning only once.

    Each trainer would read the entry points of all packages, which takes 5 ms of CPU of 6.
    """
    lightning_registry: Any = registry
    original = lightning_registry.entry_points
    lightning_registry.entry_points = _entry_points
    try:
        return Trainer(**arguments)
    finally:
        lightning_registry.entry_points = original


# Lightning sets these three documented attributes from outside of its Trainer class, so that type
# checkers do not find them.


def callbacks_of(trainer: Any, kind: type[CallbackT] = Callback) -> list[CallbackT]:
    """Return the callbacks of a trainer that are of a class; by default all of them."""
    return [callback for callback in trainer.callbacks if isinstance(callback, kind)]


def data_module_of(trainer: Any) -> Any:
    """Return `trainer.datamodule`; None without a data module."""
    return trainer.datamodule


def is_fast_dev_run(trainer: Any) -> bool:
    """Return True if `trainer.fast_dev_run` limits the fit to a few batches."""
    return bool(trainer.fast_dev_run)


def set_max_steps(trainer: Trainer, steps: int) -> None:
    """Set `trainer.max_steps` after the trainer was made."""
    trainer.fit_loop.epoch_loop.max_steps = steps


def set_global_step(trainer: Trainer, steps: int) -> None:
    """Set `trainer.global_step`."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step
    else:
        progress = loop.manual_optimization.optim_step_progress
    progress.total.ready = steps
    progress.total.completed = steps


def set_up_data(trainer: Trainer) -> float:
    """Request the train dataloader now, and return the batches of an epoch, which may be inf."""
    trainer.fit_loop.setup_data()
    return batches_of_epoch(trainer)


def error_of_fit(error: Exception) -> Exception:
    """Return the error that ended a fit, instead of an error of the teardown that followed."""
    first = error.__context__
    while isinstance(first, Exception):
        functions = [frame.f_code for frame, _ in traceback.walk_tb(first.__traceback__)]
        if Trainer._fit_impl.__code__ in functions:
            return first
        first = first.__context__
    return error


def batches_of_epoch(trainer: Trainer) -> float:
    """Return the batches of an epoch, after the data were set up; infinity without an end."""
    return trainer.fit_loop.max_batches


def max_epochs(trainer: Trainer) -> int | None:
    """Return the number of epochs that stops training; -1 without a limit."""
    return trainer.fit_loop.max_epochs


def has_epoch_limit(trainer: Trainer) -> bool:
    """Return True if epochs are limited, or if `compute_max_epochs` was called."""
    return (
        trainer.fit_loop.__dict__.get("max_epochs") != -1 or type(trainer.fit_loop) is not _FitLoop
    )


def compute_max_epochs(trainer: Trainer, compute: Callable[[], int]) -> None:
    """Call `compute` whenever the limit of epochs is read, until `set_max_epochs` sets it."""
    loop = trainer.fit_loop
    original = type(loop)

    class ComputedEpochs(original):
        @property
        def max_epochs(self) -> int:
            return compute()

        @max_epochs.setter
        def max_epochs(self, number: int) -> None:
            self.__class__ = original  # pyright: ignore[reportAttributeAccessIssue]
            self.max_epochs = number

    loop.__class__ = ComputedEpochs


def set_max_epochs(trainer: Trainer, number: int) -> None:
    """Set `trainer.max_epochs` after the trainer was made."""
    trainer.fit_loop.max_epochs = number


def epochs_with_next(trainer: Trainer) -> int:
    """Return the number of ended epochs plus one. Call this at the end of an epoch."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    return epochs.processed + 1


def replace_dataloader(trainer: Trainer, wrap: Callable[[Any], Any]) -> None:
    """Wrap the train dataloader when it is made."""
    source = trainer.fit_loop._data_source
    make = source.dataloader
    source.dataloader = lambda: wrap(make())


def replace_train_loaders(trainer: Trainer, replace: Callable[[Any], tuple[Any, float]]) -> None:
    """Replace each train dataloader of a fit.

    Call this when training starts (`on_train_start`). Optimizers and schedules that were made
    before know the original length of an epoch.

    Args:
        trainer: The trainer of the fit.
        replace: Returns another loader, and the most batches to take of it.
    """
    loop = trainer.fit_loop
    combined = loop._combined_loader
    fetcher = loop._data_fetcher
    assert combined is not None and fetcher is not None
    loaders, limits = zip(*map(replace, combined.flattened), strict=True)
    combined.flattened = list(loaders)
    combined.limits = list(limits)
    fetcher.setup(combined)
    iter(fetcher)
    length = fabric_data.sized_len(combined)
    loop.max_batches = math.inf if length is None else length


def train_loaders(trainer: Trainer) -> tuple[Any, int]:
    """Return the combined train dataloaders, and the number of prefetched batches."""
    loop = trainer.fit_loop
    return loop._combined_loader, len(getattr(loop._data_fetcher, "batches", ()))


def validation_loaders(trainer: Trainer) -> tuple[Any, int]:
    """Return the combined validation dataloaders, and the number of prefetched batches."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    return loop._combined_loader, len(getattr(loop._data_fetcher, "batches", ()))


def before_each_fetch(trainer: Trainer, call: Callable[[], None]) -> None:
    """Call a function before each training batch is loaded. For `on_train_start`."""
    loop: Any = trainer.fit_loop.epoch_loop
    profile = type(loop)._on_before_fetch

    def before_fetch() -> None:
        call()
        profile(loop)

    loop._on_before_fetch = before_fetch


def batches_trained(trainer: Trainer) -> tuple[int, int]:
    """Return the numbers of begun and completed batches of this epoch."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.current
    return batches.ready, batches.completed


def validate_now(trainer: Trainer) -> None:
    """Run the validation of a fit, as Lightning's loop does between two batches."""
    trainer.validating = True
    trainer.fit_loop.epoch_loop.val_loop.run()
    trainer.training = True


def logged_metrics(trainer: Trainer) -> Iterable[Any]:
    """Return the logged results of the running loop, with `meta` and counts of updates."""
    return (trainer._results or {}).values()


def before_transfer(module: LightningModule, batch: Any, dataloader_idx: int = 0) -> Any:
    """Return a batch after the hooks that precede its transfer to the device."""
    return module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)


def owners_of(module: LightningModule) -> tuple[Any, Any]:
    """Return the trainer and the fabric that a module is attached to; None without one."""
    return module._trainer, module._fabric


def detects_anomalies(trainer: Trainer) -> bool:
    """Return True if the trainer was made with `detect_anomaly`."""
    return trainer._detect_anomaly


def leave_signals_alone(trainer: Trainer) -> None:
    """Prevent Lightning from registering signal handlers. Call this in `on_fit_start`.

    Lightning's handler of SIGTERM would end the process at the next batch, with exit code 0. With
    several ranks, the rank that receives the signal would wait forever in a broadcast.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
