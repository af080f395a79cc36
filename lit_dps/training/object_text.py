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
import os
import re
import sys
import types
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, MappingView, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING
from enum import Enum
from io import IOBase
from typing import Any, NamedTuple, get_args, get_origin

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset
from torchmetrics import Metric

from lit_dps.core.aliases import RENAMED_METHODS
from lit_dps.core.environment import UNKNOWN
from lit_dps.pruning.mask import GENERATORS, MAX_LENGTH
from lit_dps.training.code_tree import (
    attribute_or_none,
    code_text,
    follow,
    is_set_by_clock,
    values_read,
)
from lit_dps.training.method_attributes import globals_changed, stored_in_use
from lit_dps.training.object_attributes import (
    attributes_of,
    is_made_of_fields,
    methods_of,
    settings_of,
    unshown_attributes,
)
from lit_dps.training.object_paths import (
    PROCESS_MODULES,
    global_of,
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
_SHOWN_WHOLE = (range, str, bytes, bytearray, np.generic, np.dtype)
_STREAMS = ("stdin", "stdout", "stderr")
CachedFunction = type(functools.cache(len))
_RUNNING = (nn.modules.batchnorm._NormBase, Metric)  # training changes their buffers
LAZY = "lazy"
MAX_ELEMENTS = 1 << 20  # of an array; of a larger one, evenly spaced elements are described
HASH_LENGTH = 16  # hexadecimal digits


class Description(NamedTuple):
    """The description of an object.

    Attributes:
        text: The text of the object itself.
        read: The texts of the functions, classes and values of the script or notebook that its code
            reads, by path, such as "__main__.WIDTH".
        opaque: Names of the parts whose values change no text.
    """

    text: str
    read: dict[str, str]
    opaque: tuple[str, ...]


def describe(
    item: Any, name: str = "", is_tree: bool = True, known: Mapping[str, Any] | None = None
) -> Description:
    """Return the description of a function, a class or an object.

    Args:
        item: The item.
        name: Its name, which begins the names of its parts.
        is_tree: Whether to describe code by its syntax tree, and not by its source.
        known: Objects by path, which are described by their path alone.
    """
    describer = _Describer(is_tree, known or {})
    describer.read[name] = ""  # for code that reads its own name
    text = describer.describe_whole(item, name)
    del describer.read[name]
    describer.leave_out_changed()
    return Description(text, describer.read, tuple(describer.opaque))


def code_hashes(item: Any, name: str) -> dict[str, list[str]]:
    """Return the hashes of a function or class and of what its code reads, by name.

    The first hash is of sources, the second of syntax trees without docstrings, as for files. A
    part whose value cannot be compared has `UNKNOWN`.
    """
    by_source, by_tree = describe(item, name, is_tree=False), describe(item, name)
    hashes = {name: [_hash(by_source.text), _hash(by_tree.text)]}
    for path, text in by_tree.read.items():
        hashes[path] = [_hash(by_source.read[path]), _hash(text)]
    for part in by_tree.opaque:
        hashes[part] = UNKNOWN
    return hashes


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:HASH_LENGTH]


class _Describer:
    """Describes objects and their parts.

    Attributes:
        read: The texts of the globals of the script or notebook, by path.
        opaque: Names of the parts that have no description other than their class.
    """

    def __init__(self, is_tree: bool, known: Mapping[str, Any]):
        self.read: dict[str, str] = {}
        self.opaque: list[str] = []
        self._is_tree = is_tree
        self._code: set[str] = set()  # paths of functions and classes
        self._changed: set[str] = set()  # paths of globals that code changes
        self._texts = {id(part): f"part {path!r}" for path, part in known.items()}
        self._items: list[Any] = []  # an id is unique only as long as its object lives

    def describe_whole(self, item: Any, name: str) -> str:
        """Return the description of an item; of an importable one its content, not its path."""
        function = item
        self._texts[id(item)] = "itself"
        self._items.append(item)
        if isinstance(item, functools.partial):
            function = item.func
        if isinstance(function, types.FunctionType):
            texts = [self._function(function, name, is_whole=True)]
            if function is not item:
                parts = {"args": item.args, "keywords": item.keywords}
                texts.append(self._parts(parts.items(), name))
            return repr(texts)
        if isinstance(item, type):
            return self._class(item, name)
        return self._describe_new(item, name)

    def describe(self, item: Any, name: str) -> str:
        """Return the description of an item; `name` is its path for `opaque`."""
        if isinstance(item, Enum):
            value = self.describe(item.value, name)
            return f"{self._type(item, name)}.{item.name} {value}"
        if type(item) in SCALARS:
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
        if isinstance(item, types.BuiltinFunctionType):
            return self._builtin(item, name)
        if is_found_by_path(item):
            if item.__module__ in PROCESS_MODULES:
                self._add_read(path_of(item), item)
            return path_of(item)
        if isinstance(item, types.FunctionType):
            return self._function(item, name)
        if isinstance(item, type):
            return self._class(item, name)
        if get_origin(item) is not None:  # such as tuple[int, ...]
            parts = {"origin": get_origin(item), "arguments": get_args(item)}
            return "type" + self._parts(parts.items(), name)
        if item is os.environ or isinstance(item, logging.Logger):
            # Their values belong to the process, as those of a module of Python do.
            return f"{path_of(type(item))} {module_name(getattr(item, 'name', ''))}"
        for stream in _STREAMS:
            if item is getattr(sys, stream) or item is getattr(sys, f"__{stream}__"):
                return f"sys.{stream}"
        is_library = not is_of_user(type(item)) and not isinstance(item, _SHOWN_WHOLE)
        if isinstance(item, dict) or (is_library and isinstance(item, Mapping)):
            return self._collection(item, name)
        if isinstance(item, (set, frozenset)):
            elements = sorted(self.describe(each, f"{name}[]") for each in item)
            return self._type(item, name) + repr([len(item), *elements])
        if isinstance(item, (list, tuple, deque)):
            return self._type(item, name) + repr(self._elements(item, name))
        if is_library and isinstance(item, (Sequence, MappingView)):
            return self._collection(item, name)
        return self._object(item, name)

    def _elements(self, items: Any, name: str) -> list[str]:
        """Return the descriptions of the elements; of long collections, those of the first ones."""
        texts = [str(len(items))]
        is_plain = all(type(item) in SCALARS for item in items)
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
            return self._type(item, name) + shown_without_address(item)
        texts = [self._elements(part, name) for part in parts]
        if isinstance(item, defaultdict):
            texts.append([self.describe(item.default_factory, name)])
        return self._type(item, name) + repr(texts)

    def _type(self, item: Any, name: str) -> str:
        """Return the path of a class; of the user's class its description and attributes."""
        if not is_of_user(type(item)):
            return path_of(type(item))
        text = self.describe(type(item), name)
        if not isinstance(item, Enum) and any(True for _ in attributes_of(item)):
            text += self._attributes(item, name)
        return text

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

    def _builtin(self, item: types.BuiltinFunctionType, name: str) -> str:
        """Return the name of a compiled function, such as `torch.relu`, or of a bound method."""
        owner = item.__self__
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            return (
                f"built-in {item.__module__} {getattr(owner, '__name__', '')} {item.__qualname__}"
            )
        return f"built-in {item.__name__}" + self._parts({"self": owner}.items(), name)

    def _function(self, function: types.FunctionType, name: str, is_whole: bool = False) -> str:
        """Return the code of a function and the values that it holds; add what it reads.

        It reads the globals of the script or notebook. If `is_whole`, the values of its closure
        count among them, so that they have names.
        """
        code = function.__code__
        module = function.__globals__.get("__name__", "")
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None and not is_users_module(module):
            # The wrapper of a library's decorator. The code of `wrapped` begins with the decorator.
            return code.co_qualname + self._parts({"wrapped": wrapped}.items(), name)
        held: dict[str, Any] = {
            "defaults": function.__defaults__,
            "keyword defaults": function.__kwdefaults__,
        }
        outer = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        names = []
        changed = []
        for place in globals_changed(code):
            # A function of a module may have the name of a method of lists, such as `ops.add`.
            if not isinstance(function.__globals__.get(place), types.ModuleType):
                changed.append(place)
                self._changed.add(f"{module_name(module)}.{place}")
        for read in values_read(code):
            # The class that defines a method, for super(), and the name that a worker changes.
            if read.name in ("__class__", "__name__"):
                continue
            if read.is_outer:
                if read.name not in outer:  # a local variable that an inner function reads
                    continue
                with suppress(ValueError):  # an empty cell
                    value, path = follow(outer[read.name].cell_contents, read.path)
                    if is_whole:
                        names.append(f"{name}.{read.name}{path}")
                        self._add_read(names[-1], value)
                    else:
                        held[f"{read.name}{path}"] = value
            elif read.name in function.__globals__ and is_users_module(module):
                found = global_of(function, read)
                value, path = follow(found.value, found.path)
                place = f"{found.place}{path}"
                if isinstance(value, types.ModuleType) or is_found_by_path(value):
                    held[place] = value
                    continue
                for each in changed:
                    if each.startswith(found.local):
                        self._changed.add(found.place + each.removeprefix(found.local))
                is_changed = any(overlaps(f"{found.local}{path}", each) for each in changed)
                if is_changed or is_set_by_clock(found.module, found.name):
                    self.opaque.append(place)
                    if is_changed:
                        continue  # it may be missing before the code runs
                else:
                    self._add_read(place, value)
                names.append(place)
        texts = [code_text(code, self._is_tree), self._parts(sorted(held.items()), name)]
        return repr([*texts, *sorted(names)])

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
        """Return the bases of a class, its methods, and its other attributes."""
        texts = [path_of(cls)]
        for base in cls.__bases__:
            texts.append(self.describe(base, name))
        is_dataclass = "__dataclass_fields__" in vars(cls)
        has_made_methods = is_dataclass or (issubclass(cls, tuple) and "_fields" in vars(cls))
        stored = stored_in_use(cls)
        adopted = {new: vars(cls).get(former) for former, new in RENAMED_METHODS.items()}
        for key, member in sorted(vars(cls).items()):
            if key in adopted and member is adopted[key]:
                continue  # `adopt_former_methods` has added it
            functions = methods_of(cls, member)
            for function in functions:
                if not (has_made_methods and is_made_of_fields(function, key)):
                    texts.append(f"{key} {self._function(function, f'{name}.{key}')}")
            if isinstance(member, (functools.partial, functools.partialmethod)):
                given = {"args": member.args, "keywords": member.keywords}
                texts.append(self._parts(given.items(), f"{name}.{key}"))
            is_special = key.startswith("_abc_") or (key.startswith("_") and key.endswith("_"))
            if stored.has(key):  # such as a list of the class that hooks fill
                self.opaque.append(f"{name}.{key}")
            elif not functions and not is_special:
                texts.append(
                    self._parts([(key, attribute_or_none(member, "__func__") or member)], name)
                )
        if issubclass(cls, Enum):
            texts.append(self._parts(cls.__members__.items(), name))
        if is_dataclass:
            for field in vars(cls)["__dataclass_fields__"].values():
                parts = {"type": field.type}
                if field.default is not MISSING:
                    parts["default"] = field.default
                if field.default_factory is not MISSING:
                    parts["factory"] = field.default_factory
                texts.append(field.name + self._parts(parts.items(), name))
        return repr(texts)

    # ---- Other objects ----

    def _object(self, item: Any, name: str) -> str:
        """Return the class of an object, and its attributes or its text form."""
        texts = [self.describe(type(item), name)]
        if isinstance(item, GENERATORS):  # its state changes while it is used
            self.opaque.append(name)
            return texts[0]
        if isinstance(item, nn.Module):
            return self._module(item, name)
        parts = pandas_parts(item)
        if parts:
            if parts["values"] is None:
                self.opaque.append(name)
            return repr([*texts, self._parts(parts.items(), name)])
        if isinstance(item, (Dataset, LightningDataModule)):
            with self._ignored_opaque():  # studies compare the content of data
                texts.append(self._attributes(item, name))
            return repr(texts)
        if is_of_user(type(item)):
            texts.append(self._attributes(item, name))
            return repr(texts)
        if isinstance(item, IOBase):  # its text form depends on the terminal
            self.opaque.append(name)
            return texts[0]
        texts.append(shown_without_address(item))
        is_container = hasattr(type(item), "__len__") and not isinstance(item, _SHOWN_WHOLE)
        if not texts[-1] or is_container or _SHORTENED.search(texts[-1]):
            self.opaque.append(name)
        else:
            texts.append(self._parts(unshown_attributes(item), name))
        return repr(texts)

    def _attributes(self, item: Any, name: str) -> str:
        """Return the descriptions of attributes, without values that change while it is used."""
        attributes = {}
        stored = stored_in_use(type(item))
        for key, value in attributes_of(item):
            if stored.has(key):
                self.opaque.append(f"{name}.{key}")
            else:
                attributes[key] = value
        if attributes or stored.names:
            return self._parts(sorted(attributes.items()), name)
        return shown_without_address(item)

    @contextmanager
    def _ignored_opaque(self) -> Iterator[None]:
        opaque = list(self.opaque)
        yield
        self.opaque = opaque

    def _module(self, module: nn.Module, name: str) -> str:
        """Return the classes, settings and buffers of submodules, and shapes of weights.

        The values of weights are left out, because a trial may train them in place.
        """
        texts = []
        for path, part in module.named_modules():
            described: dict[str, Any] = {"class": type(part)}
            stored = stored_in_use(type(part)) if is_of_user(type(part)) else None
            for key, value in settings_of(part):
                # Weights that are attributes, such as the pruned weight of a layer of PyTorch.
                is_weight = isinstance(value, Tensor) and value.requires_grad
                if is_weight or (stored is not None and stored.has(key)):
                    self.opaque.append(".".join(filter(None, (name, path, key))))
                else:
                    described[key] = value
            texts.append([path, self._parts(described.items(), f"{name}.{path}".rstrip("."))])
            if not isinstance(part, _RUNNING):
                described = {key: buffer for key, buffer in part.named_buffers(recurse=False)}
                texts.append(self._parts(described.items(), f"{name}.{path}".rstrip(".")))
        for key, tensor in module.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                texts.append([key, shape_of(tensor), str(tensor.dtype)])
        if any(True for _ in module.parameters()):
            self.opaque.append(f"{name}.parameters")
        return repr(texts)


def shape_of(item: Any) -> tuple[int, ...] | str:
    """Return the shape of a tensor or array; `LAZY` for a parameter without a shape yet."""
    if is_lazy(item):
        return LAZY
    return tuple(item.shape)
