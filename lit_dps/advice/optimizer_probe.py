"""The optimizers that a trial trains with, read within a fit that ends before its first step."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from lit_dps.advice.step_probe import FEWEST, of_one_device
from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Trial
from lit_dps.study.probe_run import EndProbe, probe_run
from lit_dps.study.setup import StudySetup
from lit_dps.training.adam_scaling import (
    AdamScales,
    adam_scales_of,
    is_adaptive,
    measured_adaptive,
    needs_measurement,
)


class OptimizerLook(Callback):
    """Reads the optimizers of a run when training starts, and ends the run.

    Attributes:
        adaptive: Settings that follow the batch size; None without an adaptive optimizer.
        notes: What was measured of optimizers of unknown classes, a sentence each.
    """

    def __init__(self) -> None:
        self.adaptive: AdamScales | None = None
        self.notes: list[str] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for optimizer in trainer.optimizers:
            if needs_measurement(optimizer):
                self.notes.append(_measured(optimizer))
        self.adaptive = adam_scales_of(trainer.optimizers)
        raise EndProbe


def look_at_optimizers(setup: StudySetup, trial: Trial) -> OptimizerLook:
    """Return what the optimizers of a trial are when its training starts, under the study's budget,
    on one device.

    Raises:
        Exception: what the module, its data or a callback raises before.
    """
    look = OptimizerLook()
    probe_run(of_one_device(setup), Attempt(trial, setup.unreachable_goal(FEWEST)), [look])
    return look


def _measured(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    found = measured_adaptive(optimizer)
    if found is None:
        treated = "like Adam" if is_adaptive([optimizer]) else "like SGD"
        return f"{name} could not be measured: it is treated {treated}, by its arguments"
    if found:
        return (
            f"{name} was measured: its update does not grow with the gradient, so that it is "
            "treated like Adam"
        )
    return (
        f"{name} was measured: its update grows with the gradient, so that it is treated like SGD"
    )
