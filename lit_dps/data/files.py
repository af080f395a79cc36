"""Image data sets on disk: torchvision's IDX layout (plain or .gz), its CIFAR-10 folder, or Hugging
Face parquet.

Everything is read into arrays without executing anything from the files, and torchvision's CIFAR-10
pickles only where their digests match the official ones.
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

from lit_dps.core.errors import DataError
from lit_dps.data.pickles import read_batches

ENV = "LIT_DPS_DATA"


@dataclass(frozen=True)
class ImageFiles:
    """Where a data set lies below the root, and its name in torchvision.

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
    """The data folder: the argument, else the environment variable LIT_DPS_DATA, else ./data."""
    return Path(root or os.environ.get(ENV) or "data").expanduser()


def read_images(
    files: ImageFiles, root: Path, train: bool, download: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Images (uint8, shape (n, height, width, channels)) and labels (int64, shape (n,)) of the
    training or test file.

    Raises:
        DataError: if nothing is there and nothing can be downloaded, or a file is unreadable or
            truncated.
    """
    for _ in range(2):
        if files.idx and (
            images := _plain_or_gz(root / files.idx, f"{_part(train)}-images-idx3-ubyte")
        ):
            labels = _plain_or_gz(root / files.idx, f"{_part(train)}-labels-idx1-ubyte")
            if labels is not None:
                return _checked(read_idx(images, 3)[..., None], read_idx(labels, 1), images)
            if not download:  # else a download that broke off is taken up again
                raise DataError(f"{files.name}: {images} is there but its labels file is missing")
        elif (
            table := root / files.parquet / ("train.parquet" if train else "test.parquet")
        ).exists():
            return _checked(*read_parquet(table), table)
        elif files.pickles and (root / files.pickles).exists():
            return _read_pickles(files, root, train)
        elif not download:
            break
        _download(files, root)
        download = False
    raise DataError(_missing(files, root, "downloading is switched off (data.download)"))


def read_idx(path: Path, dims: int) -> np.ndarray:
    """An IDX file of unsigned bytes with `dims` dimensions, plain or .gz.

    Raises:
        DataError: if it is not such a file, or shorter or longer than its header says.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    if data[:4] != bytes([0, 0, 8, dims]) or len(data) < 4 + 4 * dims:
        raise DataError(f"{path} is not an IDX file of unsigned bytes with {dims} dimensions")
    shape = np.frombuffer(data, ">u4", dims, offset=4).astype(int)
    size = int(shape.prod())
    if len(data) != 4 + 4 * dims + size:
        raise DataError(
            f"{path} is truncated or damaged: {len(data) - 4 - 4 * dims} data bytes, its header "
            f"says {size}"
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dims).reshape(shape)


def read_parquet(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a Hugging Face parquet file: column img or image (struct with bytes),
    column label.

    Raises:
        DataError: if the file or an image in it cannot be read.
    """
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    try:
        with path.open("rb") as file:
            table = pyarrow.parquet.read_table(file)
        column = next(name for name in ("img", "image") if name in table.column_names)
        images = [
            np.asarray(Image.open(io.BytesIO(row["bytes"]))) for row in table[column].to_pylist()
        ]
        labels = table["label"].cast(pyarrow.int64())
        if labels.null_count:
            raise ValueError("column label has missing values")
        x, y = np.stack(images), labels.to_numpy()
    except (
        OSError,
        pyarrow.ArrowException,
        KeyError,
        TypeError,
        ValueError,
        StopIteration,
        SyntaxError,
    ) as error:
        # Pillow raises SyntaxError for some damaged PNG files
        reason = (
            "no column img or image"
            if isinstance(error, StopIteration)
            else str(error).splitlines()[0]
        )
        raise DataError(f"cannot read {path}: {reason}") from None
    return (x if x.ndim == 4 else x[..., None]), y


def _read_pickles(files: ImageFiles, root: Path, train: bool) -> tuple[np.ndarray, np.ndarray]:
    import torchvision

    known = getattr(torchvision.datasets, files.name)
    names = [name for name, _ in (known.train_list if train else known.test_list)]
    return read_batches(root / files.pickles, names, dict(known.train_list + known.test_list))


def _download(files: ImageFiles, root: Path) -> None:
    import torchvision

    folders = [root / folder for folder in (files.idx, files.pickles) if folder]
    absent = [path for folder in folders for path in (folder, *folder.parents) if not path.exists()]
    try:
        getattr(torchvision.datasets, files.name)(root, download=True)
    except (RuntimeError, OSError) as error:
        for (
            path
        ) in absent:  # leave no empty folders of a failed attempt behind, and the user's own alone
            with suppress(OSError):
                path.rmdir()
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(_missing(files, root, f"the download failed ({reason})")) from None


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
        f"{files.name}: no files at {where}, and {why}; put them there, or name their folder "
        "by "
        f"--data.root or {ENV}"
    )


def _checked(x: np.ndarray, y: np.ndarray, path: Path) -> tuple[np.ndarray, np.ndarray]:
    if len(x) != len(y) or not len(x):
        raise DataError(f"{path}: {len(x)} images but {len(y)} labels")
    return x, y.astype(np.int64)


def _plain_or_gz(folder: Path, name: str) -> Path | None:
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)


def _part(train: bool) -> str:
    return "train" if train else "t10k"
