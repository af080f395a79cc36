"""Nets, data and callbacks that keep what no checkpoint has, or seem to."""

from __future__ import annotations

import copy
import random
import time
from typing import ClassVar

import numpy as np
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Subset

from tests.zoo.animals.data import Clouds
from tests.zoo.animals.models import Net


def make_counter():
    """Return a function that counts its calls."""
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class HiddenCounter(Net):
    """Warms up by a counter that a closure keeps."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.count = make_counter()

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.count()


class DivergesAtHighRates(HiddenCounter):
    """Has a loss that is not a number at the upper half of the rates."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 if self.hparams.lr < 0.01 else float("nan"))


class Diverges(Net):
    """Has a loss that is not a number at each rate."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * float("nan")


class FailsAfterValidation(Net):
    """Fails at a training step that follows a validation in the first epoch."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.is_validated = False

    def on_validation_end(self):
        self.is_validated = True

    def training_step(self, batch, batch_idx):
        if self.is_validated and not self.trainer.current_epoch:
            raise RuntimeError("it was validated")
        return self.loss(batch)


class Trembling(Net):
    """Has rounding that differs from run to run, as kernels that add in any order have."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + 1e-6 * random.SystemRandom().random())


class TremblingCounter(HiddenCounter):
    """The same, with a counter that no checkpoint has."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + 1e-6 * random.SystemRandom().random())


class SavedCounter(HiddenCounter):
    """Saves that counter."""

    def training_step(self, batch, batch_idx):
        self.calls = self.count()
        return self.loss(batch) * self.calls

    def on_save_checkpoint(self, checkpoint):
        checkpoint["calls"] = self.calls

    def on_load_checkpoint(self, checkpoint):
        for _ in range(checkpoint["calls"]):
            self.count()


class Mean(Net):
    """Validates by a mean of its weights in a plain list."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.mean = [p.detach().clone() for p in self.parameters()]

    def on_train_batch_end(self, outputs, batch, batch_idx):
        with torch.no_grad():
            for mean, p in zip(self.mean, self.parameters(), strict=True):
                mean.lerp_(p, 0.5)

    def validation_step(self, batch, batch_idx):
        twin = copy.deepcopy(self.body), copy.deepcopy(self.head)
        with torch.no_grad():
            for part, mean in zip(
                [p for each in twin for p in each.parameters()], self.mean, strict=True
            ):
                part.copy_(mean)
        x, y = batch
        logits = twin[1](twin[0](x))
        self.log("val_error", (logits.argmax(1) != y).float().mean())
        self.log("val_loss", torch.nn.functional.cross_entropy(logits, y))


class ByClock(Net):
    """Its loss depends on the time."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + time.perf_counter() % 1)


class Unseeded(Net):
    """Draws from a generator that it makes anew, and from those that are seeded."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (
            np.random.default_rng().random() + random.random() + np.random.rand()
        )


class SeededDraws(Net):
    """Draws from NumPy, `random` and torch."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (random.random() + np.random.rand() + float(torch.rand(())))


class OfTheClass(Net):
    """Counts the steps of all its objects."""

    steps: ClassVar[int] = 0

    def training_step(self, batch, batch_idx):
        OfTheClass.steps += 1
        return self.loss(batch) / OfTheClass.steps


class ArrayOrder(Clouds):
    """Turns the order of its examples, an array, at each batch that it hands out."""

    def setup(self, stage=None):
        super().setup(stage)
        self.order = np.arange(len(self.train))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            self.order[:] = np.roll(self.order, 1)
        x, y = batch
        return x * (1 + 0.1 * self.order[0]), y

    def train_dataloader(self):
        return DataLoader(Subset(self.train, self.order), self.hparams.batch_size)


class NumberOrder(Clouds):
    """Counts its batches, and scales them by their number."""

    def setup(self, stage=None):
        super().setup(stage)
        self.given = 0

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            self.given += 1
        x, y = batch
        return x / (1 + self.given), y


class Scaler(Callback):
    """Scales gradients by a counter that is outside of its state."""

    def __init__(self):
        self.count = make_counter()

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        scale = 1 / self.count()
        for parameter in pl_module.parameters():
            parameter.grad *= scale


class AsksInSetup(Net):
    """Reads the length of training in `setup`, before a checkpoint is read."""

    def setup(self, stage):
        self.length = self.trainer.estimated_stepping_batches


class Curriculum(Clouds):
    """Draws from a share of its examples that grows with the batches, by attributes of its own."""

    def __init__(self, batch_size: int = 16):
        super().__init__(batch_size)
        self.drawn = 0
        self.generator = torch.Generator().manual_seed(0)

    def train_dataloader(self):
        return DataLoader(self.train, batch_sampler=EasyFirst(self))


class EasyFirst:
    """The batches of a curriculum."""

    def __init__(self, data: Curriculum):
        self.data = data

    def __len__(self) -> int:
        return len(self.data.train) // self.data.hparams.batch_size

    def __iter__(self):
        data = self.data
        size = data.hparams.batch_size
        for _ in range(len(self)):
            data.drawn += 1
            pool = min(size * data.drawn, len(data.train))
            yield torch.randint(pool, (size,), generator=data.generator).tolist()


class DrawnMasks(Net):
    """Draws a mask for each size, type and device once, in the forward pass."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.masks = {}

    def forward(self, x):
        key = (x.shape[1:], x.dtype, x.device)
        if key not in self.masks:
            self.masks[key] = (torch.rand(x.shape[1:]) > 0.2).to(x)
        return super().forward(x * self.masks[key])
