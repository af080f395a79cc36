"""A character transformer as anybody would write it: AdamW, and a rate that warms up.
Nothing of lit_dps."""

from pathlib import Path

import sklearn
import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CONTEXT = 24


class Characters(LightningDataModule):
    """Windows of 24 characters of scikit-learn's descriptions of its data sets.

    Every tenth window is one to validate on.
    """

    def __init__(self, batch_size: int = 16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        folder = Path(sklearn.__file__).parent / "datasets" / "descr"
        text = "".join(file.read_text("utf-8") for file in sorted(folder.glob("*.rst")))
        codes = torch.tensor([min(ord(character), 127) for character in text])
        windows = codes.unfold(0, CONTEXT + 1, CONTEXT)
        is_validation = torch.arange(len(windows)) % 10 == 0
        self.train = TensorDataset(windows[~is_validation])
        self.val = TensorDataset(windows[is_validation])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 256)


class CharacterTransformer(LightningModule):
    def __init__(
        self, width: int = 32, lr: float = 4e-3, weight_decay: float = 0.05, warm_up: int = 40
    ):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(128, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 128))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def loss(self, windows):
        x = self.embedding(windows[:, :-1]) + self.position
        logits = self.head(self.layers(x, mask=self.mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch[0])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch[0]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(
            self.parameters(), self.hparams.lr, weight_decay=self.hparams.weight_decay
        )
        warm_up = self.hparams.warm_up
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / warm_up)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
