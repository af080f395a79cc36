"""A regressor of tabular data as anybody would write it: an MLP with AdamW and a cosine schedule.
Nothing of lit_dps."""

import torch
from lightning import LightningDataModule, LightningModule
from sklearn.datasets import make_friedman1
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class FriedmanData(LightningDataModule):
    """5,000 rows of Friedman's first regression problem: 4,000 to train on, the others to
    validate."""

    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        x, y = make_friedman1(5000, n_features=10, noise=0.5, random_state=0)
        x = torch.tensor(x, dtype=torch.float32)
        y = torch.tensor(y, dtype=torch.float32)
        x = (x - x[:4000].mean(0)) / x[:4000].std(0)
        y = (y - y[:4000].mean()) / y[:4000].std()
        self.train = TensorDataset(x[:4000], y[:4000])
        self.val = TensorDataset(x[4000:], y[4000:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 1000)


class Regressor(LightningModule):
    def __init__(self, width: int = 64, lr: float = 2e-3, weight_decay: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Linear(10, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.layers(x).squeeze(1), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(x).squeeze(1), y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            self.parameters(), self.hparams.lr, weight_decay=self.hparams.weight_decay
        )
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
