"""In-memory image data modules: tensors on the device, a batch is an index.

The protocol of Lee et al. (2021, Section 2) and its code: a tenth of the training file is the
validation split; images are normalized by the mean and the (population) deviation of the whole
training file before that split, one number for gray images and one per channel for colour; no
augmentation.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

import lit_dps.data.order as orders
from lit_dps.core.errors import ConfigError
from lit_dps.data.files import ImageFiles, data_root, read_images
from lit_dps.data.loaders import EndlessLoader, IndexBatch, PassLoader, Steps

VALIDATION = 0.1


@dataclass(frozen=True)
class Images:
    """A data set in memory, split and normalized.

    Attributes:
        x: Images of the splits "train", "val" and "test", float32, shape (n, channels, height,
            width).
        y: Their classes, int64, shape (n,).
        order: The split and the shared order of the training split.
        digest: SHA-256 of the files' images and labels, hexadecimal.
    """

    x: dict[str, Tensor]
    y: dict[str, Tensor]
    order: orders.AuthorsOrder
    digest: str
    _copies: dict[tuple[str, torch.device], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def on_device(self, split: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """Images and classes of a split on a device. One copy serves all trials of a process, also
        side by side."""
        place = (split, device)
        if place not in self._copies:
            self._copies[place] = self.x[split].to(device), self.y[split].to(device)
        return self._copies[place]


def prepare(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> Images:
    """Splits and normalizes (images, labels) of a training and a test file; images are (n, height,
    width, channels)."""
    x, y = train
    order = orders.AuthorsOrder(len(x), VALIDATION)
    axes = (
        0,
        1,
        2,
    )  # float64: a float32 mean over these axes is off by enough to move the first loss by 0.6 %
    mean, std = x.mean(axis=axes, dtype=np.float64), x.std(axis=axes, dtype=np.float64)
    digest = hashlib.sha256()
    for array in (x, y, *test):
        digest.update(np.ascontiguousarray(array))
    picks = {
        "train": (x, y, order.train_ids),
        "val": (x, y, order.val_ids),
        "test": (*test, slice(None)),
    }

    def normalized(images: np.ndarray) -> Tensor:
        scaled = ((images - mean) / std).astype(np.float32)
        return torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)))

    return Images(
        x={name: normalized(images[ids]) for name, (images, _, ids) in picks.items()},
        y={
            name: torch.from_numpy(np.ascontiguousarray(labels[ids]))
            for name, (_, labels, ids) in picks.items()
        },
        order=order,
        digest=digest.hexdigest(),
    )


class ImageData(LightningDataModule):
    """Base of the built-in data sets; a subclass says where its images come from.

    Args:
        root: Folder of the data sets; else the environment variable LIT_DPS_DATA, else ./data.
        batch_size: Global batch size, from 1 to the training split.
        order: "authors" for the one order that the authors' code draws, shared by all trials;
            "per_trial" for an order from `order_seed`; or the path of a .npy file with permutations
            of the training split, one epoch a row.
        order_seed: Seed of a per-trial order; a study sets it from the point.
        eval_batch_size: Examples a forward pass of validation and test; no influence on results.
        download: Whether torchvision may download what is not there.
        train_examples: Train on the first so many examples of the training split, which the split
            has shuffled: a smaller number's are among a larger one's. Batch sizes go up to it. By
            default all. Split, normalization, validation and test stay those of the whole data set
            (Shallue et al. 2019 vary the size so).

    Attributes:
        steps_per_batch: If set, a batch of the training loader is the `Steps` of so many
            consecutive batches.

    Raises:
        DataError: see `lit_dps.data.files.read_images`.
        ConfigError: if `train_examples` is not in 1 ... the training split, or the batch size not
            in 1 ... those.
    """

    steps_per_batch: int | None = None

    def __init__(
        self,
        root: str | None = None,
        batch_size: int = 128,
        order: str = "authors",
        order_seed: int = 0,
        eval_batch_size: int = 1000,
        download: bool = True,
        train_examples: int | None = None,
    ):
        super().__init__()
        self.root, self.batch_size, self.order, self.order_seed = (
            root,
            batch_size,
            order,
            order_seed,
        )
        self.eval_batch_size, self.download, self.train_examples = (
            eval_batch_size,
            download,
            train_examples,
        )

    def load(self) -> Images:
        """Read the data set. A process calls this once for each class and its arguments.

        It is called on a copy of the data module, so attributes that it sets are lost. In the copy,
        the arguments of batches (`batch_size`, `order`, `order_seed`, `eval_batch_size`,
        `train_examples`) have their defaults.
        """
        raise TypeError(
            f"{type(self).__name__} does not say how its images are read: override load()"
        )

    def read(self) -> Images:
        """Return the data set of this class and these arguments. A process caches the last two."""
        return _load_once(self)

    def setup(self, stage: str | None = None) -> None:
        self.images = self.read()
        whole = len(self.images.y["train"])
        if self.train_examples is not None and not 1 <= self.train_examples <= whole:
            raise ConfigError(
                "data.train_examples",
                self.train_examples,
                f"1 to {whole}, the size of the training split",
            )
        self.check_batch_size(self.batch_size)
        if self.eval_batch_size < 1:
            raise ConfigError("data.eval_batch_size", self.eval_batch_size, "at least 1 example")

    def check_batch_size(self, batch_size: int) -> None:
        """Raises ConfigError unless 1 <= batch_size <= training split."""
        n = self.training_size
        if not 1 <= batch_size <= n:
            what = (
                "the size of the training split"
                if self.train_examples is None
                else "data.train_examples"
            )
            raise ConfigError("data.batch_size", batch_size, f"1 to {n}, {what}")

    @property
    def digest(self) -> str:
        """SHA-256 of the data set's images and labels."""
        return self.images.digest

    @property
    def training_size(self) -> int:
        """Examples that are trained on: those of the training split, or `train_examples`."""
        return len(self.images.y["train"]) if self.train_examples is None else self.train_examples

    def order_anew(self, seed: int) -> None:
        """Lets a repeat draw its order from a seed of its own, as the authors' code draws the one
        of all trials.

        The split stays, and so does an order from a file: it is what somebody asked for.
        """
        self.order, self.order_seed = ("per_trial" if self.order == "authors" else self.order), seed

    def epochs(self) -> Iterator[np.ndarray]:
        """The permutations of the training examples, one an epoch."""
        n = self.training_size
        if self.order == "authors":
            return self.images.order.epochs(n)
        if self.order == "per_trial":
            return orders.seeded_epochs(n, self.order_seed)
        return orders.given_epochs(self.order, n)

    def train_dataloader(self) -> EndlessLoader:
        if self.steps_per_batch is None:
            return EndlessLoader(lambda: orders.batches(self.epochs(), self.batch_size))
        return EndlessLoader(
            lambda: orders.steps(self.epochs(), self.batch_size, self.steps_per_batch)
        )

    def pruning_dataloader(self, batch_size: int = 100) -> PassLoader:
        """One pass over the training examples, in the order of the authors' pruning epoch."""
        epoch = self.images.order.pruning_epoch
        return PassLoader("train", torch.from_numpy(epoch[epoch < self.training_size]), batch_size)

    @property
    def validation_size(self) -> int:
        """Examples in the validation split."""
        return len(self.images.y["val"])

    def validation_batch(self, index: Tensor) -> IndexBatch:
        """A batch of some examples of the validation split, to be moved to a device."""
        return IndexBatch("val", index)

    def val_dataloader(self) -> PassLoader:
        return self._in_order("val")

    def test_dataloader(self) -> PassLoader:
        return self._in_order("test")

    def on_device(self, split: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """All images and classes of a split, as in `Images`, kept on a device from the first call
        on."""
        return self.images.on_device(split, device)

    def transfer_batch_to_device(
        self, batch: IndexBatch, device: torch.device, dataloader_idx: int = 0
    ):
        """The images and labels that the index names, gathered on the device; of several steps as
        `Steps`."""
        x, y = self.on_device(batch.split, device)
        index = batch.index.to(device)
        if index.ndim == 2:
            return Steps(x, y, index)
        x, y = x[index], y[index]
        # Lightning converts a batch to the trainer's precision before this hook, when it is still
        # an index
        return (
            self.trainer.precision_plugin.convert_input(x) if self.trainer is not None else x
        ), y

    def _in_order(self, split: str) -> PassLoader:
        return PassLoader(split, torch.arange(len(self.images.y[split])), self.eval_batch_size)


# Arguments of `ImageData` on which `load` does not depend, and the values that it gets.
_OF_BATCHES = {
    name: inspect.signature(ImageData.__init__).parameters[name].default
    for name in ("batch_size", "order", "order_seed", "eval_batch_size", "train_examples")
}
# Attributes that Lightning and `setup` add to a data module.
_NOT_ARGUMENTS = {*vars(LightningDataModule()), "images"}
_HYPERPARAMETERS = ("_hparams", "_hparams_initial")  # of `save_hyperparameters`


@dataclass(frozen=True)
class _Source:
    """The source of images. Data modules of one class with equal arguments have equal sources.

    Attributes:
        kind: The class.
        root: The folder of data sets.
        arguments: The attributes that `load` may depend on, pickled.
        data: A copy of the data module with these attributes.
    """

    kind: type[ImageData]
    root: str
    arguments: bytes
    data: ImageData = field(compare=False)


def _reset_batch_arguments(values: dict[str, object]) -> None:
    """Set the arguments of batches to their defaults."""
    for name in _OF_BATCHES:
        if name in values:
            values[name] = _OF_BATCHES[name]


def _load_once(data: ImageData) -> Images:
    attributes = {name: value for name, value in vars(data).items() if name not in _NOT_ARGUMENTS}
    _reset_batch_arguments(attributes)
    for name in _HYPERPARAMETERS:
        if name in attributes:
            attributes[name] = copy.copy(attributes[name])
            _reset_batch_arguments(attributes[name])
    twin = copy.copy(data)
    vars(twin).update(attributes, trainer=None)
    vars(twin).pop("images", None)
    try:
        arguments = pickle.dumps(attributes)
    except (
        Exception
    ):  # an argument cannot be pickled, such as a function; its class may raise anything
        return twin.load()
    return _loaded(_Source(type(data), str(data_root(data.root)), arguments, twin))


@lru_cache(maxsize=2)
def _loaded(source: _Source) -> Images:
    return source.data.load()


class _FileImages(ImageData):
    files: ImageFiles

    def load(self) -> Images:
        root = data_root(self.root)
        train, test = (read_images(self.files, root, part, self.download) for part in (True, False))
        return prepare(train, test)


class MNIST(_FileImages):
    """MNIST: 54,000 training, 6,000 validation and 10,000 test images of shape (1, 28, 28), 10
    classes."""

    files = ImageFiles("MNIST", parquet="mnist", idx="MNIST/raw")


class FashionMNIST(_FileImages):
    """Fashion-MNIST: sizes and shape as MNIST."""

    files = ImageFiles("FashionMNIST", parquet="fashion_mnist", idx="FashionMNIST/raw")


class CIFAR10(_FileImages):
    """CIFAR-10: 45,000 training, 5,000 validation and 10,000 test images of shape (3, 32, 32), 10
    classes."""

    files = ImageFiles("CIFAR10", parquet="cifar10", pickles="cifar-10-batches-py")
