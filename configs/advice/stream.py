"""A classifier of an endless stream as anybody would write it: an IterableDataset, and SGD.
Nothing of lit_dps."""

import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def waves(count, generator):
    """Return noisy sine waves of 8 frequencies with random phases, and the frequencies."""
    label = torch.randint(8, (count,), generator=generator)
    phase = 6.28 * torch.rand(count, 1, generator=generator)
    angle = (1 + label[:, None]) * torch.linspace(0, 3.14, 32) + phase
    return torch.sin(angle) + 0.7 * torch.randn(count, 32, generator=generator), label


class Waves(IterableDataset):
    """Endless waves; each pass has other ones."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(int(torch.randint(2**31, ())))
        while True:
            yield from zip(*waves(256, generator), strict=True)


class WaveData(LightningDataModule):
    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(Waves(), self.batch_size)

    def val_dataloader(self):
        fixed = waves(1000, torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(*fixed), 1000)


class WaveNet(LightningModule):
    def __init__(self, width: int = 16, lr: float = 0.02):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, 7, stride=2, padding=3),
            nn.ReLU(),
            nn.Conv1d(width, width, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * width, 8),
        )

    def training_step(self, batch, batch_idx):
        x, label = batch
        return nn.functional.cross_entropy(self.layers(x[:, None]), label)

    def validation_step(self, batch, batch_idx):
        x, label = batch
        error = (self.layers(x[:, None]).argmax(1) != label).float().mean()
        self.log("val_error", error)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)
