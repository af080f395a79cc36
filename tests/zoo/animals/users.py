"""Nets and data that users bring and that the first authors of the engines did not think of."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassF1Score,
    MulticlassPrecision,
)

from lit_dps.data import Digits
from lit_dps.module import ImageClassifier
from tests.zoo.animals.data import Clouds
from tests.zoo.animals.models import Net


class KeptWorkers(Clouds):
    """Its workers live as long as its dataloaders."""

    def train_dataloader(self):
        return DataLoader(
            self.train,
            self.hparams.batch_size,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
        )

    def val_dataloader(self):
        return DataLoader(self.val, 20, num_workers=1, persistent_workers=True)


class FollowsOrNot(lr_scheduler.LRScheduler):
    """A schedule that halves the rate whenever it is stepped with a metric."""

    def __init__(self, optimizer):
        self.factor = 1.0
        super().__init__(optimizer)

    def step(self, metrics=None):
        if metrics is not None:
            self.factor /= 2
        super().step()

    def get_lr(self):
        return [base * self.factor for base in self.base_lrs]


class OwnPlateau(Net):
    """Its schedule is of its own class, and Lightning steps it with the validation loss."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr)
        settings = {
            "scheduler": FollowsOrNot(optimizer),
            "reduce_on_plateau": True,
            "monitor": "val_loss",
        }
        return {"optimizer": optimizer, "lr_scheduler": settings}


class Halved(Net):
    """Its weights have a type of its own.

    Args:
        kind: Name of the type.
        part: Name of the part that has it; "" for all weights.
    """

    def __init__(self, width: int = 16, lr: float = 1e-2, kind: str = "bfloat16", part: str = ""):
        super().__init__(width, lr)
        self.kind = getattr(torch, kind)
        self.get_submodule(part).to(self.kind)

    def forward(self, x):
        x = x.to(self.body[0].weight.dtype)
        return self.head(self.body(x).to(self.head.weight.dtype)).float()


class Scores(Net):
    """Logs a collection of objects that share their states."""

    def __init__(self, width: int = 16, lr: float = 1e-2, at_end: bool = False):
        super().__init__(width, lr)
        self.at_end = at_end
        self.scores = MetricCollection(
            {
                "val_accuracy": MulticlassAccuracy(4, average="macro", validate_args=False),
                "val_f1": MulticlassF1Score(4, average="macro", validate_args=False),
                "val_precision": MulticlassPrecision(4, average="macro", validate_args=False),
            }
        )

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.scores.update(self(x).argmax(1), y)
        if not self.at_end:
            self.log_dict(self.scores)

    def on_validation_epoch_end(self):
        if self.at_end:
            self.log_dict(self.scores.compute())
            self.scores.reset()


class Taught(Net):
    """Learns the answers of a slow copy of itself too, which begins elsewhere.

    Args:
        how: How the teacher is updated: "data" replaces its data, "in_place" changes them.
    """

    def __init__(self, width: int = 16, lr: float = 1e-2, how: str = "data"):
        super().__init__(width, lr)
        self.how = how
        self.teacher = nn.Sequential(self.make_body(width), nn.Linear(width, 4))
        self.teacher.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        with torch.no_grad():
            ours = [*self.body.parameters(), *self.head.parameters()]
            for slow, fast in zip(self.teacher.parameters(), ours, strict=True):
                if self.how == "data":
                    slow.data = 0.5 * slow.data + 0.5 * fast.data
                else:
                    slow.mul_(0.5).add_(fast, alpha=0.5)
            targets = self.teacher(x)
        return self.loss(batch) + F.mse_loss(self(x), targets)


class SoftDigits(Digits):
    """Digits whose labels are probabilities of the classes."""

    def load(self):
        images = super().load()
        soft = {split: F.one_hot(y, 10).float() for split, y in images.y.items()}
        return replace(images, y=soft)


class SoftClassifier(ImageClassifier):
    """Trains on probabilities."""

    def per_example_error(self, batch):
        x, y = batch
        return super().per_example_error((x, y.argmax(1)))

    def summed_loss(self, batch):
        x, y = batch
        return F.cross_entropy(self(x), y, reduction="sum")


class Undecided(ImageClassifier):
    """The error of each mistake is nan."""

    def per_example_error(self, batch):
        errors = super().per_example_error(batch)
        return errors.masked_fill(errors >= 1, torch.nan)


class RareClasses(Digits):
    """Digits whose first examples are of one class."""

    def load(self):
        images = super().load()
        order = images.y["train"].argsort(stable=True)
        x = {**images.x, "train": images.x["train"][order]}
        y = {**images.y, "train": images.y["train"][order]}
        return replace(images, x=x, y=y)


class Weighted(ImageClassifier):
    """Its loss has a weight for each class."""

    def loss(self, batch):
        x, y = batch
        weights = torch.linspace(0.1, 4.0, 10, device=x.device, dtype=x.dtype)
        return F.cross_entropy(self(x), y, weight=weights)
