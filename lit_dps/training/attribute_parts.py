"""Kinds and parts of the objects that `hidden_state` captures, and their restored values."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_dps.pruning.mask import GENERATORS, MODULE_PARTS, attributes_of
from lit_dps.training.dict_keys import PLAIN_TYPES, keys_by_plain_key

# Objects that do not change, or whose owners save them.
_METHODS = (FunctionType, MethodType, partial)  # strategies add some to a module
_IGNORED = (*_METHODS, Trainer, Optimizer, LRScheduler, *GENERATORS, type, ModuleType)

# Objects of libraries are loggers, threads and loaders, whose attributes must not be changed.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "lightning", "numpy"}
_CONTAINERS_OF_LIBRARIES = (nn.Module, LightningDataModule, SimpleNamespace, Namespace)

# Attributes that the base classes of Lightning manage themselves.
_BASE_ATTRIBUTES = {
    *vars(LightningModule()),
    *vars(LightningDataModule()),
    "_hparams",
    "_hparams_initial",
} - {"training"}
_KINDS: tuple[tuple[Any, str], ...] = (
    (tuple, "tuple"),
    ((list, deque), "list"),
    (dict, "dict"),
    (set, "set"),
    (frozenset, "frozenset"),
)


def kind_of(item: Any) -> str | None:
    """Return the kind of an item that has parts; None for other items."""
    for types, kind in _KINDS:
        if isinstance(item, types):
            return kind
    if isinstance(item, _IGNORED) or not hasattr(item, "__dict__"):
        return None
    is_of_library = type(item).__module__.split(".")[0] in _LIBRARIES
    if is_of_library and not isinstance(item, _CONTAINERS_OF_LIBRARIES):
        return None
    return "object"


def kind_and_class(item: Any, kind: str) -> str:
    """Return the kind of an item and the name of its class, except for modules of torch."""
    if isinstance(item, (nn.Module, LightningDataModule)):
        return kind
    return f"{kind} {class_name_of(item)}"


def class_name_of(item: Any) -> str:
    """Return the name of a class; with its module if the class is of a library.

    The user's modules have other names in other processes, such as `__mp_main__`.
    """
    cls = type(item)
    module = cls.__module__
    if module == "builtins" or module.split(".")[0] not in _LIBRARIES:
        return cls.__qualname__
    return f"{module}.{cls.__qualname__}"


def has_kind(item: Any, saved: str) -> bool:
    """Return True if an item has a saved kind, and its class if the state contains the class."""
    kind, _, class_name = saved.partition(" ")
    if kind_of(item) != kind:
        return False
    return not class_name or isinstance(item, nn.Module) or class_name_of(item) == class_name


def parts_of(item: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a list, a dict or an object, each with its name."""
    if isinstance(item, (list, tuple, deque)):
        yield from enumerate(item)
        return
    if isinstance(item, dict):
        for plain, key in keys_by_plain_key(item).items():
            yield plain, item[key]
        return
    for name, value in attributes_of(item).items():
        if name not in _BASE_ATTRIBUTES and not isinstance(value, _METHODS):
            yield name, value


def are_plain(values: Any) -> bool:
    """Return True if all values are numbers, texts or None."""
    return all(type(value) in PLAIN_TYPES for value in values)


def device_type_of(owner: Any) -> str | None:
    """Return the type of a module's device, such as "cuda"; None without weights or buffers."""
    if not isinstance(owner, nn.Module):
        return None
    for tensors in (owner.parameters(), owner.buffers()):
        for tensor in tensors:
            return tensor.device.type
    return None


def dict_of_attribute(item: Any, name: str) -> dict[str, Any]:
    """Return the dict in which an object keeps an attribute."""
    if isinstance(item, nn.Module):
        for part in MODULE_PARTS:
            attributes = vars(item).get(part, {})
            if name in attributes:
                return attributes
    return vars(item)


def tuple_with(item: tuple, values: list[Any]) -> tuple:
    """Return a tuple of the same class with these values; the tuple itself if it has them."""
    has_values = len(values) == len(item)
    if has_values and all(new is old for new, old in zip(values, item, strict=True)):
        return item
    if hasattr(item, "_fields"):
        return type(item)(*values)
    if isinstance(item, torch.Size):
        return torch.Size(values)
    return tuple(values)


@torch.no_grad()
def filled_tensor(item: Any, saved: Tensor, device_type: str) -> Tensor:
    """Return a tensor with the saved values: the item itself if shape and type are the same.

    Args:
        item: The present item.
        saved: The values, on the device onto which the checkpoint was read.
        device_type: Where a tensor is made if the item is none, such as "cuda"; "" for the device
            of `saved`.
    """
    if not isinstance(item, Tensor):
        if device_type in ("", saved.device.type) or not _is_available(device_type):
            return saved
        return saved.to(device_type)
    is_same_kind = item.shape == saved.shape and item.dtype == saved.dtype
    if is_same_kind and not item.is_inference():
        return item.copy_(saved)
    return saved.to(item.device)


def _is_available(device_type: str) -> bool:
    if device_type in ("cpu", "meta"):
        return True
    return torch.accelerator.is_available() and device_type == str(
        torch.accelerator.current_accelerator()
    )


def filled_array(item: Any, saved: np.ndarray) -> np.ndarray:
    """Return an array with the saved values: the item itself if it has the same shape."""
    if isinstance(item, np.ndarray) and item.flags.writeable and item.shape == saved.shape:
        item[...] = saved
        return item
    return saved
