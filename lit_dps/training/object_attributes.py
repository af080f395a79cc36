"""The attributes of objects and classes that the user sets."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torchmetrics import Metric

from lit_dps.training.code_tree import attribute_or_none
from lit_dps.training.method_attributes import stored_by_user


def attributes_of(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object by name, also of `__slots__`."""
    for cls in type(item).__mro__:
        for slot in getattr(cls, "__slots__", ()):
            value = attribute_or_none(item, slot)
            if slot not in ("__dict__", "__weakref__") and value is not None:
                yield slot, value
    is_data = isinstance(item, LightningDataModule)
    for name, value in getattr(item, "__dict__", {}).items():
        # Lightning keeps its own state in a data module, such as the trainer.
        if not (is_data and (name.startswith("_") or name == "trainer")):
            yield name, value


def settings_of(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that the user sets, by name. Lightning and PyTorch set others."""
    if not isinstance(part, (nn.Module, LightningDataModule)):
        yield from attributes_of(part)
        return
    stored = stored_by_user(type(part))
    states = getattr(part, "_defaults", {}) if isinstance(part, Metric) else {}
    for name, value in vars(part).items():
        if name in ("training", "trainer") or name in states:
            continue
        if not name.startswith("_") or stored.has(name):
            yield name, value


def methods_of(cls: type, member: Any) -> list[types.FunctionType]:
    """Return the functions of a member of a class that its body defines."""
    candidates = [member]
    for key in ("__func__", "func"):
        candidates.append(attribute_or_none(member, key))
    if isinstance(member, property):
        candidates = [member.fget, member.fset]
    methods = []
    for each in candidates:
        is_function = isinstance(each, types.FunctionType)
        if is_function and each.__qualname__.startswith(f"{cls.__qualname__}."):
            methods.append(each)
    return methods


def is_made_of_fields(function: types.FunctionType, name: str) -> bool:
    """Return True for a method that Python makes from the fields of a dataclass or NamedTuple.

    Args:
        function: The method; its code may differ between versions of Python.
        name: Its name in the class.
    """
    inner = inspect.unwrap(function)
    module = str(inner.__globals__.get("__name__"))
    if module in ("dataclasses", "collections", "typing") or module.startswith("namedtuple_"):
        return True
    return name.startswith("__") and inner.__code__.co_filename == "<string>"


def unshown_attributes(item: Any) -> list[tuple[str, Any]]:
    """Return the public arrays, functions and lists of an object of a library, sorted by name.

    Its text form may omit them, as that of a distribution or of a fitted scaler does.
    """
    kinds = (Tensor, np.ndarray, types.FunctionType, list, tuple)
    attributes = []
    for name, value in sorted(getattr(item, "__dict__", {}).items()):
        if not name.startswith("_") and isinstance(value, kinds):
            attributes.append((name, value))
    return attributes
