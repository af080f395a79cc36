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
    """Counts its steps at its optimizer, its logger and its data module, in attributes that it
    makes."""

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


class FadingArray(Net):
    """Fades the training data through NumPy, which leaves the tensor's version as it is."""

    def training_step(self, batch, batch_idx):
        images = self.trainer.datamodule.train.tensors[0].numpy()
        images *= 0.9
        return self.loss(batch)


class Weighted(Net):
    """Fades an array of weights at its data module, which the data module itself does not read."""

    def training_step(self, batch, batch_idx):
        weights = self.trainer.datamodule.weights
        weights *= 0.9
        return self.loss(batch) * float(weights[0])


class FilledState(Net):
    """Keeps means in the state of its optimizer, and halves them at each step."""

    def on_train_start(self):
        state = self.trainer.optimizers[0].state
        for parameter in self.parameters():
            state[parameter].setdefault("mean", torch.ones_like(parameter))

    def training_step(self, batch, batch_idx):
        for state in self.trainer.optimizers[0].state.values():
            state["mean"] *= 0.5
        return self.loss(batch)
