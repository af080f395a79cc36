"""Modules whose network in a stack would be another one than alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.animals.models import Net


class Padded(Net):
    """An embedding with a padding index: `torch.vmap` forgets it for all networks but the first."""

    def make_body(self, width: int) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(5, 4, padding_idx=0), nn.Flatten(), nn.Linear(32, width), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.abs() * 2).long().clamp(max=4))


class Calibrated(Net):
    """A parameter that validation alone uses: AdamW skips it, as it has no gradient."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.scale = nn.Parameter(torch.ones(4))

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", ((self(x) * self.scale).argmax(1) != y).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.hparams.lr, weight_decay=1.0)


class Cautious(Net):
    """Without a trainer, which raises RuntimeError, it takes epoch 0."""

    def training_step(self, batch, batch_idx):
        try:
            epoch = self.trainer.current_epoch
        except RuntimeError:
            epoch = 0
        return self.loss(batch) * 0.5**epoch


class TypedNumber(Net):
    """Halves the loss of every other batch, if batches have numbers."""

    def training_step(self, batch, batch_idx):
        factor = 0.5 if isinstance(batch_idx, int) and batch_idx % 2 else 1.0
        return self.loss(batch) * factor


class Normalizing(Net):
    """Normalizes its validation batches in place."""

    def validation_step(self, batch, batch_idx):
        batch[0].sub_(0.05).div_(1.1)
        super().validation_step(batch, batch_idx)


class Clips(Net):
    """Clips gradients its own way."""

    def clip_gradients(self, optimizer, *args, **kwargs):
        for parameter in self.parameters():
            parameter.grad = parameter.grad.sign()


class WarmsUpSmoothing(Net):
    """Smooths labels by `epsilon`, from the second step on."""

    def __init__(self, width: int = 16, lr: float = 1e-2, epsilon: float = 0.1):
        super().__init__(width, lr)
        self.register_buffer("steps", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        x, _ = batch
        uniform = -F.log_softmax(self(x), 1).mean()
        weight = self.hparams.epsilon * self.steps.clamp(max=1)
        self.steps += 1
        return loss + weight * uniform


class Prototypes(Net):
    """Means of outputs, as parameters without gradient that each training step moves."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.centre = nn.Parameter(torch.zeros(4), requires_grad=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(logits.detach().mean(0), alpha=0.1)
        return F.cross_entropy(logits - self.centre, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x) - self.centre
        self.log("val_error", (logits.argmax(1) != y).float().mean())
        self.log("val_loss", F.cross_entropy(logits, y))
