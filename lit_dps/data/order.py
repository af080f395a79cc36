"""The split of the training file and the order of its examples: which indices make the batch of
step t.

An order is an endless stream of epochs, each a permutation of the training split; batches run on
across the ends of epochs, so that every batch is full and any batch size up to the split is exact.
Orders know no device and no dtype of the data, and no rank: a batch is always the global one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch

from lit_dps.core.errors import ConfigError, DataError

AUTHORS_SEED = 0


class AuthorsOrder:
    """The split and order that the code of Lee et al. (2021) draws, the same in all its runs.

    One `numpy.random.RandomState(0)` shuffles the indices of the training file (the first tenth is
    the validation split), then the epoch of the pruning pass, then every training epoch, each from
    the identity.

    Args:
        n: Examples in the training file.
        validation: Share of them that becomes the validation split.
    """

    def __init__(self, n: int, validation: float = 0.1):
        state = np.random.RandomState(AUTHORS_SEED)
        ids = _shuffled(state, n)
        n_val = int(n * validation)
        self.val_ids, self.train_ids = ids[:n_val], ids[n_val:]
        self.pruning_epoch = _shuffled(state, n - n_val)
        self._state = state.get_state()

    def epochs(self, n: int | None = None) -> Iterator[np.ndarray]:
        """Endless permutations of range(n), by default n_train, always from the first training
        epoch on."""
        state = np.random.RandomState()
        state.set_state(self._state)
        while True:
            yield _shuffled(state, len(self.train_ids) if n is None else n)


def seeded_epochs(n: int, seed: int) -> Iterator[np.ndarray]:
    """Endless permutations of range(n) from a seed of its own: an order for one trial."""
    state = np.random.RandomState(seed)
    while True:
        yield _shuffled(state, n)


def given_epochs(path: str | Path, n: int) -> Iterator[np.ndarray]:
    """The epochs of a .npy file, shape (epochs, n) or (n,), over and over.

    Raises:
        DataError: if the file cannot be read without unpickling.
        ConfigError: if a row is not a permutation of range(n).
    """
    try:
        rows = np.atleast_2d(np.load(path, allow_pickle=False))
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise DataError(f"data.order: cannot read {path}: {error}") from None
    if rows.shape[1:] != (n,) or not len(rows) or not (np.sort(rows, axis=1) == np.arange(n)).all():
        raise ConfigError(
            "data.order", str(path), f"rows must be permutations of range({n}), the training split"
        )
    return _cycle(rows.astype(np.int64))


def batches(epochs: Iterator[np.ndarray], batch_size: int) -> Iterator[torch.Tensor]:
    """Endless batches of exactly `batch_size` indices (int64, shape (batch_size,)), run on across
    epoch ends."""
    rest = np.empty(0, dtype=np.int64)
    for epoch in epochs:
        rest = np.concatenate([rest, epoch])
        full = len(rest) // batch_size
        yield from torch.from_numpy(rest[: full * batch_size]).view(full, batch_size)
        rest = rest[full * batch_size :]


def steps(epochs: Iterator[np.ndarray], batch_size: int, n: int) -> Iterator[torch.Tensor]:
    """The same batches, n at a time: int64, shape (n, batch_size)."""
    return (indices.view(n, batch_size) for indices in batches(epochs, n * batch_size))


def _shuffled(state: np.random.RandomState, n: int) -> np.ndarray:
    ids = np.arange(n)
    state.shuffle(ids)
    return ids


def _cycle(rows: np.ndarray) -> Iterator[np.ndarray]:
    while True:
        yield from rows
