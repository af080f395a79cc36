"""One pass over the training split outside of training, with the module's own loss, that leaves no trace.

Of several ranks each takes whole batches, in turn: their gradients are those of one process to the last bit.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from lit_dps.errors import ConfigError
from lit_dps.parallel import parts, ranks


class TrainingPass:
    """This rank's batches of one pass over the training split, and the module's own `training_step` loss of each.

    A data module with a `pruning_dataloader(batch_size)` gives the pass; of any other, one pass of the train dataloader
    is taken.

    Args:
        trainer: The trainer of a running fit.
        module: Its module.
        batch_size: Examples a batch, where the data module gives the pass.
        examples: Stop after so many examples, of all ranks together; by default all.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, batch_size: int, examples: int | None = None):
        self.trainer, self.module, self.batch_size, self.examples = trainer, module, batch_size, examples

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Each batch on the module's device, with its number of examples.

        Raises:
            ConfigError: for data without a finite pass.
        """
        left = sys.maxsize if self.examples is None else self.examples
        for i, batch in enumerate(self._loader()):
            if self.examples is None and not ranks.mine(i):
                continue
            batch = self.trainer.precision_plugin.convert_input(batch)  # the way of a batch in Lightning's own loop
            batch = self.module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = self.trainer.strategy.batch_to_device(batch, self.module.device, 0)
            size = extract_batch_size(batch)
            if size > left:
                batch, size = _first(batch, left), left
            if ranks.mine(i):
                yield batch, size
            left -= size
            if left <= 0:
                return

    def losses(self) -> Iterator[tuple[Tensor, int]]:
        """Mean loss of each batch, and its number of examples."""
        for i, (batch, size) in enumerate(self.batches()):
            with self.trainer.precision_plugin.train_step_context():
                yield loss_in(self.module.training_step(batch, i)), size

    @contextmanager
    def traceless(self) -> Iterator[None]:
        """In here training steps leave no trace: no metric, no draw from a generator, no running statistic."""
        loader, module = parts.whole(self.trainer.train_dataloader), self.module
        owners = (loader, getattr(loader, "sampler", None))
        generators = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners) if g is not None}
        states = {key: generator.get_state() for key, generator in generators.items()}
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module.__dict__["log"] = lambda *args, **kwargs: None
        try:
            with torch.random.fork_rng():
                yield
        finally:
            del module.__dict__["log"]
            for key, generator in generators.items():
                generator.set_state(states[key])
            for metric in module.modules():
                if isinstance(metric, Metric):
                    metric.reset()
            for name, buffer in module.named_buffers():
                buffer.copy_(buffers[name])

    def _loader(self):
        data = getattr(self.trainer, "datamodule", None)
        if hasattr(data, "pruning_dataloader"):
            return data.pruning_dataloader(self.batch_size)
        loader = parts.whole(self.trainer.train_dataloader)
        if not 0 < _length(loader) < sys.maxsize:
            raise ConfigError(
                "data",
                type(data or loader).__name__,
                "a pass over the training split needs a finite train dataloader or a pruning_dataloader",
            )
        loader = copy.copy(loader)
        if getattr(loader, "_iterator", None) is not None:
            loader._iterator = None  # persistent workers: the training epoch keeps its iterator
        return loader


def loss_in(output: Any) -> Tensor:
    """The loss in what a `training_step` returned."""
    return output["loss"] if isinstance(output, dict) else output


def _first(batch: Any, n: int) -> Any:
    return tree_map(lambda x: x[:n] if isinstance(x, Tensor) else x, batch)


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except TypeError:
        return float("inf")
