"""Describes Python objects and code as texts. Equal objects of two processes have equal texts.

For example, `lambda lr: Net(build(WIDTH), lr)` of a script has four descriptions: of its own code,
of `Net`, of `build` and of WIDTH. A study stores their hashes with the hashes of the user's files
(`code_hashes`). What another process can import has its path as text, because studies hash the
files of the user's modules.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import re
import sys
import types
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, MappingView, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from io import IOBase
from typing import Any, NamedTuple, get_args, get_origin

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import Dataset

from lit_dps.core.environment import OBJECT_TEXT, UNKNOWN
from lit_dps.pruning.mask import GENERATORS, MAX_LENGTH
from lit_dps.training.code_tree import code_text, is_set_by_clock, node_of, values_read
from lit_dps.training.method_attributes import globals_changed, stored_in_use
from lit_dps.training.object_attributes import (
    LAZY,
    attributes_of,
    facts_of_module,
    members_of,
    shape_of,
)
from lit_dps.training.object_paths import (
    PROCESS_MODULES,
    follow,
    is_found_by_path,
    is_of_user,
    is_users_module,
    module_name,
    overlaps,
    path_of,
)
from lit_dps.training.shown_text import SCALARS, pandas_parts, shown_without_address

# A text form may be shortened. Of a library's container it rarely has all elements.
_SHORTENED = re.compile(r"\.\.\.|…")
_INDEX = re.compile(r"\[\d+\]")
_SHOWN_WHOLE = (range, str, bytes, bytearray, np.generic, np.dtype)
_COLLECTIONS = (dict, set, frozenset, list, tuple, deque)
_LIBRARY_COLLECTIONS = (Mapping, MappingView, Sequence)
_CACHED = type(functools.cache(len))
# Objects that hold a function, and the names under which they hold it.
_HOLDERS = (
    *(property, classmethod, staticmethod, types.MethodType, types.BuiltinFunctionType),
    *(functools.partial, functools.partialmethod, functools.cached_property),
    _CACHED,
)
_HELD = (
    *("fget", "fset", "fdel", "__self__", "__func__", "__wrapped__", "func", "args", "keywords"),
)
# Variables that differ between processes or folders, and the class that super() reads.
_OF_PROCESS = ("__class__", "__name__", "__file__")
MAX_ELEMENTS = 1 << 20  # of an array; of a larger one, evenly spaced elements are described
MAX_NAMES = 3  # of elements of one list that cannot be compared
HASH_LENGTH = 16  # hexadecimal digits


class Description(NamedTuple):
    """The description of an object.

    Attributes:
        text: The text of the object itself.
        read: The texts of the functions, classes and values of the script or notebook that its code
            reads, by path, such as "__main__.WIDTH".
        opaque: Names of the parts whose values change no text.
        has_byte_code: Whether a function has no source, so that the texts have byte code.
    """

    text: str
    read: dict[str, str]
    opaque: tuple[str, ...]
    has_byte_code: bool


def describe(
    item: Any, name: str = "", known: Mapping[int, str] | None = None, names_data: bool = True
) -> Description:
    """Return the description of a function, a class or an object.

    Args:
        item: The item.
        name: Its name, which begins the names of its parts.
        known: The `known_texts` of objects that are described by their path alone.
        names_data: Whether `opaque` names parts of data sets.
    """
    describer = _Describer(known or {}, names_data)
    describer.read[name] = ""  # for code that reads its own name
    try:
        text = describer.describe_whole(item, name)
    except RecursionError:  # such as a long list of linked objects
        return Description("", {}, (name,), False)
    del describer.read[name]
    describer.leave_out_changed()
    opaque = _without_indices(describer.opaque)
    return Description(text, describer.read, opaque, describer.has_byte_code)


def known_texts(parts: Mapping[str, Any]) -> dict[int, str]:
    """Return the texts of parts that are described by their path alone, by their id."""
    return {id(part): f"part {path!r}" for path, part in parts.items()}


def _without_indices(names: list[str]) -> tuple[str, ...]:
    """Return names of parts, with one name `x[]` instead of more than `MAX_NAMES` elements."""
    shorter = [_INDEX.sub("[]", name) for name in names]
    numbers = Counter(shorter)
    kept = {}
    for name, short in zip(names, shorter, strict=True):
        kept[short if numbers[short] > MAX_NAMES else name] = None
    return tuple(kept)


def code_hashes(item: Any, name: str) -> dict[str, list[str]]:
    """Return the hash of a function or class, and of what its code reads, by name.

    A part whose value cannot be compared has `UNKNOWN`. Studies compare the content of data.
    """
    description = describe(item, name, names_data=False)
    version = OBJECT_TEXT
    if description.has_byte_code:
        version += f" of Python {sys.version_info.major}.{sys.version_info.minor}"
    hashes = {}
    for path, text in {name: description.text, **description.read}.items():
        hashes[path] = [f"{version}: {_digest(text)[:HASH_LENGTH]}"]
    for part in description.opaque:
        hashes[part] = UNKNOWN
    return hashes


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


class _Describer:
    """Describes objects and their parts.

    Attributes:
        read: The texts of the globals of the script or notebook, by path.
        opaque: Names of the parts that have no description other than their class.
    """

    def __init__(self, known: Mapping[int, str], names_data: bool):
        self.read: dict[str, str] = {}
        self.opaque: list[str] = []
        self.has_byte_code = False
        self._names_data = names_data
        self._code: set[str] = set()  # paths of functions and classes
        self._changed: set[str] = set()  # paths of globals that code changes
        self._texts = dict(known)
        self._items: list[Any] = []  # an id is unique only as long as its object lives

    def describe_whole(self, item: Any, name: str) -> str:
        """Return the description of an item; of importable code its content, not its path."""
        if isinstance(item, (types.FunctionType, type)):
            self._texts[id(item)] = "itself"
            self._items.append(item)
        if isinstance(item, types.FunctionType):
            return self._function(item, name, is_whole=True)
        if isinstance(item, type):
            return self._class(item, name)
        return self.describe(item, name)

    def describe(self, item: Any, name: str) -> str:
        """Return the description of an item; `name` is its path for `opaque`."""
        if isinstance(item, Enum):
            value = self.describe(item.value, name)
            return f"{self.describe(type(item), name)}.{item.name} {value}"
        if type(item) in SCALARS:
            return repr(item)
        if id(item) in self._texts:
            return self._texts[id(item)]
        self._texts[id(item)] = "itself"  # for an object that contains itself
        self._items.append(item)
        text = self._describe_new(item, name)
        if len(text) > hashlib.sha256().digest_size * 2:
            text = _digest(text)
        self._texts[id(item)] = text
        return text

    def _describe_new(self, item: Any, name: str) -> str:
        if isinstance(item, types.ModuleType):
            return item.__name__
        if isinstance(item, (Tensor, np.ndarray)):
            return self._array(item, name)
        if isinstance(item, _HOLDERS):
            held = {key: getattr(item, key) for key in _HELD if hasattr(item, key)}
            return f"{type(item).__name__} {getattr(item, '__qualname__', '')}" + self._parts(
                held, name
            )
        if is_found_by_path(item):
            if item.__module__ in PROCESS_MODULES:
                self._add_read(path_of(item), item)
            return path_of(item)
        if isinstance(item, types.FunctionType):
            return self._function(item, name)
        if isinstance(item, type):
            return self._class(item, name) if is_of_user(item) else path_of(item)
        if get_origin(item) is not None:  # such as tuple[int, ...]
            parts = {"origin": get_origin(item), "arguments": get_args(item)}
            return "type" + self._parts(parts, name)
        if item is os.environ or isinstance(item, logging.Logger):
            # Their values belong to the process, as those of a module of Python do.
            return f"{path_of(type(item))} {module_name(getattr(item, 'name', ''))}"
        if isinstance(item, (IOBase, *GENERATORS)):  # they change while they are used
            self.opaque.append(name)
            return "stream or generator"
        is_library = not is_of_user(type(item)) and not isinstance(item, _SHOWN_WHOLE)
        if isinstance(item, _COLLECTIONS):
            return self._collection(item, name)
        if is_library and isinstance(item, _LIBRARY_COLLECTIONS):
            return self._collection(item, name)
        return self._object(item, name)

    def _collection(self, item: Any, name: str) -> str:
        """Return the description of a list, a set, a dict or a collection of a library."""
        texts = [self.describe(type(item), name)]
        if is_of_user(type(item)):
            texts.append(self._attributes(item, name))
        try:
            parts = [list(item)]
            if isinstance(item, Mapping):
                parts = [list(item.keys()), list(item.values())]
        # A collection of a library may fail, such as a closed file.
        except Exception:
            self.opaque.append(name)
            return repr([*texts, shown_without_address(item)])
        for part in parts:
            if isinstance(item, (set, frozenset)):
                elements = sorted(self.describe(each, f"{name}[]") for each in part)
            else:
                elements = self._elements(part, name)
            texts.append(f"{len(part)} {elements}")
        if isinstance(item, defaultdict):
            texts.append(self.describe(item.default_factory, name))
        return repr(texts)

    def _elements(self, items: list[Any], name: str) -> list[str]:
        """Return the descriptions of elements; a long list of objects is cut, and named."""
        if len(items) > MAX_LENGTH and all(map(_is_row, items)):
            rows = hashlib.sha256()
            for each in items:
                rows.update(f"{each!r}\n".encode(errors="replace"))
            return [rows.hexdigest()]
        if len(items) > MAX_LENGTH:
            self.opaque.append(f"{name}[{MAX_LENGTH}:]")
            items = items[:MAX_LENGTH]
        return [self.describe(each, f"{name}[{i}]") for i, each in enumerate(items)]

    def _parts(self, parts: Mapping[str, Any], name: str) -> str:
        texts = []
        for part_name, part in sorted(parts.items()):
            texts.append(f"{part_name} = {self.describe(part, f'{name}.{part_name}'.lstrip('.'))}")
        return repr(texts)

    def _array(self, item: Tensor | np.ndarray, name: str) -> str:
        text = f"{shape_of(item)} {item.dtype}"
        if shape_of(item) == LAZY:
            return text
        if isinstance(item, np.ndarray) and item.dtype.hasobject:
            return text + repr(self._elements(item.ravel().tolist(), name))
        if isinstance(item, Tensor) and item.requires_grad:  # a trial may train it in place
            self.opaque.append(name)
            return text + " trained"
        try:
            flat = item.ravel()
            if isinstance(item, Tensor):
                flat = item.detach().ravel()
            step = 1 + flat.shape[0] // MAX_ELEMENTS
            # Otherwise the elements may be of some columns only.
            while math.gcd(step, flat.shape[0]) > 1:
                step += 1
            flat = flat[::step]
            if isinstance(flat, Tensor):
                flat = flat.contiguous().cpu().view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError):  # such as a sparse or a meta tensor
            self.opaque.append(name)
            return text
        return f"{text} {hashlib.sha256(flat.tobytes()).hexdigest()}"

    # ---- Code ----

    def _function(self, function: types.FunctionType, name: str, is_whole: bool = False) -> str:
        """Return the code of a function and the values that it holds; add what it reads.

        It reads the globals of the script or notebook. If `is_whole`, the values of its closure
        count among them, so that they have names.
        """
        code = function.__code__
        module = str(function.__globals__.get("__name__", ""))
        outer = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None and not is_users_module(module):
            # The wrapper of a library's decorator. The code of `wrapped` begins with the decorator.
            return code.co_qualname + self._parts({"wrapped": wrapped}, name)
        held: dict[str, Any] = {
            "defaults": function.__defaults__,
            "keyword defaults": function.__kwdefaults__,
        }
        changed = set()
        for read in globals_changed(code):
            value = function.__globals__.get(read.name)
            value, place = follow(value, read, f"{module_name(module)}.{read.name}")
            # A function of a module may have the name of a method of lists, such as `ops.add`.
            if not isinstance(value, types.ModuleType):
                changed.add(place)
        self._changed |= changed
        names = set()
        for read in values_read(code):
            if read.name in _OF_PROCESS:
                continue
            if read.is_outer and read.name in outer:
                with suppress(ValueError):  # an empty cell
                    value = outer[read.name].cell_contents
                    value, place = follow(value, read, f"{name}.{read.name}")
                    if is_whole:
                        names.add(place)
                        self._add_read(place, value)
                    else:
                        held[place.removeprefix(f"{name}.")] = value
            elif (
                is_users_module(module) and not read.is_outer and read.name in function.__globals__
            ):
                value = function.__globals__[read.name]
                value, place = follow(value, read, f"{module_name(module)}.{read.name}")
                owner, _, variable = place.rpartition(".")
                if isinstance(value, types.ModuleType) or is_found_by_path(value):
                    held[place] = value
                elif any(overlaps(place, each) for each in changed):
                    self.opaque.append(place)  # it may be missing before the code runs
                elif is_set_by_clock(sys.modules.get(owner), variable):
                    self.opaque.append(place)
                else:
                    names.add(place)
                    self._add_read(place, value)
        self.has_byte_code |= node_of(code) is None
        return repr([code_text(code), self._parts(held, name), *sorted(names)])

    def _add_read(self, path: str, value: Any) -> None:
        """Describe a function, class or value of the script, unless it is described already."""
        if path in self.read:
            return
        self.read[path] = ""  # for code that calls itself
        if isinstance(value, (type, types.FunctionType)):
            self._code.add(path)
        if is_found_by_path(value) and value.__module__ in PROCESS_MODULES:
            self.read[path] = self.describe_whole(value, path)
        else:
            self.read[path] = self.describe(value, path)

    def leave_out_changed(self) -> None:
        """Leave the globals that the described code changes out of `read`, and name them."""
        for path in [*self.read]:
            is_changed = any(overlaps(path, each) for each in self._changed)
            if is_changed and path not in self._code:
                del self.read[path]
                self.opaque.append(path)

    def _class(self, cls: type, name: str) -> str:
        """Return the bases of a class, its methods, and its other members."""
        texts = [path_of(cls)]
        for base in cls.__bases__:
            texts.append(self.describe(base, name))
        for key, member in members_of(cls):
            is_function = isinstance(member, types.FunctionType)
            if is_function and member.__qualname__.startswith(f"{cls.__qualname__}."):
                texts.append(f"{key} {self._function(member, f'{name}.{key}')}")
            elif key in stored_in_use(cls) and not is_function:  # such as a list that hooks fill
                self.opaque.append(f"{name}.{key}")
            else:
                texts.append(self._parts({key: member}, name))
        return repr(texts)

    # ---- Other objects ----

    def _object(self, item: Any, name: str) -> str:
        """Return the class of an object, and its attributes or its text form."""
        texts = [self.describe(type(item), name)]
        if isinstance(item, nn.Module):
            return self._module(item, name)
        parts = pandas_parts(item)
        if parts:
            if parts["values"] is None:
                self.opaque.append(name)
            return repr([*texts, self._parts(parts, name)])
        is_data = isinstance(item, (Dataset, LightningDataModule))
        # The text form of a data class may have a set, in another order in each process.
        if is_data or is_of_user(type(item)) or is_dataclass(item):
            number = len(self.opaque)
            texts.append(self._attributes(item, name))
            if is_data and not self._names_data:
                del self.opaque[number:]
            return repr(texts)
        texts.append(shown_without_address(item))
        is_container = hasattr(type(item), "__len__") and not isinstance(item, _SHOWN_WHOLE)
        if not texts[-1] or is_container or _SHORTENED.search(texts[-1]):
            self.opaque.append(name)
        else:
            texts.append(self._parts(dict(attributes_of(item)), name))
        return repr(texts)

    def _attributes(self, item: Any, name: str) -> str:
        """Return the descriptions of attributes, without values that change while it is used."""
        attributes = {}
        stored = stored_in_use(type(item))
        for key, value in attributes_of(item):
            if key in stored:
                self.opaque.append(f"{name}.{key}".lstrip("."))
            else:
                attributes[key] = value
        if attributes or stored:
            return self._parts(attributes, name)
        return shown_without_address(item)

    def _module(self, module: nn.Module, name: str) -> str:
        """Return the facts of a module.

        The values of weights are left out, because a trial may train them in place.
        """
        texts = []
        parts = dict(module.named_modules())
        for fact in facts_of_module(module):
            place = f"{name}.{fact.place}".rstrip(".")
            path, _, key = fact.place.rpartition(".")
            cls = type(parts.get(path))  # a name may have dots
            if fact.name == fact.place and is_of_user(cls) and key in stored_in_use(cls):
                self.opaque.append(place)
            else:
                texts.append(f"{fact.name} {self.describe(fact.value, place)}")
        if any(True for _ in module.parameters()):
            self.opaque.append(f"{name}.parameters")
        return repr(texts)


def _is_row(item: Any) -> bool:
    """Return True for numbers and texts, and for tuples and lists of them."""
    if type(item) in (tuple, list):
        return all(type(each) in SCALARS for each in item)
    return type(item) in SCALARS
