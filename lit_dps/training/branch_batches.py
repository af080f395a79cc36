"""The batches of the branches of a fork: other examples for each repetition."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lit_dps.core.errors import ConfigError
from lit_dps.data.loaders import EndlessLoader
from lit_dps.parallel.ddp import unsharded
from lit_dps.training.hidden_state import generators_in
from lit_dps.training.training_pass import batch_on_device, copy_loader, has_indices

# Samplers whose order follows a generator of torch.
SHUFFLING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def skipped_batches(trainer: Trainer, repetition: int, repetitions: int, count: int) -> int:
    """Return after how many batches of the train dataloader a repetition begins.

    It is 0 if the loader shuffles by a generator, because each repetition has its own seed.

    Args:
        trainer: The trainer of the fit, at the step of the fork.
        repetition: The number of the repetition, from 0.
        repetitions: The number of repetitions.
        count: The batches of a repetition.
    """
    loader = unsharded(trainer.train_dataloader)
    if isinstance(loader, EndlessLoader):
        # The examples that follow those of the run so far.
        return trainer.global_step * trainer.accumulate_grad_batches + repetition * count
    if has_indices(loader) and isinstance(loader.sampler, SHUFFLING):
        return 0
    length = sized_len(loader)
    if not length and has_indices(loader):
        # Lists of indices cost little. An endless sampler has enough of them for all repetitions.
        length = sum(1 for _ in islice(loader.batch_sampler, repetitions * count))
    if not length:
        return repetition * count
    skipped = repetition * length // repetitions
    # Without lists of indices, the batches before the first one are loaded.
    return skipped if has_indices(loader) else min(skipped, repetition * count)


def seed_generators(seed: int, *owners: Any) -> None:
    """Seed the generators that objects keep, such as the generator of a DataLoader."""
    for generator in generators_in(*owners):
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            bits: Any = type(generator.bit_generator)
            generator.bit_generator.state = bits(seed).state
        elif isinstance(generator, (np.random.RandomState, Random)):
            generator.seed(seed)


def batches_of_branch(
    trainer: Trainer, module: LightningModule, count: int, skipped: int
) -> Iterator[Any]:
    """Yield `count` training batches on the module's device, over several passes if necessary.

    Args:
        trainer: The trainer of the fit.
        module: The module of the fit.
        count: Number of batches.
        skipped: Number of batches before the first one. They are loaded, unless lists of indices
            make the batches.
    """
    yielded = 0
    while True:
        is_empty = True
        is_shortened = False
        loader = copy_loader(unsharded(trainer.train_dataloader))
        if skipped and has_indices(loader):
            # A DataLoader refuses to set this attribute.
            loader.__dict__["batch_sampler"] = islice(loader.batch_sampler, skipped, None)
            skipped = 0
            is_shortened = True
        for batch in loader:
            is_empty = False
            if skipped:
                skipped -= 1
                continue
            yield batch_on_device(trainer, module, batch)
            yielded += 1
            if yielded == count:
                return
        if is_empty and not is_shortened:
            name = type(trainer.train_dataloader).__name__
            raise ConfigError("data", name, "a train dataloader with batches")
