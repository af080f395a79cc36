"""The examples of `lit_dps.models.NoisyQuadratic`: standard normal noise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lit_dps.core.errors import ConfigError

# Examples of a pass over the training split that are drawn independently. As many follow.
INDEPENDENT = 1024


class GradientNoise(LightningDataModule):
    """Endless batches of standard normal examples of length `NoisyQuadratic.example_size`.

    The loss is linear in the examples, so that only the mean of a batch counts. It is drawn as one
    example of variance 1 / B and repeated B times. So all batch sizes cost the same. The numbers
    come from torch's global generator, which a study seeds by the point.

    Args:
        batch_size: Examples of a batch.

    Attributes:
        independent_examples: How many examples of a pass are independent. Estimates of noise may
            not use more.

    Raises:
        ConfigError: for a batch size below 1.
    """

    independent_examples = INDEPENDENT

    def __init__(self, batch_size: int = 16):
        super().__init__()
        if batch_size < 1:
            raise ConfigError("data.batch_size", batch_size, "at least 1")
        self.batch_size = batch_size
        self._signs: Tensor | None = None

    @property
    def _size(self) -> int:
        trainer: Any = self.trainer
        return trainer.lightning_module.example_size

    def train_dataloader(self) -> Noise:
        return Noise(self.batch_size, self._size)

    def pruning_dataloader(self, batch_size: int = 100) -> DataLoader:
        """Return examples for measurements along training: random signs s, then -s.

        The mean of all is exactly 0 and their variance exactly 1, as in the distribution. The first
        `independent_examples` have the noise of independent examples. Larger batches would have too
        little noise, so this is the largest size of a batch.
        """
        if self._signs is None:
            generator = torch.Generator().manual_seed(0)
            bits = torch.randint(0, 2, (INDEPENDENT, self._size), generator=generator)
            self._signs = bits * 2.0 - 1
        examples: Any = torch.cat([self._signs, -self._signs])
        return DataLoader(examples, min(batch_size, INDEPENDENT))

    def val_dataloader(self) -> DataLoader:
        """Return one example, because the validation loss does not depend on examples."""
        example: Any = torch.zeros(1, 1)
        return DataLoader(example)


class Noise:
    """Endless batches, shape (batch size, size), which Lightning treats as one epoch."""

    def __init__(self, batch_size: int, size: int):
        self.batch_size = batch_size
        self.size = size

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield (torch.randn(self.size) / self.batch_size**0.5).expand(self.batch_size, -1)
