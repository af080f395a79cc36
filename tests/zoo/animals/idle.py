"""Nets and data with arguments that change nothing, or act in one place alone."""

from __future__ import annotations

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.zoo.animals.data import Clouds, clouds
from tests.zoo.animals.models import Net


class FixedNoise(Clouds):
    """Its noise is always the same; `cut` examples are left out of the validation."""

    def __init__(self, batch_size: int = 16, noise: float = 0.5, cut: int = 0):
        super().__init__(batch_size)
        self.noise, self.cut = noise, cut

    def val_dataloader(self):
        return DataLoader(clouds(50 - self.cut, 2), 20)


class Options(torch.optim.SGD):
    """Keeps a momentum among its options and does not use it."""

    def __init__(self, parameters, lr: float, momentum: float):
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["inertia"] = momentum


class Swallowing(Net):
    """Takes any keywords, and a few arguments that act in one place alone.

    Args:
        rate: Overwritten in `configure_optimizers`.
        momentum: Of the optimizer "momentum" alone.
        inertia: An option that the optimizer "options" ignores.
        shift: Added to the logits in validation.
        smoothing: Of the training loss.
        decay: The share of the rate that is left at the end of the budget, from step 20 on.
        late: A weight of the loss from the second epoch on.
        kwargs: Ignored.
    """

    def __init__(
        self,
        lr: float = 1e-2,
        optimizer: str = "sgd",
        rate: float = 0.1,
        momentum: float = 0.0,
        inertia: float = 0.0,
        shift: float = 0.0,
        smoothing: float = 0.0,
        decay: float = 1.0,
        late: float = 1.0,
        **kwargs,
    ):
        super().__init__(16, lr)
        self.save_hyperparameters()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self(x), y, label_smoothing=self.hparams.smoothing)
        return loss * (self.hparams.late if self.current_epoch else 1.0)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x) + self.hparams.shift * torch.arange(4, device=self.device)
        self.log("val_error", (logits.argmax(1) != y).float().mean())

    def configure_optimizers(self):
        h = self.hparams
        if h.optimizer == "options":
            return Options(self.parameters(), h.lr, h.inertia)
        momentum = h.momentum if h.optimizer == "momentum" else 0.0
        optimizer = torch.optim.SGD(self.parameters(), h.rate, momentum=momentum)
        for group in optimizer.param_groups:
            group["lr"] = h.lr
        if h.optimizer == "decay":
            return [optimizer], [
                {
                    "scheduler": LambdaLR(optimizer, lambda step: 1.0 if step < 20 else h.decay),
                    "interval": "step",
                }
            ]
        return optimizer


class FailsInValidation(Swallowing):
    """Fails in each validation."""

    def validation_step(self, batch, batch_idx):
        raise RuntimeError("no validation here")
