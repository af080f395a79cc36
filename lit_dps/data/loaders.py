"""The order of the examples, and loaders whose batches are indices.

An order is an endless stream of epochs, each a permutation of the training split. Batches continue
across the ends of epochs, so that every batch is full and any batch size up to the split is exact.
The sizes of the batches may differ; the order of the examples does not depend on them.
A batch is the global one of all ranks. The data module gathers the images of a batch on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice, repeat
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from lit_dps.core.errors import ConfigError, DataError

AUTHORS_SEED = 0


class AuthorsOrder:
    """The split and the order that the code of Lee et al. (2021) draws in all of its runs.

    One `numpy.random.RandomState(0)` shuffles the indices of the training file, the epoch of the
    pruning pass, and every training epoch. The first tenth of the shuffled file is the validation
    split. Each epoch is shuffled from the identity.

    Departure: their code also shuffles the validation split with this generator, at the check of
    step 100 and later ones. So their later training epochs differ by batch size. These do not.

    Args:
        n: Examples in the training file.
        validation: Share of the examples in the validation split.
    """

    def __init__(self, n: int, validation: float = 0.1):
        state = np.random.RandomState(AUTHORS_SEED)
        ids = _shuffled(state, n)
        n_val = int(n * validation)
        self.val_ids = ids[:n_val]
        self.train_ids = ids[n_val:]
        self.pruning_epoch = _shuffled(state, n - n_val)
        self._state = state.get_state()

    def epochs(self, n: int | None = None) -> Iterator[np.ndarray]:
        """Yield endless permutations of range(n), from the first training epoch on.

        By default n is the size of the training split.
        """
        if n is None:
            n = len(self.train_ids)
        state = np.random.RandomState()
        state.set_state(self._state)
        while True:
            yield _shuffled(state, n)


def seeded_epochs(n: int, seed: int) -> Iterator[np.ndarray]:
    """Yield endless permutations of range(n) from a seed, the order of one trial."""
    state = np.random.RandomState(seed)
    while True:
        yield _shuffled(state, n)


def epochs_of_file(path: str | Path, n: int) -> Iterator[np.ndarray]:
    """Return an endless repetition of the epochs of a .npy file, shape (epochs, n) or (n,).

    Raises:
        DataError: if the file cannot be read without unpickling.
        ConfigError: if a row is not a permutation of range(n).
    """
    try:
        rows = np.atleast_2d(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise DataError(
            f"data.order: cannot read {path}: {error}", key="data.order", value=str(path)
        ) from None
    has_shape = rows.shape[1:] == (n,) and len(rows) > 0
    if not has_shape or not (np.sort(rows, axis=1) == np.arange(n)).all():
        allowed = f"an array of permutations of range({n}), the training split"
        raise ConfigError("data.order", str(path), allowed)
    return cycle(rows.astype(np.int64))


def batches(epochs: Iterator[np.ndarray], batch_size: int | Iterable[int]) -> Iterator[Tensor]:
    """Yield endless batches of exactly `batch_size` indices, int64, across the ends of epochs.

    Args:
        epochs: The order, endless.
        batch_size: The size of every batch, or the size of each batch.
    """
    if isinstance(batch_size, int):
        batch_size = repeat(batch_size)
    remaining = np.empty(0, dtype=np.int64)
    for size in batch_size:
        remaining = _extended(remaining, epochs, size)
        yield torch.from_numpy(remaining[:size])
        remaining = remaining[size:]


def interval_batches(
    epochs: Iterator[np.ndarray], sizes: Iterator[int], n: int
) -> Iterator[Tensor | tuple[Tensor, ...]]:
    """Yield the batches of `batches`, n at a time.

    Batches of equal size are one tensor: int64, shape (n, size). Others are n tensors.
    """
    remaining = np.empty(0, dtype=np.int64)
    while True:
        of_interval = list(islice(sizes, n))
        total = sum(of_interval)
        remaining = _extended(remaining, epochs, total)
        indices = torch.from_numpy(remaining[:total])
        remaining = remaining[total:]
        if len(set(of_interval)) == 1:
            yield indices.view(n, of_interval[0])
        else:
            yield indices.split(of_interval)


def _extended(indices: np.ndarray, epochs: Iterator[np.ndarray], size: int) -> np.ndarray:
    """Return indices with those of further epochs: at least `size`."""
    while len(indices) < size:
        indices = np.concatenate([indices, next(epochs)])
    return indices


def _shuffled(state: np.random.RandomState, n: int) -> np.ndarray:
    ids = np.arange(n)
    state.shuffle(ids)
    return ids


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
            If the batches differ in size, a tensor for each.
    """

    def __init__(self, x: Tensor, y: Tensor, index: Tensor | Sequence[Tensor]):
        self.x = x
        self.y = y
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.index:
            yield self.x[index], self.y[index]


class EndlessLoader:
    """Batches of the training split without an end, which Lightning treats as one epoch.

    Args:
        make: Returns the indices of each batch.
        batch_size: Examples of each batch; None if they differ.
    """

    def __init__(self, make: Callable[[], Iterator[Tensor]], batch_size: int | None = None):
        self.make = make
        self.batch_size = batch_size

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
