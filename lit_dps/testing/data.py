"""check_data: the conformance test of a data module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sized
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lit_dps.data.loaders import EndlessLoader
from lit_dps.testing.failure import ConformanceError, require
from lit_dps.training.hidden_state import preserve_rng_state

BATCH_SIZES = (4, 16)
BATCHES = 12  # of the training split that are checked


def check_data(
    make: Callable[[int], LightningDataModule],
    batch_sizes: tuple[int, int] = BATCH_SIZES,
) -> None:
    """Raise ConformanceError if a data module does not do what lit_dps requires.

    - Training batches have the batch size, except for the last one of an epoch.
    - The length of a loader is the number of its batches.
    - Two data modules that are made with equal global generators give equal training batches. So a
      run that resumes in the middle of an epoch continues with the batches that follow.
    - Validation has the same batches in each pass, and as many examples at each batch size.

    Args:
        make: Makes the data module for a batch size. It is called several times.
        batch_sizes: The two batch sizes to try.
    """
    counts = []
    for batch_size in batch_sizes:
        with preserve_rng_state(seed=0):
            data = _set_up(make, batch_size)
            batches = _first_batches(data)
        _check_training(data, batches, batch_size)
        with preserve_rng_state(seed=0):
            again = _first_batches(_set_up(make, batch_size))
        for i in range(max(len(batches), len(again))):
            has_both = i < len(batches) and i < len(again)
            require(
                "same_order",
                has_both and _digest(batches[i]) == _digest(again[i]),
                f"training batch {i + 1} differs between two data modules of equal generators",
                "equal batches, so that a resumed run continues exactly",
                f"batch size {batch_size}",
            )
        counts.append(_check_validation(data, batch_size))
    require(
        "complete",
        counts[0] == counts[1],
        f"validation has {counts[0]} examples at batch size {batch_sizes[0]} and {counts[1]} at "
        f"batch size {batch_sizes[1]}",
        "all examples at every batch size; set drop_last=False",
        f"batch sizes {batch_sizes[0]} and {batch_sizes[1]}",
    )


def _set_up(make: Callable[[int], LightningDataModule], batch_size: int) -> LightningDataModule:
    data = make(batch_size)
    data.prepare_data()
    data.setup("fit")
    return data


def _first_batches(data: LightningDataModule) -> list[Any]:
    """Return the first training batches, one more than are checked: it may be the last one."""
    return list(islice(data.train_dataloader(), BATCHES + 1))


def _check_training(data: LightningDataModule, batches: list[Any], batch_size: int) -> None:
    require(
        "empty",
        len(batches) > 0,
        "there are no training batches",
        "batches",
        f"batch size {batch_size}",
    )
    # The last batch of an epoch may be smaller.
    for i, batch in enumerate(batches[:-1]):
        size = _examples_of(batch)
        require(
            "batch_size",
            size == batch_size,
            f"training batch {i + 1} has {size} examples",
            f"{batch_size}; only the last batch of an epoch may be smaller",
            f"batch size {batch_size}",
        )
    loader = data.train_dataloader()
    if isinstance(loader, Sized) and not isinstance(loader, EndlessLoader):
        _check_length(loader, "training", batch_size)


def _check_length(loader: Any, split: str, batch_size: int) -> None:
    count = sum(1 for _ in loader)
    require(
        "length",
        count == len(loader),
        f"the {split} loader has {count} batches and a length of {len(loader)}",
        "equal numbers",
        f"batch size {batch_size}",
    )


def _check_validation(data: LightningDataModule, batch_size: int) -> int:
    """Check the validation loaders, and return their number of examples."""
    passes = []
    total = 0
    for repeat in range(2):
        torch.manual_seed(repeat)
        digests = []
        total = 0
        for loader in _loaders(data.val_dataloader()):
            for batch in loader:
                digests.append(_digest(batch))
                total += _examples_of(batch)
        passes.append(digests)
    require(
        "validation_order",
        passes[0] == passes[1],
        "two passes over the validation split differ",
        "equal batches in each pass; set shuffle=False, and draw no random numbers",
        f"batch size {batch_size}",
    )
    for loader in _loaders(data.val_dataloader()):
        if isinstance(loader, Sized):
            _check_length(loader, "validation", batch_size)
    return total


def _loaders(loaders: Any) -> list[Iterable]:
    """Return the validation loaders of a data module, which may have one or many."""
    if isinstance(loaders, dict):
        return list(loaders.values())
    if isinstance(loaders, (list, tuple)):
        return list(loaders)
    return [loaders]


def _examples_of(batch: Any) -> int:
    """Return the number of examples of a batch, the first dimension of its first tensor."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    shown_by = f"a {type(batch).__name__}"
    raise ConformanceError("tensors", "a batch has no tensor", "tensors with examples", shown_by)


def _digest(batch: Any) -> str:
    """Return a hash of the tensors and values of a batch."""
    digest = hashlib.sha256()
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            values = leaf.detach().cpu().contiguous()
            digest.update(repr((values.dtype, tuple(values.shape))).encode())
            digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
