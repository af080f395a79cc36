"""Loaders whose batches are indices. The data module gathers their images on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor


class IndexBatch(NamedTuple):
    """The examples of a batch: int64, shape (batch,), or (steps, batch) for several steps."""

    split: str
    index: Tensor


class Steps:
    """The batches of several steps. Iterating gathers them one after another.

    Args:
        x: Images of a split.
        y: Their classes.
        index: The examples of each batch: int64, shape (steps, batch), on the device of the images.
    """

    def __init__(self, x: Tensor, y: Tensor, index: Tensor):
        self.x = x
        self.y = y
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.index:
            yield self.x[index], self.y[index]


class EndlessLoader:
    """Batches of the training split without an end, which Lightning treats as one epoch."""

    def __init__(self, make: Callable[[], Iterator[Tensor]]):
        self.make = make

    def __iter__(self) -> Iterator[IndexBatch]:
        for index in self.make():
            yield IndexBatch("train", index)


class PassLoader:
    """One pass over some indices of a split; the last batch may be short."""

    def __init__(self, split: str, index: Tensor, batch_size: int):
        self.split = split
        self.parts = index.split(batch_size)

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[IndexBatch]:
        for part in self.parts:
            yield IndexBatch(self.split, part)
