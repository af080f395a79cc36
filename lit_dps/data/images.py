"""Data modules of images in memory: the images are tensors on the device, a batch is an index.

They follow the protocol of Lee et al. (2021, Section 2) and its code. A tenth of the training file
is the validation split. Images are normalized by mean and (population) deviation of the entire
training file, one number for gray images and one per channel for colour. There is no augmentation.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

import lit_dps.data.loaders as orders
from lit_dps.core.batch_schedule import CONSTANT_BATCH, BatchSchedule
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
        """Return images and classes of a split on a device. All trials of a process share them."""
        place = (split, device)
        if place not in self._copies:
            self._copies[place] = self.x[split].to(device), self.y[split].to(device)
        return self._copies[place]


def prepare(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> Images:
    """Return the split and normalized images of a training and a test file.

    Args:
        train, test: Images, shape (n, height, width, channels), and labels of each file.
    """
    x, y = train
    order = orders.AuthorsOrder(len(x), VALIDATION)
    axes = (0, 1, 2)
    # In float32, the mean over these axes would be wrong enough to change the first loss by 0.6 %.
    mean = x.mean(axis=axes, dtype=np.float64)
    std = x.std(axis=axes, dtype=np.float64)
    digest = hashlib.sha256()
    for array in (x, y, *test):
        digest.update(np.ascontiguousarray(array))  # pyright: ignore[reportArgumentType]
    splits = {
        "train": (x[order.train_ids], y[order.train_ids]),
        "val": (x[order.val_ids], y[order.val_ids]),
        "test": test,
    }
    images, classes = {}, {}
    for name, (split_images, labels) in splits.items():
        scaled = ((split_images - mean) / std).astype(np.float32)
        images[name] = torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2)))
        classes[name] = torch.from_numpy(np.ascontiguousarray(labels))
    return Images(images, classes, order, digest.hexdigest())


class ImageData(LightningDataModule):
    """Base of the built-in data sets; a subclass reads its images in `load`.

    Args:
        root: Folder of the data sets; else the environment variable LIT_DPS_DATA, else ./data.
        batch_size: Global batch size, from 1 to the training split.
        order: "authors" for the split and the first epoch of the authors' code, and one order of
            later epochs for all trials (`AuthorsOrder`); "per_trial" for an order from
            `order_seed`; or the path of a .npy file with permutations of the training split, one
            epoch a row.
        order_seed: Seed of a per-trial order; a study sets it from the point.
        eval_batch_size: Examples in a forward pass of validation and test. Results do not depend
            on it.
        download: Whether torchvision may download missing files.
        train_examples: Train on this number of examples, the first ones of the shuffled training
            split; by default on all. It is the largest batch size. Split, normalization, validation
            and test do not depend on it (as in Shallue et al. 2019).

    Raises:
        DataError: see `lit_dps.data.files.read_images`.
        ConfigError: if `train_examples` is not between 1 and the size of the training split, or
            the batch size not between 1 and the number of training examples.
    """

    _schedule: tuple[BatchSchedule, int] = (CONSTANT_BATCH, 1)

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
        self.root = root
        self.batch_size = batch_size
        self.order = order
        self.order_seed = order_seed
        self.eval_batch_size = eval_batch_size
        self.download = download
        self.train_examples = train_examples

    def schedule_batches(self, schedule: BatchSchedule, parts: int = 1) -> None:
        """Train on batches whose size depends on the optimizer step. Call it before training.

        Args:
            schedule: The size of each step. The largest one is `batch_size` times `parts`.
            parts: Batches of a step, if gradients are accumulated.
        """
        self._schedule = schedule, parts

    def batch_sizes(self) -> Iterator[int]:
        """Yield the size of each training batch, without an end."""
        schedule, parts = self._schedule
        if schedule.is_constant:
            return repeat(self.batch_size)
        return schedule.sizes_of_parts(self.batch_size * parts, parts)

    def examples_of(self, batches: int) -> float:
        """Return the examples of the first training batches."""
        schedule, parts = self._schedule
        return schedule.examples_of(batches / parts, self.batch_size * parts)

    def load(self) -> Images:
        """Read the data set. A process calls this once for each class and its arguments.

        It is called on a copy of the data module, so attributes that it sets are lost. In the copy,
        the arguments of batches (`batch_size`, `order`, `order_seed`, `eval_batch_size`,
        `train_examples`) have their defaults.
        """
        raise TypeError(
            f"{type(self).__name__} does not define how its images are read: override load()"
        )

    def read(self) -> Images:
        """Return the data set of this class and these arguments. A process caches the last two."""
        return _load_once(self)

    def setup(self, stage: str | None = None) -> None:
        self.images = self.read()
        size = len(self.images.y["train"])
        if self.train_examples is not None and not 1 <= self.train_examples <= size:
            allowed = f"1 to {size}, the size of the training split"
            raise ConfigError("data.train_examples", self.train_examples, allowed)
        self.check_batch_size(self.batch_size)
        if self.eval_batch_size < 1:
            raise ConfigError("data.eval_batch_size", self.eval_batch_size, "at least 1 example")

    def check_batch_size(self, batch_size: int) -> None:
        """Raise ConfigError unless the batch size is between 1 and the training size."""
        if 1 <= batch_size <= self.training_size:
            return
        limit = "data.train_examples"
        if self.train_examples is None:
            limit = "the size of the training split"
        raise ConfigError("data.batch_size", batch_size, f"1 to {self.training_size}, {limit}")

    @property
    def digest(self) -> str:
        """The SHA-256 of the data set's images and labels."""
        return self.images.digest

    @property
    def training_size(self) -> int:
        """The number of examples to train on: the training split, or `train_examples`."""
        if self.train_examples is not None:
            return self.train_examples
        return len(self.images.y["train"])

    def reseed_order(self, seed: int) -> None:
        """Draw the order from the seed of a repeat, instead of the order of all trials.

        The split does not change. Neither does an order from a file, because the user chose it.
        """
        if self.order == "authors":
            self.order = "per_trial"
        self.order_seed = seed

    def epochs(self) -> Iterator[np.ndarray]:
        """Return the permutations of the training examples, one for each epoch."""
        n = self.training_size
        if self.order == "authors":
            return self.images.order.epochs(n)
        if self.order == "per_trial":
            return orders.seeded_epochs(n, self.order_seed)
        return orders.epochs_of_file(self.order, n)

    def train_dataloader(self) -> EndlessLoader:
        schedule, _ = self._schedule
        batch_size = self.batch_size if schedule.is_constant else None
        return EndlessLoader(lambda: orders.batches(self.epochs(), self.batch_sizes()), batch_size)

    def pruning_dataloader(self, batch_size: int = 100) -> PassLoader:
        """Return one pass over the training examples, in the order of the authors' code."""
        epoch = self.images.order.pruning_epoch
        return PassLoader("train", torch.from_numpy(epoch[epoch < self.training_size]), batch_size)

    @property
    def validation_size(self) -> int:
        """The number of examples of the validation split."""
        return len(self.images.y["val"])

    def validation_batch(self, index: Tensor) -> IndexBatch:
        """Return a batch of some examples of the validation split, to be moved to a device."""
        return IndexBatch("val", index)

    def val_dataloader(self) -> PassLoader:
        return self._in_order("val")

    def test_dataloader(self) -> PassLoader:
        return self._in_order("test")

    def on_device(self, split: str, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return all images and classes of a split on a device, see `Images.on_device`."""
        return self.images.on_device(split, device)

    def transfer_batch_to_device(
        self, batch: IndexBatch, device: torch.device, dataloader_idx: int = 0
    ):
        """Return the images and labels of an index on the device; `Steps` for several steps."""
        x, y = self.on_device(batch.split, device)
        index = batch.index.to(device)
        if index.ndim == 2:
            return Steps(x, y, index)
        x, y = x[index], y[index]
        if self.trainer is not None:
            # Lightning has converted the index, and not the images, to the trainer's precision.
            x = self.trainer.precision_plugin.convert_input(x)
        return x, y

    def _in_order(self, split: str) -> PassLoader:
        return PassLoader(split, torch.arange(len(self.images.y[split])), self.eval_batch_size)


# Arguments of `ImageData` on which `load` does not depend, and the values that it gets.
_OF_BATCHES = {
    name: inspect.signature(ImageData.__init__).parameters[name].default
    for name in ("batch_size", "order", "order_seed", "eval_batch_size", "train_examples")
}
# Attributes that Lightning and `setup` add to a data module.
_NOT_ARGUMENTS = {*vars(LightningDataModule()), "images", "_schedule"}
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
    taken = _NOT_ARGUMENTS & inspect.signature(type(data).__init__).parameters.keys()
    if taken:
        allowed = f"a class whose arguments are not called {', '.join(sorted(taken))}"
        hint = "ImageData keeps something else in that attribute"
        raise ConfigError("data", type(data).__name__, allowed, hint)
    attributes = dict(vars(data))
    for name in _NOT_ARGUMENTS & attributes.keys():
        del attributes[name]
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
    except Exception:
        # An argument, such as a function, cannot be pickled. Its class may raise any error.
        return twin.load()
    return _loaded(_Source(type(data), str(data_root(data.root)), arguments, twin))


@lru_cache(maxsize=2)
def _loaded(source: _Source) -> Images:
    return source.data.load()


class _FileImages(ImageData):
    files: ImageFiles

    def load(self) -> Images:
        root = data_root(self.root)
        train = read_images(self.files, root, True, self.download)
        test = read_images(self.files, root, False, self.download)
        return prepare(train, test)


class MNIST(_FileImages):
    """MNIST: 54,000 training, 6,000 validation and 10,000 test images, shape (1, 28, 28).

    10 classes.
    """

    files = ImageFiles("MNIST", parquet="mnist", idx="MNIST/raw")


class FashionMNIST(_FileImages):
    """Fashion-MNIST, with the sizes and the shape of MNIST."""

    files = ImageFiles("FashionMNIST", parquet="fashion_mnist", idx="FashionMNIST/raw")


class CIFAR10(_FileImages):
    """CIFAR-10: 45,000 training, 5,000 validation and 10,000 test images, shape (3, 32, 32).

    10 classes.
    """

    files = ImageFiles("CIFAR10", parquet="cifar10", pickles="cifar-10-batches-py")
