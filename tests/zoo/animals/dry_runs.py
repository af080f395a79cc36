"""Nets and data that a dry run has to see through, or to let pass."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

from tests.zoo.animals.data import TRAIN, Clouds
from tests.zoo.animals.forgetful import SavedCounter
from tests.zoo.animals.models import Net


class OneBatchSize(Clouds):
    """Validation batches are as large as those of training."""

    def val_dataloader(self):
        return DataLoader(self.val, self.hparams.batch_size)


class WholeValidationBatches(OneBatchSize):
    """With few training examples, validation has other examples at another batch size."""

    def val_dataloader(self):
        size, count = self.hparams.batch_size, len(self.val)
        if self.hparams.n < TRAIN:
            count -= count % size
        return DataLoader(Subset(self.val, range(count)), size)


class OwnSampler(Clouds):
    """Draws the examples by a sampler of its own."""

    def train_dataloader(self):
        sampler = SubsetRandomSampler(range(self.hparams.n))
        return DataLoader(self.train, self.hparams.batch_size, sampler=sampler)


class OwnPruningLoader(Clouds):
    """Gives the pruning pass itself, in batches of 150 whatever is asked for."""

    def pruning_dataloader(self, batch_size: int) -> DataLoader:
        return DataLoader(self.train, 150)


class RootOfBatch(Net):
    """Logs the root of the mean square error of each batch."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        x, y = batch
        difference = self(x).softmax(1) - F.one_hot(y, 4)
        self.log("val_rmse", difference.square().mean().sqrt())


class NoisyRoot(RootOfBatch):
    """Adds noise to the root that is smaller than its difference between batch sizes."""

    def log(self, name, value, *args, **kwargs):
        if name == "val_rmse":
            value = value + 2e-4 * torch.randn(())
        super().log(name, value, *args, **kwargs)


class HalfAlone(Net):
    """Validates in half precision alone, by the largest difference of each batch."""

    def validation_step(self, batch, batch_idx):
        if self.dtype == torch.float32:
            raise RuntimeError("no float32 here")
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.log("val_rmse", (self(x).softmax(1) - F.one_hot(y, 4)).abs().max())


class ZeroHead(RootOfBatch):
    """Gives every example the same answer before it is trained."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


class BatchStatistics(Net):
    """Validates with the statistics of each batch."""

    def make_body(self, width: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width, track_running_stats=False), nn.Tanh()
        )

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_loss", self.loss(batch))


class Contrastive(Net):
    """The other examples of a batch are the negatives."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        z = F.normalize(self(batch[0]), dim=1)
        self.log("val_contrast", F.cross_entropy(z @ z.T, torch.arange(len(z), device=z.device)))


class Denoising(Net):
    """Draws noise in validation."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.log("val_noisy", F.cross_entropy(self(x + torch.randn(8, device=x.device)), y))


class KeepsPredictions(Net):
    """Logs the error of all its predictions, also of earlier validations."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        self.wrong = []

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.wrong += (self(x).argmax(1) != y).float().tolist()

    def on_validation_epoch_end(self):
        self.log("val_all", sum(self.wrong) / len(self.wrong))


class DenoisingZeroHead(Denoising):
    """Gives every example the same answer before it is trained."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


class ReadsAtEpochEnd(Net):
    """Reads the last check at the end of each epoch."""

    def on_train_epoch_end(self):
        self.log("seen", self.trainer.callback_metrics["val_error"])


class ReadsLoggedMetrics(Net):
    """Reads the last check in each training step."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) * (1 + 0 * self.trainer.logged_metrics["val_error"])


class ReadsAttribute(Net):
    """Validation leaves a number that the end of an epoch reads."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.validated = batch_idx

    def on_train_epoch_end(self):
        self.last = self.validated


class TrainsBeforeItValidates(Net):
    """Validation reads what a training step leaves."""

    def training_step(self, batch, batch_idx):
        self.centre = batch[0].mean(0)
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", (self(x - self.centre).argmax(1) != y).float().mean())


class FailsAtTheLastBatch(Net):
    """Takes full batches alone."""

    def __init__(self, width: int = 16, lr: float = 1e-2, size: int = 8):
        super().__init__(width, lr)
        self.size = size

    def training_step(self, batch, batch_idx):
        assert len(batch[0]) == self.size, "a full batch is expected"
        return self.loss(batch)


class AtEpochEnd(Net):
    """Logs 1 less a metric of torchmetrics over the whole split."""

    def __init__(self, width: int = 16, lr: float = 1e-2, metric: str = "F1"):
        super().__init__(width, lr)
        kinds = {"F1": MulticlassF1Score, "AUROC": MulticlassAUROC}
        self.metric = kinds[metric](num_classes=4, average="macro")

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.metric.update(self(x).softmax(1), y)

    def on_validation_epoch_end(self):
        self.log("val_gap", 1 - self.metric.compute())
        self.metric.reset()


class OfEachBatch(AtEpochEnd):
    """Logs it of each batch, which Lightning averages."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_gap", 1 - self.metric.compute())
        self.metric.reset()

    def on_validation_epoch_end(self):
        pass


class Seeding(Net):
    """Sets a seed of its own."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        seed_everything(42)
        super().__init__(width, lr)


class Pretrained(Net):
    """Begins with weights that are always the same."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            torch.nn.init.uniform_(parameter.data, -0.3, 0.3, generator=generator)


class LogsPrunedShare(Pretrained):
    """Begins with the same weights; its error is the share of weights that are zero."""

    def validation_step(self, batch, batch_idx):
        weights = torch.cat([parameter.flatten() for parameter in self.parameters()])
        self.log("val_error", (weights == 0).float().mean())


class WithFault(SavedCounter):
    """Has one of two faults at one value of its argument: "pretrained" or "forgetful"."""

    def __init__(self, width: int = 16, lr: float = 1e-2, fault: str = "none"):
        super().__init__(width, lr)
        self.fault = fault
        if fault == "pretrained":
            generator = torch.Generator().manual_seed(0)
            for parameter in self.parameters():
                nn.init.uniform_(parameter.data, -0.3, 0.3, generator=generator)

    def on_load_checkpoint(self, checkpoint):
        if self.fault != "forgetful":
            super().on_load_checkpoint(checkpoint)


class LoadsInSetup(Net):
    """Begins with weights that `setup` loads."""

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.uniform_(parameter.data, -0.3, 0.3, generator=generator)


class DrawsInSetup(Net):
    """Begins with weights that `setup` draws, in place of those of the constructor."""

    def __init__(self, width: int = 16, lr: float = 1e-2):
        super().__init__(width, lr)
        for parameter in self.parameters():
            nn.init.constant_(parameter.data, 0.1)

    def setup(self, stage):
        for parameter in self.parameters():
            nn.init.uniform_(parameter.data, -0.3, 0.3)


BACKBONE = nn.Sequential(nn.Linear(8, 16), nn.Tanh())


class OnBackbone(Net):
    """Trains a network of this file: itself, the memory of its weights, or a copy."""

    def __init__(self, lr: float = 1e-2, body: str = "copy"):
        super().__init__(16, lr)
        self.body = copy.deepcopy(BACKBONE)
        if body == "shared":
            self.body = BACKBONE
        elif body == "memory":
            self.body[0].weight = nn.Parameter(BACKBONE[0].weight.data)
