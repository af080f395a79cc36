"""Watches the trainers of a study from outside, with Lightning's hooks and the optimizers' own, and
nothing of lit_dps.

Each `Trainer.fit` that is no `fast_dev_run` gets one more callback, which takes down what happened.
What a study stored of a trial is compared with that in `tests.zoo.verify`.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader


@dataclass
class Check:
    """One validation of a run.

    Attributes:
        step: Optimizer steps before it.
        examples: Examples seen, by dataloader.
        error: What the module logged under the monitored name.
    """

    step: int
    examples: dict[int, int] = field(default_factory=dict)
    error: float | None = None


@dataclass
class Start:
    """A run as it stood right before its first training step: tensors, plain attributes, a digest
    of the global generators, first batch."""

    tensors: dict[str, Tensor]
    plain: dict[str, Any]
    generators: str
    batch: list[Tensor]


class Audit(Callback):
    """What one run did.

    Args:
        monitor: Name of the metric that the goal is asked of.
        copies: Prefix of parameters that are copies, and the prefix of those they are copies of.

    Attributes:
        mask: Name of each pruned parameter and what is kept of it; empty for a dense run.
        steps: Examples of each optimizer step; a step is a batch in which an optimizer stepped and
            had gradients.
        rates: First learning rate of the first optimizer at the start of each training batch.
        checks: The validations.
        pruned: Largest absolute value of a pruned weight at the start of a training batch or in a
            validation batch.
        seen: How often it was looked for.
        start: The run before its first training step.
        again: The monitored value of the final weights, by a fresh trainer.
        split: Examples of each validation data set.
        callbacks: Class names of the trainer's other callbacks.
    """

    def __init__(self, monitor: str, copies: Mapping[str, str]):
        self.monitor, self.copies = monitor, copies
        self.mask: dict[str, Tensor] = {}
        self.steps: list[int] = []
        self.rates: list[float] = []
        self.checks: list[Check] = []
        self.pruned, self.seen = 0.0, 0
        self.start: Start | None = None
        self.again: float | None = None
        self.split: list[int] = []
        self.callbacks: list[str] = []
        self._fired = self._updated = False
        self._examples = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.callbacks = [
            type(callback).__name__ for callback in trainer.callbacks if callback is not self
        ]
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self._after_step)
        masks = [
            m
            for m in (getattr(c, "mask", None) for c in trainer.callbacks)
            if isinstance(m, Mapping)
        ]
        self.mask = {name: keep.clone() for mask in masks for name, keep in mask.items()}

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._fired = True
        self._updated |= any(
            p.grad is not None for group in optimizer.param_groups for p in group["params"]
        )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.start is None:
            self.start = _start(pl_module, batch)
        self._look(pl_module)
        self._examples += _size(batch)
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self._updated:
            self.steps.append(self._examples)
        if self._fired:
            self._fired = self._updated = False
            self._examples = 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checks.append(Check(len(self.steps)))

    def on_validation_batch_end(
        self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0
    ) -> None:
        self._look(pl_module)
        seen = self.checks[-1].examples
        seen[dataloader_idx] = seen.get(dataloader_idx, 0) + _size(batch)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get(self.monitor)
        self.checks[-1].error = None if value is None else float(value)

    def _look(self, module: LightningModule) -> None:
        named = dict(module.named_parameters(remove_duplicate=False))
        for name, keep in self.mask.items():
            tensors = [named[name]]
            tensors += [
                named[c + name[len(o) :]] for c, o in self.copies.items() if name.startswith(o)
            ]
            owner, _, last = name.rpartition(".parametrizations.")
            if (
                owner and not module.training
            ):  # asking in training moves what a parametrization keeps
                effective = getattr(module.get_submodule(owner), last.split(".")[0])
                tensors += [effective] if effective.shape == keep.shape else []
            for pruned in (tensor.detach()[~keep].abs() for tensor in tensors if not keep.all()):
                self.pruned = max(self.pruned, float(pruned.max().nan_to_num(torch.inf)))
        self.seen += 1

    def finish(self, trainer: Trainer, module: LightningModule) -> None:
        """Validates the final weights once more."""
        loaders = trainer.val_dataloaders
        loaders = loaders if isinstance(loaders, list) else [loaders]
        if not all(isinstance(loader, DataLoader) for loader in loaders):
            return
        self.split = [len(loader.dataset) for loader in loaders]
        quiet = {
            "logger": DummyLogger(),
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accelerator": "cpu",
        }
        fresh = Trainer(**quiet, enable_checkpointing=False, precision=trainer.precision)
        with torch.random.fork_rng():
            fresh.validate(copy.deepcopy(module), dataloaders=loaders, verbose=False)
        self.again = float(fresh.callback_metrics.get(self.monitor, torch.nan))


def _size(batch: Any) -> int:
    return next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _start(module: LightningModule, batch: Any) -> Start:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    tensors = {name: tensor for name, tensor in tensors.items() if not nn.parameter.is_lazy(tensor)}
    _, key, position, *_ = np.random.get_state()
    states = (torch.get_rng_state().tolist(), key.tolist(), position, random.getstate())
    return Start(
        {name: tensor.detach().clone() for name, tensor in tensors.items()},
        {
            k: v
            for k, v in vars(module).items()
            if isinstance(v, (int, float, str)) and not k.startswith("_")
        },
        hashlib.sha256(repr(states).encode()).hexdigest(),
        [leaf.clone() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)],
    )


@contextmanager
def audited(monitor: str, copies: Mapping[str, str]) -> Iterator[list[Audit]]:
    """In here each run is audited; the list has those with a check, in their order."""
    audits: list[Audit] = []
    original: Callable = Trainer.fit

    @wraps(original)
    def fit(trainer: Trainer, model: LightningModule, *args: Any, **kwargs: Any) -> Any:
        if trainer.fast_dev_run:
            return original(trainer, model, *args, **kwargs)
        audit = Audit(monitor, copies)
        trainer.callbacks.append(audit)
        try:
            result = original(trainer, model, *args, **kwargs)
            if audit.checks:
                audit.finish(trainer, model)
            return result
        finally:
            if audit.checks:
                audits.append(audit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "fit", fit)
        yield audits
