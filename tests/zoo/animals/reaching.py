"""Nets whose training step reaches through its trainer and changes what it finds."""

from __future__ import annotations

import torch

from tests.zoo.animals.models import Net


class Rate(Net):
    """Lowers its rate."""

    def training_step(self, batch, batch_idx):
        self.optimizers().param_groups[0]["lr"] *= 0.9
        return self.loss(batch)


class Marked(Net):
    """Counts its steps at its optimizer, its logger and its data module, in attributes that it makes."""

    def training_step(self, batch, batch_idx):
        trainer = self.trainer
        for holder in (trainer.optimizers[0], trainer.logger, trainer.datamodule):
            holder.calls = vars(holder).get("calls", 0) + 1
        trainer.datamodule.share = getattr(trainer.datamodule, "share", torch.ones(())) * 0.9
        return self.loss(batch) * trainer.logger.calls * trainer.datamodule.share


class FadingData(Net):
    """Fades the training data."""

    def training_step(self, batch, batch_idx):
        self.trainer.datamodule.train.tensors[0].mul_(0.9)
        return self.loss(batch)
