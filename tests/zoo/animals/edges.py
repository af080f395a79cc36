"""Animals that look plain and are not: averages by the wrong weight, trimmed data, samplers without
an end, ..."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, Subset

from tests.zoo.animals.data import Clouds
from tests.zoo.animals.models import Net


class ConstantWeight(Net):
    """Tells the same batch size for every validation batch, the short last one too."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", (self(x).argmax(1) != y).float().mean(), batch_size=20)


class TokenWeight(Net):
    """Weighs by tokens, seven for each example."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", (self(x).argmax(1) != y).float().mean(), batch_size=7 * len(y))


class Trimmed(Clouds):
    """Leaves out what does not fill a batch."""

    def train_dataloader(self):
        size = self.hparams.batch_size
        whole = Subset(self.train, range(len(self.train) // size * size))
        return DataLoader(whole, size, shuffle=True)


class Forever(Sampler):
    """The examples over and over."""

    def __init__(self, n: int):
        self.n = n

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(self.n)


class Endless(Clouds):
    """Draws by a sampler that never ends."""

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, sampler=Forever(len(self.train)))


class Distilled(Net):
    """Learns from a frozen copy of itself too."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.model = nn.Sequential(self.body, self.head)
        del self.body, self.head
        self.model_of_old = copy.deepcopy(self.model).requires_grad_(False)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        return self.loss(batch) + (self(batch[0]) - self.model_of_old(batch[0])).square().mean()


class Twins(Net):
    """Two layers that begin equal, as those of torch's encoders do, and are both trained."""

    def make_body(self, width: int) -> nn.Module:
        layer = nn.Linear(width, width)
        return nn.Sequential(nn.Linear(8, width), layer, nn.Tanh(), copy.deepcopy(layer), nn.Tanh())


class WritesFiles(Net):
    """Asks the trainer for a folder of its own."""

    def on_train_end(self):
        os.makedirs(self.trainer.log_dir, exist_ok=True)
        with open(os.path.join(self.trainer.log_dir, "ended"), "w") as file:
            file.write(str(self.global_step))


class ByHand(Net):
    """Steps at every fourth batch, by Lightning's own hook."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if (batch_idx + 1) % 4 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        if batch_idx % 4 == 0:
            optimizer.zero_grad()


class TimeFirst(Clouds):
    """Batches whose first dimension is no example's: the features come first."""

    def train_dataloader(self):
        return DataLoader(
            self.train, self.hparams.batch_size, shuffle=True, collate_fn=features_first
        )

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size, collate_fn=features_first)


def features_first(rows):
    return torch.stack([x for x, _ in rows], 1), torch.stack([y for _, y in rows])


class OnFeaturesFirst(Net):
    """Takes such batches."""

    def forward(self, x):
        return super().forward(x.T)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", (self(x).argmax(1) != y).float().mean(), batch_size=len(y))
        self.log("val_loss", self.loss(batch), batch_size=len(y))
