"""Which methods an object has unchanged from lit_dps and Lightning.

The fast ways (the interval loop, early checks) replace calls of these methods. They are taken only where nobody
overrides the methods: by a subclass, by an attribute of the instance, or by a patch of our own class.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning
import torch

import lit_dps

_PACKAGES = tuple(str(Path(package.__file__).parent) + os.sep for package in (lit_dps, lightning, torch))


def inherits(instance: Any, base: type, names: Iterable[str]) -> bool:
    """Return True if the instance has all these methods from `base`, as `base` was written."""
    if not isinstance(instance, base):
        return False
    for name in names:
        if name in vars(instance) or getattr(type(instance), name) is not getattr(base, name):
            return False
        if is_patched(base, name):
            return False
    return True


def decides(instance: Any, wanted: str, *others: str) -> bool:
    """Return True if who overrides one of the methods `others` last also overrides `wanted`.

    An attribute of the instance overrides its class, and a class overrides its bases.
    """
    names = {wanted, *others}
    if names & vars(instance).keys():
        return wanted in vars(instance)
    definer = next((kind for kind in type(instance).__mro__ if names & vars(kind).keys()), object)
    patched = {name for name in names & vars(definer).keys() if is_patched(definer, name)}
    return wanted in (patched or vars(definer))


def is_patched(kind: type, name: str) -> bool:
    """Return True if a class of lit_dps or Lightning has a method of this name that is written elsewhere."""
    if not kind.__module__.startswith(("lit_dps.", "lightning.")):
        return False
    method = inspect.getattr_static(kind, name)
    if isinstance(method, property):
        method = method.fget
    # A decorator of a patch keeps the name and the module of what it wraps, but not the file of its code.
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    return code is None or not code.co_filename.startswith(_PACKAGES)
