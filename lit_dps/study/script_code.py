"""Hashes of the code of a script or notebook: classes, functions, and the constants they name.

For example, `lambda lr: Net(build(WIDTH), lr)` names the class `Net`, the function `build` and the
constant WIDTH. Their code names further ones. Other values, such as dicts and arrays, are left to
`lit_dps.study.first_steps`, which compares what the code computes.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np
import torch

from lit_dps.core.aliases import RENAMED_METHODS
from lit_dps.core.environment import OBJECT_TEXT, UNKNOWN
from lit_dps.core.user_code import is_user_file, is_user_module
from lit_dps.training.code_text import (
    PROCESS_MODULES,
    READS_GLOBAL,
    attribute_or_none,
    attributes_stored,
    byte_code,
    function_of_member,
    is_importable,
    names_in,
    path_of,
)
from lit_dps.training.user_objects import factory_of_class

HASH_LENGTH = 16  # hexadecimal digits
_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, range, type(None), type(...)),
    *(np.generic, torch.dtype, pathlib.PurePath),
)
# Objects that hold a function, and the names under which they hold it.
_HOLDERS = (
    *(property, classmethod, staticmethod, types.MethodType),
    *(functools.partial, functools.partialmethod, functools.cached_property),
    type(functools.cache(len)),
)
_HELD = (
    *("fget", "fset", "fdel", "__func__", "__self__", "__wrapped__", "func", "args", "keywords"),
)
_CONTAINERS = (list, tuple, set, frozenset, deque)
MAX_DEPTH = 4  # of nested containers and objects whose functions and classes are read
MAX_ITEMS = 1_000  # containers, objects and functions that are read in one value


def hashes_of_paths(paths: Sequence[str]) -> dict[str, list[str]]:
    """Return the hashes of classes that only this process can import, and of what their code names.

    For the class of a function, these are the hashes of the function.

    Returns:
        Hashes by name, such as `__main__.Net`; `UNKNOWN` for a constant that code assigns, and
        for a path without a class.
    """
    items = _items_of_paths(paths)
    unknown = {path: UNKNOWN for path in paths if items.get(path, path) is None}
    return code_hashes({name: item for name, item in items.items() if item is not None}) | unknown


def _items_of_paths(paths: Sequence[str]) -> dict[str, Any]:
    """Return classes by path, and functions by their section; None without a class."""
    items = {}
    for path in paths:
        module, _, name = path.rpartition(".")
        cls = getattr(sys.modules.get(module), name, None)
        factory = None if cls is None else factory_of_class(cls)
        if factory is None:
            items[path] = cls
        else:
            items[factory.section] = factory.function
    return items


def code_hashes(items: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the hashes of functions and classes, and of the code and constants that they name.

    Functions of equal paths, such as lambdas, have one hash together.

    Args:
        items: Functions and classes by name.
    """
    walk = _CodeWalk()
    walk.code |= dict.fromkeys(items, "")
    for name, item in items.items():
        if isinstance(item, (type, types.FunctionType)):
            walk.add(item, name)
        else:  # such as a partial
            walk.code[name] += walk.text_of(item)
    assigned = walk.assigned()
    for path, (operation, _) in sorted(walk.constants.items()):
        owner, _, attribute = path.rpartition(".")
        # A new constant may replace one of a base class.
        if operation == "STORE_ATTR" and (operation, attribute) not in assigned:
            walk.code[owner] += f"{attribute},"
    hashes = {}
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    for path, text in walk.code.items():
        hashes[path] = _hash(f"{OBJECT_TEXT} of {python}", text)
    for path, (operation, text) in walk.constants.items():
        if path in walk.code:  # such as a decorated function
            hashes[path] = _hash(f"{OBJECT_TEXT} of {python}", walk.code[path] + text)
            continue
        hashes[path] = _hash(OBJECT_TEXT, text)
        if (operation, path.rpartition(".")[2]) in assigned:
            hashes[path] = UNKNOWN
    return hashes


def _hash(version: str, text: str) -> list[str]:
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()
    return [f"{version}: {digest[:HASH_LENGTH]}"]


class _CodeWalk:
    """Collects the code and the constants that code of the user names.

    Attributes:
        code: Texts of functions and classes, by the path of the outermost one.
        constants: The operation that assigns a constant, and its text, by path.
        codes: Byte code of the functions.
    """

    def __init__(self):
        self.code: dict[str, str] = {}
        self.constants: dict[str, tuple[str, str]] = {}
        self._items: dict[int, Any] = {}  # an id is unique only as long as its object lives
        self.codes: list[types.CodeType] = []
        self._methods: set[types.CodeType] = set()  # with an object as their first argument
        self._depth = 0  # of nested values
        self._max_items = 0

    def text_of(self, value: Any) -> str:
        """Return the text of a constant, or the path of code; "" for other values."""
        if isinstance(value, Enum):
            return f"{self.text_of(type(value))}.{value.name} {self.text_of(value.value)}"
        if isinstance(value, _CONSTANTS):
            # The text of a scalar of NumPy differs between its versions.
            return repr(value.item() if isinstance(value, np.generic) else value)
        if isinstance(value, (tuple, frozenset)):
            texts = [f"{self.text_of(each)}," for each in value]
            if isinstance(value, frozenset):
                texts.sort()
            return f"{self.text_of(type(value))}{texts}"
        if isinstance(value, _HOLDERS):
            return self._text_of_holder(value)
        if isinstance(value, (type, types.FunctionType)):
            outermost = path_of(value).removesuffix(value.__qualname__)
            self.add(value, outermost + value.__qualname__.partition(".")[0])
            return path_of(value)
        if isinstance(value, types.BuiltinFunctionType):
            return value.__qualname__
        if not isinstance(value, types.ModuleType):
            self.text_of(type(value))  # the class of an object
            self._add_values(value)
            rules = getattr(type(value), "__dataclass_params__", None)
            if is_dataclass(value) and rules is not None and rules.frozen:
                return self.text_of(tuple(getattr(value, each.name) for each in fields(value)))
        return ""

    def _add_values(self, item: Any) -> None:
        """Add the code of functions and classes in a container or an object."""
        if self._depth == 0:
            self._max_items = len(self._items) + MAX_ITEMS
        if id(item) in self._items or self._depth == MAX_DEPTH:
            return
        if len(self._items) >= self._max_items:
            return
        self._items[id(item)] = item
        values: Any = item
        if not isinstance(item, (dict, *_CONTAINERS)):
            values = attribute_or_none(item, "__dict__")
        if isinstance(values, dict):
            values = list(values.values())
        elif not isinstance(values, _CONTAINERS):
            return
        values = [each for each in islice(values, MAX_ITEMS) if not isinstance(each, _CONSTANTS)]
        if isinstance(item, set):
            values.sort(key=_text_for_order)
        self._depth += 1
        for each in values:
            function = function_of_member(each)
            # Closures of libraries may hold values of one process.
            is_library = function is not None and not is_user_file(function.__code__.co_filename)
            if not isinstance(each, types.FunctionType) or not is_library:
                self.text_of(each)
        self._depth -= 1

    def _text_of_holder(self, holder: Any) -> str:
        texts = [type(holder).__name__]
        for name in _HELD:
            held = getattr(holder, name, None)
            if isinstance(held, dict):  # keywords
                held = tuple(sorted(held.items()))
            texts.append(self.text_of(held))
        return repr(texts)

    def add(self, item: Any, path: str) -> None:
        """Add the code of a function or class, unless another process can import it."""
        if id(item) in self._items:
            return
        self._items[id(item)] = item
        if is_importable(item):
            return
        if isinstance(item, type):
            text = ""
            if item.__module__ in PROCESS_MODULES or is_user_module(item.__module__):
                text = self._text_of_class(item, path)
        else:
            text = self._text_of_function(item, path)
        # Functions in a function, for example, have one path.
        self.code[path] = self.code.get(path, "") + text

    def _text_of_function(self, function: types.FunctionType, path: str) -> str:
        code = function.__code__
        text = code.co_qualname
        if is_user_file(code.co_filename):  # not the wrapper of a library's decorator
            text = byte_code(code)
            self.codes.append(code)
        defaults = (function.__defaults__, tuple(sorted((function.__kwdefaults__ or {}).items())))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                if name != "__class__":
                    self._add_constant("STORE_DEREF", f"{path}.{name}", cell.cell_contents)
        if function.__globals__.get("__name__") in PROCESS_MODULES:
            variables = function.__globals__
            for name in sorted(names_in(code, *READS_GLOBAL) & variables.keys()):
                if not name.startswith("__"):
                    self._add_constant("STORE_GLOBAL", f"__main__.{name}", variables[name])
        return repr((text, self.text_of(defaults)))

    def _add_constant(self, operation: str, path: str, value: Any) -> None:
        """Add a constant, unless it is code or an object."""
        text = self.text_of(value)
        if text and text != path:
            if operation != "STORE_GLOBAL":  # functions in a function have one path
                text = self.constants.get(path, ("", ""))[1] + text
            self.constants[path] = (operation, text)

    def _text_of_class(self, cls: type, path: str) -> str:
        self.text_of(type(cls))  # its metaclass
        texts = [self.text_of(base) for base in cls.__bases__]
        for name, member in _members_of(cls):
            function = function_of_member(member)
            has_class = isinstance(member, (classmethod, staticmethod)) or issubclass(cls, type)
            if function is not None and not has_class:
                self._methods.add(function.__code__)
            if isinstance(member, _CONSTANTS):
                self._add_constant("STORE_ATTR", f"{path}.{name}", member)
                continue
            text = self.text_of(member)
            if text:
                texts.append(f"{name} {text}")
        return repr(texts)

    def assigned(self) -> set[tuple[str, str]]:
        """Return the operations and names of the assignments in the code.

        An attribute that a method stores in its object changes no class.
        """
        assigned: set[tuple[str, str]] = set()
        for code in self.codes:
            instance = ""
            if code in self._methods and code.co_argcount:
                instance = code.co_varnames[0]
            assigned |= {("STORE_ATTR", name) for name in attributes_stored(code, instance)}
            assigned |= {("STORE_GLOBAL", name) for name in names_in(code, "STORE_GLOBAL")}
            for name in names_in(code, "STORE_DEREF") & {*code.co_freevars}:
                assigned.add(("STORE_DEREF", name))
        return assigned


def _text_for_order(item: Any) -> str:
    """Return a text that sorts the members of a set in the same way in all processes."""
    if isinstance(item, types.FunctionType):
        return byte_code(item.__code__)
    return path_of(item if isinstance(item, type) else type(item))


def _members_of(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the members that the body or a decorator of a class defines, by name."""
    members = dict(vars(cls))
    for former, new in RENAMED_METHODS.items():
        if members.get(new) is members.get(former):
            members.pop(new, None)  # by `adopt_former_methods`
    for name, field in vars(cls).get("__pydantic_fields__", {}).items():
        members[name] = field.default
    if issubclass(cls, Enum):
        members |= {name: each.value for name, each in cls.__members__.items()}
    for name, member in sorted(members.items()):
        is_made = name.startswith("_") and name.endswith("_")  # by Python, unless it is code
        if not is_made or isinstance(member, (types.FunctionType, *_HOLDERS)):
            yield name, member
