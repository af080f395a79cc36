"""Determines which methods an object inherits unchanged from lit_dps and Lightning.

The fast code paths (the interval loop, early validation) replace calls of these methods. They are
used only if no subclass, attribute of the instance or patch of a class overrides the methods.
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
from lit_dps.core.aliases import RENAMED_METHODS, warn_of_former_name

_FOLDERS = tuple(
    f"{Path(str(package.__file__)).parent}{os.sep}" for package in (lit_dps, lightning, torch)
)


def inherits(instance: Any, base: type, names: Iterable[str]) -> bool:
    """Return True if the instance inherits all these methods from `base`, and none is patched."""
    if not isinstance(instance, base):
        return False
    for name in names:
        if name in vars(instance) or getattr(type(instance), name) is not getattr(base, name):
            return False
        if is_patched(base, name):
            return False
    return True


def decides(instance: Any, wanted: str, *others: str) -> bool:
    """Return True if `wanted` is defined where the first of these methods is defined.

    The methods are `wanted` and `others`. They are looked up in the attributes of the instance, in
    its class, and in the bases of the class. In one class, a patched method precedes the others.
    """
    names = {wanted, *others}
    if names & vars(instance).keys():
        return wanted in vars(instance)
    for kind in type(instance).__mro__:
        defined = names & vars(kind).keys()
        if defined:
            patched = {name for name in defined if is_patched(kind, name)}
            return wanted in (patched or defined)
    return False


def adopt_former_methods(instance: Any) -> None:
    """Give methods with a former name (`RENAMED_METHODS`) their present name, and warn once.

    Of a class that defines both names, the present one counts.
    """
    for former, present in RENAMED_METHODS.items():
        for kind in type(instance).__mro__:
            is_ours = kind.__module__.startswith("lit_dps.")
            if former in vars(kind) and present not in vars(kind) and not is_ours:
                setattr(kind, present, vars(kind)[former])
                _warn_of_former_method(kind, former, present)
        if former in vars(instance) and present not in vars(instance):
            setattr(instance, present, vars(instance)[former])
            _warn_of_former_method(type(instance), former, present)


def _warn_of_former_method(kind: type, former: str, present: str) -> None:
    warn_of_former_name(f"{kind.__name__}.{former}", f"{kind.__name__}.{present}")


def is_patched(kind: type, name: str) -> bool:
    """Return True if code outside lit_dps and Lightning replaced a method of their class."""
    if not kind.__module__.startswith(("lit_dps.", "lightning.")):
        return False
    method = inspect.getattr_static(kind, name)
    if isinstance(method, property):
        method = method.fget
    # functools.wraps copies name and module of the original method, but not the file of its code.
    code = getattr(getattr(method, "__func__", method), "__code__", None)
    return code is None or not code.co_filename.startswith(_FOLDERS)
