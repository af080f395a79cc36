"""GradientNorms: squared norms of the gradient of a rank's part of a batch and of the whole batch.

The difference of both norms measures the noise of the gradient without an extra pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed import GradBucket  # pyright: ignore[reportPrivateImportUsage]

from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP
from lit_dps.training.masked_tensors import squared_norm
from lit_dps.training.pruning_callback import masks_by_parameter


class GradientNorms(Callback):
    """Records squared norms of the gradient on a rank's part of the batch and on the whole batch.

    On b of a batch's B examples the expected squared norm is ||G||^2 + tr(Sigma)/b (McCandlish et
    al. 2018, Appendix A.1). Each rank records its own part. Pruned coordinates do not count, and
    training itself is not changed. Gradients are read as backward() leaves them, so gradients of
    16-bit floats are still scaled.

    Args:
        interval: Optimizer steps between readings.
        start: First step with a reading.

    Attributes:
        readings: Equally long lists. "step"; "share", the fraction of the batch on this rank;
            "part", the squared norm of the gradient of the mean loss over this part, before the sum
            over the ranks (nan for an empty part); "whole", the squared norm for the whole batch.

    Raises:
        ConfigError: for an interval below 1, and under gradient accumulation.
    """

    measures_one_network = True  # local SGD trains several networks and refuses this callback

    def __init__(self, interval: int = 1, start: int = 0):
        if interval < 1:
            raise ConfigError("GradientNorms.interval", interval, "at least 1 step")
        self.interval = interval
        self.start = start
        self.readings: dict[str, list[float]] = {"step": [], "share": [], "part": [], "whole": []}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            key = "trainer.accumulate_grad_batches"
            raise ConfigError(key, trainer.accumulate_grad_batches, "1 for GradientNorms")
        self._masks: dict[Tensor, Tensor] | None = None
        if isinstance(trainer.strategy, SharedBatchDDP):
            trainer.strategy.observe_gradients(self._add_bucket)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._masks is None:
            # A pruning callback may come after this callback, so `on_train_start` is too early.
            self._masks = masks_by_parameter(trainer, pl_module)
        steps = trainer.global_step - self.start
        self._is_due = steps >= 0 and steps % self.interval == 0
        self._part_square: Tensor | None = None

    def _add_bucket(self, bucket: GradBucket) -> None:
        """Add the gradients of a DDP bucket to this rank's squared norm, before the reduction."""
        if not self._is_due:
            return
        assert self._masks is not None
        squares = []
        if self._part_square is not None:
            squares.append(self._part_square)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            squares.append(squared_norm(gradient, self._masks.get(parameter)))
        self._part_square = torch.stack(squares).sum()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if not self._is_due:
            return
        assert self._masks is not None
        squares = []
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                squares.append(squared_norm(parameter.grad, self._masks.get(parameter)))
        whole = float(torch.stack(squares).sum())
        share = getattr(trainer.strategy, "share", 1.0)
        if self._part_square is None:
            part = whole
        elif share:
            # DDP scales a rank's gradient by its share and by the number of ranks.
            part = float(self._part_square) / (share * ranks.world()) ** 2
        else:
            part = math.nan
        self.readings["step"].append(trainer.global_step)
        self.readings["share"].append(share)
        self.readings["part"].append(part)
        self.readings["whole"].append(whole)
