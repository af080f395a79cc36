"""A contrastive encoder as anybody would write it: the other pairs of a batch are the negatives.
Nothing of lit_dps."""

import torch
from lightning import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def noisy_view(x):
    """Hide a fifth of the pixels, and add noise."""
    return x * (torch.rand_like(x) > 0.2) + 0.05 * torch.randn_like(x)


class DigitPairs(LightningDataModule):
    """1,500 digits to train on. The other 297 have two fixed views each to validate on."""

    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        x, _ = load_digits(return_X_y=True)
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(x), generator=generator)
        x = torch.tensor(x / 16, dtype=torch.float32)[order]
        self.train = TensorDataset(x[:1500])
        views = []
        for _ in range(2):
            kept = torch.rand(297, 64, generator=generator) > 0.2
            views.append(x[1500:] * kept + 0.05 * torch.randn(297, 64, generator=generator))
        self.val = TensorDataset(*views)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 297)


class PairEncoder(LightningModule):
    def __init__(self, width: int = 128, lr: float = 1e-3, temperature: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 32),
        )

    def similarities(self, first, second):
        a = nn.functional.normalize(self.layers(first), dim=1)
        b = nn.functional.normalize(self.layers(second), dim=1)
        return a @ b.T / self.hparams.temperature

    def training_step(self, batch, batch_idx):
        (x,) = batch
        similarities = self.similarities(noisy_view(x), noisy_view(x))
        return nn.functional.cross_entropy(similarities, torch.arange(len(x), device=x.device))

    def validation_step(self, batch, batch_idx):
        similarities = self.similarities(*batch)
        match = torch.arange(len(similarities), device=similarities.device)
        self.log("val_error", (similarities.argmax(1) != match).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)
