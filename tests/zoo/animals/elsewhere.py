"""A net of the package pytorch_lightning, which is a copy of lightning.pytorch with classes of its
own."""

from __future__ import annotations

import pytorch_lightning
import torch
from torch import nn


class Elsewhere(pytorch_lightning.LightningModule):
    """Knows nothing of lightning.pytorch."""

    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.lr, self.net = lr, nn.Linear(8, 4)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", (self.net(x).argmax(1) != y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)
