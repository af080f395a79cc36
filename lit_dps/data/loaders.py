"""Loaders whose batches are indices: which examples make a batch, gathered where the images are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor


class IndexBatch(NamedTuple):
    """Which examples of a split make a batch: int64, shape (batch,), or (steps, batch) for those of
    several steps."""

    split: str
    index: Tensor


class Steps:
    """The batches of several steps, gathered one after another: iterates over (images, classes).

    Args:
        x: Images of a split.
        y: Their classes.
        index: Which examples make each batch: int64, shape (steps, batch), on their device.
    """

    def __init__(self, x: Tensor, y: Tensor, index: Tensor):
        self.x, self.y, self.index = x, y, index

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((self.x[index], self.y[index]) for index in self.index)


class EndlessLoader:
    """Batches of the training split without a length: Lightning takes them for one endless
    epoch."""

    def __init__(self, make: Callable[[], Iterator[Tensor]]):
        self.make = make

    def __iter__(self) -> Iterator[IndexBatch]:
        return (IndexBatch("train", index) for index in self.make())


class PassLoader:
    """One pass over given indices of a split; the last batch may be short."""

    def __init__(self, split: str, index: Tensor, batch_size: int):
        self.split, self.parts = split, index.split(batch_size)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[IndexBatch]:
        return (IndexBatch(self.split, part) for part in self.parts)
