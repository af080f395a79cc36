"""Whether a batch in parts trains like the batch; `study` and `advise` use the same definition.

Gradient accumulation averages the gradients of the parts of a batch. That is the gradient of the
batch only if the loss is a mean over examples. Batch norm, a mean over the tokens of texts of
different lengths, and contrastive losses break this: the accumulated step is then another step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lit_dps.core.errors import first_line
from lit_dps.core.trial import Trial
from lit_dps.engines.trial_settings import TrialSettings
from lit_dps.parallel.example_count import can_be_cut, cut
from lit_dps.study.probe_run import EndProbe, probe_fit
from lit_dps.study.setup import StudySetup
from lit_dps.training.deterministic import full_float32
from lit_dps.training.example_count import examples_of_part, record_batches
from lit_dps.training.training_pass import TrainingPass

# What differs between a batch and its parts. Advice stores these values.
LOSS = "loss"  # the loss itself, on average over batches
WEIGHTS = "weights"  # the gradient of a batch, but not the loss on average
NORM = "norm"  # the statistics of batch norm
UNKNOWN = "unknown"  # whether the loss differs
BATCHES = 8  # that are compared
EQUAL_BATCHES = 2  # that end the comparison if they equal their halves
ROUNDING = 1e-3  # relative; float32 sums of the same numbers in another order differ by less
# The loss differs on average if the mean difference is this many standard errors, and this share
# of the loss. A smaller share hardly changes K.
STANDARD_ERRORS = 4.0
LEAST_SHARE = 0.02

_CAUSES = {
    LOSS: "its loss is no mean over examples",
    WEIGHTS: "its loss weights examples by the batch, as a mean over tokens does",
}


def check_parts(settings: TrialSettings, trial: Trial, setup: StudySetup) -> list[str]:
    """Return notes if a batch in two halves trains differently from the whole batch.

    Studies that accumulate gradients, or whose ranks divide a batch, are checked, on a dense
    network.

    Args:
        settings: The settings of the study.
        trial: A trial of the study.
        setup: The study.
    """
    cells = [cell for cell in setup.study.cells if settings.workload.parts_of(cell) > 1]
    parts = "accumulated batches"
    effect = "K with accumulated batches is not K of batches in one piece"
    has_synchronized_norm = False
    if not cells and setup.ranks > 1:
        cells = list(setup.study.cells)
        parts = f"the parts of {setup.ranks} ranks"
        effect = f"K on {setup.ranks} ranks is not K on one device"
        has_synchronized_norm = bool(setup.workload.trainer.get("sync_batchnorm"))
    if not cells:
        return []
    cell = replace(max(cells, key=lambda cell: cell.batch_size), sparsity=0.0)
    probe = PartsProbe()
    with full_float32():
        probe_fit(settings, replace(trial, cell=cell), probe)
    name = settings.workload.model["class_path"].rpartition(".")[2]
    notes = []
    for each in probe.dependence():
        if each == UNKNOWN:
            notes.append(f"whether a batch in parts equals the batch is not known: {probe.reason}")
        elif each == NORM:
            if has_synchronized_norm:
                continue
            notes.append(
                f"{name} trains differently on {parts}: batch norm "
                f"({probe.batch_norm}) takes the statistics of each part. {effect}"
            )
        else:
            notes.append(
                f"{name} trains differently on {parts}: {probe.difference_text()}, "
                f"because {_CAUSES[each]}. {effect}"
            )
    return notes


class _NoGradient(Exception):
    """PyTorch cannot compute the gradient of a loss."""


class _Pass(NamedTuple):
    """Loss and gradient of a part of a batch; the gradient has a tensor for each parameter."""

    loss: float
    gradient: list[Tensor]


class PartsProbe(Callback):
    """Compares some batches with their halves, then ends the run.

    Copies of the module compute losses and gradients. Their dropout is off, because it would draw
    other numbers for the halves, and their batch norm does not use the statistics of the batch.

    Attributes:
        differences: Norm of the difference of the gradients over the norm of the gradient, by
            batch; empty if the loss is random.
        wholes: The loss of each batch.
        halves: The mean loss of its halves.
        examples: Examples of both halves together.
        batch_norm: The name of a batch norm that uses the statistics of the batch; "" without one.
        reason: Why the difference is unknown.
    """

    def __init__(self) -> None:
        self.differences: list[float] = []
        self.wholes: list[float] = []
        self.halves: list[float] = []
        self.examples = 0
        self.batch_norm = ""
        self.reason = "the run has no batch"
        self._is_random = False
        self._batches = 0

    def dependence(self) -> list[str]:
        """Return what differs: `LOSS`, `WEIGHTS` or `UNKNOWN`, and `NORM`; [] if nothing does."""
        differ = differs(self.wholes, self.halves)
        found = []
        if not self.wholes:
            found.append(UNKNOWN)
        elif self._is_random:
            # Only a difference on average can be seen.
            if differ is None:
                found.append(UNKNOWN)
            elif differ:
                found.append(LOSS)
        elif max(self.differences) > ROUNDING:
            # One batch does not show whether the difference averages out.
            found.append(WEIGHTS if differ is False else LOSS)
        if self.batch_norm:
            found.append(NORM)
        return found

    def difference_text(self) -> str:
        """Return what differs by how much; the gradient, or the loss if it is random."""
        if self._is_random:
            mean = statistics.fmean(self.wholes)
            share = abs(statistics.fmean(self.halves) - mean) / abs(mean)
            return (
                f"the mean loss of two halves differs from the loss of {self.examples} examples "
                f"by {100 * share:.2g} %"
            )
        return (
            "the mean gradient of two halves differs from the gradient of "
            f"{self.examples} examples by {100 * max(self.differences):.2g} %"
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        record_batches(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # The module may freeze its layers in its own `on_train_start`, which is called later.
        self.batch_norm = _active_batch_norm(pl_module)
        size = examples_of_part(trainer, batch) or 0
        if size < 2 or not can_be_cut(batch, size):
            self.reason = "its batches cannot be cut into halves of at least one example"
            raise EndProbe
        self.reason = "its training step returns no loss with a gradient"
        try:
            self._compare(TrainingPass(trainer, pl_module, size), batch, batch_idx, size // 2)
        except _NoGradient as error:
            self.reason = f"the gradient of its loss cannot be computed: {error}"
            raise EndProbe from error
        self._batches += 1
        if self._batches == BATCHES or self._are_equal():
            raise EndProbe

    def _are_equal(self) -> bool:
        """Return True if enough batches equal their halves, so that more would show the same."""
        if self._is_random or len(self.differences) < EQUAL_BATCHES:
            return False
        return max(self.differences) <= ROUNDING

    def _compare(self, data_pass: TrainingPass, batch: Any, batch_idx: int, half: int) -> None:
        """Compare a batch of twice `half` examples with its halves."""
        loss, rest = _pass_of(data_pass, cut(batch, slice(0, 2 * half)), batch_idx)
        norm = _norm(rest)
        # Other random numbers and another order: the difference is rounding, or the loss is random.
        backwards = torch.arange(2 * half - 1, -1, -1)
        again = _pass_of(data_pass, cut(batch, backwards), batch_idx, skipped_draws=1)
        distance = _norm([a - b for a, b in zip(again.gradient, rest, strict=True)])
        # At most two gradients are in memory at a time.
        del again
        losses = []
        for i, part in enumerate((slice(0, half), slice(half, 2 * half))):
            of_half = _pass_of(data_pass, cut(batch, part), batch_idx, skipped_draws=2 + i)
            losses.append(of_half.loss)
            # Not in place, because two gradients may share their memory.
            for j, gradient in enumerate(of_half.gradient):
                rest[j] = torch.sub(rest[j], gradient, alpha=0.5)
            del of_half
        mean = statistics.fmean(losses)
        if not math.isfinite(loss - mean):
            # For example, a half without a label has the loss nan.
            self.reason = "the loss of a batch or of its half is not finite"
            return
        if not 0 < norm < math.inf:
            self.reason = f"the gradient of a batch has norm {norm:g}"
            return
        self.examples = 2 * half
        self.wholes.append(loss)
        self.halves.append(mean)
        self.differences.append(_norm(rest) / norm)
        self._is_random |= distance > ROUNDING * norm


def differs(wholes: Sequence[float], halves: Sequence[float]) -> bool | None:
    """Return True if losses of batches differ on average from the mean losses of their halves.

    None for fewer than two batches.

    Args:
        wholes: The loss of each batch.
        halves: The mean loss of the halves of each batch.
    """
    if len(wholes) < 2:
        return None
    shares = []
    for whole, half in zip(wholes, halves, strict=True):
        # As a share, because the loss changes along the run.
        size = (abs(whole) + abs(half)) / 2
        shares.append((whole - half) / size if size else 0.0)
    mean = abs(statistics.fmean(shares))
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    return mean > STANDARD_ERRORS * error and mean > LEAST_SHARE


def _active_batch_norm(module: nn.Module) -> str:
    """Return the name of a batch norm that uses the statistics of the batch; "" without one."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.training:
            return name
    return ""


def _pass_of(data_pass: TrainingPass, batch: Any, batch_idx: int, skipped_draws: int = 0) -> _Pass:
    """Return loss and gradient of a part of a batch by a fresh copy of the module.

    Args:
        data_pass: The pass of the run.
        batch: The part.
        batch_idx: The number of the batch.
        skipped_draws: Random numbers to skip, so that random losses differ between passes.

    Raises:
        EndProbe: if the training step returns no loss, or one without a gradient.
        _NoGradient: if PyTorch cannot compute the gradient.
    """
    with data_pass.without_side_effects() as twin:
        for layer in twin.modules():
            if isinstance(layer, (_DropoutNd, _BatchNorm)):
                layer.eval()
        torch.rand(skipped_draws, device=twin.device)
        loss = data_pass.loss(twin, batch, batch_idx)
        if loss is None or not loss.requires_grad:
            raise EndProbe
        weights = [parameter for parameter in twin.parameters() if parameter.requires_grad]
        try:
            gradient = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # For example, a manual module has freed the graph of the loss that it returns.
            raise _NoGradient(first_line(error)) from error
        # Embeddings may have sparse gradients, which have no norm.
        return _Pass(float(loss.detach()), [each.to_dense() for each in gradient])


def _norm(gradient: Sequence[Tensor]) -> float:
    """Return the norm of a gradient over all parameters."""
    return math.hypot(*[float(torch.linalg.vector_norm(each)) for each in gradient])
