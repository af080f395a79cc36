"""Four clouds of points, and the many ways in which a data module may hand them out."""

from __future__ import annotations

import random

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, random_split

TRAIN, VALIDATION = 160, 50


def clouds(n: int, seed: int) -> TensorDataset:
    """n points around four centres in eight dimensions, always the same."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2.0 * torch.randn(4, 8, generator=torch.Generator().manual_seed(99))
    y = torch.arange(n) % 4
    return TensorDataset(centres[y] + torch.randn(n, 8, generator=generator), y)


class Clouds(LightningDataModule):
    """The plain one."""

    def __init__(
        self, batch_size: int = 16, n: int = TRAIN, drop_last: bool = False, workers: int = 0
    ):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str | None = None) -> None:
        self.train, self.val = clouds(self.hparams.n, 1), clouds(VALIDATION, 2)

    def train_dataloader(self):
        h = self.hparams
        return DataLoader(
            self.train, h.batch_size, shuffle=True, drop_last=h.drop_last, num_workers=h.workers
        )

    def val_dataloader(self):
        return DataLoader(self.val, 20)


class _Cache(Dataset):
    """Copies each example into an array when it is read first."""

    def __init__(self, examples: TensorDataset):
        self.examples, self.seen = examples, np.zeros((len(examples), 8), dtype=np.float32)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, i: int):
        x, y = self.examples[i]
        self.seen[i] = x
        return torch.from_numpy(self.seen[i]), y


class Cached(Clouds):
    """Its data set fills an array as it is read."""

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self.train = _Cache(self.train)


class WithWeights(Clouds):
    """Keeps an array of weights, which a module may read."""

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self.weights = np.ones(4)


class Deaf(Clouds):
    """Its argument `batch` feeds no loader."""

    def __init__(self, batch_size: int = 16, batch: int = 16):
        super().__init__(batch_size)


class OwnOrder(Clouds):
    """Takes the seed of its order as an argument."""

    def __init__(self, batch_size: int = 16, order_seed: int = 0):
        super().__init__(batch_size)
        self.order_seed = order_seed

    def train_dataloader(self):
        generator = torch.Generator().manual_seed(self.order_seed)
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, generator=generator)


class CroppedValidation(Clouds):
    """Its validation loader drops the last ten examples."""

    def val_dataloader(self):
        return DataLoader(self.val, 20, drop_last=True)


class ValidationByBatchSize(Clouds):
    """How many examples it validates on depends on the batch size."""

    def val_dataloader(self):
        return DataLoader(clouds(self.hparams.batch_size, 2), 20)


class NoValidation(Clouds):
    """Its validation split is empty."""

    def val_dataloader(self):
        return DataLoader(clouds(0, 2), 20)


class TwoValidations(Clouds):
    """Two validation splits."""

    def val_dataloader(self):
        return [DataLoader(self.val, 20), DataLoader(clouds(30, 3), 20)]


class DictOfLoaders(Clouds):
    """Two train dataloaders by name."""

    def train_dataloader(self):
        return {"first": super().train_dataloader(), "second": super().train_dataloader()}


class ListOfLoaders(Clouds):
    """Two train dataloaders in a list."""

    def train_dataloader(self):
        return [super().train_dataloader(), super().train_dataloader()]


class Combined(Clouds):
    """Two train dataloaders in Lightning's own wrapper."""

    def train_dataloader(self):
        return CombinedLoader(
            [super().train_dataloader(), super().train_dataloader()], "max_size_cycle"
        )


class AsksTheTrainer(Clouds):
    """Needs its trainer to set up."""

    def setup(self, stage: str | None = None) -> None:
        assert self.trainer.world_size == 1
        super().setup(stage)


class Endless(IterableDataset):
    """The training split over and over, without a length."""

    def __init__(self, data: TensorDataset):
        self.data = data

    def __iter__(self):
        while True:
            yield from self.data


class Streamed(Clouds):
    """Trains on a stream."""

    def train_dataloader(self):
        return DataLoader(Endless(self.train), self.hparams.batch_size)


class Dicts(Dataset):
    """Examples as dictionaries."""

    def __init__(self, data: TensorDataset):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x, y = self.data[i]
        return {"x": x, "y": y}


class DictBatches(Clouds):
    """Batches are dictionaries."""

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self.train, self.val = Dicts(self.train), Dicts(self.val)


class Augmented(Dataset):
    """Adds noise of numpy and of `random` to each example as it is taken."""

    def __init__(self, data: TensorDataset):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int):
        x, y = self.data[i]
        noise = torch.from_numpy(np.random.randn(len(x))).float()
        return x * random.uniform(0.5, 1.5) + noise, y


class Noisy(Clouds):
    """Augments its training examples."""

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        self.train = Augmented(self.train)


class SplitBySeed(Clouds):
    """Draws its validation examples by the global generator."""

    def setup(self, stage: str | None = None) -> None:
        self.train, self.val = random_split(clouds(TRAIN + VALIDATION, 1), [TRAIN, VALIDATION])


class SplitByName(SplitBySeed):
    """Draws its validation examples by the global generator at one value of its argument."""

    def __init__(self, batch_size: int = 16, split: str = "fixed"):
        super().__init__(batch_size)
        self.split = split

    def setup(self, stage: str | None = None) -> None:
        if self.split == "fixed":
            self.train, self.val = clouds(TRAIN, 1), clouds(VALIDATION, 2)
        else:
            super().setup(stage)


class SplitOnce(SplitBySeed):
    """Draws them by a generator of its own."""

    def setup(self, stage: str | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.train, self.val = random_split(
            clouds(TRAIN + VALIDATION, 1), [TRAIN, VALIDATION], generator
        )
