"""LoaderData: the batches of any data module in memory, for the networks of a stack.

A stack trains its networks on the same examples in different orders. So the examples of a map-style
data set are collated once, and a batch is an index. The order of a trial is the order that its
dataloader draws from the seed of the point, as in Lightning's loop. If the module draws random
numbers too, such as dropout, later epochs have another order of the same distribution.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lit_dps.engines.logged_module import training_loss
from lit_dps.engines.module_hooks import TRANSFER_HOOKS, NeedsLightning
from lit_dps.engines.stackable_loss import same_tensors
from lit_dps.training.hidden_state import capture_rng_state, equal_states, preserve_rng_state
from lit_dps.training.inheritance import inherits
from lit_dps.training.training_pass import has_indices, pass_key, rebatched

CHUNK = 1024  # examples that are collated at a time
COMPARED_BATCHES = 2
MAX_BYTES = 2**31  # largest size of the training examples
MAX_DEVICE_SHARE = 0.25  # largest share of the free memory of a GPU


class Examples:
    """Examples of a data set, as the tensors of one large batch.

    Args:
        batch: Tensors, in tuples, lists and dicts; examples are their first dimension.
    """

    def __init__(self, batch: Any):
        self.batch = batch

    def __len__(self) -> int:
        return len(tree_leaves(self.batch)[0])

    def __getitem__(self, index: Any) -> Any:
        """Return the batch of an index: its tensors have the index's dimensions first."""
        return tree_map(lambda tensor: tensor[index], self.batch)

    def equals(self, other: Examples) -> bool:
        """Return True if both have the same examples."""
        return same_tensors(self.batch, other.batch)


class IndexedBatch(NamedTuple):
    """A batch of a scoring pass before it is gathered: the numbers of its examples."""

    index: Tensor


class LoaderPass:
    """A pass over the first training examples, as `TrainingPass` makes it of a dataloader.

    Args:
        data: The data in memory.
        batch_size: Examples of a batch.
        examples: Examples of the pass; None for all.
    """

    def __init__(self, data: LoaderData, batch_size: int, examples: int | None):
        self._data = data
        self._batch_size = batch_size
        self._examples = examples

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Yield each batch on the device, with its number of examples."""
        remaining = self._examples
        for part in self._data.pruning_dataloader(self._batch_size):
            index = part.index
            if remaining is not None:
                if not self._data.drops_short_batches:
                    index = index[:remaining]
                remaining -= len(index)
            device = tree_leaves(self._data.train.batch)[0].device
            yield self._data.train[index.to(device)], len(index)
            if remaining is not None and remaining <= 0:
                return

    def loss(self, module: Any, batch: Any, i: int) -> Tensor | None:
        """Return the mean loss of batch number i by a copy of the module."""
        return training_loss(module, batch, i)


# A `LightningDataModule`, so that checkpoints do not save its tensors.
class LoaderData(LightningDataModule):
    """The examples and the order of the dataloaders of a data module.

    It has the methods of `ImageData` that the interval loop calls.

    Args:
        data: The data module, set up under the seed of the trial.
        module: The module, whose hooks may move batches.
        device: Where the examples are.
        batch_size: Examples of a step.
        check_interval: Steps between two validations, which draw seeds for workers too.

    Attributes:
        train: The training examples.
        validation: The batches of the validation split, on the device.

    Raises:
        NeedsLightning: If its batches cannot be kept in memory. The message is the reason.
    """

    def __init__(
        self,
        data: LightningDataModule,
        module: Any,
        device: torch.device,
        batch_size: int,
        check_interval: int,
    ):
        super().__init__()
        self._name = type(data).__name__
        self._generator_state = torch.get_rng_state()
        self.batch_size = batch_size
        self._check_interval = check_interval
        self._refuse_hooks(data, module)
        self._loader = self._loader_of(data.train_dataloader(), "train_dataloader")
        self._sampler_state = self._state_of_sampler()
        loader = self._loader_of(data.val_dataloader(), "val_dataloader")
        if type(loader.sampler) is not SequentialSampler or loader.drop_last:
            self._refuse("shuffles or drops validation examples")
        self._validation_draws = loader.generator is None
        self._keeps_validation_workers = loader.persistent_workers
        with preserve_rng_state():
            before = capture_rng_state(data)
            self.train = Examples(self._collate_all(self._loader, device))
            self.validation = [
                _on_device(self._collate(loader, list(part)), device)
                for part in loader.batch_sampler  # pyright: ignore[reportOptionalIterable]
            ]
            if not equal_states(before, capture_rng_state(data)):
                self._refuse("draws random numbers when it reads examples, as augmentation does")
        self._compare(self._loader, device)
        self._refuse_other_sizes()
        self.validation_size = sum(map(_size_of, self.validation))

    def _refuse(self, reason: str) -> None:
        raise NeedsLightning(f"{self._name} {reason}")

    def _refuse_hooks(self, data: LightningDataModule, module: Any) -> None:
        """Refuse hooks that change a batch, and a scoring pass of the user."""
        if not inherits(data, LightningDataModule, TRANSFER_HOOKS):
            self._refuse("overrides a hook that moves batches")
        for owner in (data, module):
            if hasattr(owner, "pruning_dataloader"):
                raise NeedsLightning(f"{type(owner).__name__} has a pruning_dataloader")

    def _loader_of(self, loader: Any, name: str) -> DataLoader:
        """Return a dataloader whose batches are indices of a data set; refuse others."""
        if type(loader) is not DataLoader or not has_indices(loader):
            self._refuse(f"does not return a DataLoader of a map-style data set from {name}")
        if type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
            self._refuse(f"uses a custom batch sampler in {name}")
        if type(loader.sampler) not in (RandomSampler, SequentialSampler):
            self._refuse(f"uses a custom sampler in {name}")
        is_ordered = type(loader.sampler) is SequentialSampler
        if loader.generator is not None and is_ordered:
            self._refuse(f"gives a generator to an unshuffled DataLoader in {name}")
        if loader.worker_init_fn is not None:
            self._refuse(f"uses a worker_init_fn in {name}")
        return loader

    def _state_of_sampler(self) -> Tensor | None:
        """Return the state of the generator that the sampler keeps; None without one."""
        generator = getattr(self._loader.sampler, "generator", None)
        return None if generator is None else generator.get_state()

    def _collate(self, loader: DataLoader, part: list[int]) -> Any:
        """Return the batch of some examples, as a dataloader makes it."""
        dataset: Any = loader.dataset
        if hasattr(dataset, "__getitems__") and dataset.__getitems__:
            examples = dataset.__getitems__(part)
        else:
            examples = [dataset[i] for i in part]
        batch = loader.collate_fn(examples)
        for leaf in tree_leaves(batch):
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != len(part):
                self._refuse("returns batches that are not tensors with one entry per example")
        return batch

    def _collate_all(self, loader: DataLoader, device: torch.device) -> Any:
        """Return all examples of a dataloader as one batch on the device."""
        size = len(loader.dataset)  # pyright: ignore[reportArgumentType]
        parts = []
        for start in range(0, size, CHUNK):
            part = self._collate(loader, list(range(start, min(start + CHUNK, size))))
            if not parts:
                self._refuse_large(part, size, device)
            parts.append(part)
        shapes = {tuple(leaf.shape[1:] for leaf in tree_leaves(part)) for part in parts}
        if not parts or len(shapes) > 1 or len({str(tree_flatten(p)[1]) for p in parts}) > 1:
            self._refuse("has examples of different shapes")
        structure = tree_flatten(parts[0])[1]
        columns = zip(*map(tree_leaves, parts), strict=True)
        whole = tree_unflatten([torch.cat(column) for column in columns], structure)
        return _on_device(whole, device)

    def _refuse_large(self, part: Any, size: int, device: torch.device) -> None:
        """Refuse a data set that does not fit in memory, from its first examples."""
        limit = MAX_BYTES
        if device.type == "cuda":
            limit = min(limit, int(MAX_DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]))
        of_part = sum(leaf.nbytes for leaf in tree_leaves(part))
        if of_part * size / _size_of(part) > limit:
            self._refuse(f"has more than {limit / 2**30:.2g} GiB of training examples")

    def _compare(self, loader: DataLoader, device: torch.device) -> None:
        """Refuse a data set whose batches differ from the same examples one after another."""
        generator = torch.Generator().manual_seed(0)
        size = len(self.train)
        for _ in range(COMPARED_BATCHES):
            index = torch.randperm(size, generator=generator)[: self.batch_size]
            batch = _on_device(self._collate(loader, index.tolist()), device)
            if not same_tensors(batch, self.train[index.to(device)]):
                self._refuse("returns other values when it reads the same examples again")

    def _refuse_other_sizes(self) -> None:
        """Refuse batches of other sizes than the cell's; the last one of an epoch may be short."""
        loader = self._loader
        if loader.batch_size != self.batch_size:
            self._refuse(f"returns batches of {loader.batch_size} examples, not {self.batch_size}")
        if self._examples_of_epoch < self.batch_size:
            self._refuse("has fewer training examples than a batch")

    def equals(self, other: LoaderData) -> bool:
        """Return True if both have the same examples and the same validation batches."""
        if not self.train.equals(other.train) or not same_tensors(
            self.validation, other.validation
        ):
            return False
        return self._order_kind() == other._order_kind()

    def _order_kind(self) -> tuple:
        sampler: Any = self._loader.sampler
        return type(sampler), len(sampler), self._loader.drop_last

    def share(self, other: LoaderData) -> None:
        """Use the tensors of equal data, so that a stack keeps them once."""
        self.train = other.train
        self.validation = other.validation

    @property
    def _examples_of_epoch(self) -> int:
        """Examples of an epoch, without those that the dataloader drops."""
        drawn = len(self._loader.sampler)  # pyright: ignore[reportArgumentType]
        if self._loader.drop_last:
            return drawn - drawn % self.batch_size
        return drawn

    @property
    def _last_batch_size(self) -> int:
        """Examples of the last batch of an epoch."""
        return self._examples_of_epoch % self.batch_size or self.batch_size

    @property
    def pass_key(self) -> tuple[int, ...] | None:
        """The key of the scoring pass (`TrainingPass.key`)."""
        return pass_key(self._loader)

    @property
    def steps_of_epoch(self) -> int:
        """The number of batches of an epoch."""
        return -(-self._examples_of_epoch // self.batch_size)

    def short_steps(self, steps: int) -> int:
        """Return how many of the first steps have fewer examples than the batch size."""
        if self._last_batch_size == self.batch_size:
            return 0
        return steps // self.steps_of_epoch

    def epochs(self) -> Iterator[np.ndarray]:
        """Yield the examples of each epoch in the order of the dataloader, without an end."""
        steps_of_epoch = self.steps_of_epoch
        is_exhausted = self._exhausts_sampler
        steps = 0
        seeds = 0
        state = self._generator_state
        sampler = self._private_sampler()
        generator = None
        if self._loader.generator is not None:
            generator = sampler.generator
        while True:
            with preserve_rng_state():
                torch.set_rng_state(state)
                # Each iterator of a dataloader draws a seed for its workers.
                if self._validation_draws:
                    _draw_seeds(self._validation_seeds(steps) - seeds)
                seeds = self._validation_seeds(steps)
                if steps == 0 or not self._loader.persistent_workers:
                    _draw_seeds(1, generator)
                indices = iter(sampler)
                order = np.fromiter(islice(indices, len(sampler)), dtype=np.int64)
                if is_exhausted:
                    next(indices, None)
                state = torch.get_rng_state()
            steps += steps_of_epoch
            yield order[: self._examples_of_epoch]

    def _validation_seeds(self, steps: int) -> int:
        """Return how many seeds the validations of the first steps have drawn."""
        validations = steps // self._check_interval
        if self._keeps_validation_workers:
            return min(validations, 1)  # persistent workers keep their iterator
        return validations

    @property
    def _exhausts_sampler(self) -> bool:
        """Whether an epoch asks the sampler for an example beyond its last one.

        A random sampler then draws once more. If it keeps its generator, the next epoch has another
        order. An epoch asks for it if its last batch is short, and if workers load ahead.
        """
        return self._last_batch_size < self.batch_size or self._loader.num_workers > 0

    def _private_sampler(self) -> Any:
        """Return a copy of the sampler, with a separate generator if it keeps one."""
        sampler: Any = self._loader.sampler
        if type(sampler) is SequentialSampler:
            return sampler
        generator = None
        if self._sampler_state is not None:
            generator = torch.Generator()
            generator.set_state(self._sampler_state)
        return RandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            generator=generator,
        )

    def batch_sizes(self) -> Iterator[int]:
        """Return the number of examples of each step, without an end."""
        full_batches = repeat(self.batch_size, self.steps_of_epoch - 1)
        return cycle(chain(full_batches, [self._last_batch_size]))

    @property
    def drops_short_batches(self) -> bool:
        """Whether the training dataloader drops a short last batch."""
        return self._loader.drop_last

    @property
    def eval_batch_size(self) -> int:
        """Examples of a validation batch."""
        return _size_of(self.validation[0])

    def on_device(self, split: str, device: torch.device) -> tuple[Any, Tensor]:
        """Return the examples of a split, and their numbers."""
        if split == "train":
            return self.train, torch.arange(len(self.train), device=device)
        return self.validation, torch.arange(self.validation_size, device=device)

    def pruning_dataloader(self, batch_size: int) -> list[IndexedBatch]:
        """Return the scoring pass that Lightning's loop makes of the dataloader."""
        batches: Any = rebatched(self._loader, batch_size).batch_sampler
        return [IndexedBatch(torch.tensor(list(part))) for part in batches]

    def transfer_batch_to_device(self, batch: IndexedBatch, device: torch.device) -> Any:
        """Return the examples of a batch of the scoring pass."""
        return self.train[batch.index.to(device)]


def _draw_seeds(count: int, generator: torch.Generator | None = None) -> None:
    for _ in range(count):
        torch.empty((), dtype=torch.int64).random_(generator=generator)


def _on_device(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda tensor: tensor.to(device), batch)


def _size_of(batch: Any) -> int:
    """Return the number of examples of a batch of tensors."""
    return len(tree_leaves(batch)[0])
