"""Checks that a batch in parts has the gradient of the batch.

Gradient accumulation averages the gradients of the parts of a batch. That is the gradient of the
batch only if the loss is a mean over examples. Batch norm, a mean over the tokens of texts of
different lengths, and contrastive losses break this: the accumulated step is then another step.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lit_dps.core.trial import Trial
from lit_dps.engines.engine import TrialSettings
from lit_dps.parallel.example_count import Sizes, batch_size_of, can_be_cut, cut
from lit_dps.study.preflight.short_trial import perturb
from lit_dps.study.probe_run import EndProbe, probe_fit
from lit_dps.study.setup import StudySetup
from lit_dps.training.deterministic import full_float32
from lit_dps.training.training_pass import TrainingPass

ROUNDING = 1e-3  # relative; float32 sums of the same numbers in another order differ by less


def check_parts(training: TrialSettings, trial: Trial, setup: StudySetup) -> list[str]:
    """Return a note if a batch in two halves has another gradient than the whole batch.

    Only studies that accumulate gradients are checked, on a dense network and one batch.

    Args:
        training: The settings of the study.
        trial: A trial of the study.
        setup: The study.
    """
    accumulates = [cell for cell in setup.study.cells if training.workload.parts_of(cell) > 1]
    if not accumulates:
        return []
    cell = replace(max(accumulates, key=lambda cell: cell.batch_size), sparsity=0.0)
    probe = PartsProbe()
    name = training.workload.model["class_path"].rpartition(".")[2]
    with full_float32():
        probe_fit(training, replace(trial, cell=cell), probe)
    if probe.difference is None:
        return [f"whether a batch in parts equals the batch is not known: {probe.reason}"]
    if probe.difference <= ROUNDING:
        return []
    return [
        f"a batch in parts is another batch for {name}: the mean gradient of two halves differs "
        f"from the gradient of {probe.examples} examples by {100 * probe.difference:.2g} %, "
        f"because {probe.cause}. K with accumulated batches is not K of batches in one piece"
    ]


class PartsProbe(Callback):
    """Compares the gradient of the first batch with the mean over its halves, and ends the run.

    Dropout is off, because it would draw other numbers for the halves.

    Attributes:
        difference: Norm of the difference over the norm of the gradient; None if it is unknown.
        examples: Examples of both halves together.
        reason: Why the difference is unknown.
        cause: What makes the difference, as far as it is known.
    """

    def __init__(self):
        self.difference: float | None = None
        self.examples = 0
        self.reason = "the run has no batch"
        self.cause = ""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        size = Sizes(batch_size_of(trainer.train_dataloader)).examples_in(batch)
        if size is None or size < 2 or not can_be_cut(batch, size):
            self.reason = "its batches cannot be cut into halves of at least one example"
            raise EndProbe
        data_pass = TrainingPass(trainer, pl_module, size)
        half = size // 2
        self.examples = 2 * half
        parts = [slice(0, 2 * half), slice(0, half), slice(half, 2 * half), slice(0, 2 * half)]
        gradients = []
        for i, part in enumerate(parts):
            # A fresh copy for each part, because running statistics change along a pass.
            with data_pass.without_side_effects() as twin:
                # The whole batch comes twice, with other random numbers.
                torch.rand(i, device=pl_module.device)
                gradients.append(_gradient(data_pass, twin, cut(batch, part), batch_idx))
        self._compare(gradients, pl_module)
        raise EndProbe

    def _compare(self, gradients: list[Tensor | None], module: nn.Module) -> None:
        """Set the difference from the gradients of the whole, both halves, and the whole again."""
        tensors = [gradient for gradient in gradients if gradient is not None]
        if len(tensors) < len(gradients):
            self.reason = "its training step returns no loss"
            return
        whole, first, second, again = tensors
        norm = float(whole.norm())
        if not 0 < norm < math.inf:
            self.reason = f"the gradient of its first batch has norm {norm:g}"
            return
        if float((again - whole).norm()) > ROUNDING * norm:
            self.reason = "its loss is random, also without dropout"
            return
        self.difference = float(((first + second) / 2 - whole).norm()) / norm
        self.cause = "its loss is no mean over examples"
        norms = [name for name, part in module.named_modules() if isinstance(part, _BatchNorm)]
        if norms:
            self.cause = f"batch norm ({norms[0]}) takes the statistics of each part"


def _gradient(
    data_pass: TrainingPass, twin: LightningModule, batch: Any, batch_idx: int
) -> Tensor | None:
    """Return the gradient of a part of a batch by a copy, flat, in float64; None without loss."""
    for part in twin.modules():
        if isinstance(part, _DropoutNd):
            part.eval()
    perturb(twin)
    loss = data_pass.loss(twin, batch, batch_idx)
    if loss is None:
        return None
    weights = [parameter for parameter in twin.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, weights, allow_unused=True, materialize_grads=True)
    return torch.cat([gradient.flatten().double() for gradient in gradients])
