"""A user's module whose steps to goal are known: it counts examples and steps, and asks for a good
rate."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

C1, C2 = 1600.0, 25.0  # of K = C1 / B + C2 at the best rate
STEEPNESS = 0.1  # a rate off by a factor of e takes e^STEEPNESS times the steps


class Data(LightningDataModule):
    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        x = torch.randn(1024, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x), self.batch_size, drop_last=True)

    def val_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(8, 4)), 8)


class Module(LightningModule):
    """Its error falls by the progress of each step, 1 / K; a rate off by a factor of e takes 1.1
    times the steps."""

    def __init__(self, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 1)
        self.progress, self.size = 0.0, 0

    def training_step(self, batch, batch_idx):
        self.size = len(batch[0])
        off = math.exp(STEEPNESS * abs(math.log(self.hparams.lr / 0.1)))
        self.progress += 1 / ((C1 / self.size + C2) * off)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_error", max(0.0, 1 - self.progress))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["progress"] = self.progress

    def on_load_checkpoint(self, checkpoint):
        self.progress = checkpoint["progress"]


class Scheduled(Module):
    """Its rate falls over the budget of steps; `seen` has the budgets of all trainings."""

    seen: list[int] = []

    def configure_optimizers(self):
        steps = self.trainer.max_steps
        self.seen.append(steps)
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (steps + 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OneCycle(Module):
    """Its schedule fails after 100 steps."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Hopeless(Module):
    """Never meets a goal."""

    def validation_step(self, batch, batch_idx):
        self.log("val_error", 0.9)


class Unlogged(Module):
    """Logs another metric than its goal is of."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)


class Fixed(Data):
    """Has batches of 32, whatever it is asked for."""

    def __init__(self, batch_size: int = 32):
        super().__init__(32)


class Sizeless(Data):
    """Has no argument for its batch size."""

    def __init__(self, batch: int = 32):
        super().__init__(batch)


class Rateless(Module):
    """Has no argument that is called a rate."""

    def __init__(self):
        super().__init__()
