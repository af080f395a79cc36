"""Paths of modules, classes and functions, the same in all processes of a study."""

from __future__ import annotations

import inspect
import sys
import types
from argparse import Namespace
from dataclasses import Field
from types import SimpleNamespace
from typing import Any

from lit_dps.core.identity import OBJECTS
from lit_dps.core.user_code import is_user_module
from lit_dps.training.code_tree import Read, attribute_or_none
from lit_dps.training.method_attributes import stored_in_use

# The script or notebook, which workers import under another name.
MAIN = ("__main__", "__mp_main__")
# Modules of this process alone: the script or notebook, and classes without an importable path.
PROCESS_MODULES = (*MAIN, OBJECTS)


def path_of(item: Any) -> str:
    """Return the path of a class or function, such as `torch.nn.modules.linear.Linear`."""
    return f"{module_name(item.__module__)}.{item.__qualname__}"


def module_name(name: str) -> str:
    """Return the name of a module; the script has the same name in all processes."""
    return MAIN[0] if name in MAIN else name


def is_found_by_path(item: Any) -> bool:
    """Return True for a class or function that its module has under its name."""
    name = attribute_or_none(item, "__qualname__")
    if not isinstance(name, str):
        return False
    found: Any = sys.modules.get(str(attribute_or_none(item, "__module__")))
    for part in name.split("."):
        found = attribute_or_none(found, part)
    # An object of the script may have the name of a function, by `functools.update_wrapper`.
    is_code = isinstance(item, (type, types.FunctionType))
    return found is item and (is_code or item.__module__ not in PROCESS_MODULES)


def is_of_user(cls: type) -> bool:
    """Return True for a class of the user or of lit_dps, and for containers of any attributes."""
    if cls in (SimpleNamespace, Namespace, Field) or cls.__module__.startswith("lit_dps."):
        return True
    return is_users_module(cls.__module__)


def is_users_module(name: str) -> bool:
    """Return True for a module of the user, such as the script."""
    return name in PROCESS_MODULES or is_user_module(name)


def follow(value: Any, read: Read, place: str) -> tuple[Any, str]:
    """Return the part of a variable that code reads, and its path, such as "__main__.args.width".

    Parts are of an object, a dict or a user's module. Methods and properties may read each
    attribute of their object, so the object is the part.

    Args:
        value: The variable.
        read: Its name, and the attributes and elements that follow.
        place: The path of the variable.
    """
    for is_element, key in read.path:
        parts: Any = {}
        module = ""
        if isinstance(value, types.ModuleType) and is_users_module(value.__name__):
            module = value.__name__
        if is_element and type(value) is dict:
            parts = value
        elif not is_element and (module or _keeps(value, key)):
            parts = vars(value)
        if key not in parts:
            break
        text = f"[{key!r}]" if is_element else f".{key}"
        place = (module or place) + text
        value = parts[key]
    return value, place


def _keeps(value: Any, name: str) -> bool:
    """Return True for an attribute that an object keeps: no property, and no method stores it."""
    cls = type(value)
    if cls in (Namespace, SimpleNamespace):
        return True
    if cls.__getattribute__ not in (object.__getattribute__, dict.__getattribute__):
        return False
    if name not in getattr(value, "__dict__", {}):
        return False
    member = inspect.getattr_static(cls, name, None)
    return not hasattr(type(member), "__set__") and name not in stored_in_use(cls)


def overlaps(one: str, other: str) -> bool:
    """Return True if paths are equal or if one begins the other: "args" and "args.width"."""
    shorter, longer = sorted((one, other), key=len)
    return longer.startswith(shorter) and longer[len(shorter) :][:1] in ("", ".", "[")
