"""Nets with a learning rate that follows a schedule."""

from __future__ import annotations

import math

import torch
from torch.optim import lr_scheduler

from tests.zoo.animals.models import Net


class Scheduled(Net):
    """Trained by SGD with a schedule.

    Args:
        kind: "one_cycle" over the steps that the trainer estimates, "cosine_steps" and
            "cosine_epochs" over its budgets, "halving" at each epoch, or "plateau" of the
            validation loss, which takes each for worse.
    """

    def __init__(self, width: int = 16, lr: float = 1e-2, kind: str = "one_cycle"):
        super().__init__(width, lr)
        self.kind = kind

    def configure_optimizers(self):
        optimizer, lr = torch.optim.SGD(self.parameters(), self.hparams.lr), self.hparams.lr
        if self.kind == "one_cycle":
            steps = self.trainer.estimated_stepping_batches
            by = {
                "scheduler": lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps),
                "interval": "step",
            }
        elif self.kind == "cosine_steps":
            by = {
                "scheduler": lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_steps),
                "interval": "step",
            }
        elif self.kind == "cosine_epochs":
            by = {"scheduler": lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)}
        elif self.kind == "halving":
            by = {"scheduler": lr_scheduler.StepLR(optimizer, 1, 0.5)}
        else:
            worse = lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=0, threshold=1e6, eps=0
            )
            by = {"scheduler": worse, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": by}


class LateOneCycle(Net):
    """Trained at a constant rate, then by one cycle, which changes the momentum too.

    Args:
        begin: The first step of the cycle.
    """

    def __init__(self, width: int = 16, lr: float = 1e-2, begin: int = 250):
        super().__init__(width, lr)
        self.begin = begin

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)
        constant = lr_scheduler.ConstantLR(optimizer, 1.0)
        cycle = lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=500)
        schedule = lr_scheduler.SequentialLR(optimizer, [constant, cycle], [self.begin])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class LengthInSetup(Net):
    """Computes the length of its schedule in `setup`, by the trainer's numbers, as fine-tuning
    examples do.

    Args:
        kind: "epochs" times the batches of the train dataloader, "estimated" steps, or "max_steps".
    """

    def __init__(self, width: int = 16, lr: float = 1e-2, kind: str = "epochs"):
        super().__init__(width, lr)
        self.kind = kind

    def setup(self, stage):
        if stage != "fit":
            return
        trainer = self.trainer
        if self.kind == "epochs":
            batches = len(trainer.datamodule.train_dataloader())
            self.total = math.ceil(batches / trainer.accumulate_grad_batches) * trainer.max_epochs
        elif self.kind == "estimated":
            self.total = trainer.estimated_stepping_batches
        else:
            self.total = trainer.max_steps

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / self.total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TooShort(Net):
    """Decays to zero within a number of steps of its own, whatever the budget is."""

    def __init__(self, width: int = 16, lr: float = 1e-2, steps: int = 5):
        super().__init__(width, lr)
        self.steps = steps

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.hparams.lr)
        schedule = lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
