"""Kinds, parts and keys of the objects that `hidden_state` captures, and their restored values.

Keys of dicts and elements of sets have plain representations that a checkpoint can contain. A
number, a text or a tuple of them represents itself. A device, a size and a type of torch are
represented by their names and made again after a resume. A member of an Enum, a class or a
function is represented by its name too. After a resume, the key of the same name in the new dict
replaces it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_dps.pruning.mask import GENERATORS, MODULE_PARTS, attributes_of

PLAIN_TYPES = (bool, int, float, complex, str, type(None))
_NAME = "lit_dps name"  # the first element of a name
_DEVICE = "lit_dps device"
_SIZE = "lit_dps size"
_CONSTANT = "lit_dps torch"
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)  # such as torch.float32

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


# ---- Keys ----


class UnknownKey(ValueError):
    """A key that has no plain representation, such as an object."""


def plain_key(key: Any) -> Any:
    """Return the plain representation of a key.

    Raises:
        UnknownKey: for an object without a name.
    """
    if isinstance(key, Enum):
        return _NAME, f"{type(key).__qualname__}.{key.name}"
    if isinstance(key, np.generic):
        key = key.item()
    if type(key) in PLAIN_TYPES:
        return key
    if isinstance(key, str):
        return str.__str__(key)
    if type(key) is tuple:
        return tuple(map(plain_key, key))
    if isinstance(key, torch.Size):
        return (_SIZE, *key)
    if isinstance(key, (type, FunctionType, BuiltinFunctionType)):
        return _NAME, key.__qualname__
    if isinstance(key, torch.device):
        return _DEVICE, str(key)
    if isinstance(key, _CONSTANTS):
        return _CONSTANT, str(key).removeprefix("torch.")
    raise UnknownKey(f"a key is a {type(key).__name__}")


def are_representable(keys: Iterable[Any]) -> bool:
    """Return True if all keys have different plain representations."""
    keys = list(keys)
    try:
        return len(set(map(plain_key, keys))) == len(keys)
    except UnknownKey:
        return False


def keys_by_plain_key(keys: Iterable[Any]) -> dict[Any, Any]:
    """Return the keys that have a plain representation, by it."""
    result = {}
    for key in keys:
        try:
            result[plain_key(key)] = key
        except UnknownKey:
            continue
    return result


def restored_key(
    plain: Any, current: dict[Any, Any], path: str, former_device: str | None = None
) -> Any:
    """Return the key of a plain representation.

    Args:
        plain: The representation.
        current: The present keys, from `keys_by_plain_key`.
        path: Name of the dict or set in the message.
        former_device: The type of the device that the module has left, such as "cuda"; None if its
            device has the same type. The module would not use a key of the former device.

    Raises:
        ValueError: for a name of an Enum, a class or a function that no present key has; for a
            former device.
    """
    if plain in current:
        return current[plain]
    if not isinstance(plain, tuple):
        return plain
    if plain[:1] == (_DEVICE,):
        device = torch.device(plain[1])
        if device.type == former_device:
            raise ValueError(f"{path} has the key {device}, and the module is on another device")
        return device
    if plain[:1] == (_SIZE,):
        return torch.Size(plain[1:])
    if plain[:1] == (_CONSTANT,):
        return getattr(torch, plain[1])
    if plain[:1] == (_NAME,):
        raise ValueError(f"{path} has no key {plain[1]}, which cannot be made from a checkpoint")
    return tuple(restored_key(part, current, path, former_device) for part in plain)
