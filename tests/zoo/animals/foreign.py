"""Nets that are made in other ways than by a class with plain arguments."""

from __future__ import annotations

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from tests.zoo.animals.models import Net


class Keywords(Net):
    """Hands its keywords on."""

    def __init__(self, gain: float = 1.0, **kwargs):
        super().__init__(**kwargs)
        self.gain = gain

    def loss(self, batch):
        return self.gain * super().loss(batch)


def make_net(lr: float = 1e-2, **kwargs) -> Net:
    """Makes a net; `kwargs` has what no signature tells of."""
    options = dict(kwargs)
    net = Net(options.pop("hidden", 16), lr)
    net.options = options
    return net


class GivenOptimizer(Net):
    """Is given its optimizer and its schedule as functions."""

    def __init__(
        self,
        width: int = 16,
        optimizer: OptimizerCallable = torch.optim.Adam,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
    ):
        super().__init__(width)
        self.make_optimizer, self.make_scheduler = optimizer, scheduler

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}
