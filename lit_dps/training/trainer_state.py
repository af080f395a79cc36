"""Restores the state that a training step changes through its trainer.

Pruning methods and readings run `training_step` outside of training, on a copy of the module. The
copy still shares the trainer: a training step that calls `self.trainer.optimizers[0]` or counts in
`self.trainer.datamodule.seen` changes the run itself. `unmoved` restores such values, and
`DataTensors` detects changes of tensors that are too large to copy.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

import lit_dps.training.lightning_private as lightning_private
from lit_dps.core.errors import ConfigError
from lit_dps.optim.parameter_groups import group_settings
from lit_dps.pruning.mask import walk_attributes
from lit_dps.training.attribute_parts import PLAIN_TYPES
from lit_dps.training.hidden_state import (
    capture_attributes,
    equal_states,
    restore_attributes,
    unchanged_attributes,
    without_new_names,
)

LARGEST = 1 << 30  # bytes of an array; its checksum takes a second


@contextmanager
def unmoved(trainer: Trainer) -> Iterator[None]:
    """Restore, at the end of the block, the state that its code changed through the trainer.

    The restored state is:
    - parameter groups with their learning rates, and schedules;
    - attributes of the data module, of optimizers and of callbacks: numbers, texts, lists and
      dicts, and tensors of callbacks; new attributes there or at a logger are deleted;
    - the trainer's plain attributes and its metrics.

    `DataTensors` watches the tensors of the data and of the optimizers' state. State outside of the
    trainer, such as a global variable or an attribute of a class, is not restored.

    Raises:
        ConfigError: if a changed attribute of the data module or of a callback cannot be restored.
    """
    owners = _owners(trainer)
    attributes = capture_attributes(*owners)
    with ExitStack() as stack:
        stack.enter_context(without_new_names(*owners, *trainer.loggers, *trainer.optimizers))
        stack.enter_context(_unchanged_values(trainer))
        for optimizer in trainer.optimizers:
            stack.enter_context(_unchanged_optimizer(optimizer))
        # Restored first, because some schedules set the rates when they are loaded.
        stack.enter_context(_unchanged_schedules(trainer))
        yield
    if equal_states(capture_attributes(*owners), attributes):
        return
    try:
        restore_attributes(attributes, *owners)
    except ValueError as error:
        allowed = (
            "a module whose training_step does not change attributes of callbacks or of "
            "the data module. It also runs outside of training, on a copy of the module, "
            f"and this change cannot be undone: {error}"
        )
        raise ConfigError("model", type(trainer.lightning_module).__name__, allowed) from error


@contextmanager
def _unchanged_values(trainer: Trainer) -> Iterator[None]:
    """Restore, at the end of the block, the trainer's numbers, texts and metrics."""
    plain = _plain_attributes(trainer)
    metrics: list[Any] = [
        trainer.callback_metrics,
        trainer.logged_metrics,
        trainer.progress_bar_metrics,
    ]
    metrics_before = [dict(values) for values in metrics]
    try:
        yield
    finally:
        for name in _plain_attributes(trainer).keys() - plain.keys():
            delattr(trainer, name)
        vars(trainer).update(plain)
        for values, before in zip(metrics, metrics_before, strict=True):
            values.clear()
            values.update(before)


@contextmanager
def _unchanged_optimizer(optimizer: Optimizer) -> Iterator[None]:
    """Restore groups and attributes of an optimizer at the end of the block; delete new states."""
    attributes = SimpleNamespace(**vars(optimizer))
    for name in ("state", "param_groups"):
        vars(attributes).pop(name, None)  # a wrapper may have them as properties
    groups_before = _group_values(optimizer)
    states_before = set(optimizer.state)
    try:
        with unchanged_attributes(attributes):
            yield
    finally:
        vars(optimizer).update(vars(attributes))
        del optimizer.param_groups[len(groups_before) :]
        for group, before in zip(optimizer.param_groups, groups_before, strict=True):
            group.clear()
            group.update(before)
        for parameter in optimizer.state.keys() - states_before:
            del optimizer.state[parameter]


@contextmanager
def _unchanged_schedules(trainer: Trainer) -> Iterator[None]:
    """Restore, at the end of the block, the state of schedules."""
    states: list[tuple[Any, dict[str, Any]]] = []
    for config in trainer.lr_scheduler_configs:
        schedule: Any = config.scheduler
        states.append((schedule, copy.deepcopy(schedule.state_dict())))
    try:
        yield
    finally:
        for schedule, state in states:
            if not equal_states(schedule.state_dict(), state):
                schedule.load_state_dict(state)


class DataTensors:
    """Detects in-place changes of the tensors of a fit's data and of its optimizers' state.

    These tensors may be too large to copy.

    Args:
        trainer: The trainer of the fit.
        content_blocks: The number of first blocks that also compare the contents of the data, and
            of NumPy arrays. A block takes two seconds for each GB, and detects changes through
            NumPy. Arrays above `LARGEST` bytes are not compared.
    """

    def __init__(self, trainer: Trainer, content_blocks: int = 0):
        self._trainer = trainer
        self._content_blocks = content_blocks
        data = [getattr(trainer, "datamodule", None), trainer.train_dataloader]
        states = [list(optimizer.state.values()) for optimizer in trainer.optimizers]
        # An inference tensor has no version.
        tensors = _tensors_in(*data, *states)
        self._tensors = [tensor for tensor in tensors if not tensor.is_inference()]
        self._contents: list[np.ndarray] = []
        if content_blocks > 0:
            for array in _numeric_arrays_in(*data):
                if array.nbytes <= LARGEST:
                    self._contents.append(array)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Raise ConfigError if the code of the block changes a tensor in place.

        Tensors that a data set adds meanwhile, such as a cache, are not watched.
        """
        before = self._state()
        yield
        if before != self._state():
            allowed = (
                "a module whose training_step does not change a tensor or array of the data "
                "or of an optimizer in place. It also runs outside of training, on a copy of "
                "the module, and this change cannot be undone"
            )
            raise ConfigError("model", type(self._trainer.lightning_module).__name__, allowed)
        self._content_blocks -= 1
        if self._content_blocks <= 0:
            self._contents = []

    def _state(self) -> list[int]:
        versions = [tensor._version for tensor in self._tensors]
        checksums = []
        for array in self._contents:
            content = np.ascontiguousarray(array).view(np.uint8)
            checksums.append(zlib.crc32(content))  # pyright: ignore[reportArgumentType]
        return versions + checksums


def user_callbacks(trainer: Trainer) -> list[Callback]:
    """Return the callbacks of the user, which are neither ours nor Lightning's."""
    callbacks = []
    for callback in lightning_private.callbacks_of(trainer):
        if type(callback).__module__.split(".")[0] not in ("lit_dps", "lightning"):
            callbacks.append(callback)
    return callbacks


def _tensors_in(*owners: Any) -> list[Tensor]:
    """Return the tensors that objects keep in attributes, lists and dicts, at any depth."""
    tensors = []
    for _, value in walk_attributes(*owners):
        if type(value) in (Tensor, nn.Parameter):
            tensors.append(value)
    return tensors


def _numeric_arrays_in(*owners: Any) -> list[np.ndarray]:
    """Return the NumPy arrays of numbers that objects keep, and contiguous tensors as bytes."""
    arrays = []
    for _, value in walk_attributes(*owners):
        if type(value) is np.ndarray and value.dtype.kind in "biufc":
            arrays.append(value)
    for tensor in _tensors_in(*owners):
        has_plain_memory = tensor.device.type == "cpu" and tensor.layout is torch.strided
        if has_plain_memory and tensor.is_contiguous():
            arrays.append(tensor.detach().view(-1).view(torch.uint8).numpy())
    return arrays


def _owners(trainer: Trainer) -> list[Any]:
    """Return the data module and the callbacks of the user."""
    owners: list[Any] = user_callbacks(trainer)
    data = getattr(trainer, "datamodule", None)
    if data is not None:
        owners = [data, *owners]
    return owners


def _plain_attributes(trainer: Trainer) -> dict[str, Any]:
    """Return the numbers and texts among the attributes of a trainer."""
    return {name: value for name, value in vars(trainer).items() if type(value) in PLAIN_TYPES}


def _group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the values of each parameter group: its parameters, and copies of other values."""
    groups = []
    for group in optimizer.param_groups:
        values: dict[str, Any] = {"params": list(group["params"])}
        for key, value in group_settings(group).items():
            values[key] = copy.deepcopy(value)
        groups.append(values)
    return groups
