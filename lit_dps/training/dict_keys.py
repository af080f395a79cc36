"""Keys of dicts, and elements of sets, as plain values that a checkpoint can contain.

A number, a text or a tuple of them represents itself. A device, a size and a type of torch are
represented by their names and made again after a resume. A member of an Enum, a class or a
function is represented by its name too. After a resume, the key of the same name in the new dict
replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

PLAIN_TYPES = (bool, int, float, complex, str, type(None))
_NAME = "lit_dps name"  # the first element of a name
_DEVICE = "lit_dps device"
_SIZE = "lit_dps size"
_CONSTANT = "lit_dps torch"
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)  # such as torch.float32


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
