"""Keys of dicts, and elements of sets, as plain values that a checkpoint can contain.

A number, a text or a tuple of them represents itself. A member of an Enum, a class, a function, a
type of torch or a device is represented by its name. After a resume, the key of the same name in
the new dict replaces the name.
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
    if isinstance(key, (type, FunctionType, BuiltinFunctionType)):
        return _NAME, key.__qualname__
    if isinstance(key, (torch.dtype, torch.device)):
        return _NAME, str(key)
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


def restored_key(plain: Any, current: dict[Any, Any], path: str) -> Any:
    """Return the key of a plain representation.

    Args:
        plain: The representation.
        current: The present keys, from `keys_by_plain_key`.
        path: Name of the dict or set in the message.

    Raises:
        ValueError: for a name that no present key has.
    """
    if plain in current:
        return current[plain]
    if _has_name(plain):
        raise ValueError(f"{path} has no key {plain}, which cannot be made from a checkpoint")
    return plain


def _has_name(plain: Any) -> bool:
    if not isinstance(plain, tuple):
        return False
    return plain[:1] == (_NAME,) or any(map(_has_name, plain))
