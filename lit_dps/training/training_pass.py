"""TrainingPass: one pass over the training split with the module's loss, without side effects.

For example, SNIP needs the gradient of the training loss before the first step. The pass calls
`training_step` on a copy of the module (`copy_of`), so that dropout, batch norm, counters and
random generators of the run remain as they were.

With several ranks, rank r takes the batches r, r + world, and so on, as a whole. Gradients
therefore equal the gradients of one process to the last bit, except with dropout.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from io import IOBase
from itertools import islice
from types import CellType, FunctionType
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError, UserError
from lit_dps.data.loaders import AUTHORS_SEED
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import unsharded
from lit_dps.parallel.example_count import Sizes, can_be_cut, counted, cut
from lit_dps.pruning.mask import MODULE_PARTS
from lit_dps.training.example_count import training_sizes
from lit_dps.training.hidden_state import preserve_rng_state
from lit_dps.training.trainer_state import DataTensors, unmoved

SHORT_BATCHES = 2  # batches of a short pass: a full one, and the last one


class TrainingPass:
    """This rank's batches of one pass over the training split, and the loss of each batch.

    A data module may provide the batches by `pruning_dataloader(batch_size)`. Otherwise the pass
    covers the whole data set of the train dataloader, in batches of `batch_size`. If the dataloader
    cannot be made with another batch size, it is used unchanged. If it has `drop_last`, batches
    have even, nearly equal sizes of at most `batch_size` (`even_batches`), so that no batch is
    short.

    The trainer must be in a fit. The pass stops after `examples` examples, over all ranks; by
    default it takes all.

    A short pass, for a dry run, has `SHORT_BATCHES` batches: the first ones, and the last one,
    which may be short. If batches cannot be chosen, as in a stream, it has only the first ones.

    Attributes:
        key: Equal for passes over the same examples, at any training batch size; None if the
            batches of the pass depend on the training batch size.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        batch_size: int,
        examples: int | None = None,
        is_short: bool = False,
    ):
        self.trainer = trainer
        self.module = module
        self.batch_size = batch_size
        self.examples = SHORT_BATCHES * batch_size if is_short else examples
        self.is_short = is_short
        self._data: Any = getattr(trainer, "datamodule", None)
        self._data_tensors: DataTensors | None = None
        self._has_pruning_loader = hasattr(self._data, "pruning_dataloader")
        self.key: tuple[int, ...] | None = ()
        if not self._has_pruning_loader:
            self.key = pass_key(self._training)

    @property
    def _training(self) -> Any:
        """The train dataloader. Lightning may replace it between two epochs."""
        return unsharded(self.trainer.train_dataloader)

    @contextmanager
    def without_side_effects(self, begin: bool = False) -> Iterator[LightningModule]:
        """Yield a copy of the module for training steps, and undo all side effects afterwards.

        Changes through the trainer are undone too (`trainer_state.unmoved`).

        Args:
            begin: Whether to call `on_train_start` and `on_train_epoch_start` of the copy, in
                Lightning's order. A training step may need them, and in a pass before training the
                module has not called them yet.
        """
        loader = self._training
        samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
        with preserve_rng_state(loader, *samplers, self._data), unmoved(self.trainer):
            twin = copy_of(self.module)
            if begin:
                twin.on_train_start()
                twin.on_train_epoch_start()
                self._keep_trainable(twin)
            yield twin

    def _keep_trainable(self, twin: LightningModule) -> None:
        """Set `requires_grad` of the copy's parameters to the values of the module.

        The hooks of the copy may freeze parameters. Masks must not depend on this, because the
        module is pruned before its hooks are called.
        """
        parameters = dict(twin.named_parameters())
        for name, parameter in self.module.named_parameters():
            if name in parameters:
                parameters[name].requires_grad_(parameter.requires_grad)

    def __len__(self) -> int:
        """The number of batches of the pass, over all ranks."""
        loader = self._loader()
        most_batches = -(-self._most_examples(loader) // self.batch_size)
        return min(len(loader), most_batches)

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Yield each batch on the module's device, with its number of examples.

        Raises:
            ConfigError: if a pass over the data has no end.
        """
        loader = self._loader()
        remaining = self._most_examples(loader)
        for i, (batch, number) in enumerate(counted(loader, self._sizes())):
            if self.examples is None and not ranks.is_mine(i):
                continue
            batch = batch_on_device(self.trainer, self.module, batch)
            size = number or self.batch_size
            if size > remaining and self._can_be_cut(batch, number):
                size = remaining
                batch = cut(batch, slice(0, remaining))
            if ranks.is_mine(i):
                yield batch, size
            remaining -= size
            if remaining <= 0:
                return

    def _most_examples(self, loader: Any) -> int:
        """Return the most examples that the pass takes from a loader."""
        has_all_examples = isinstance(getattr(loader, "batch_sampler", None), _Ends)
        if self.examples is None or has_all_examples:
            return sys.maxsize
        return self.examples

    def _sizes(self) -> Sizes:
        """Return the counter of batches without index lists."""
        if self._has_pruning_loader:
            return Sizes(self.batch_size)
        return Sizes(training_sizes(self.trainer).batch_size)

    def _can_be_cut(self, batch: Any, size: int | None) -> bool:
        """Return True if the first examples of a batch form a batch.

        They do not if the loader drops short batches, or if a tensor belongs to the whole batch.
        """
        if not self._has_pruning_loader and getattr(self._training, "drop_last", False):
            return False
        for leaf in tree_leaves(batch):
            if isinstance(leaf, Tensor) and leaf.ndim == 0:
                return False
        return can_be_cut(batch, size)

    def losses(self, module: LightningModule) -> Iterator[tuple[Tensor, int]]:
        """Yield the mean loss of each batch by a copy of the module, and its number of examples.

        Batches without a loss are skipped.
        """
        for i, (batch, size) in enumerate(self.batches()):
            loss = self.loss(module, batch, i)
            if loss is not None:
                yield loss, size

    def loss(self, module: LightningModule, batch: Any, i: int) -> Tensor | None:
        """Return the mean loss of batch number i by a copy; None if the training step returns None.

        `on_train_batch_start` of the copy is called first, as in training. If it returns -1,
        Lightning would skip the rest of the epoch, and the loss is None. A batch that is None is
        not trained on either.

        In a precision that scales the loss, such as 16-mixed, this loss is in full precision.
        Without the scale its small gradients would be 0 in float16.
        """
        if batch is None:
            return None
        if self._data_tensors is None:
            content_blocks = SHORT_BATCHES if self.is_short else 0
            self._data_tensors = DataTensors(self.trainer, content_blocks)
        with self._data_tensors.unchanged():
            if module.on_train_batch_start(batch, i) == -1:
                return None
            precision = self.trainer.precision_plugin
            if getattr(precision, "scaler", None) is None:
                context = precision.train_step_context()
            else:
                context = nullcontext()
            with context:
                return loss_of(module, batch, i)

    def _loader(self) -> Any:
        loader = self._whole_loader()
        # Without a key the pass uses the training batches; the dry run also trains on the last one.
        if self.is_short and self.key is not None and has_indices(loader):
            return ends_of(loader, SHORT_BATCHES - 1, 1)
        return loader

    def _whole_loader(self) -> Any:
        if self._has_pruning_loader:
            return self._data.pruning_dataloader(self.batch_size)
        loader = self._training
        for leaf in tree_leaves(loader):
            refuse_read_once(leaf)
        if self.key is not None:
            return rebatched(loader, self.batch_size)
        if not isinstance(loader, DataLoader) and isinstance(loader, (dict, list, tuple)):
            loader = CombinedLoader(tree_map(copy_loader, loader), "max_size_cycle")
            iter(loader)  # a CombinedLoader has no length before this
        if not 0 < (sized_len(loader) or 0) < sys.maxsize:
            allowed = (
                "a class with a pruning_dataloader, because pruning methods such as snip "
                "pass over the training split and need a finite train dataloader"
            )
            raise ConfigError("data", type(self._data or loader).__name__, allowed)
        if isinstance(loader, CombinedLoader):
            return loader
        return copy_loader(loader)


def batch_on_device(
    trainer: Trainer, module: LightningModule, batch: Any, dataloader_idx: int = 0
) -> Any:
    """Return a batch on the module's device, by the same three steps as in Lightning's loop."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = lightning_private.before_transfer(module, batch, dataloader_idx)
    return trainer.strategy.batch_to_device(batch, module.device, dataloader_idx)


def loss_of(module: LightningModule, batch: Any, batch_idx: int) -> Tensor | None:
    """Return the loss of a module's training step, called as Lightning does; None without one."""
    training_step: Any = module.training_step
    if is_param_in_hook_signature(training_step, "batch_idx", min_args=2):
        output = training_step(batch, batch_idx)
    else:
        output = training_step(batch)
    return output["loss"] if isinstance(output, dict) else output


def loss_of_output(output: Any) -> Any:
    """Return the loss in the output of a training step; None without one."""
    if isinstance(output, dict):
        return output.get("loss")
    return output


def pass_key(loader: Any) -> tuple[int, ...] | None:
    """Return how many examples a plain DataLoader has and draws; None for other loaders.

    Passes over two loaders with this key have the same examples.
    """
    if not has_indices(loader) or type(loader.batch_sampler) is not BatchSampler:
        return None
    try:
        return len(loader.dataset), len(loader.sampler)
    except TypeError:
        # For example, a sampler without an end has no length.
        return None


def rebatched(loader: DataLoader, batch_size: int) -> DataLoader:
    """Return a loader of the same examples in other batches, for a loader with a `pass_key`.

    If the loader shuffles, the order is the same in each pass and at every batch size.
    """
    dataset: Any = loader.dataset
    sampler: Any = loader.sampler
    if type(sampler) is RandomSampler and len(sampler) == len(dataset):
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(AUTHORS_SEED))
    elif type(sampler) is not SequentialSampler:
        sampler = list(islice(sampler, len(sampler)))
    names = ("collate_fn", "num_workers", "worker_init_fn", "multiprocessing_context")
    settings = {name: getattr(loader, name) for name in names}
    if loader.drop_last:
        batches = even_batches(list(sampler), batch_size)
        return DataLoader(dataset, batch_sampler=batches, **settings)
    return DataLoader(dataset, batch_size, sampler=sampler, **settings)


def even_batches(order: Sequence[int], most: int) -> list[list[int]]:
    """Return batches with even, nearly equal sizes of at most `most` examples (at least 2).

    If the number of examples is odd, the last example is dropped. A single example is a batch.

    With `drop_last`, a module may rely on batches that are never short. Batch normalization refuses
    a batch of one example, and losses over pairs need an even number.
    """
    pairs = len(order) // 2
    if pairs == 0:
        return [list(order)]
    count = math.ceil(pairs / max(1, most // 2))
    ends = [2 * (i * pairs // count) for i in range(count + 1)]
    return [list(order[ends[i] : ends[i + 1]]) for i in range(count)]


def copy_loader(loader: Any) -> Any:
    """Return a shallow copy of a loader, whose pass begins from the start."""
    loader = copy.copy(loader)
    if getattr(loader, "_iterator", None) is not None:
        # A loader with persistent workers keeps the iterator of the training epoch.
        loader._iterator = None
    return loader


def refuse_read_once(loader: Any) -> None:
    """Refuse a loader from which a second reader would take batches of the training.

    Raises:
        ConfigError: if each `iter` of the loader, of its samplers or of its data set continues the
            same reading.
    """
    streams = [loader]
    if isinstance(loader, DataLoader):
        batch_sampler = loader.batch_sampler
        streams = [loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
        # Each worker reads a copy of the data set.
        if isinstance(loader.dataset, IterableDataset) and not loader.num_workers:
            streams = [loader.dataset]
    for stream in streams:
        is_shared = isinstance(stream, Iterator)
        if isinstance(stream, IterableDataset) and not is_shared:
            is_shared = iter(stream) is iter(stream)
        if is_shared:
            allowed = (
                "data that can be read again: `__iter__` has to return a new iterator each time, "
                "because a reading or pruning method also reads the training data"
            )
            raise ConfigError("data", type(stream).__name__, allowed)


def has_indices(loader: Any) -> bool:
    """Return True if indices of the data set alone determine the batches of a loader."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


def ends_of(loader: DataLoader, first: int, last: int) -> DataLoader:
    """Return a loader of the first and the last batches of a loader with `has_indices`."""
    shortened = copy_loader(loader)
    # A DataLoader refuses to set this attribute.
    shortened.__dict__["batch_sampler"] = _Ends(loader.batch_sampler, first, last)
    return shortened


class _Ends:
    """A batch sampler of the first and the last batches of another batch sampler.

    If all of these batches are short, the largest batch of the pass replaces the first one.
    """

    def __init__(self, batches: Any, first: int, last: int):
        self.batches = batches
        self.first = first
        self.last = last
        self.sampler = getattr(batches, "sampler", None)
        self.batch_size = getattr(batches, "batch_size", None)
        self.drop_last = getattr(batches, "drop_last", False)

    def __len__(self) -> int:
        return min(len(self.batches), self.first + self.last)

    def __iter__(self) -> Iterator[Any]:
        # Nothing is drawn before the first batch is asked for. A run that resumes begins its pass
        # twice, and draws in the second one.
        yield from self._ends()

    def _ends(self) -> list[Any]:
        """Draw a pass of the batches, and return the first and the last ones."""
        batches = list(islice(self.batches, len(self.batches)))
        if len(batches) <= self.first + self.last:
            return batches
        ends = batches[: self.first] + batches[-self.last :]
        largest = max(batches, key=len)
        if len(largest) > max(map(len, ends)):
            ends[0] = largest
        return ends


def copy_of(module: LightningModule) -> LightningModule:
    """Return a copy of a module, equal to the bit, that logs nothing.

    Parameters, buffers, attributes and generators are copied. Functions among the attributes, such
    as hooks, refer to the copy where they referred to the module or its attributes. The copy shares
    the trainer, and what cannot be copied, such as a lock or a file. It does not share iterators: a
    step of the copy would take an item from the training. `_NotShared` replaces them.
    """
    owners = lightning_private.owners_of(module)
    memo: dict[int, Any] = {id(owner): owner for owner in owners}
    cells: list[tuple[CellType, CellType]] = []
    attributes = []
    for part in module.modules():
        for name, value in vars(part).items():
            if name not in MODULE_PARTS:
                attributes.append(value)
    for value in [*attributes, *_values_in(attributes)]:
        if isinstance(value, FunctionType) and value.__closure__:
            copied = with_empty_cells(value)
            cells += zip(value.__closure__, copied.__closure__ or (), strict=True)
            memo[id(value)] = copied
        elif isinstance(value, Tensor) and value.grad_fn is not None:
            # A result of an earlier forward pass. torch refuses to deep-copy it.
            memo[id(value)] = value.detach().clone()
        elif isinstance(value, Iterator) and not isinstance(value, IOBase):
            try:
                _deep_copy(value, memo)
            except Exception:
                memo[id(value)] = _NotShared(type(module).__name__)
    try:
        twin, memo = _deep_copy(module, memo)
    # The class of an attribute may raise any error. Such an attribute is shared.
    except Exception:
        for value in attributes:
            try:
                _deep_copy(value, memo)
            except Exception:
                memo[id(value)] = value
        twin, memo = _deep_copy(module, memo)
    for cell, new_cell in cells:
        new_cell.cell_contents = memo.get(id(cell.cell_contents), cell.cell_contents)
    twin.trainer = owners[0]  # Lightning's copies have no trainer
    twin.__dict__["log"] = lambda *args, **kwargs: None
    return twin


class _NotShared:
    """Replaces, in a copy of a module, an iterator that cannot be copied, such as a generator."""

    def __init__(self, module: str):
        self.module = module

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise UserError(
            f"{self.module} draws from an iterator that cannot be copied, so a measured "
            "step would change the training. Draw with a torch.Generator, or omit the "
            "reading or pruning method that measures it.",
            key="model",
            value=self.module,
        )


def _deep_copy(value: Any, memo: Mapping[int, Any]) -> tuple[Any, dict[int, Any]]:
    """Return a deep copy, and the copies of all its parts by `id`, with those in `memo`."""
    copies = dict(memo)
    return copy.deepcopy(value, copies), copies


def _values_in(collections: list[Any]) -> Iterator[Any]:
    """Yield the values of all dicts, lists and tuples among these objects."""
    for each in collections:
        if isinstance(each, dict):
            yield from each.values()
        elif isinstance(each, (list, tuple)):
            yield from each


def with_empty_cells(function: FunctionType) -> FunctionType:
    """Return a copy of a function whose enclosed variables are empty."""
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(CellType() for _ in function.__closure__ or ()),
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    copied.__dict__ = dict(function.__dict__)
    return copied
