"""How many examples the current batch of a fit has, as `lit_dps.parallel.examples` defines it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.parallel.ddp import ShardLoader, whole
from lit_dps.parallel.examples import Sizes, batch_size_of, examples_drawn, first_iterator, record_examples


class _Recorded:
    """How a trainer's batches are counted where no list of indices tells it, in training and by validation loader."""

    def __init__(self):
        self.training = Sizes()
        self.validation: dict[int, Sizes] = defaultdict(Sizes)


_recorded: WeakKeyDictionary[Trainer, _Recorded] = WeakKeyDictionary()


def record_batches(trainer: Trainer, batch_size: int | None = None) -> None:
    """Lets the dataloaders of the next fit keep how many examples they draw for each batch.

    To be called before the trainer asks for its dataloaders: in `setup` at the latest.

    Args:
        trainer: Of the fit.
        batch_size: Examples of a full training batch; None if nobody knows.
    """
    if trainer not in _recorded:
        _recorded[trainer] = _Recorded()
        process = trainer.strategy.process_dataloader

        def process_dataloader(loader: Any) -> Any:
            processed = process(loader)
            record_examples(whole(processed))
            return processed

        trainer.strategy.process_dataloader = process_dataloader
    recorded = _recorded[trainer]
    recorded.training.place = None
    recorded.validation.clear()
    if batch_size is not None:
        recorded.training.batch_size = batch_size


def examples_of(trainer: Trainer, batch: Any) -> int | None:
    """Return the number of examples of the current training batch, of all ranks that share it; None if unknown."""
    number = _counts_of(*lightning_private.train_loaders(trainer))[0]
    return training_sizes(trainer).examples_in(batch, _promised(trainer)) if number is None else number


def examples_of_part(trainer: Trainer, batch: Any) -> int | None:
    """Return the number of examples of this rank's part of the current training batch; None if unknown."""
    number = _counts_of(*lightning_private.train_loaders(trainer))[1]
    return examples_of(trainer, batch) if number is None else number


def full_batch_size(trainer: Trainer, batch: Any) -> int:
    """Return the number of examples of a full training batch of all ranks that share it; 0 if unknown.

    The current batch may be a short one. It decides where the loader does not say what a full one is.
    """
    known = training_sizes(trainer).batch_size or _promised(trainer)
    return known or examples_of(trainer, batch) or 0


def validation_examples_of(trainer: Trainer, batch: Any, number: int) -> int | None:
    """Return the number of examples of this rank's part of the current batch of a validation loader, by its number."""
    loaders, ahead = lightning_private.validation_loaders(trainer)
    counts = _counts_of(loaders, ahead, number)
    if counts[1] is not None:
        return counts[1]
    recorded = _recorded.get(trainer) or _Recorded()
    return recorded.validation[number].examples_in(batch, batch_size_of(loaders.flattened[number]))


def _counts_of(loaders: Any, ahead: int, number: int = 0) -> tuple[int | None, int | None]:
    """Return the examples of the current batch as its loader counts them, and of this rank's part; None if unknown."""
    if loaders is None:
        return None, None
    loader = loaders.flattened[number]
    if isinstance(loader, ShardLoader):
        return loader.counts[-1 - ahead] if len(loader.counts) > ahead else (None, None)
    drawn = examples_drawn(first_iterator(loaders), ahead)
    return drawn, drawn


def training_sizes(trainer: Trainer) -> Sizes:
    """Return what counts a trainer's training batches where no list of indices does."""
    recorded = _recorded.get(trainer)
    return Sizes() if recorded is None else recorded.training


def _promised(trainer: Trainer) -> int | None:
    """Return the batch size that the first train dataloader promises; None if it promises none."""
    loaders, _ = lightning_private.train_loaders(trainer)
    return None if loaders is None else batch_size_of(whole(loaders.flattened[0]))
