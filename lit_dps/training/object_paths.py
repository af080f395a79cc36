"""Paths of modules, classes and functions, the same in all processes of a study."""

from __future__ import annotations

import sys
import types
from argparse import Namespace
from types import SimpleNamespace
from typing import Any, NamedTuple

from lit_dps.core.identity import OBJECTS
from lit_dps.core.user_code import is_user_module
from lit_dps.training.code_tree import Read, attribute_or_none

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
    return found is item


def is_of_user(cls: type) -> bool:
    """Return True for a class of the user or of lit_dps, and for containers of any attributes."""
    if cls in (SimpleNamespace, Namespace) or cls.__module__.startswith("lit_dps."):
        return True
    return is_users_module(cls.__module__)


def is_users_module(name: str) -> bool:
    """Return True for a module of the user, such as the script."""
    return name in PROCESS_MODULES or is_user_module(name)


class Global(NamedTuple):
    """A global that code reads, also with the attributes of the user's modules before it.

    In `settings.WIDTH.real`, `settings.WIDTH` is the global.

    Attributes:
        value: The value.
        path: The attributes and elements that code reads of it.
        module: The module that defines it, if it is imported.
        name: Its name in this module.
        place: Its path, such as "settings.WIDTH" or "__main__.WIDTH".
        local: How the code names it.
    """

    value: Any
    path: tuple[tuple[str, Any], ...]
    module: types.ModuleType | None
    name: str
    place: str
    local: str


def global_of(function: types.FunctionType, read: Read) -> Global:
    """Return the global that a function reads."""
    owner = str(function.__globals__.get("__name__", ""))
    name, local, path = read.name, read.name, read.path
    value = function.__globals__[name]
    while path and isinstance(value, types.ModuleType) and is_users_module(value.__name__):
        if path[0][1] not in vars(value):
            break
        owner, name, path = value.__name__, path[0][1], path[1:]
        value = vars(value)[name]
        local += f".{name}"
    place = f"{module_name(owner)}.{name}"
    return Global(value, path, sys.modules.get(owner), name, place, local)


def overlaps(one: str, other: str) -> bool:
    """Return True if paths are equal or if one begins the other: "args" and "args.width"."""
    shorter, longer = sorted((one, other), key=len)
    return longer.startswith(shorter) and longer[len(shorter) :][:1] in ("", ".", "[")
