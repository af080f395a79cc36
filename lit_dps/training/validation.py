"""What a validation covered, and which metrics the module logged in it.

K* is comparable between runs only if every validation covers the same, entire validation split, and
if each metric is the mean over this split. `GoalErrorCallback` refuses other metrics.
"""

from __future__ import annotations

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
        logged = _logged_by_batch(trainer, metric)
        if logged is None or _hook_of(logged) != "validation_step":
            return None
        meta = logged.meta
        loader = meta.dataloader_idx or 0
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
        ConfigError: if the module did not log the metric, or if ranks have different values of a
            metric that is not logged for each batch.
    """
    logged = trainer.callback_metrics.get(name)
    if isinstance(logged, torch.Tensor):
        logged = logged.double()
    value = None if logged is None else float(logged)
    if isinstance(trainer.strategy, SharedBatchDDP):
        # A rank without validation examples logs nothing.
        value = _mean_over_ranks(trainer, name, key, value)
    if value is None:
        names = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
        raise ConfigError(
            key,
            name,
            "a metric that each validation logs, with on_epoch=True. This validation "
            f"logged {names}",
        )
    return value


def _logged_by_batch(trainer: Trainer, metric: str) -> Any:
    """Return the result that a module logged for each validation batch; None without one.

    Args:
        trainer: The trainer of a fit whose validation has ended.
        metric: A name in `trainer.callback_metrics`.
    """
    for logged in lightning_private.logged_metrics(trainer):
        meta = logged.meta
        if _hook_of(logged) not in _BATCH_HOOKS:
            continue
        suffix = ""
        if meta.add_dataloader_idx and meta.dataloader_idx is not None:
            suffix = f"/dataloader_idx_{meta.dataloader_idx}"
        # With on_step=True, Lightning adds "_epoch" to the name of the mean.
        if metric in (meta.name + suffix, meta.forked_name(on_step=False) + suffix):
            return logged
    return None


def _hook_of(logged: Any) -> str:
    """Return the hook that logged a result, such as "validation_step"."""
    # With several dataloaders, Lightning writes "validation_step.1".
    return logged.meta.fx.partition(".")[0]


def _mean_over_ranks(trainer: Trainer, name: str, key: str, value: float | None) -> float | None:
    """Return the mean of a metric over the validation examples of all ranks; None without any.

    A value that is equal on all ranks is returned as it is, because it is already over all
    examples. Other values are means over the batches of a rank. Their weights are the weights of
    the batches in `self.log`, such as numbers of examples or tokens.

    Args:
        trainer, name, key: As in `logged_metric`.
        value: The value on this rank; None if it has no validation examples.

    Raises:
        ConfigError: if the values differ, and the metric is not logged for each batch. A function
            of the whole split, such as an F1 score, is no mean over the ranks.
    """
    logged = _logged_by_batch(trainer, name)
    weight = None
    if logged is not None and logged.is_tensor and logged.meta.is_mean_reduction:
        weight = float(logged.cumulated_batch_size)
    loaders = tree_leaves(trainer.val_dataloaders)
    had_examples = any(loader.examples_seen for loader in loaders)  # on this rank
    gathered = ranks.all_gather((value, weight, had_examples))
    parts = []
    for rank_value, rank_weight, has_examples in gathered:
        # A rank whose batches all have a weight of 0 has the value nan.
        if rank_value is not None and has_examples and rank_weight != 0:
            parts.append((rank_value, rank_weight))
    if not parts:
        return value
    if len({repr(rank_value) for rank_value, _ in parts}) == 1:
        return parts[0][0]
    if any(rank_weight is None for _, rank_weight in parts):
        values = ", ".join(f"{rank_value:g}" for rank_value, _ in parts)
        raise ConfigError(
            key,
            name,
            f"a metric that has the same value on all ranks, or that is logged as a number for "
            f"each validation batch; the ranks have {values}",
            "Log a torchmetrics object, or compute the metric from sums over the ranks "
            "(self.all_gather)",
        )
    total = sum(rank_value * rank_weight for rank_value, rank_weight in parts)
    return total / sum(rank_weight for _, rank_weight in parts)


def sum_text(examples: dict[int, int]) -> str:
    """Return the examples of each data loader as a sum, such as "100 + 20"."""
    return " + ".join(map(str, examples.values()))


def _data_name(trainer: Trainer) -> str:
    owner = lightning_private.data_module_of(trainer) or trainer.lightning_module
    return type(owner).__name__


# Hooks in which a module or callback logs a number for each batch, whose mean Lightning takes.
_BATCH_HOOKS = ("validation_step", "on_validation_batch_start", "on_validation_batch_end")
