"""Describes a Python object as a text. Equal objects of two processes have equal texts.

For example, the text of `lambda lr: Net(build(WIDTH), lr)` depends on its source, on the source of
`build` and on the value of WIDTH. If one of them changes, a study of the first function does not
resume with the second one. The text of a function or class that another process can import is its
path, because studies hash the files of the user's modules.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import logging
import os
import re
import sys
import types
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping, MappingView, Sequence
from contextlib import suppress
from enum import Enum
from io import IOBase
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args, get_origin

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from lit_dps.core.identity import OBJECTS
from lit_dps.core.user_code import is_user_module
from lit_dps.pruning.mask import GENERATORS, MAX_LENGTH

# Modules of this process alone: the script or notebook, and classes without an importable path.
_PROCESS_MODULES = ("__main__", "__mp_main__", OBJECTS)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_GLOBAL_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
# A text form may be shortened. Of a library's container it rarely has all elements.
_SHORTENED = re.compile(r"\.\.\.|…")
_SHOWN_WHOLE = (range, str, bytes, bytearray, np.generic, np.dtype)
_STREAMS = ("stdin", "stdout", "stderr")
CachedFunction = type(functools.cache(len))
LAZY = "lazy"
MAX_ELEMENTS = 1 << 20  # of an array; of a larger one, evenly spaced elements are described


class Description(NamedTuple):
    """The description of an object.

    Attributes:
        text: The text.
        opaque_part: Name of the first part whose value does not change the text; None without one.
    """

    text: str
    opaque_part: str | None


def describe(item: Any) -> Description:
    """Return the description of a function, a class or an object.

    Values that a function reads are no parts of it. The values of a `functools.partial`, of an
    object, and of the object of a bound method are parts.
    """
    describer = _Describer()
    text = describer.describe(item, "")
    if describer.opaque:
        return Description(text, describer.opaque[0])
    return Description(text, None)


class _Describer:
    """Describes objects and their parts.

    Attributes:
        opaque: Names of the parts that have no description other than their class.
    """

    def __init__(self):
        self.opaque: list[str] = []
        self._texts: dict[int, str] = {}
        self._items: list[Any] = []  # an id is unique only as long as its object lives

    def describe(self, item: Any, name: str) -> str:
        """Return the description of an item; `name` is its path for `opaque`."""
        if isinstance(item, Enum):
            return f"{_path_of(type(item))}.{item.name}"
        if type(item) in _SCALARS:
            return repr(item)
        if id(item) in self._texts:
            return self._texts[id(item)]
        self._texts[id(item)] = "itself"  # for an object that contains itself
        self._items.append(item)
        text = self._describe_new(item, name)
        if len(text) > hashlib.sha256().digest_size * 2:
            text = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        self._texts[id(item)] = text
        return text

    def _describe_new(self, item: Any, name: str) -> str:
        if isinstance(item, types.ModuleType):
            return item.__name__
        if isinstance(item, (Tensor, np.ndarray)):
            return self._array(item, name)
        if isinstance(item, functools.partial):
            parts = {"func": item.func, "args": item.args, "keywords": item.keywords}
            return "partial" + self._parts(parts.items(), name)
        if isinstance(item, CachedFunction):
            return "cached" + self._parts({"func": item.__wrapped__}.items(), name)
        if isinstance(item, re.Pattern):  # its text form has 200 characters
            return f"pattern {item.pattern!r} {item.flags}"
        if isinstance(item, types.MethodType):
            parts = {"self": item.__self__, "function": item.__func__}
            return "method" + self._parts(parts.items(), name)
        if isinstance(item, types.FunctionType):
            is_factory = name in ("", "func")
            if _is_importable(item) and not is_factory:
                return _path_of(item)
            return self._function(item)
        if isinstance(item, type):
            return self._class(item)
        if get_origin(item) is not None:  # such as tuple[int, ...]
            parts = {"origin": get_origin(item), "arguments": get_args(item)}
            return "type" + self._parts(parts.items(), name)
        if item is os.environ or isinstance(item, logging.Logger):
            # Their values belong to the process, as those of a module of Python do.
            return f"{_path_of(type(item))} {getattr(item, 'name', '')}"
        for stream in _STREAMS:
            if item is getattr(sys, stream) or item is getattr(sys, f"__{stream}__"):
                return f"sys.{stream}"
        is_library = not is_of_user(type(item)) and not isinstance(item, _SHOWN_WHOLE)
        if isinstance(item, dict) or (is_library and isinstance(item, Mapping)):
            return self._collection(item, name)
        if isinstance(item, (set, frozenset)):
            return _path_of(type(item)) + repr(sorted(self._elements(item, name)))
        if isinstance(item, (list, tuple, deque)):
            return _path_of(type(item)) + repr(self._elements(item, name))
        if is_library and isinstance(item, (Sequence, MappingView)):
            return self._collection(item, name)
        return self._object(item, name)

    def _elements(self, items: Any, name: str) -> list[str]:
        """Return the descriptions of the elements; of long collections, those of the first ones."""
        texts = [str(len(items))]
        is_plain = all(type(item) in _SCALARS for item in items)
        for i, item in enumerate(items):
            if i >= MAX_LENGTH and not is_plain:
                break
            texts.append(self.describe(item, f"{name}[{i}]"))
        return texts

    def _collection(self, item: Any, name: str) -> str:
        """Return the description of a mapping, a view of one, or a sequence of a library."""
        try:
            parts = [list(item)]
            if isinstance(item, Mapping):
                parts = [list(item.keys()), list(item.values())]
        # A collection of a library may fail, such as a closed file.
        except Exception:
            self.opaque.append(name)
            return _path_of(type(item)) + shown_without_address(item)
        return _path_of(type(item)) + repr([self._elements(part, name) for part in parts])

    def _parts(self, parts: Any, name: str) -> str:
        texts = []
        for part_name, part in parts:
            texts.append(f"{part_name} = {self.describe(part, f'{name}.{part_name}'.lstrip('.'))}")
        return repr(texts)

    def _array(self, item: Tensor | np.ndarray, name: str) -> str:
        shape = shape_of(item)
        text = f"{shape} {item.dtype}"
        if shape == LAZY:
            return text
        if isinstance(item, np.ndarray):
            if item.dtype.hasobject:
                return text + repr(self._elements(item.ravel().tolist(), name))
            flat = item.ravel()
            content = flat[:: 1 + flat.size // MAX_ELEMENTS].tobytes()
            return f"{text} {hashlib.sha256(content).hexdigest()}"
        try:
            flat = item.detach().cpu().reshape(-1)
            flat = flat[:: 1 + flat.numel() // MAX_ELEMENTS].contiguous()
            content = flat.view(torch.uint8).numpy().tobytes()
        except (RuntimeError, NotImplementedError):  # such as a sparse or a meta tensor
            self.opaque.append(name)
            return text
        return f"{text} {hashlib.sha256(content).hexdigest()}"

    # ---- Code ----

    def _function(self, function: types.FunctionType) -> str:
        """Return the source of a function and the values that it reads, or its path."""
        texts = [source_of(function.__code__)]
        values: dict[str, Any] = {
            "defaults": function.__defaults__,
            "keyword defaults": function.__kwdefaults__,
        }
        for name in _names_read(function.__code__):
            if name in function.__globals__:
                values[name] = function.__globals__[name]
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with suppress(ValueError):  # an empty cell
                values[name] = cell.cell_contents
        return repr(texts + self._values_read(values))

    def _values_read(self, values: Mapping[str, Any]) -> list[str]:
        """Return the descriptions of the values that a function reads."""
        opaque = list(self.opaque)
        texts = []
        for name, value in sorted(values.items()):
            texts.append(f"{name} = {self.describe(value, f'value {name}')}")
        self.opaque = opaque
        return texts

    def _class(self, cls: type) -> str:
        """Return the source of a class, its plain attributes and its methods, or its path."""
        if _is_importable(cls):
            return _path_of(cls)
        texts = [_path_of(cls)]
        with suppress(OSError, TypeError):
            texts.append(inspect.getsource(cls))
        values = {}
        for i, base in enumerate(cls.__bases__):
            values[f"base {i}"] = base
        for name, member in vars(cls).items():
            if isinstance(member, property):
                member = member.fget
            member = getattr(member, "__func__", member)  # of a class method or static method
            is_special = name.startswith("__") and name.endswith("__")
            is_plain = isinstance(member, (*_SCALARS, list, tuple, dict)) and not is_special
            if is_plain or isinstance(member, types.FunctionType):
                values[name] = member
        return repr(texts + self._values_read(values))

    # ---- Other objects ----

    def _object(self, item: Any, name: str) -> str:
        """Return the class of an object, and its attributes or its text form."""
        texts = [self.describe(type(item), name)]
        if isinstance(item, GENERATORS):  # its state changes while it is used
            self.opaque.append(name)
            return texts[0]
        if isinstance(item, nn.Module):
            return self._module(item)
        parts = _pandas_parts(item)
        if parts:
            if parts["values"] is None:
                self.opaque.append(name)
            return repr([*texts, self._parts(parts.items(), name)])
        attributes = dict(_attributes_of(item))
        is_users = is_of_user(type(item))
        if is_users or isinstance(item, (Dataset, LightningDataModule)):
            texts.append(self._parts(sorted(attributes.items()), name))
            if not attributes:
                texts.append(shown_without_address(item))
            return repr(texts)
        if isinstance(item, IOBase):  # its text form depends on the terminal
            self.opaque.append(name)
            return texts[0]
        texts.append(shown_without_address(item))
        is_container = hasattr(type(item), "__len__") and not isinstance(item, _SHOWN_WHOLE)
        if not texts[-1] or is_container or _SHORTENED.search(texts[-1]):
            self.opaque.append(name)
        return repr(texts)

    def _module(self, module: nn.Module) -> str:
        """Return the classes and plain attributes of all submodules, and shapes of weights.

        The values of weights are left out, because a trial may train them in place.
        """
        texts = []
        for path, part in module.named_modules():
            plain = {}
            for name, value in vars(part).items():
                if type(value) in _SCALARS or isinstance(value, (list, tuple)):
                    plain[name] = value
            plain.pop("training", None)
            values = self._values_read({**plain, "class": type(part)})
            texts.append([path, *values])
        for name, tensor in module.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                texts.append([name, shape_of(tensor), str(tensor.dtype)])
        return repr(texts)


def shape_of(item: Any) -> tuple[int, ...] | str:
    """Return the shape of a tensor or array; `LAZY` for a parameter without a shape yet."""
    if is_lazy(item):
        return LAZY
    return tuple(item.shape)


def _pandas_parts(item: Any) -> dict[str, Any]:
    """Return the values and names of a table, a column or an index of pandas; {} for others.

    "values" is None if the text of a cell has an address, which differs between processes.
    """
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(item, (pandas.DataFrame, pandas.Series, pandas.Index)):
        return {}
    if isinstance(item, pandas.DataFrame):
        parts = {"columns": list(item.columns), "types": [str(each) for each in item.dtypes]}
    else:
        parts = {"name": item.name, "types": str(item.dtype)}
    try:
        # The hash of an object in a cell is that of its text.
        parts["values"] = pandas.util.hash_pandas_object(item).to_numpy()
        if not all(map(shown_without_address, _object_cells(item))):
            parts["values"] = None
    except (TypeError, ValueError):  # a cell has a list or another value without a hash
        parts["values"] = item.to_numpy(dtype=object)
        parts["index"] = list(getattr(item, "index", []))
    return parts


def _object_cells(item: Any) -> Iterator[Any]:
    """Yield the cells of pandas that are objects, with those of the index."""
    columns = [item]
    if hasattr(item, "columns"):
        columns = [item.iloc[:, i] for i in range(item.shape[1])]
    columns.append(getattr(item, "index", item))
    for column in columns:
        if column.dtype == object:
            for cell in column:
                if type(cell) not in _SCALARS:
                    yield cell


def shown_without_address(item: Any) -> str:
    """Return the text form of an object; "" if it has an address or no content."""
    if type(item).__repr__ is object.__repr__:
        return ""
    try:
        shown = repr(item)
    # A method of the user may fail.
    except Exception:
        return ""
    if _ADDRESS.search(shown):
        return ""
    return shown


def _attributes_of(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object by name, also of `__slots__`."""
    for cls in type(item).__mro__:
        for slot in getattr(cls, "__slots__", ()):
            if slot not in ("__dict__", "__weakref__") and hasattr(item, slot):
                yield slot, getattr(item, slot)
    is_data = isinstance(item, LightningDataModule)
    for name, value in getattr(item, "__dict__", {}).items():
        # Lightning keeps its own state in a data module, such as the trainer.
        if not (is_data and (name.startswith("_") or name == "trainer")):
            yield name, value


def _path_of(item: Any) -> str:
    return f"{item.__module__}.{item.__qualname__}"


def _is_importable(item: Any) -> bool:
    """Return True for a class or function that another process can import by its path."""
    if not isinstance(item, (type, types.FunctionType)):
        return False
    if item.__module__ in _PROCESS_MODULES:
        return False
    found: Any = sys.modules.get(str(item.__module__))
    for name in item.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is item


def is_of_user(cls: type) -> bool:
    """Return True for a class of the user or of lit_dps, and for containers of any attributes."""
    if cls.__module__ in _PROCESS_MODULES or cls in (SimpleNamespace, Namespace):
        return True
    return cls.__module__.startswith("lit_dps.") or is_user_module(cls.__module__)


def source_of(code: types.CodeType) -> str:
    """Return the source of a function; its byte code if the source is unknown."""
    with suppress(OSError, TypeError):
        return inspect.getsource(code)
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            constants.append(source_of(constant))
        elif isinstance(constant, frozenset):
            constants.append(repr(sorted(map(repr, constant))))
        else:
            constants.append(repr(constant))
    return repr((code.co_code.hex(), code.co_names, constants))


def _names_read(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the global variables that code reads, also in its inner functions."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_READS:
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_read(constant)
