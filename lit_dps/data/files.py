"""Image data sets on disk: torchvision's IDX files or CIFAR-10 folder, or Hugging Face parquet.

Reading a file executes nothing from it. CIFAR-10's pickles must have the official digests.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lit_dps.core.errors import DataError, first_line
from lit_dps.data.pickles import read_batches

ENV = "LIT_DPS_DATA"


@dataclass(frozen=True)
class ImageFiles:
    """The places of a data set below the root, and its name in torchvision.

    Attributes:
        name: Class name in `torchvision.datasets`.
        parquet: Folder with train.parquet and test.parquet.
        idx: Folder with the four IDX files of the MNIST family, or None.
        pickles: Folder of torchvision's CIFAR-10 batches, or None.
    """

    name: str
    parquet: str
    idx: str | None = None
    pickles: str | None = None


def data_root(root: str | os.PathLike | None) -> Path:
    """Return the data folder: the argument, the environment variable LIT_DPS_DATA, or ./data."""
    return Path(root or os.environ.get(ENV) or "data").expanduser()


def read_images(
    files: ImageFiles, root: Path, train: bool, download: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of the training or the test file.

    Args:
        files: The places of the data set.
        root: The folder of the data sets.
        train: Whether to read the training file.
        download: Whether to download missing files.

    Returns:
        Images (uint8, shape (n, height, width, channels)) and labels (int64, shape (n,)).

    Raises:
        DataError: if files are missing and cannot be downloaded, or if a file is unreadable or
            truncated.
    """
    examples = _read_present(files, root, train, download)
    if examples is None and download:
        _download(files, root)
        examples = _read_present(files, root, train, download=False)
    if examples is None:
        message = _missing(files, root, "data.download is false")
        raise DataError(message, key="data.root", value=str(root))
    return examples


def _read_present(
    files: ImageFiles, root: Path, train: bool, download: bool
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return images and labels of a file that is on disk; None if it is missing.

    Raises:
        DataError: if the labels of images are missing and cannot be downloaded.
    """
    if files.idx is not None:
        folder = root / files.idx
        part = "train" if train else "t10k"
        images = _plain_or_gz(folder, f"{part}-images-idx3-ubyte")
        if images is not None:
            labels = _plain_or_gz(folder, f"{part}-labels-idx1-ubyte")
            if labels is not None:
                return _checked(read_idx(images, 3)[..., None], read_idx(labels, 1), images)
            if download:  # an interrupted download continues
                return None
            raise DataError(
                f"{files.name}: the file of labels beside {images} is missing. Download both "
                "again.",
                key=str(images),
            )
    name = "train.parquet" if train else "test.parquet"
    table = root / files.parquet / name
    if table.exists():
        return _checked(*read_parquet(table), table)
    if files.pickles is not None and (root / files.pickles).exists():
        return _read_pickles(files.name, root / files.pickles, train)
    return None


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Return the array of an IDX file of unsigned bytes with `dims` dimensions, plain or .gz.

    Raises:
        DataError: if it is no such file, or if its length differs from its header.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}", key=str(path)) from None
    if data[:4] != bytes([0, 0, 8, dims]) or len(data) < 4 + 4 * dims:
        raise DataError(
            f"{path} is no IDX file of unsigned bytes with {dims} dimensions. Download it again.",
            key=str(path),
        )
    shape = np.frombuffer(data, ">u4", dims, offset=4).astype(int)
    size = int(shape.prod())
    if len(data) != 4 + 4 * dims + size:
        raise DataError(
            f"{path} is damaged: it has {len(data) - 4 - 4 * dims} data bytes, and its "
            f"header says {size}. Download it again.",
            key=str(path),
            value=len(data) - 4 - 4 * dims,
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)


def read_parquet(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of a Hugging Face parquet file.

    Its columns are img or image (struct with bytes) and label.

    Raises:
        DataError: if the file or an image in it cannot be read.
    """
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    # Pillow raises SyntaxError for some damaged PNG files.
    damage = (OSError, pyarrow.ArrowException, KeyError, TypeError, ValueError, SyntaxError)
    try:
        with path.open("rb") as file:
            table = pyarrow.parquet.read_table(file)
        column = "img" if "img" in table.column_names else "image"
        if column not in table.column_names:
            raise ValueError("no column img or image")
        images = []
        for row in table[column].to_pylist():
            images.append(np.asarray(Image.open(io.BytesIO(row["bytes"]))))
        labels = table["label"].cast(pyarrow.int64())
        if labels.null_count:
            raise ValueError("column label has missing values")
        x = np.stack(images)
        y = labels.to_numpy()
    except damage as error:
        message = f"cannot read {path}: {first_line(error)}"
        raise DataError(message, key=str(path)) from None
    if x.ndim < 4:  # gray images
        x = x[..., None]
    return x, y


def _read_pickles(name: str, folder: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels of torchvision's batches of CIFAR-10."""
    import torchvision

    dataset = getattr(torchvision.datasets, name)
    official = dict(dataset.train_list + dataset.test_list)
    batches = dataset.test_list
    if train:
        batches = dataset.train_list
    return read_batches(folder, [batch for batch, _ in batches], official)


def _download(files: ImageFiles, root: Path) -> None:
    """Download a data set by torchvision. Raise DataError if that fails."""
    import torchvision

    missing = []
    for name in (files.idx, files.pickles):
        if name is not None:
            folder = root / name
            missing += [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        getattr(torchvision.datasets, files.name)(root, download=True)
    except (RuntimeError, OSError) as error:
        # Remove the empty folders of the failed attempt, and no folder of the user.
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        message = _missing(files, root, f"the download failed ({first_line(error)})")
        raise DataError(message, key="data.root", value=str(root)) from None


def _missing(files: ImageFiles, root: Path, why: str) -> str:
    places = [str(root / files.parquet / "{train,test}.parquet")]
    if files.idx:
        places.insert(
            0, str(root / files.idx / "{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]")
        )
    if files.pickles:
        places.insert(0, str(root / files.pickles))
    where = " or ".join(places)
    return (
        f"{files.name}: there are no files at {where}, and {why}. Put the files "
        f"there, or name their folder by --data.root or {ENV}."
    )


def _checked(x: np.ndarray, y: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images and int64 labels. Raise DataError if their numbers differ or are 0."""
    if len(x) != len(y) or not len(x):
        raise DataError(
            f"{path} has {len(x)} images and {len(y)} labels; it must have at least one "
            "image, and a label for each. Download it again.",
            key=str(path),
            value=(len(x), len(y)),
        )
    return x, y.astype(np.int64)


def _plain_or_gz(folder: Path, name: str) -> Path | None:
    """Return a file or its compressed form; None if both are missing."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    return None
