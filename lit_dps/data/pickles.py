"""Reads CIFAR-10's batches, which are Python pickles, without executing their content."""

from __future__ import annotations

import codecs
import hashlib
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lit_dps.core.errors import DataError

_RECONSTRUCT = np.zeros(0).__reduce__()[0]
# All names in a pickle of arrays and plain values, also if Python 2 or an old numpy wrote it.
_KNOWN = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,
}


class _Arrays(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no array needs")
        return _KNOWN[module, name]


def read_pickle(path: Path) -> Any:
    """Return the content of a pickle of arrays and plain values.

    Raises:
        DataError: if the file is no such pickle, or names anything else.
    """
    try:
        with path.open("rb") as file:
            return _Arrays(file, encoding="latin1").load()
    except Exception as error:  # a damaged pickle raises anything
        raise DataError(
            f"cannot read {path}: {error or type(error).__name__}", key=str(path)
        ) from None


def read_batches(
    folder: Path, names: Sequence[str], official: dict[str, str]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of some batches.

    Args:
        folder: The folder of the batches.
        names: The batches to read.
        official: MD5 digests of all files that the folder must have, by name.

    Returns:
        Images (uint8, shape (n, 32, 32, 3)) and labels (int64, shape (n,)).

    Raises:
        DataError: if a file is missing, or differs from the official one.
    """
    for name, digest in official.items():
        path = folder / name
        if not path.is_file() or _md5(path) != digest:
            raise DataError(
                f"{folder} cannot be read: {name} is missing or damaged. Download the data "
                "set again.",
                key=str(folder),
                value=name,
            )
    batches = [read_pickle(folder / name) for name in names]
    pixels = np.concatenate([batch["data"] for batch in batches])
    labels = np.concatenate([batch["labels"] for batch in batches])
    images = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, labels.astype(np.int64)


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
