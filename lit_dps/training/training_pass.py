"""TrainingPass: one pass over the training split with the module's loss, without side effects.

With several ranks, each rank takes whole batches in turn. So gradients equal those of one process
to the last bit.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from lit_dps.core.errors import ConfigError
from lit_dps.data.order import AUTHORS_SEED
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import whole
from lit_dps.parallel.example_count import Sizes, can_be_cut, counted, cut
from lit_dps.training.example_count import training_sizes
from lit_dps.training.rng_state import preserve_rng_state
from lit_dps.training.trainer_state import DataTensors, unmoved

SHORT_BATCHES = 2  # batches of a short pass: a full one, and the last one


class TrainingPass:
    """This rank's batches of one pass over the training split, and the `training_step` loss of each
    batch.

    A data module may provide the batches by `pruning_dataloader(batch_size)`. Otherwise the pass
    covers the whole data set of the train dataloader, in batches of `batch_size`. If the dataloader
    cannot be made with another batch size, it is used unchanged. If it has `drop_last`, batches
    have even, nearly equal sizes of at most `batch_size` (`even_batches`), so that no batch is
    short.

    The trainer must be in a fit. The pass stops after `examples` examples, over all ranks; by
    default it takes all.

    A short pass, for a dry run, has `SHORT_BATCHES` batches: the first ones, and the last one,
    which may be short. If batches cannot be chosen, such as those of a stream, it has only the
    first ones.

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
        self.trainer, self.module, self.batch_size, self.examples = (
            trainer,
            module,
            batch_size,
            examples,
        )
        self.is_short = is_short
        if is_short:
            self.examples = SHORT_BATCHES * batch_size
        self._data = getattr(trainer, "datamodule", None)
        self._data_tensors: DataTensors | None = None
        self._given = hasattr(self._data, "pruning_dataloader")
        self.key: tuple[int, ...] | None = () if self._given else _examples_of(self._training)

    @property
    def _training(self) -> Any:
        return whole(self.trainer.train_dataloader)  # which may be made anew between two epochs

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
        """The batches of the pass, of all ranks together."""
        loader = self._loader()
        return min(len(loader), -(-self._most_examples(loader) // self.batch_size))

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
            batch = self.trainer.precision_plugin.convert_input(batch)  # as in Lightning's loop
            batch = lightning_private.before_transfer(self.module, batch)
            batch = self.trainer.strategy.batch_to_device(batch, self.module.device, 0)
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
        are_ends = isinstance(getattr(loader, "batch_sampler", None), _Ends)
        return sys.maxsize if self.examples is None or are_ends else self.examples

    def _sizes(self) -> Sizes:
        """Return the counter of batches without index lists."""
        if self._given:
            return Sizes(self.batch_size)
        return Sizes(training_sizes(self.trainer).batch_size)

    def _can_be_cut(self, batch: Any, size: int | None) -> bool:
        """Return True if the first examples of a batch form a batch.

        They do not if the loader drops short batches, or if a tensor belongs to the whole batch.
        """
        if not self._given and getattr(self._training, "drop_last", False):
            return False
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        return can_be_cut(batch, size) and all(tensor.ndim > 0 for tensor in tensors)

    def losses(self, module: LightningModule) -> Iterator[tuple[Tensor, int]]:
        """Mean loss of each batch by this copy of the module, and its number of examples.

        Batches that the training step gives no loss for are left out.
        """
        for i, (batch, size) in enumerate(self.batches()):
            loss = self.loss(module, batch, i)
            if loss is not None:
                yield loss, size

    def loss(self, module: LightningModule, batch: Any, i: int) -> Tensor | None:
        """Return the mean loss of batch number i by this copy; None if the training step returns
        none.

        `on_train_batch_start` of the copy is called first, as in training. If it returns -1,
        Lightning would skip the rest of the epoch, and the loss is None. A batch that is None is
        not trained on either.
        """
        if batch is None:
            return None
        if self._data_tensors is None:
            self._data_tensors = DataTensors(self.trainer, contents=self.is_short)
        with self._data_tensors.unchanged():
            if module.on_train_batch_start(batch, i) == -1:
                return None
            with self.trainer.precision_plugin.train_step_context():
                return loss_of(module, batch, i)

    def _loader(self) -> Any:
        loader = self._whole_loader()
        # Without a key the pass uses the training batches; the dry run also trains on the last one.
        if self.is_short and self.key is not None and has_indices(loader):
            return ends_of(loader, SHORT_BATCHES - 1, 1)
        return loader

    def _whole_loader(self) -> Any:
        if self._given:
            return self._data.pruning_dataloader(self.batch_size)
        loader = self._training
        if self.key is not None:
            return _anew(loader, self.batch_size)
        if not isinstance(loader, DataLoader) and isinstance(loader, (dict, list, tuple)):
            loader = CombinedLoader(tree_map(fresh, loader), "max_size_cycle")
            iter(loader)  # a CombinedLoader has no length before this
        if not 0 < (sized_len(loader) or 0) < sys.maxsize:
            finite = (
                "a pass over the training split, for snip, needs a finite train dataloader "
                "or a "
                "pruning_dataloader"
            )
            raise ConfigError("data", type(self._data or loader).__name__, finite)
        return loader if isinstance(loader, CombinedLoader) else fresh(loader)


def loss_of(module: LightningModule, batch: Any, batch_idx: int) -> Tensor | None:
    """The loss of a module's training step, which is given what Lightning gives it; None if it
    returns none."""
    more = (
        [batch_idx]
        if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        else []
    )
    output = module.training_step(batch, *more)
    return output["loss"] if isinstance(output, dict) else output


def _examples_of(loader: Any) -> tuple[int, ...] | None:
    """How many examples a plain DataLoader has and draws; None if its batches are made of more than
    those."""
    plain = (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and type(loader.batch_sampler) is BatchSampler
    )
    try:
        return (len(loader.dataset), len(loader.sampler)) if plain else None
    except TypeError:  # a sampler without an end, say
        return None


def _anew(loader: DataLoader, batch_size: int) -> DataLoader:
    """The whole data set of a loader, or what its own sampler takes of it, in other batches.

    Where the loader shuffles the order is always the same, so that the pass is the same at every
    batch size.
    """
    sampler = loader.sampler
    if type(sampler) is RandomSampler and len(sampler) == len(loader.dataset):
        sampler = RandomSampler(
            loader.dataset, generator=torch.Generator().manual_seed(AUTHORS_SEED)
        )
    elif type(sampler) is not SequentialSampler:
        sampler = list(islice(sampler, len(sampler)))
    names = ("collate_fn", "num_workers", "worker_init_fn", "multiprocessing_context")
    same = {name: getattr(loader, name) for name in names}
    if loader.drop_last:
        return DataLoader(
            loader.dataset, batch_sampler=even_batches(list(sampler), batch_size), **same
        )
    return DataLoader(loader.dataset, batch_size, sampler=sampler, **same)


def even_batches(order: Sequence[int], most: int) -> list[list[int]]:
    """Return batches with even, nearly equal sizes of at most `most` examples (at least 2).

    If the number of examples is odd, the last example is left out. A single example is a batch.

    With `drop_last`, a module may rely on batches that are never short. Batch normalization refuses
    a batch of one example, and losses over pairs need an even number.
    """
    pairs = len(order) // 2
    if pairs == 0:
        return [list(order)]
    count = math.ceil(pairs / max(1, most // 2))
    ends = [2 * (i * pairs // count) for i in range(count + 1)]
    return [list(order[ends[i] : ends[i + 1]]) for i in range(count)]


def fresh(loader: Any) -> Any:
    """A loader that keeps no iterator of the one that it is a copy of."""
    loader = copy.copy(loader)
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None  # persistent workers: the training epoch keeps its iterator
    return loader


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
    shortened = fresh(loader)
    # A DataLoader refuses to set this attribute.
    shortened.__dict__["batch_sampler"] = _Ends(loader.batch_sampler, first, last)
    return shortened


class _Ends:
    """A batch sampler of the first and the last batches of another batch sampler.

    If all of these batches are short, the largest batch of the pass replaces the first one.
    """

    def __init__(self, batches: Any, first: int, last: int):
        self.batches, self.first, self.last = batches, first, last
        self.sampler = getattr(batches, "sampler", None)
        self.batch_size = getattr(batches, "batch_size", None)
        self.drop_last = getattr(batches, "drop_last", False)

    def __len__(self) -> int:
        return min(len(self.batches), self.first + self.last)

    def __iter__(self) -> Iterator[Any]:
        batches = list(islice(self.batches, len(self.batches)))
        if len(batches) <= self.first + self.last:
            return iter(batches)
        ends = batches[: self.first] + batches[-self.last :]
        largest = max(batches, key=len)
        if len(largest) > max(map(len, ends)):
            ends[0] = largest
        return iter(ends)


_STRUCTURE = ("_modules", "_parameters", "_buffers")


def copy_of(module: LightningModule) -> LightningModule:
    """A module of its own parameters, buffers, attributes and generators, equal to the bit, that
    logs nothing.

    Functions that it keeps, hooks say, refer to the copy where they refer to the module or to what
    it keeps. It shares the trainer, and what cannot be copied, such as a lock or an open file.
    """
    memo: dict[int, Any] = {id(shared): shared for shared in lightning_private.owners_of(module)}
    cells: list[tuple[CellType, CellType]] = []
    kept = [
        value
        for part in module.modules()
        for key, value in vars(part).items()
        if key not in _STRUCTURE
    ]
    for value in [*kept, *_within(kept)]:
        if isinstance(value, FunctionType) and value.__closure__:
            memo[id(value)] = _rebound(value, cells)
        elif (
            isinstance(value, Tensor) and value.grad_fn is not None
        ):  # what is left from a backward pass
            memo[id(value)] = value.detach().clone()
    for value in kept:
        if id(value) not in memo:
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:  # whatever its class raises: it is shared
                memo[id(value)] = value
    twin = copy.deepcopy(module, memo)
    for old, new in cells:
        new.cell_contents = memo.get(id(old.cell_contents), old.cell_contents)
    twin.trainer = lightning_private.owners_of(module)[0]  # Lightning's own copies forget it
    twin.__dict__["log"] = lambda *args, **kwargs: None
    return twin


def _within(values: list[Any]) -> Iterator[Any]:
    """What dicts and lists among these values hold."""
    for value in values:
        if isinstance(value, (dict, list, tuple)):
            yield from value.values() if isinstance(value, dict) else value


def _rebound(function: FunctionType, cells: list[tuple[CellType, CellType]]) -> FunctionType:
    """Return a function with new, empty enclosed variables; add each old and new variable to
    `cells`."""
    new_cells = tuple(CellType() for _ in function.__closure__)
    cells.extend(zip(function.__closure__, new_cells, strict=True))
    new = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, new_cells
    )
    new.__kwdefaults__ = function.__kwdefaults__
    new.__dict__ = dict(function.__dict__)
    return new
