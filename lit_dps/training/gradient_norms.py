"""GradientNorms: squared norms of the gradient on a rank's part of the batch and on the whole batch."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed import GradBucket

from lit_dps.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.training.pruning import PruningCallback


class GradientNorms(Callback):
    """Reads them every `interval` optimizer steps, over the unpruned coordinates; training is not touched.

    The difference of the two tells the noise of the gradient without another pass: on b of a batch's B examples the
    squared norm is expected to be ||G||^2 + tr(Sigma)/b (McCandlish et al. 2018, Appendix A.1). Each rank keeps its
    own.

    It reads gradients as backward() leaves them: not under gradient accumulation, nor scaled for 16-bit floats.

    Args:
        interval: Optimizer steps between readings.

    Attributes:
        readings: Equally long lists "step"; "share", of the batch that is this rank's part; "part", the squared norm of
            the gradient of the mean loss over that part, before it is added up over the ranks (nan for an empty part);
            and "whole", that of the mean loss over the batch.

    Raises:
        ConfigError: for an interval below 1, and under gradient accumulation.
    """

    def __init__(self, interval: int = 1):
        if interval < 1:
            raise ConfigError("GradientNorms.interval", interval, "at least 1 step")
        self.interval = interval
        self.readings: dict[str, list[float]] = {"step": [], "share": [], "part": [], "whole": []}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise ConfigError("trainer.accumulate_grad_batches", trainer.accumulate_grad_batches, "1 for GradientNorms")
        self._keep: dict[Tensor, Tensor] | None = None
        self._part: Tensor | None = None
        if isinstance(trainer.strategy, SharedBatchDDP):
            trainer.strategy.watch(self._read)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._keep is None:  # not before: pruning may come after this callback
            masks = [c.mask for c in trainer.callbacks if isinstance(c, PruningCallback) and c.mask is not None]
            parameters = dict(pl_module.named_parameters())
            self._keep = {parameters[n]: m.to(parameters[n].device) for mask in masks for n, m in mask.items()}
        self._due = trainer.global_step % self.interval == 0
        self._part = None

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer) -> None:
        if not self._due:
            return
        squares = [self._square(p, p.grad) for p in pl_module.parameters() if p.grad is not None]
        whole, share = float(torch.stack(squares).sum()), getattr(trainer.strategy, "share", 1.0)
        part = whole
        if self._part is not None:
            part = float(self._part) / (share * ranks.world()) ** 2 if share else math.nan
        for key, value in zip(self.readings, (trainer.global_step, share, part, whole), strict=True):
            self.readings[key].append(value)

    def _read(self, bucket: GradBucket) -> None:
        if self._due:
            squares = [self._square(p, g) for p, g in zip(bucket.parameters(), bucket.gradients(), strict=True)]
            self._part = torch.stack(squares if self._part is None else [self._part, *squares]).sum()

    def _square(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        keep = self._keep.get(parameter)
        return (gradient if keep is None else gradient * keep).double().square().sum()
