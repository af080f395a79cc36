"""A user's own module and data, which know nothing of lit_dps."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TwoMoons(LightningDataModule):
    """Two interleaved half circles with noise."""

    def __init__(self, batch: int = 16, n: int = 400, noise: float = 0.1):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        n = self.hparams.n
        angle, side = torch.rand(n, generator=generator) * torch.pi, torch.arange(n) % 2
        x = torch.stack([angle.cos() + side, angle.sin() * (1 - 2 * side) + 0.5 * side], 1)
        x += self.hparams.noise * torch.randn(x.shape, generator=generator)
        self.train, self.val = (
            TensorDataset(x[100:], side[100:]),
            TensorDataset(x[:100], side[:100]),
        )

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 64)


class Classifier(LightningModule):
    """A small network trained with Adam."""

    def __init__(self, width: int = 32, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.head = nn.Linear(width, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.head(self.body(x)), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", (self.head(self.body(x)).argmax(1) != y).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
