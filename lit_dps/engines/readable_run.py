"""ReadableRun: the view of a run of the interval loop that readings receive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor

from lit_dps.core.attempt import Attempt
from lit_dps.data.image_pass import ImagePass, validation_batches
from lit_dps.engines.loader_data import LoaderData, LoaderPass
from lit_dps.engines.logged_module import training_loss
from lit_dps.optim.parameter_groups import trained_ids
from lit_dps.pruning import Mask
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.training_pass import copy_of


class ReadableRun:
    """A run of the interval loop, as `lit_dps.readings.reading.ReadRun` describes it.

    Attributes:
        attempt, module, data, optimizer, mask, source: As in `NetworkRun`.
    """

    attempt: Attempt
    module: Any
    data: Any
    optimizer: torch.optim.Optimizer
    mask: Mask | None
    source: LightningDataModule | None

    @property
    def data_module(self) -> LightningDataModule:
        """The data module as the study configures it."""
        return self.source or self.data

    @property
    def masks(self) -> Mapping[str, Tensor]:
        """The mask of each pruned parameter by name, on its device."""
        return {name: keep.to(self.module.device) for name, keep in (self.mask or {}).items()}

    @property
    def trained(self) -> set[int]:
        """The `id` of each parameter that the optimizer trains."""
        return trained_ids([self.optimizer])

    @contextmanager
    def copied(self) -> Iterator[LightningModule]:
        """Yield a copy of the module, and undo all side effects of the block afterwards."""
        with preserve_rng_state(self.data, self.data_module):
            yield copy_of(self.module)

    def training_pass(self, batch_size: int, examples: int | None) -> ImagePass | LoaderPass:
        """Return a fresh pass over the first examples of the training split; None for all."""
        if isinstance(self.data, LoaderData):
            return LoaderPass(self.data, batch_size, examples)
        return ImagePass(self.data, self.module.device, batch_size, examples)

    def validation_batches(self) -> Iterator[Any]:
        """Yield the batches of the whole validation split on the device."""
        if isinstance(self.data, LoaderData):
            return iter(self.data.validation)
        return validation_batches(self.data, self.module.device)

    @property
    def batch_size(self) -> int:
        """The cell's batch size: the most examples of an optimizer step."""
        return self.attempt.study_trial.cell.batch_size

    def loss_of(self, module: LightningModule, batch: Any) -> Tensor | None:
        """Return the mean training loss of a batch by a copy of the module."""
        return training_loss(module, batch)
