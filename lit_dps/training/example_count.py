"""Counts the examples of the current batch of a fit. See `lit_dps.parallel.example_count`."""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.attempt import Attempt
from lit_dps.core.batch_schedule import CONSTANT, NAME_KEY
from lit_dps.core.errors import ConfigError
from lit_dps.core.unit import EXAMPLES, SECONDS
from lit_dps.data.loaders import EndlessLoader
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import ShardLoader, unsharded
from lit_dps.parallel.example_count import (
    Sizes,
    batch_size_of,
    examples_drawn,
    first_iterator,
    record_examples,
)
from lit_dps.training.batch_schedule_callback import schedule_name
from lit_dps.training.stopwatch import Stopwatch


class _Recorded:
    """Counts a trainer's batches that have no index lists.

    Attributes:
        training: Counts the training batches.
        validation: Counts the batches of each validation loader, by its number.
    """

    def __init__(self):
        self.training = Sizes()
        self.validation: dict[int, Sizes] = defaultdict(Sizes)


_recorded: WeakKeyDictionary[Trainer, _Recorded] = WeakKeyDictionary()


class SpentOfSteps:
    """Counts the examples and seconds that optimizer steps spend between two validations."""

    def __init__(self):
        self._batches: list[int | None] = []  # since the last step
        self._steps: list[int | None] = []  # since the last `take`
        self._seconds_before = 0.0  # of training, up to the last `take`

    def add_batch(self, examples: int | None) -> None:
        """Add a batch that is trained on; None for an unknown number of examples."""
        self._batches.append(examples)

    def skip_batch(self) -> None:
        """Remove the last batch, which had no loss."""
        self._batches = self._batches[:-1]

    def step(self) -> None:
        """Count the batches since the last step."""
        self._steps += self._batches
        self._batches = []

    def take(self, trainer: Trainer, attempt: Attempt, stopwatch: Stopwatch) -> dict[str, float]:
        """Return what the steps since the last call spent, in each unit that the curve counts."""
        spent: dict[str, float] = {}
        if EXAMPLES.column in attempt.curve:
            counts = [count for count in self._steps if count is not None]
            if len(counts) < len(self._steps):
                reason = "the number of examples of a batch of this data is unknown"
                goal = attempt.goal
                if goal.max_examples is not None:
                    raise ConfigError("goal.max_examples", goal.max_examples, f"omitted: {reason}")
                if goal.cost_unit is EXAMPLES:
                    raise ConfigError("goal.unit", goal.unit, f"omitted: {reason}")
                if schedule_name(trainer) == CONSTANT:
                    raise ConfigError("study.readings", EXAMPLES.name, f"omitted: {reason}")
                # Without a goal in examples, the batch schedule counts them.
                raise ConfigError(NAME_KEY, schedule_name(trainer), f"{CONSTANT}: {reason}")
            spent[EXAMPLES.column] = sum(counts)
        if SECONDS.column in attempt.curve:
            seconds = stopwatch.training_seconds
            # With several ranks, the clock of the first one decides.
            spent[SECONDS.column] = ranks.broadcast(seconds - self._seconds_before)
            self._seconds_before = seconds
        self._steps = []
        return spent


def record_batches(trainer: Trainer, batch_size: int | None = None) -> None:
    """Make the dataloaders of the next fit record how many examples each batch has.

    Call this before the trainer requests its dataloaders: in `setup` at the latest.

    Args:
        trainer: The trainer of the fit.
        batch_size: Examples of a full training batch; None if unknown.
    """
    if trainer not in _recorded:
        _recorded[trainer] = _Recorded()
        process = trainer.strategy.process_dataloader

        def process_dataloader(loader: Any) -> Any:
            processed = process(loader)
            record_examples(unsharded(processed))
            return processed

        vars(trainer.strategy)["process_dataloader"] = process_dataloader
    recorded = _recorded[trainer]
    recorded.training.place = None
    recorded.validation.clear()
    if batch_size is not None:
        recorded.training.batch_size = batch_size


def examples_of(trainer: Trainer, batch: Any) -> int | None:
    """Return the examples of the current training batch, over all ranks; None if unknown."""
    number, _ = _counts_of(*lightning_private.train_loaders(trainer))
    if number is None:
        return training_sizes(trainer).examples_in(batch, _declared_batch_size(trainer))
    return number


def examples_of_part(trainer: Trainer, batch: Any) -> int | None:
    """Return the examples of this rank's part of the current training batch; None if unknown."""
    _, number = _counts_of(*lightning_private.train_loaders(trainer))
    return examples_of(trainer, batch) if number is None else number


def full_batch_size(trainer: Trainer, batch: Any) -> int:
    """Return the number of examples of a full training batch, over all ranks; 0 if unknown.

    If the loader declares no batch size, return the size of the current batch, which may be short.
    """
    return declared_batch_size(trainer) or examples_of(trainer, batch) or 0


def declared_batch_size(trainer: Trainer) -> int:
    """Return the number of examples of a full training batch, if it is declared; else 0."""
    return training_sizes(trainer).batch_size or _declared_batch_size(trainer) or 0


def validation_examples_of(trainer: Trainer, batch: Any, number: int) -> int | None:
    """Return the examples of this rank's part of the current validation batch; None if unknown.

    Args:
        trainer: The trainer of the fit.
        batch: The batch.
        number: The number of the validation loader.
    """
    loaders, ahead = lightning_private.validation_loaders(trainer)
    _, examples = _counts_of(loaders, ahead, number)
    if examples is not None:
        return examples
    sizes = _recorded.get(trainer, _Recorded()).validation[number]
    return sizes.examples_in(batch, batch_size_of(loaders.flattened[number]))


def _counts_of(loaders: Any, ahead: int, number: int = 0) -> tuple[int | None, int | None]:
    """Return the loader's counts of the current batch, over all ranks and of this rank.

    A count is None if the loader does not know it.
    """
    if loaders is None:
        return None, None
    loader = loaders.flattened[number]
    if not isinstance(loader, ShardLoader):
        drawn = examples_drawn(first_iterator(loaders), ahead)
        return drawn, drawn
    if len(loader.counts) <= ahead:
        return None, None
    return loader.counts[-1 - ahead]


def training_sizes(trainer: Trainer) -> Sizes:
    """Return the counter of a trainer's training batches that have no index lists."""
    return _recorded.get(trainer, _Recorded()).training


def _declared_batch_size(trainer: Trainer) -> int | None:
    """Return the batch size that the first train dataloader declares; None if it declares none."""
    loaders, _ = lightning_private.train_loaders(trainer)
    if loaders is None:
        return None
    loader = unsharded(loaders.flattened[0])
    if isinstance(loader, EndlessLoader):
        return loader.batch_size
    return batch_size_of(loader)
