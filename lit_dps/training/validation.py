"""What a validation covered, and which metrics the module logged in it.

K* is comparable between runs only if every validation covers the same, entire validation split, and
if each metric is the mean over this split. `GoalErrorCallback` refuses other metrics.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils._pytree import tree_leaves

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError
from lit_dps.parallel import ranks
from lit_dps.parallel.ddp import SharedBatchDDP, unsharded
from lit_dps.training.example_count import validation_examples_of
from lit_dps.training.step_count import sizes_of_loader


class ValidationCount:
    """Counts the batches and examples of each validation, by dataloader.

    Attributes:
        first: Examples of the first validation, by the number of the dataloader; None before. See
            `lit_dps.parallel.example_count`.
    """

    def __init__(self):
        self.first: dict[int, int] | None = None
        self.begin()

    def begin(self) -> None:
        """Begin to count a validation."""
        self._batches: Counter[int] = Counter()
        self._examples: Counter[int] = Counter()
        self._batch_sizes: dict[int, set[int]] = defaultdict(set)

    def add(self, trainer: Trainer, batch: Any, loader: int) -> None:
        """Count a batch of the dataloader of this number."""
        size = validation_examples_of(trainer, batch, loader) or 1
        self._batches[loader] += 1
        self._examples[loader] += size
        self._batch_sizes[loader].add(size)

    @property
    def batches(self) -> dict[int, int]:
        """Batches of the last validation, by the number of the dataloader."""
        return dict(self._batches)

    def end(self, trainer: Trainer) -> None:
        """Check the counts of a validation that has ended.

        Raises:
            ConfigError: if it had no examples, or another number than the first validation.
        """
        examples = dict(self._examples)
        name = _data_name(trainer)
        # With several ranks, another rank may have had the examples.
        if not examples and ranks.world() == 1:
            raise ConfigError("data", name, "a validation dataloader that gives batches")
        if self.first is not None and self.first != examples:
            raise ConfigError(
                "data",
                name,
                "the same validation examples at every validation, not "
                f"{sum_text(self.first)} and {sum_text(examples)}",
            )
        self.first = examples

    def why_no_mean(self, trainer: Trainer, metric: str) -> str | None:
        """Return why a metric is not the mean over the validation split; None if it may be.

        Metrics that the module logs at the end of the epoch, and torchmetrics objects, are accepted
        as they are. Call this in `on_validation_end`.
        """
        name, loader = metric, 0
        match = _LOADER_SUFFIX.fullmatch(metric)
        if match:
            name, loader = match["name"], int(match["loader"])
        for logged in lightning_private.logged_metrics(trainer):
            meta = logged.meta
            if meta.name != name or meta.fx != "validation_step":
                continue
            if match and meta.dataloader_idx != loader:
                continue
            return self._why_no_mean(logged, loader)
        return None

    def _why_no_mean(self, logged: Any, loader: int) -> str | None:
        meta = logged.meta
        if not meta.on_epoch:
            return "it is logged with on_epoch=False, so it covers only the last batch"
        if not logged.is_tensor:
            return None
        if not meta.is_mean_reduction:
            reduction = getattr(meta.reduce_fx, "__name__", meta.reduce_fx)
            return f"it is logged with reduce_fx={reduction}, which is no mean"
        updates = logged._update_count
        if updates < self._batches[loader]:
            return f"it is logged in {updates} of {self._batches[loader]} validation batches"
        if len(self._batch_sizes[loader]) <= 1:
            return None
        # Weights are correct if each batch counts by its examples, or by its tokens. Then the total
        # weight is a multiple of the number of examples.
        weight = int(logged.cumulated_batch_size)
        if weight % updates == 0 and weight % self._examples[loader] != 0:
            return (
                f"it is logged with batch_size={weight // updates} over batches of different "
                "size: pass batch_size=, the examples of the batch, to self.log"
            )
        return None


def refuse_drop_last(trainer: Trainer) -> None:
    """Raise ConfigError if a validation dataloader drops examples by `drop_last`."""
    for loader in map(unsharded, tree_leaves(trainer.val_dataloaders)):
        sizes = sizes_of_loader(loader)
        if getattr(loader, "drop_last", False) and sizes.short_batch_examples:
            dropped = f"it leaves out {sizes.short_batch_examples} of {sizes.examples} examples"
            raise ConfigError(
                "data", _data_name(trainer), f"a validation dataloader without drop_last: {dropped}"
            )


def logged_metric(trainer: Trainer, name: str, key: str) -> float:
    """Return a metric that the module logged, over all ranks.

    Args:
        trainer: The trainer of a fit whose validation has ended.
        name: The metric.
        key: The configuration key that names the metric, for errors.

    Raises:
        ConfigError: if the module did not log the metric.
    """
    logged = trainer.callback_metrics.get(name)
    if isinstance(logged, torch.Tensor):
        logged = logged.double()
    value = None if logged is None else float(logged)
    if isinstance(trainer.strategy, SharedBatchDDP):
        # A rank without validation examples logs nothing.
        value = trainer.strategy.mean_over_examples(value)
    if value is None:
        names = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
        raise ConfigError(
            key,
            name,
            "a metric that each validation logs, with on_epoch=True. This validation "
            f"logged {names}",
        )
    return value


def sum_text(examples: dict[int, int]) -> str:
    """Return the examples of each data loader as a sum, such as "100 + 20"."""
    return " + ".join(map(str, examples.values()))


def _data_name(trainer: Trainer) -> str:
    owner = lightning_private.data_module_of(trainer) or trainer.lightning_module
    return type(owner).__name__


# Lightning adds this suffix if there are several validation dataloaders.
_LOADER_SUFFIX = re.compile(r"(?P<name>.*)/dataloader_idx_(?P<loader>\d+)")
