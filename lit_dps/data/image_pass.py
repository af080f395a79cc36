"""ImagePass: a pass over the training examples of `ImageData`; batches of its validation split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_dps.data.images import ImageData


def validation_batches(data: ImageData, device: torch.device) -> Iterator[Any]:
    """Yield the batches of the validation split on a device."""
    for index in data.val_dataloader():
        yield data.transfer_batch_to_device(index, device)


@dataclass(frozen=True)
class ImagePass:
    """A pass over the first training examples, as `TrainingPass` makes it of `ImageData`.

    Attributes:
        data: The data module, set up.
        device: Where the batches are.
        batch_size: Examples of a batch.
        examples: Examples of the pass; None for all.
    """

    data: ImageData
    device: torch.device
    batch_size: int
    examples: int | None

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Yield each batch on the device, with its number of examples."""
        remaining = self.examples
        for index in self.data.pruning_dataloader(self.batch_size):
            x, y = self.data.transfer_batch_to_device(index, self.device)
            if remaining is not None:
                x, y = x[:remaining], y[:remaining]
                remaining -= len(y)
            yield (x, y), len(y)
            if remaining == 0:
                return

    def loss(self, module: Any, batch: Any, i: int) -> Tensor | None:
        """Return the mean loss of a batch by a copy of an `ImageClassifier`."""
        return module.loss(batch)
