"""PruningCallback: prunes a module at initialization and keeps its pruned weights at zero."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torchmetrics import Metric

from lit_dps.errors import ConfigError
from lit_dps.pruning.mask import Biases, Mask, prunable
from lit_dps.pruning.prune import top_k
from lit_dps.pruning.scores import SCORES
from lit_dps.trial import check_sparsity

Method = Literal["snip", "magnitude", "random"]


class PruningCallback(Callback):
    """Prunes before the first step, in one global top-k, and trains the weights that are left from where they stand.

    The loss of a batch is the module's own `training_step`. A data module with a `pruning_dataloader(batch_size)` gives
    the pass over the training split; of any other, one pass of the train dataloader is taken.

    Args:
        sparsity: Share of the parameters to prune, in [0, 1); 0 prunes nothing.
        method: Score: "snip" (the paper's), "magnitude" or "random".
        biases: "paper" prunes over weights and biases, as the authors' code does; "keep" over the weights alone.
        batch_size: Examples a batch of the saliency pass. A last short batch weighs as much as its share, so the
            saliency is the sum over the examples, whatever the batch size.
        seed: Seed of the "random" score.

    Attributes:
        mask: The mask, once pruned; None before, and at sparsity 0.
    """

    def __init__(
        self,
        sparsity: float = 0.0,
        method: Method = "snip",
        biases: Biases = "paper",
        batch_size: int = 100,
        seed: int = 0,
    ):
        check_sparsity("pruning.sparsity", sparsity)
        for key, value, kind in (("method", method, Method), ("biases", biases, Biases)):
            if value not in get_args(kind):
                raise ConfigError(f"pruning.{key}", value, f"one of {', '.join(get_args(kind))}")
        if batch_size < 1:
            raise ConfigError("pruning.batch_size", batch_size, "at least 1 example")
        self.sparsity, self.method, self.biases = sparsity, method, biases
        self.batch_size, self.seed = batch_size, seed
        self.mask: Mask | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # a checkpoint is loaded after this
            self.mask = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.sparsity > 0 and self.mask is None:  # a run taken up from a checkpoint brings its mask
            parameters = prunable(pl_module, self.biases)
            generator = torch.Generator().manual_seed(self.seed)
            with _unchanged(pl_module, trainer.train_dataloader):
                scores = SCORES[self.method](parameters, self._losses(trainer, pl_module), generator)
            self.mask = top_k(scores, self.sparsity)
        if self.mask is not None:
            self.mask.apply_to_weights(pl_module)
            parameters = dict(pl_module.named_parameters())
            self._pairs = [(parameters[name], keep.to(parameters[name].device)) for name, keep in self.mask.items()]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if self.mask is not None:
            for parameter, keep in self._pairs:
                if parameter.grad is not None:
                    parameter.grad.mul_(keep)

    def _losses(self, trainer: Trainer, module: LightningModule) -> Iterator[tuple[Tensor, float]]:
        for i, batch in enumerate(self._batches(trainer)):
            batch = trainer.precision_plugin.convert_input(batch)  # the way of a batch in Lightning's own loop
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            batch = trainer.strategy.batch_to_device(batch, module.device, 0)
            with trainer.precision_plugin.train_step_context():
                output = module.training_step(batch, i)
            loss = output["loss"] if isinstance(output, dict) else output
            yield loss, extract_batch_size(batch) / self.batch_size

    def _batches(self, trainer: Trainer):
        data = getattr(trainer, "datamodule", None)
        if hasattr(data, "pruning_dataloader"):
            return data.pruning_dataloader(self.batch_size)
        loader = trainer.train_dataloader
        if not 0 < _length(loader) < sys.maxsize:
            raise ConfigError(
                "data", type(data or loader).__name__, "pruning needs a finite train dataloader or a pruning_dataloader"
            )
        loader = copy.copy(loader)
        if getattr(loader, "_iterator", None) is not None:
            loader._iterator = None  # persistent workers: the training epoch keeps its iterator
        return loader

    def state_dict(self) -> dict[str, Any]:
        return {"mask": dict(self.mask) if self.mask is not None else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.mask = Mask(state_dict["mask"]) if state_dict["mask"] is not None else None


def _length(loader: Any) -> float:
    try:
        return len(loader)
    except TypeError:
        return float("inf")


@contextmanager
def _unchanged(module: LightningModule, loader: Any) -> Iterator[None]:
    """In here training steps leave no trace: no metric, no draw from a generator, no running statistic."""
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
