"""The plain network that most animals vary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Net(LightningModule):
    """Three linear layers trained with Adam; logs the share of wrong examples and the mean loss in
    validation."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.body = self.make_body(width)
        self.head = nn.Linear(width, 4)

    def make_body(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def loss(self, batch) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val_error", (logits.argmax(1) != y).float().mean())
        self.log("val_loss", F.cross_entropy(logits, y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


class Images(Net):
    """The same for images of 28 x 28 in ten classes, with a rate that halves at the end of each
    epoch."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.head = nn.Linear(width, 10)

    def make_body(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Tanh())

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]
