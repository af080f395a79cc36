"""Nets that remember each call of `training_step`."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import nn

from tests.zoo.animals.models import Net
from tests.zoo.animals.optimizers import Teacher


class WarmUp(Net):
    """Counts its training steps and warms up by them."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return self.loss(batch) * min(1.0, self.calls / 10)


class MovingTeacher(Teacher):
    """Moves its teacher in the training step."""

    def training_step(self, batch, batch_idx):
        self.follow()
        return self.loss(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass


class Memory(Net):
    """Keeps the features of the last examples in a buffer that grows."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.register_buffer("bank", torch.zeros(0, width))

    def training_step(self, batch, batch_idx):
        features = self.body(batch[0])
        self.bank = torch.cat([self.bank, features.detach()])[-200:]
        return self.loss(batch) + 0.01 * (features.mean(0) - self.bank.mean(0)).square().sum()


class LateBuffer(Net):
    """Makes a buffer in its first training step."""

    def training_step(self, batch, batch_idx):
        if not hasattr(self, "centre"):
            self.register_buffer("centre", batch[0].mean(0))
        return self.loss((batch[0] - 0.1 * self.centre, batch[1]))


class NumpyNoise(Net):
    """Draws from numpy in its training step."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        return self.loss((x + torch.from_numpy(0.1 * np.random.randn(*x.shape)).to(x), y))


class Dropout(Net):
    """Draws from PyTorch in its training step."""

    def make_body(self, width: int) -> nn.Module:
        return nn.Sequential(super().make_body(width), nn.Dropout(0.2))


class Spy(Net):
    """Tells how many examples each call of its training step had, and the first feature of each."""

    calls: ClassVar[list[list[float]]] = []

    def training_step(self, batch, batch_idx):
        self.calls.append(batch[0][:, 0].tolist())
        return self.loss(batch)


class Misspelt(Net):
    """Uses an attribute that it never makes."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * self.no_such_attribute
