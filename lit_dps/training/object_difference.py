"""Compares an object with new objects of its class: does a new object train in the same way?

Compared are classes, settings, parameters without values, buffers, plain attributes and hooks.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import types
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torchmetrics import MeanMetric, Metric

from lit_dps.core.text import shorten
from lit_dps.core.user_code import is_user_module
from lit_dps.training.code_text import (
    PROCESS_MODULES,
    attribute_or_none,
    byte_code,
    function_of_member,
    is_importable,
    names_in,
    path_of,
)

_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
_ARRAYS = (Tensor, np.ndarray)
_HOLDERS = (types.MethodType, functools.partial)
_HELD = ("__self__", "__func__", "func", "args", "keywords")
_NORM = nn.modules.batchnorm._NormBase  # training changes its buffers
_BASES = (LightningModule, LightningDataModule, nn.Module, object)
# The user calls them to make or to change an object.
_OF_USER = ("__init__", "__new__", "__post_init__", "__setattr__", "freeze", "unfreeze")
# Functions that set an attribute whose name is an argument.
_SETTERS = {"setattr", "add_module", "register_module", "register_buffer", "register_parameter"}
_CALLS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
MAX_DEPTH = 20  # of nested values that are compared
MAX_TEXT_LENGTH = 200  # characters; an object may be part of many others
_OPEN = "itself at depth "  # begins the text of an object inside of itself


class Difference(NamedTuple):
    """How an object differs from a new object of its class.

    Attributes:
        reason: Why a new object trains differently; empty if it does not.
        unused: The attributes that changed while the object was used, or that are random.
        uncompared: The attributes with a value that cannot be compared, such as a tokenizer.
    """

    reason: str
    unused: list[str]
    uncompared: list[str]


class Fact(NamedTuple):
    """A property of an object.

    Attributes:
        place: The dotted path of the attribute or submodule that has it.
        value: Its value.
        text: Its text, equal for equal properties.
    """

    place: str
    value: Any
    text: str


class _Facts(dict[str, Fact]):
    """The properties of an object and of its submodules, by name.

    Attributes:
        parts: The object and its submodules by dotted path.
        uncompared: Values of which only the class is compared, by dotted path.
    """

    def __init__(self, instance: Any, with_modes: bool):
        self.uncompared: list[str] = []
        self.parts: dict[str, Any] = {"": instance}
        self._first: dict[int, str] = {}  # the first name of a parameter
        self._paths: dict[int, str] = {id(instance): ""}
        self._texts: dict[int, str] = {}
        self._described: list[Any] = []  # an id is unique only as long as its object lives
        self._has_cycle = False
        for name, value in dict(instance.hparams).items():
            self._add(f"hparams.{name}", "", value)
        if not isinstance(instance, nn.Module):
            self._add_attributes("", instance)
            return
        self.parts = dict(instance.named_modules())
        self._paths = {id(part): path for path, part in self.parts.items()}
        for path, part in self.parts.items():
            self._add_part(path, part, with_modes)

    def _add(self, name: str, place: str, value: Any) -> None:
        self._has_cycle = False
        self[name] = Fact(place, value, self.text_of(value, place))
        if self._has_cycle:  # the texts in a cycle depend on where it was entered
            self._texts.clear()
        if isinstance(value, _ARRAYS):  # also of random contents
            self._add(f"the shape of {name}", place, str(_shape_of(value)))

    def _add_part(self, path: str, part: nn.Module, with_modes: bool) -> None:
        prefix = f"{path}." if path else ""
        shown = path or "the module"
        for name, weight in part._parameters.items():
            text = _weight_text(weight)
            first = self._first.setdefault(id(weight), prefix + name)
            if weight is not None and first != prefix + name:
                text += f", tied to {first}"
            self._add(prefix + name, prefix + name, text)
        self._add(f"the class of {shown}", path, type(part))
        self._add(f"the hooks of {shown}", f"{prefix}hooks", _hooks_of(part))
        if with_modes:
            self._add(f"the mode of {shown}", path, "train" if part.training else "eval")
        self._add_attributes(prefix, part)
        for name, buffer in part._buffers.items():
            value = _weight_text(buffer) if isinstance(part, _NORM) else buffer
            self._add(prefix + name, prefix + name, value)
        self._add(f"the settings of {shown}", path, _settings_of(part))

    def _add_attributes(self, prefix: str, item: Any) -> None:
        for name, value in _attributes_of(item):
            self._add(prefix + name, prefix + name, value)

    def text_of(self, value: Any, place: str, depth: int = MAX_DEPTH) -> str:
        """Return the text of a value; of a value without a comparable text, its class.

        Each object is described once. So a long text has its hash in place of it.
        """
        if type(value) in _SCALARS:
            return repr(value)
        if isinstance(value, (type, types.BuiltinFunctionType)):
            return f"{value.__module__} {value.__qualname__}"
        known = self._texts.get(id(value))
        if known is not None:
            self._has_cycle |= known.startswith(_OPEN)
            return known
        self._described.append(value)
        self._texts[id(value)] = f"{_OPEN}{depth} of {path_of(type(value))}"
        text = self._new_text(value, place, depth)
        if len(text) > MAX_TEXT_LENGTH:
            text = hashlib.sha256(text.encode(errors="replace")).hexdigest()
        self._texts[id(value)] = text
        return text

    def _new_text(self, value: Any, place: str, depth: int) -> str:
        """Return the text of an object that has no text yet."""
        nested = functools.partial(self.text_of, depth=depth - 1)
        if isinstance(value, types.FunctionType):
            return _function_text(value, place, nested)
        text = path_of(type(value))
        if isinstance(value, Enum):
            return f"{text}.{value.name}"
        if isinstance(value, _ARRAYS):
            content = _content_of(value)
            if content is None:
                self.uncompared.append(place)
                content = b""
            digest = hashlib.sha256(content).hexdigest()
            return f"{text} {_shape_of(value)} {value.dtype} {digest}"
        if id(value) in self._paths:
            return f"{text} {self._paths[id(value)]}"
        if isinstance(value, nn.Module):
            return f"{text} {value!r}"
        if depth == 0 or isinstance(value, Iterator):
            self.uncompared.append(place)
            return text
        parts: dict[str, Any] = {}
        if isinstance(value, _HOLDERS):
            parts = {key: getattr(value, key) for key in _HELD if hasattr(value, key)}
        elif isinstance(value, Mapping):
            return text + repr([(nested(key, place), nested(value[key], place)) for key in value])
        elif isinstance(value, _CONTAINERS):
            texts = [nested(each, f"{place}[{i}]") for i, each in enumerate(value)]
            is_set = isinstance(value, (set, frozenset))
            return text + repr(sorted(texts) if is_set else texts)
        elif _is_of_user(type(value)) and hasattr(value, "__dict__"):
            for key, part in _attributes_of(value):
                if key in stored_by_hooks(type(value)):  # such as a counter of calls
                    self.uncompared.append(f"{place}.{key}")
                else:
                    parts[key] = part
        elif not _shown_without_address(value) or "..." in _shown_without_address(value):
            self.uncompared.append(place)
        else:
            text += _shown_without_address(value)
        return text + repr([(key, nested(part, f"{place}.{key}")) for key, part in parts.items()])

    def shown(self, name: str) -> str:
        """Return a fact for a message."""
        if name not in self:
            return "missing"
        value = self[name].value
        if isinstance(value, _ARRAYS):
            return f"{type(value).__name__} {_shape_of(value)}"
        if isinstance(value, str):
            return shorten(value)
        shown = attribute_or_none(value, "__qualname__")
        if not isinstance(shown, str):
            shown = _shown_without_address(value) or type(value).__name__
        return shorten(shown)


def compare_objects(instance: Any, one: Any, other: Any) -> Difference:
    """Compare an object with two new objects that were made with two seeds.

    Three differences are no reason:

    - The two new objects differ too, for example in a time or a random order.
    - A hook stores the attribute (`stored_by_hooks`).
    - An empty container was filled, or a buffer changed, and the object was used: a trainer holds
      it, or one of its hooks has stored an attribute.
    """
    # The user may have set the whole module to evaluation, which hides the modes of its parts.
    with_modes = getattr(instance, "training", True)
    given, new, again = [_Facts(each, with_modes) for each in (instance, one, other)]
    unused: dict[str, None] = {}
    changed: dict[str, Fact] = {}
    for name, fact in {**new, **given}.items():
        text = _text(new, name)
        if text == _text(given, name):
            continue
        place = fact.place
        if text == _text(again, name):
            place = _stored_place(new, place)
        if place:
            unused[place] = None
        else:
            changed[name] = fact
    is_used = bool(changed) and (bool(unused) or attribute_or_none(instance, "trainer") is not None)
    for name, fact in changed.items():
        if is_used and _may_change_in_use(new, name):
            unused[fact.place] = None
            continue
        reason = (
            f"{name} of the object is {given.shown(name)}, and {name} of a new "
            f"{type(instance).__name__} is {new.shown(name)}"
        )
        if given.shown(name) == new.shown(name):
            reason += " with another content"
        return Difference(reason, [], [])
    uncompared = [place for place in dict.fromkeys(given.uncompared) if place not in unused]
    return Difference("", list(unused), uncompared)


def _may_change_in_use(new: _Facts, name: str) -> bool:
    """Return True for an empty container, and for a buffer that is no setting of a torch module."""
    if name not in new or name != new[name].place:
        return False
    value = new[name].value
    path, _, attribute = new[name].place.rpartition(".")
    part = new.parts.get(path)
    if isinstance(value, Tensor) and attribute in getattr(part, "_buffers", {}):
        return not type(part).__module__.startswith("torch.")
    return isinstance(value, _CONTAINERS) and not value


def _text(facts: _Facts, name: str) -> str | None:
    return facts[name].text if name in facts else None


def _stored_place(new: _Facts, place: str) -> str:
    """Return the attribute with a place, if a hook stores it; else "".

    A hook may set a whole submodule, with its attributes.
    """
    while place:
        path, _, attribute = place.rpartition(".")
        if path in new.parts:
            return place if attribute in stored_by_hooks(type(new.parts[path])) else ""
        place = path
    return ""


@functools.cache
def stored_by_hooks(cls: type) -> frozenset[str]:
    """Return the attributes that the hooks of a class store, and the methods that they call.

    Hooks are methods of Lightning, special methods such as `__call__`, and properties. Other
    methods are left out: the user calls them to change an object. A class of a library may store
    in each method.
    """
    codes: dict[str, list[types.CodeType]] = {}
    for base in cls.__mro__:
        for name, member in vars(base).items():
            function = function_of_member(member)
            if base not in _BASES and function is not None and name not in _OF_USER:
                codes.setdefault(name, []).append(function.__code__)
    reached = [name for name in codes if _is_hook(cls, name)]
    stored: set[str] = set()
    for name in reached:  # grows
        for code in codes[name]:
            called = names_in(code, *_CALLS)
            stored |= names_in(code, "STORE_ATTR")
            if called & _SETTERS:
                stored |= {each for each in code.co_consts if isinstance(each, str)}
            reached += [each for each in codes if each in called and each not in reached]
    return frozenset(stored)


def _is_hook(cls: type, name: str) -> bool:
    is_special = name.startswith("__") and name.endswith("__")
    if is_special or not is_user_module(cls.__module__):
        return True
    member = inspect.getattr_static(cls, name, None)
    if isinstance(member, (property, functools.cached_property)):
        return True
    return hasattr(LightningModule, name) or hasattr(LightningDataModule, name)


# ---- Values ----


@functools.cache
def _set_by_libraries() -> frozenset[str]:
    """Return the attributes that PyTorch, Lightning and torchmetrics set, and the mode."""
    names = {"training", "trainer", "_hparams", "_hparams_name", "_hparams_initial"}
    names.add("_flat_weight_refs")  # of recurrent layers
    # Of `net.compile()` and `torch.compile(net)`.
    names |= {"_compiled_call_impl", "_compiler_ctx", "_compile_kwargs", "_is_torch_compile"}
    for item in (LightningModule(), LightningDataModule(), MeanMetric()):
        names.update(name for name in vars(item) if name.startswith("_"))
    return frozenset(names)


def _attributes_of(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an object by name, without those that libraries set.

    Values that a descriptor such as `functools.cached_property` keeps are left out, and private
    attributes of libraries.
    """
    skipped: set[str] = set()
    if isinstance(item, (nn.Module, LightningDataModule)):
        skipped |= _set_by_libraries()
    if isinstance(item, Metric):
        skipped |= item._defaults.keys()
    has_private = _is_of_user(type(item))
    for name, value in vars(item).items():
        member = inspect.getattr_static(type(item), name, None)
        is_kept = isinstance(member, functools.cached_property)
        if name not in skipped and not is_kept and (has_private or not name.startswith("_")):
            yield name, value


def _is_of_user(cls: type) -> bool:
    """Return True for a class of the user or of lit_dps, and for containers of any attributes."""
    module = cls.__module__
    is_ours = cls in (SimpleNamespace, Namespace) or module.startswith("lit_dps.")
    return is_ours or module in PROCESS_MODULES or is_user_module(module)


def _settings_of(module: nn.Module) -> str:
    try:
        return module.extra_repr()
    except Exception:  # a method of the user may fail
        return ""


def _hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of the forward and backward passes of a module, and of its weights."""
    tables: list[Any] = [module._forward_pre_hooks, module._forward_hooks]
    tables += [module._backward_pre_hooks, module._backward_hooks]
    tables += [getattr(weight, "_backward_hooks", None) for weight in module._parameters.values()]
    hooks = []
    for table in tables:
        hooks.extend((table or {}).values())
    return hooks


def _weight_text(weight: Tensor | None) -> str:
    """Return the shape and type of a weight, and whether it is trained."""
    if weight is None:
        return "None"
    return f"{_shape_of(weight)} {weight.dtype}{' trained' * weight.requires_grad}"


def _shape_of(item: Any) -> tuple[int, ...] | str:
    if is_lazy(item):
        return "lazy"
    if getattr(item, "is_nested", False):
        return "nested"
    return tuple(item.shape)


def _content_of(item: Tensor | np.ndarray) -> bytes | None:
    """Return the content of an array; None for a weight, and for sparse and lazy tensors."""
    if isinstance(item, Tensor):
        if item.requires_grad:
            return None
        try:
            item = item.detach().cpu().ravel().contiguous().view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError, ValueError):
            return None
    return repr(item.tolist()).encode() if item.dtype.hasobject else item.tobytes()


def _function_text(function: types.FunctionType, place: str, nested: Any) -> str:
    """Return the path of a function that has one, else its code and the values that it holds."""
    if is_importable(function) or "<" not in function.__qualname__:
        return path_of(function)
    held = [function.__defaults__, function.__kwdefaults__]
    for cell in function.__closure__ or ():
        held.append(attribute_or_none(cell, "cell_contents"))
    return byte_code(function.__code__) + repr([nested(each, place) for each in held])


def _shown_without_address(item: Any) -> str:
    """Return the text form of an object; "" if it has an address or no content."""
    if type(item).__repr__ is object.__repr__:
        return ""
    try:
        shown = repr(item)
    except Exception:  # a method of the user may fail
        return ""
    return "" if _ADDRESS.search(shown) else shown


def is_plain(value: Any) -> bool:
    """Return True for None, numbers and texts, and for lists and dicts of them."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(each) for key, each in value.items())
    is_enum = isinstance(value, Enum)  # YAML has none, also of numbers and texts
    return value is None or (isinstance(value, (bool, int, float, str)) and not is_enum)
