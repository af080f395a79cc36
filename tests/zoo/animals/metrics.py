"""Nets that log their error, or something else, in ways of their own."""

from __future__ import annotations

import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.zoo.animals.models import Net


class Accuracy(Net):
    """Logs how good it is, under an honest and an innocent name."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        accuracy = (self(x).argmax(1) == y).float().mean()
        self.log_dict({"val_acc": accuracy, "val_quality": accuracy})


class TrainLoss(Net):
    """Logs its training loss."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss


class Reduced(Net):
    """Logs its error with these options.

    Args:
        options: Of `log`.
    """

    def __init__(self, width: int = 16, lr: float = 1e-2, options: dict | None = None):
        super().__init__(width, lr)
        self.options = options or {}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", (self(x).argmax(1) != y).float().mean(), **self.options)


class EveryThird(Net):
    """Logs its error at every third validation.

    Args:
        first: Which of three it is, from 0.
    """

    def __init__(self, width: int = 16, lr: float = 1e-2, first: int = 0):
        super().__init__(width, lr)
        self.first, self.validations = first, 0

    def validation_step(self, batch, batch_idx):
        if self.validations % 3 == self.first:
            super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        self.validations += 1


class Minute(Net):
    """Its loss is small from the beginning, and smaller after 20 batches."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.batches = 0

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.batches += 1

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.tensor(3e-7 if self.batches < 20 else 9e-8))


class ByMetric(Net):
    """Logs a torchmetrics object."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.mistakes = MeanMetric()

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.mistakes.update((self(x).argmax(1) != y).float())
        self.log("val_error", self.mistakes)


class ByAccuracies(Net):
    """Logs 1 less an object of torchmetrics; another object measures the training batches."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.train_accuracy = MulticlassAccuracy(num_classes=4, average="micro")
        self.error = 1 - MulticlassAccuracy(num_classes=4, average="micro")

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.train_accuracy(self(x), y)
        self.log("train_accuracy", self.train_accuracy)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.error.update(self(x), y)
        self.log("val_error", self.error)
        self.log("val_loss", self.loss(batch))


class ComputedAtTheEnd(ByAccuracies):
    """Computes its object when all of the validation is done.

    Args:
        resets: Whether it resets the object.
    """

    def __init__(self, width: int = 16, lr: float = 1e-2, resets: bool = True):
        super().__init__(width, lr)
        self.resets = resets

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.error.update(self(x), y)
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self):
        self.log("val_error", self.error.compute())
        if self.resets:
            self.error.reset()


class SharedObject(ByAccuracies):
    """Updates one object in training and in validation."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.train_accuracy = self.error


class AtTheEnd(Net):
    """Logs a plain number when all of the validation is done."""

    def on_validation_epoch_start(self):
        self.mistakes = []

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.mistakes += (self(x).argmax(1) != y).tolist()

    def on_validation_epoch_end(self):
        self.log("val_error", sum(self.mistakes) / len(self.mistakes))
