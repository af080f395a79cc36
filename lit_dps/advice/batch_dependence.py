"""Whether the loss of a batch is the mean over its examples, as accumulated batches assume.

A contrastive loss with the negatives in the batch is not, and batch norm is not either: a batch of
two parts, one after the other, has another gradient than the same batch at once.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lit_dps.advice.step_probe import of_one_device
from lit_dps.core.attempt import Attempt
from lit_dps.core.trial import Trial
from lit_dps.parallel.example_count import can_be_cut, cut
from lit_dps.study.probe_run import EndProbe, probe_run
from lit_dps.study.setup import StudySetup
from lit_dps.training.example_count import examples_of_part, record_batches
from lit_dps.training.training_pass import TrainingPass

# What depends on the batch, or that the loss could not be compared. They are stored.
LOSS = "loss"
NORM = "norm"
UNKNOWN = "unknown"
BATCHES = 8  # that are compared
# The loss depends on the batch if the mean difference is this many standard errors, and this share
# of the loss: dropout and augmentations draw other numbers for the halves.
STANDARD_ERRORS = 4.0
LEAST_SHARE = 0.02

_REASONS = {
    LOSS: (
        "The loss of a batch differs from the mean loss of its halves, as a summed or contrastive "
        "loss does.",
        "have another loss",
    ),
    NORM: ("Batch norm uses the statistics of each batch.", "have other statistics"),
}


def note_on(dependence: str, is_accumulated: bool) -> str:
    """Return the note on what depends on the batch.

    Args:
        dependence: `LOSS`, `NORM` or `UNKNOWN`.
        is_accumulated: Whether the user accumulates batches.
    """
    if dependence == UNKNOWN:
        return (
            "It is unknown whether the loss of a batch is the mean over its parts. Rows with "
            "accumulation assume that it is."
        )
    reason, effect = _REASONS[dependence]
    if is_accumulated:
        return f"{reason} The parts of another size {effect}, here and on several devices."
    return (
        f"{reason} So there are no rows with accumulation, and parts of a batch on several "
        f"devices {effect}."
    )


def batch_dependence(setup: StudySetup, trial: Trial) -> list[str]:
    """Return what of a trial's loss depends on the batch: `LOSS` or `UNKNOWN`, and `NORM`.

    [] if nothing does.

    A few steps on one device compare the losses.

    Raises:
        Exception: An error of the module, its data or a callback.
    """
    reader = LossOfHalves()
    probe_run(of_one_device(setup), Attempt(trial, setup.unreachable_goal(BATCHES)), [reader])
    depends = []
    differ = differs(reader.wholes, reader.halves)
    if differ is None:
        depends.append(UNKNOWN)
    elif differ:
        depends.append(LOSS)
    if reader.has_batch_norm:
        depends.append(NORM)
    return depends


def differs(wholes: Sequence[float], halves: Sequence[float]) -> bool | None:
    """Return True if losses of batches differ from the mean losses of their halves.

    None if fewer than two batches have finite losses.

    Args:
        wholes: The loss of each batch.
        halves: The mean loss of the halves of each batch.
    """
    differences = []
    sizes = []
    for whole, half in zip(wholes, halves, strict=True):
        # For example, a half without a label has the loss nan.
        if math.isfinite(whole - half):
            differences.append(whole - half)
            sizes.append(abs(whole))
    if len(differences) < 2:
        return None
    mean = abs(statistics.fmean(differences))
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    size = statistics.fmean(sizes)
    return mean > STANDARD_ERRORS * error and mean > LEAST_SHARE * size


class LossOfHalves(Callback):
    """Reads the loss of some batches and of their halves, then ends the run.

    A copy of the module computes the losses. Its batch norm is in evaluation mode, so that its
    statistics do not depend on the batch.

    Attributes:
        wholes: The loss of each batch.
        halves: The mean loss of its halves.
        has_batch_norm: Whether the module trains with statistics of the batch.
    """

    def __init__(self) -> None:
        self.wholes: list[float] = []
        self.halves: list[float] = []
        self.has_batch_norm = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        record_batches(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pass = TrainingPass(trainer, pl_module, 1)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The module may freeze its layers in its own `on_train_start`, which is called later.
        self.has_batch_norm = any(layer.training for layer in _batch_norms(pl_module))
        size = examples_of_part(trainer, batch) or 0
        if size < 2 or not can_be_cut(batch, size):
            raise EndProbe
        half = size // 2
        losses = []
        with self._pass.without_side_effects() as twin:
            for layer in _batch_norms(twin):
                layer.eval()
            for part in (slice(0, 2 * half), slice(0, half), slice(half, 2 * half)):
                loss = self._pass.loss(twin, cut(batch, part), batch_idx)
                if loss is None:
                    raise EndProbe
                losses.append(float(loss.detach()))
        self.wholes.append(losses[0])
        self.halves.append((losses[1] + losses[2]) / 2)
        if len(self.wholes) == BATCHES:
            raise EndProbe


def _batch_norms(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
