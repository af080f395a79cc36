"""A user's module and data with much to remember: dropout, Adam, a schedule by epochs, noise from
two generators."""

from __future__ import annotations

import copy
from collections import deque
from enum import Enum

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.support.tiny import points


class Noisy(Dataset):
    """Points with noise of the global generator of torch and of one that the data set keeps."""

    def __init__(self):
        self.points, self.rng = points(50), np.random.default_rng(5)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int):
        x, y = self.points[index]
        return x + 0.1 * torch.randn(4) + torch.from_numpy(self.rng.normal(0, 0.1, 4)).float(), y


class NoisyData(LightningDataModule):
    """7 batches of 8 an epoch, the last one short."""

    def __init__(self, batch_size: int = 8, own_generator: bool = False, workers: int = 0):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str | None = None) -> None:
        self.train, self.val = Noisy(), points(30)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(3) if self.hparams.own_generator else None
        h = self.hparams
        return DataLoader(
            self.train, h.batch_size, shuffle=True, generator=generator, num_workers=h.workers
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, 16)


class Dropping(LightningModule):
    """Two layers with dropout, whose mean weights over time are what it validates with."""

    def __init__(self, network: nn.Module | None = None, rate: float = 0.01, forget: bool = False):
        super().__init__()
        self.save_hyperparameters()  # also objects
        self.network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.mean = nn.Linear(4, 3)
        self.register_buffer("steps", torch.zeros(()))

    def on_train_start(self) -> None:
        torch.rand(3)  # a draw that a run that goes on must not repeat

    def on_train_epoch_start(self) -> None:
        if self.hparams.forget:
            self.weights = iter(range(1, 100))

    def training_step(self, batch, batch_idx):
        if self.hparams.forget:
            return self.loss(batch) / next(
                self.weights
            )  # in the middle of an epoch that was taken up, from its start
        return self.loss(batch)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.network(x) + self.mean(x), y)

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        self.steps += 1
        with torch.no_grad():  # after the checks of early callbacks
            self.mean.weight.mul_(0.99)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_error", ((self.network(x) + self.mean(x)).argmax(1) != y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.hparams.rate)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "epoch"},
        }


class Ema:
    """A running mean in an object that is no module."""

    def __init__(self):
        self.loss = 1.0

    def update(self, loss: float) -> float:
        self.loss += 0.2 * (loss - self.loss)
        return self.loss


class Phase(Enum):
    LOW = 0.3
    HIGH = 1.0


class Keeping(Dropping):
    """Its loss depends on what it keeps in attributes of all kinds, and a teacher that nobody sees
    validates."""

    def __init__(self, keeps: str = "count", rate: float = 0.01):
        super().__init__(rate=rate)
        self.count, self.window, self.phase, self.ema, self.known = (
            0,
            deque(maxlen=5),
            Phase.LOW,
            Ema(),
            {"first": 1.0},
        )
        self.teacher, self.shadow = [copy.deepcopy(self.mean)], {"sum": torch.zeros(4)}
        self.array, self.seen, self.queue = np.ones(2), set(), [0.5, 0.6, 0.7, 0.8, 0.9] * 20
        self.register_buffer("hidden", torch.ones(()), persistent=False)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        value = float(loss.detach())
        self.count += 1
        self.window.append(value)
        self.phase = Phase.HIGH if self.count > 3 else Phase.LOW
        self.known[f"step {self.count}"] = value
        self.shadow["sum"] += 0.1 * batch[0].sum(0)
        self.array += 0.1
        self.seen |= {self.count}
        self.hidden += 0.1
        scales = {
            "count": lambda: 1 / self.count,
            "window": lambda: len(self.window) + sum(self.window),
            "phase": lambda: self.phase.value,
            "object": lambda: self.ema.update(value),
            "dict": lambda: sum(self.known.values()) / len(self.known),
            "teacher": lambda: 1.0,
            "shadow": lambda: float(self.shadow["sum"].abs().sum()),
            "array": lambda: float(self.array.sum()),
            "set": lambda: 1 / len(self.seen),
            "list": lambda: self.queue.pop(),
            "buffer": lambda: float(self.hidden),
        }
        return loss * scales[self.hparams.keeps]()

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            for mean, weight in zip(
                self.teacher[0].parameters(), self.mean.parameters(), strict=True
            ):
                mean.lerp_(weight, 0.3)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        mean = self.teacher[0] if self.hparams.keeps == "teacher" else self.mean
        self.log("val_error", ((self.network(x) + mean(x)).argmax(1) != y).float().mean())
        self.log("val_loss", F.cross_entropy(self.network(x) + mean(x), y))


class Warming(Callback):
    """Scales the steps of the first batches by a number of its own, and draws from a generator of
    its own."""

    def __init__(self):
        self.seen, self.rng = 0, np.random.default_rng(1)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.seen += 1
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.rng.uniform(0.5, 1) / self.seen)


class Backboned(Dropping):
    """For a finetuning callback: its network is the backbone, and the optimizer gets what is not
    frozen."""

    def __init__(self, rate: float = 0.01):
        super().__init__(rate=rate)
        self.backbone = self.network[0]

    def configure_optimizers(self):
        return torch.optim.Adam(
            [p for p in self.parameters() if p.requires_grad], self.hparams.rate
        )

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.network(x) + self.mean(x), y))


class Changing(Backboned):
    """Changes what it trains in its second epoch of seven steps."""

    def __init__(self, change: str = "freeze", rate: float = 0.01):
        super().__init__(rate=rate)
        self.save_hyperparameters()
        self.hidden, self.scale = [nn.Parameter(torch.full((3,), 0.1))], 1.0
        later = {"unfreeze": [*self.network[0].parameters()], "group": [self.mean.weight]}
        for parameter in later.get(change, []):
            parameter.requires_grad_(False)

    def configure_optimizers(self):
        trained = [
            p for p in self.parameters() if p.requires_grad or self.hparams.change == "unfreeze"
        ]
        return torch.optim.Adam(trained, self.hparams.rate)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.hparams.change == "refreeze":
            self.network[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        optimizer = self.optimizers().optimizer
        if self.current_epoch == 1:
            getattr(self, f"change_{self.hparams.change}")(optimizer)

    def change_freeze(self, optimizer) -> None:
        self.network[3].requires_grad_(False)

    def change_unfreeze(self, optimizer) -> None:
        self.network[0].requires_grad_(True)

    change_refreeze = change_unfreeze

    def change_evaluate(self, optimizer) -> None:
        self.network[2].eval()  # no dropout

    def change_group(self, optimizer) -> None:
        self.mean.weight.requires_grad_(True)
        optimizer.add_param_group({"params": [self.mean.weight], "lr": 0.003, "weight_decay": 0.1})

    def change_regroup(self, optimizer) -> None:
        weight = optimizer.param_groups[0]["params"].pop(0)
        optimizer.add_param_group({"params": [weight], "lr": 0.002})

    def change_hidden(self, optimizer) -> None:
        optimizer.add_param_group({"params": self.hidden})

    def change_grow(self, optimizer) -> None:
        self.network.append(nn.Linear(3, 3))
        optimizer.add_param_group({"params": self.network[4].parameters()})

    def change_activation(self, optimizer) -> None:
        self.network[1] = nn.Tanh()

    def change_foreign(self, optimizer) -> None:
        tensor = nn.Parameter(torch.ones(()))
        tensor.register_hook(lambda gradient: gradient * 0.5)
        self.__dict__["term"] = lambda: 0.1 * tensor.square()
        optimizer.add_param_group({"params": [tensor]})

    def change_optimizer(self, optimizer) -> None:
        self.trainer.optimizers = [torch.optim.SGD(optimizer.param_groups[0]["params"], 0.1)]

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.network(x) + self.mean(x) + self.hidden[0], y)
        return loss + self.__dict__.get("term", lambda: 0.0)()
