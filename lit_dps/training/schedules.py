"""Learning rate schedules of other people: what they are told of the length of training, and when they are stepped."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging

import lit_dps.training.lightning_private as lightning_private
from lit_dps.data.loaders import EndlessLoader
from lit_dps.errors import ConfigError
from lit_dps.parallel.ddp import whole


def give_the_length(trainer: Trainer, module: LightningModule, begun: Callable[[], int]) -> None:
    """Sets `trainer.max_epochs`, where it is unlimited, to the epochs that `trainer.max_steps` comes to.

    At the time when the module configures its optimizers and schedules: before, the data are not there. Training itself
    still ends by steps: see `go_beyond`.

    Args:
        trainer: The trainer.
        module: Its module.
        begun: The epochs that a run which is taken up had begun.
    """
    if lightning_private.epochs(trainer) != -1:
        return
    configure = module.configure_optimizers

    @wraps(configure)
    def configure_optimizers() -> Any:
        module.__dict__.pop("configure_optimizers", None)
        lightning_private.set_up_data(trainer)
        found = _epochs(trainer)
        lightning_private.set_epochs(trainer, found if found == -1 else max(found, begun() + 1))
        return configure()

    module.__dict__["configure_optimizers"] = configure_optimizers


def go_beyond(trainer: Trainer) -> None:
    """Lets a run go on whose epochs turned out shorter; to be called where one ends, if the limit was set here."""
    if (limit := lightning_private.epochs(trainer)) != -1:
        lightning_private.set_epochs(trainer, max(limit, lightning_private.epochs_with_next(trainer)))


def _epochs(trainer: Trainer) -> int:
    """The epochs that the trainer's steps come to; -1 where an epoch has no length."""
    loader = whole(trainer.train_dataloader)
    if isinstance(loader, EndlessLoader):  # one epoch to Lightning; the examples tell how many to anybody else
        data = trainer.datamodule
        size = getattr(data, "training_size", None)
        return (
            -1
            if size is None
            else math.ceil(trainer.max_steps * trainer.accumulate_grad_batches * data.batch_size / size)
        )
    batches = lightning_private.batches_of_epoch(trainer)
    if not 0 < batches < math.inf:
        return -1
    return math.ceil(trainer.max_steps / math.ceil(batches / trainer.accumulate_grad_batches))


def prepare_schedules(trainer: Trainer, module: LightningModule) -> None:
    """Lets a schedule that follows a metric wait for it, and refuses what would never be stepped.

    Raises:
        ConfigError: for a schedule by epochs on one endless epoch.
    """
    endless = isinstance(whole(trainer.train_dataloader), EndlessLoader)
    configs = trainer.lr_scheduler_configs if module.automatic_optimization else []
    by_epochs = any(config.interval == "epoch" for config in configs)
    if endless and (by_epochs or any(isinstance(c, StochasticWeightAveraging) for c in trainer.callbacks)):
        what = type(trainer.datamodule).__name__
        raise ConfigError(
            "model",
            type(module).__name__,
            f"a schedule by steps: the training data of {what} are one endless epoch, so that no epoch ends",
        )
    for config in configs:
        if config.reduce_on_plateau:
            config.strict = False  # an epoch may end before the first check


def forget_followed_metrics(trainer: Trainer, interval: str, ended: int) -> None:
    """Leaves a schedule that follows a metric, and was stepped by it, without it until there is a new value.

    Otherwise it would take one check for many: checks come by steps, and epochs may be shorter.

    Args:
        trainer: The trainer.
        interval: Of the schedules, "epoch" or "step"; to be called when one begins.
        ended: How many epochs, or batches of the epoch that the last one belonged to, have ended.
    """
    for config in trainer.lr_scheduler_configs:
        if config.reduce_on_plateau and config.interval == interval and ended % config.frequency == 0:
            trainer.callback_metrics.pop(config.monitor, None)
