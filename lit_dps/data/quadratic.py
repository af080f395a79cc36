"""The examples of `lit_dps.models.NoisyQuadratic`: nothing but noise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lit_dps.core.errors import ConfigError

PASS = 64  # examples of a pass over the training split


class GradientNoise(LightningDataModule):
    """Batches of standard normal examples without an end, as long as the module's
    (`NoisyQuadratic.example_size`).

    The loss is linear in them, so a batch is its own mean, drawn as one example of variance 1 / B
    and repeated B times: any batch size costs the same. They are drawn from torch's global
    generator, which a study seeds by the point.

    Args:
        batch_size: Examples of a batch.

    Raises:
        ConfigError: for a batch size below 1.
    """

    def __init__(self, batch_size: int = 16):
        super().__init__()
        if batch_size < 1:
            raise ConfigError("data.batch_size", batch_size, "at least 1")
        self.batch_size = batch_size

    @property
    def _size(self) -> int:
        return self.trainer.lightning_module.example_size

    def train_dataloader(self) -> Noise:
        return Noise(self.batch_size, self._size)

    def pruning_dataloader(self, batch_size: int = 100) -> DataLoader:
        """Single examples that stand for all, for what is measured along training: signs s and,
        after them, -s.

        Their mean is 0 and their variance 1, as those of the distribution, and not only nearly.
        """
        signs = (
            torch.randint(0, 2, (PASS // 2, self._size), generator=torch.Generator().manual_seed(0))
            * 2.0
            - 1
        )
        return DataLoader(torch.cat([signs, -signs]), batch_size)

    def val_dataloader(self) -> DataLoader:
        """One example: the loss of the quadratic itself takes none."""
        return DataLoader(torch.zeros(1, 1))


class Noise:
    """Batches, shape (batch size, size), without an end; Lightning takes them for one endless
    epoch."""

    def __init__(self, batch_size: int, size: int):
        self.batch_size, self.size = batch_size, size

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield (torch.randn(self.size) / self.batch_size**0.5).expand(self.batch_size, -1)
