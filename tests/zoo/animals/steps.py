"""Nets with a training step, or hooks, of their own."""

from __future__ import annotations

import lightning.pytorch.callbacks as lightning_callbacks

from tests.zoo.animals.models import Net


class OnDicts(Net):
    """Takes batches that are dictionaries."""

    def training_step(self, batch, batch_idx):
        return super().training_step((batch["x"], batch["y"]), batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step((batch["x"], batch["y"]), batch_idx)


class OneArgument(Net):
    """Asks for the batch alone."""

    def training_step(self, batch):
        return self.loss(batch)


class SkipsSome(Net):
    """Leaves out every third batch."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx % 3 == 2 else self.loss(batch)


class ReturnsDict(Net):
    """Returns more than its loss."""

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch), "size": len(batch[0])}


class OnManyLoaders(Net):
    """Takes a batch of each train dataloader, in a dictionary or a list."""

    def training_step(self, batch, batch_idx):
        batches = batch.values() if isinstance(batch, dict) else batch
        return sum(self.loss(part) for part in batches)


class OnTwoValidations(Net):
    """Validates on two splits."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)


class Logs(Net):
    """Talks to its logger."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.logger.experiment.add_scalar("train/loss", loss.detach(), self.global_step)
        self.logger.log_metrics({"train/again": float(loss.detach())}, step=self.global_step)
        return loss

    def on_validation_epoch_end(self):
        self.logger.experiment.add_histogram("head", self.head.weight, self.global_step)
        for logger in self.loggers:
            logger.log_hyperparams({"width": self.hparams.width})


class StopsItself(Net):
    """Has enough after seven steps."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.global_step >= 7:
            self.trainer.should_stop = True


class Fails(Net):
    """Raises an error in its fifteenth training step.

    Args:
        always: Whether it does in every run; else in one with batches of 8 and weights that are
            zero.
    """

    def __init__(self, width: int = 16, lr: float = 1e-2, always: bool = False):
        super().__init__(width, lr)
        self.always = always

    def training_step(self, batch, batch_idx):
        chosen = len(batch[0]) == 8 and bool((self.body[0].weight == 0).any())
        if self.global_step == 14 and (self.always or chosen):
            raise ValueError("no more of this")
        return self.loss(batch)


class BringsCallbacks(Net):
    """Has callbacks of its own.

    Args:
        callback: Name of one of Lightning's.
        options: Its arguments.
    """

    def __init__(
        self,
        width: int = 16,
        lr: float = 1e-2,
        callback: str = "ModelSummary",
        options: dict | None = None,
    ):
        super().__init__(width, lr)
        self.callback, self.options = callback, options or {}

    def configure_callbacks(self):
        return [getattr(lightning_callbacks, self.callback)(**self.options)]
