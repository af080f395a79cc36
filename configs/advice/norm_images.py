"""A ResNet with batch normalization on small images, as anybody would write it: SGD with momentum.
Nothing of lit_dps."""

import io
import os
from pathlib import Path

import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class SmallImages(LightningDataModule):
    """6,000 images of CIFAR-10 at 16 x 16 pixels: five sixths to train on, the others to validate.

    They are the first rows of `cifar10/train.parquet` in a folder, which is by default that of the
    environment variable LIT_DPS_DATA.
    """

    def __init__(self, batch_size: int = 32, root: str | None = None):
        super().__init__()
        self.batch_size = batch_size
        self.root = root

    def setup(self, stage=None):
        import numpy as np
        import pyarrow.parquet
        from PIL import Image

        root = Path(self.root or os.environ.get("LIT_DPS_DATA", "data"))
        table = pyarrow.parquet.read_table(root / "cifar10" / "train.parquet").slice(0, 6000)
        pixels = []
        for row in table.column("img").to_pylist():
            pixels.append(np.asarray(Image.open(io.BytesIO(row["bytes"])).convert("RGB")))
        x = torch.tensor(np.stack(pixels), dtype=torch.float32).permute(0, 3, 1, 2) / 255
        x = (functional.avg_pool2d(x, 2) - 0.45) / 0.22
        label = torch.tensor(table.column("label").to_pylist())
        split = len(x) * 5 // 6
        self.train = TensorDataset(x[:split], label[:split])
        self.val = TensorDataset(x[split:], label[split:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 500)


class Block(nn.Module):
    """Two convolutions with batch normalization beside a shortcut."""

    def __init__(self, n_in: int, n_out: int, stride: int):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(n_out),
        )
        self.shortcut = nn.Conv2d(n_in, n_out, 1, stride, bias=False)

    def forward(self, x):
        return functional.relu(self.main(x) + self.shortcut(x))


class SmallResNet(LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.05, weight_decay: float = 5e-4):
        super().__init__()
        self.save_hyperparameters()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))

    def training_step(self, batch, batch_idx):
        x, label = batch
        return functional.cross_entropy(self(x), label)

    def validation_step(self, batch, batch_idx):
        x, label = batch
        self.log("val_error", (self(x).argmax(1) != label).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(
            self.parameters(),
            self.hparams.lr,
            momentum=0.9,
            weight_decay=self.hparams.weight_decay,
        )
