"""One pass over the training split outside of training, with the module's own loss, that leaves no trace.

Of several ranks each takes whole batches, in turn: their gradients are those of one process to the last bit.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

import lit_dps.training.lightning_private as lightning_private
from lit_dps.data.order import AUTHORS_SEED
from lit_dps.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import whole
from lit_dps.training.examples import examples_in
from lit_dps.training.generators import isolated
from lit_dps.training.module_copy import copy_of


class TrainingPass:
    """This rank's batches of one pass over the training split, and the module's own `training_step` loss of each.

    A data module with a `pruning_dataloader(batch_size)` gives the pass. Of any other, the data set of the train
    dataloader is taken whole, in batches of this size; a train dataloader that cannot be made anew with another batch
    size is taken as it is.

    Args:
        trainer: The trainer of a running fit.
        module: Its module.
        batch_size: Examples a batch.
        examples: Stop after so many examples, of all ranks together; by default all.

    Attributes:
        key: Equal for passes over the same examples, whatever the batch size of the training; None where the batches
            depend on it.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, batch_size: int, examples: int | None = None):
        self.trainer, self.module, self.batch_size, self.examples = trainer, module, batch_size, examples
        data, loader = getattr(trainer, "datamodule", None), whole(trainer.train_dataloader)
        self._given = hasattr(data, "pruning_dataloader")
        self.key: tuple[int, ...] | None = () if self._given else _examples_of(loader)

    @contextmanager
    def traceless(self) -> Iterator[LightningModule]:
        """In here nothing leaves a trace: gives a copy of the module, whose training steps may be taken."""
        loader = whole(self.trainer.train_dataloader)
        samplers = (getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None))
        with isolated(loader, *samplers, getattr(self.trainer, "datamodule", None)):
            yield copy_of(self.module)

    def __len__(self) -> int:
        """The batches of the whole pass, of all ranks together."""
        return len(self._loader())

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Each batch on the module's device, with its number of examples.

        Raises:
            ConfigError: for data without a finite pass.
        """
        left = sys.maxsize if self.examples is None else self.examples
        for i, batch in enumerate(self._loader()):
            if self.examples is None and not ranks.is_mine(i):
                continue
            batch = self.trainer.precision_plugin.convert_input(batch)  # the way of a batch in Lightning's own loop
            batch = lightning_private.before_transfer(self.module, batch)
            batch = self.trainer.strategy.batch_to_device(batch, self.module.device, 0)
            size = examples_in(batch) or self.batch_size
            if size > left:
                batch, size = _first(batch, left), left
            if ranks.is_mine(i):
                yield batch, size
            left -= size
            if left <= 0:
                return

    def losses(self, module: LightningModule) -> Iterator[tuple[Tensor, int]]:
        """Mean loss of each batch by this copy of the module, and its number of examples.

        Batches that the training step gives no loss for are left out.
        """
        for i, (batch, size) in enumerate(self.batches()):
            with self.trainer.precision_plugin.train_step_context():
                loss = loss_of(module, batch, i)
            if loss is not None:
                yield loss, size

    def _loader(self) -> Any:
        if self._given:
            return self.trainer.datamodule.pruning_dataloader(self.batch_size)
        loader = whole(self.trainer.train_dataloader)
        if self.key is not None:
            return _anew(loader, self.batch_size)
        if not isinstance(loader, DataLoader) and isinstance(loader, (dict, list, tuple)):
            loader = _Several(tree_map(_fresh, loader))
        if not 0 < length_of(loader) < sys.maxsize:
            raise ConfigError(
                "data",
                type(getattr(self.trainer, "datamodule", None) or loader).__name__,
                "a pass over the training split, for snip, needs a finite train dataloader or a pruning_dataloader",
            )
        return loader if isinstance(loader, _Several) else _fresh(loader)


class _Several:
    """Batches of several train dataloaders together, as Lightning's own loop takes them."""

    def __init__(self, loaders: Any):
        self._together = CombinedLoader(loaders, "max_size_cycle")
        iter(self._together)  # it has no length before

    def __len__(self) -> int:
        return len(self._together)

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in self._together)


def loss_of(module: LightningModule, batch: Any, batch_idx: int) -> Tensor | None:
    """The loss of a module's training step, which is given what Lightning gives it; None if it returns none."""
    more = [batch_idx] if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else []
    output = module.training_step(batch, *more)
    return output["loss"] if isinstance(output, dict) else output


def length_of(loader: Any) -> float:
    """The number of a loader's batches, infinite where it does not know."""
    try:
        return len(loader)
    except TypeError:
        return float("inf")


def _examples_of(loader: Any) -> tuple[int, ...] | None:
    """How many examples a plain DataLoader has and draws; None if its batches are made of more than those."""
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

    Where the loader shuffles the order is always the same, so that the pass is the same at every batch size.
    """
    sampler = loader.sampler
    if type(sampler) is RandomSampler and len(sampler) == len(loader.dataset):
        sampler = RandomSampler(loader.dataset, generator=torch.Generator().manual_seed(AUTHORS_SEED))
    elif type(sampler) is not SequentialSampler:
        sampler = list(islice(sampler, len(sampler)))
    return DataLoader(
        loader.dataset,
        batch_size,
        sampler=sampler,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _fresh(loader: Any) -> Any:
    """A loader that keeps no iterator of the one that it is a copy of."""
    loader = copy.copy(loader)
    if getattr(loader, "_iterator", None) is not None:
        loader._iterator = None  # persistent workers: the training epoch keeps its iterator
    return loader


def _first(batch: Any, n: int) -> Any:
    return tree_map(lambda x: x[:n] if isinstance(x, Tensor) else x, batch)
