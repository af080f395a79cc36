"""A module and data as anybody would write them: an MLP with AdamW on scikit-learn's digits.
Nothing of lit_dps."""

import torch
from lightning import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class DigitsData(LightningDataModule):
    """1,797 images of 8 x 8: 1,500 to train on, the others to validate."""

    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        x, label = load_digits(return_X_y=True)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x, label = torch.tensor(x / 16, dtype=torch.float32)[order], torch.tensor(label)[order]
        self.train, self.val = (
            TensorDataset(x[:1500], label[:1500]),
            TensorDataset(x[1500:], label[1500:]),
        )

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 297)


class Net(LightningModule):
    def __init__(self, width: int = 64, lr: float = 1e-3, weight_decay: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))

    def training_step(self, batch, batch_idx):
        x, label = batch
        return nn.functional.cross_entropy(self.layers(x), label)

    def validation_step(self, batch, batch_idx):
        x, label = batch
        self.log("val_error", (self.layers(x).argmax(1) != label).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(
            self.parameters(), self.hparams.lr, weight_decay=self.hparams.weight_decay
        )
