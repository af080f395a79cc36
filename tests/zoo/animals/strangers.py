"""Three modules as a stranger writes them, with their data: an MLP, a ResNet, a transformer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

TRAINED_DIGITS = 1536
CHARACTERS = 12


class DigitLoaders(LightningDataModule):
    """Images of 8 x 8 digits, shape (1, 8, 8)."""

    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str | None = None) -> None:
        pixels, classes = load_digits(return_X_y=True)
        x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
        y = torch.tensor(classes)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
        x, y = x[order], y[order]
        self.train = TensorDataset(x[:TRAINED_DIGITS], y[:TRAINED_DIGITS])
        self.val = TensorDataset(x[TRAINED_DIGITS:], y[TRAINED_DIGITS:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, 128)


class Digits(LightningModule):
    """Cross-entropy with AdamW, whose rate warms up; logs the share of wrong digits."""

    def __init__(self, lr: float = 1e-3, weight_decay: float = 0.01, dropout: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.network = self.build()

    def build(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log_dict(
            {
                "val_error": (logits.argmax(1) != y).float().mean(),
                "val_loss": F.cross_entropy(logits, y),
            }
        )

    def configure_optimizers(self):
        h = self.hparams
        optimizer = torch.optim.AdamW(self.parameters(), h.lr, weight_decay=h.weight_decay)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20))
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


class Perceptron(Digits):
    """Two layers with dropout."""

    def build(self) -> nn.Module:
        p = self.hparams.dropout
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(p), nn.Linear(64, 10)
        )


class Block(nn.Module):
    """Two convolutions with batch normalization and a shortcut."""

    def __init__(self, channels: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class SmallResNet(Digits):
    """Two residual blocks."""

    def build(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            Block(8),
            nn.MaxPool2d(2),
            Block(8),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 10),
        )


def text(length: int, seed: int) -> Tensor:
    """Characters of a chain in which each one has four likely successors."""
    generator = torch.Generator().manual_seed(seed)
    chain = torch.Generator().manual_seed(99)
    likely = torch.randn(CHARACTERS, CHARACTERS, generator=chain).mul(3).softmax(1)
    characters = [0]
    for _ in range(length - 1):
        characters.append(int(torch.multinomial(likely[characters[-1]], 1, generator=generator)))
    return torch.tensor(characters)


class Windows(Dataset):
    """Windows of a text, each as a dict with its characters and the next ones."""

    def __init__(self, characters: Tensor, length: int):
        self.characters = characters
        self.length = length

    def __len__(self) -> int:
        return (len(self.characters) - 1) // self.length

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        window = self.characters[i * self.length : (i + 1) * self.length + 1]
        return {"x": window[:-1], "y": window[1:]}


class TextLoaders(LightningDataModule):
    """Windows of 16 characters."""

    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str | None = None) -> None:
        self.train = Windows(text(16 * 512 + 1, seed=1), 16)
        self.val = Windows(text(16 * 100 + 1, seed=2), 16)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 64)


class CharacterTransformer(LightningModule):
    """One block of attention over characters; logs the cross-entropy of the next character."""

    def __init__(self, lr: float = 3e-3, width: int = 24, dropout: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(CHARACTERS, width)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )
        self.head = nn.Linear(width, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places
        q, k, v = self.attention(self.norms[0](h)).chunk(3, dim=-1)
        p = self.hparams.dropout if self.training else 0.0
        heads = [each.unflatten(-1, (2, -1)).transpose(1, 2) for each in (q, k, v)]
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=p, is_causal=True)
        h = h + self.project(mixed.transpose(1, 2).flatten(2))
        return self.head(h + self.feed(self.norms[1](h)))

    def loss(self, batch) -> Tensor:
        return F.cross_entropy(self(batch["x"]).flatten(0, 1), batch["y"].flatten())

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch)}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, betas=(0.9, 0.98))


class KeepsList(Perceptron):
    """Adds a penalty on weights that it keeps in a list too."""

    def __init__(self, lr: float = 1e-3):
        super().__init__(lr, dropout=0.0)
        self.kept = [self.network[1].weight]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.kept[0].detach().square().mean()


class BatchNormMomentum(Digits):
    """Has a momentum of its running statistics, not of an optimizer."""

    def __init__(self, lr: float = 1e-3, momentum: float = 0.1):
        super().__init__(lr)
        self.network[2].momentum = momentum

    def build(self) -> nn.Module:
        norm = nn.BatchNorm1d(16)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), norm, nn.ReLU(), nn.Linear(16, 10))
