"""Saves and restores what Lightning's checkpoint leaves out: attributes, random number generators.

Lightning saves parameters and persistent buffers. But a module may keep `self.loss_weight = 0.9`
and multiply it by 0.99 after each epoch, or keep a mean teacher in `self.teachers = [network]`.
After a resume, both would begin with their initial values, and the run would differ from an
uninterrupted one.

`capture_attributes` walks through the attributes of such owners and returns a tree of pairs
(kind, content), made of plain numbers and tensors only: `{"loss_weight": 0.5}` becomes
`("dict", [("loss_weight", ("value", 0.5))])`. Reading a file with it executes no code.
`restore_attributes` walks through the attributes of new owners in the same order. It changes
objects in place where it can, because other objects may refer to them.

`capture_rng_state` saves the global generators of torch, NumPy and Python, and the generators that
objects keep in attributes, such as `self.rng = np.random.default_rng(0)` of a data set that
augments images. After a resume they draw the numbers that follow the last saved ones.
"""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from io import IOBase
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_dps.pruning.mask import (
    GENERATORS,
    MAX_LENGTH,
    MODULE_PARTS,
    attributes_of,
    walk_attributes,
)

PLAIN_TYPES = (bool, int, float, complex, str, type(None))

# Objects that do not change, or whose owners save them.
_METHODS = (FunctionType, MethodType, partial)  # strategies add some to a module
_IGNORED = (*_METHODS, Trainer, Optimizer, LRScheduler, *GENERATORS, type, ModuleType)

# Objects of libraries are loggers, threads and loaders, whose attributes must not be changed.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "lightning", "numpy"}
_CONTAINERS_OF_LIBRARIES = (nn.Module, LightningDataModule, SimpleNamespace, Namespace)

# Attributes that the base classes of Lightning manage themselves.
_BASE_ATTRIBUTES = {
    *vars(LightningModule()),
    *vars(LightningDataModule()),
    "_hparams",
    "_hparams_initial",
} - {"training"}
_KINDS: tuple[tuple[Any, str], ...] = (
    (tuple, "tuple"),
    ((list, deque), "list"),
    (dict, "dict"),
    (set, "set"),
    (frozenset, "frozenset"),
)
_ABSENT = object()


def capture_rng_state(*owners: Any) -> dict[str, Any]:
    """Return the states of the global generators, and of the generators that the owners keep."""
    cuda_states = []
    if torch.cuda.is_initialized():
        cuda_states = torch.cuda.get_rng_state_all()
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda_states,
        "numpy": _plain(np.random.get_state(legacy=False)),
        "python": random.getstate(),
        "kept": [_state(generator) for generator in generators_in(*owners)],
    }


def restore_rng_state(state: dict[str, Any], *owners: Any) -> None:
    """Set all generators to a state from `capture`.

    Raises:
        ValueError: if the owners keep other generators than at the time of `capture`.
    """
    # A file may have been read onto a GPU, with all its tensors.
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"]:
        torch.cuda.set_rng_state_all([cuda_state.cpu() for cuda_state in state["cuda"]])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    for generator, kept in zip(generators_in(*owners), state["kept"], strict=True):
        _set_state(generator, kept)


def seed_torch(seed: int) -> None:
    """Seed the generators of torch, as `torch.manual_seed` does.

    Without an accelerator, `torch.manual_seed` takes 0.3 ms to format a stack trace for each
    device that it would seed later.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def preserve_rng_state(*owners: Any, seed: int | None = None) -> Iterator[None]:
    """Restore, at the end of the block, the global generators and those that the owners keep.

    Args:
        owners: Objects that may keep generators.
        seed: Seed of the global generators within the block; by default they keep their states.
    """
    states_before = [(generator, _state(generator)) for generator in generators_in(*owners)]
    global_before = capture_rng_state()
    try:
        if seed is not None:
            seed_torch(seed)
            np.random.seed(seed)
            random.seed(seed)
        yield
    finally:
        restore_rng_state(global_before)
        for generator, state in states_before:
            _set_state(generator, state)


def generators_in(*owners: Any) -> list[Any]:
    """Return the generators that objects keep in attributes, lists and dicts, at any depth."""
    generators = []
    for _, value in walk_attributes(*owners):
        # The operating system's generator has no state.
        if isinstance(value, GENERATORS) and not isinstance(value, random.SystemRandom):
            generators.append(value)
    return generators


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(state, torch.Tensor):
        generator.set_state(state.cpu())
    else:
        generator.set_state(state)


def _plain(state: Any) -> Any:
    """Return a state of NumPy with lists in place of arrays."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    if isinstance(state, (np.ndarray, np.generic)):
        return state.tolist()
    return state


def capture_attributes(*owners: Any) -> list[Any]:
    """Return the attributes of owners, at any depth, as plain numbers and tensors.

    Captured are numbers, texts and members of an Enum, in lists, tuples, dicts, sets and objects.
    Tensors and arrays are captured too, except in data modules, where they are examples. Not
    captured are tensors in the `state_dict` of a module, objects of libraries, and objects that
    cannot be saved.

    Returns:
        The state of each owner: a pair (kind, content), or None if it is not captured.
    """
    walk = _Capture(owners)
    return list(map(walk.capture_owner, owners))


def restore_attributes(state: list[Any], *owners: Any) -> None:
    """Set attributes to a state from `capture_attributes`; tensors are changed in place.

    Raises:
        ValueError: if an object is missing, is not the object that it was, or is an iterator.
    """
    walk = _Restore()
    for owner, saved in zip(owners, state, strict=True):
        walk.restore(owner, saved, type(owner).__name__)


@contextmanager
def without_new_names(*owners: Any) -> Iterator[None]:
    """Delete, at the end of the block, attributes that its code added."""
    names_before = [set(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, names in zip(owners, names_before, strict=True):
            for name in vars(owner).keys() - names:
                del vars(owner)[name]


@contextmanager
def unchanged_attributes(*owners: Any) -> Iterator[None]:
    """Restore, at the end of the block, attributes that its code changed; delete added ones.

    Raises:
        ValueError: as `restore_attributes`.
    """
    before = capture_attributes(*owners)
    try:
        with without_new_names(*owners):
            yield
    finally:
        if not equal_states(capture_attributes(*owners), before):
            restore_attributes(before, *owners)


def equal_states(first: Any, second: Any) -> bool:
    """Return True if two captured states are equal. NaN equals NaN; tensors compare by element."""
    try:
        # Fast for lists of thousands of numbers.
        if first == second:
            return True
    except (RuntimeError, ValueError):
        # A comparison of several elements has no truth value.
        pass
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        if first.keys() != second.keys():
            return False
        return all(equal_states(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal_states, first, second))
    if isinstance(first, float) and first != first:
        return second != second
    return bool(first == second)


class _Capture:
    """Captures all attributes of some owners. An object that is met again becomes a reference."""

    def __init__(self, owners: tuple[Any, ...]):
        self._saved_by_lightning: set[int] = set()
        for owner in owners:
            if isinstance(owner, nn.Module):
                for value in owner.state_dict(keep_vars=True).values():
                    if isinstance(value, Tensor):
                        self._saved_by_lightning.add(id(value))
        self._numbers: dict[int, int] = {}  # of objects by id, in the order of the walk
        self._objects: list[Any] = []  # an id is unique only as long as its object lives
        self._is_data = False

    def capture_owner(self, owner: Any) -> Any:
        self._is_data = isinstance(owner, LightningDataModule)
        return self._capture(owner)

    def _capture(self, item: Any) -> Any:
        """Return the kind of an item and its content; None if the item is not captured."""
        if isinstance(item, Enum):
            return "enum", item.name
        if isinstance(item, np.generic):
            item = item.item()
        if type(item) in PLAIN_TYPES:
            return "value", item
        if isinstance(item, (Tensor, np.ndarray)):
            return self._capture_tensor(item)
        # An iterator over data continues by the pass over the data.
        if isinstance(item, Iterator) and not isinstance(item, IOBase) and not self._is_data:
            return "iterator", None
        kind = _kind_of(item)
        if kind is None or self._is_long(item):
            return None
        if kind in ("set", "frozenset"):
            if _are_plain(item):
                return kind, list(item)
            return None
        if id(item) in self._numbers:
            return "again", self._numbers[id(item)]
        self._numbers[id(item)] = len(self._objects)
        self._objects.append(item)
        if kind == "list" and _are_plain(item):
            # Lists of thousands of numbers are common, so they have a fast path.
            return kind, [(i, ("value", value)) for i, value in enumerate(item)]
        return kind, [(name, self._capture(value)) for name, value in _parts_of(item)]

    def _capture_tensor(self, item: Tensor | np.ndarray) -> Any:
        if self._is_data or id(item) in self._saved_by_lightning:
            return None
        if isinstance(item, Tensor):
            return "tensor", item.detach().clone()
        if item.dtype.kind not in "biufc":
            return None
        return "array", torch.from_numpy(item.copy())

    def _is_long(self, item: Any) -> bool:
        """Return True for a long collection, unless a module keeps it and it contains numbers."""
        is_collection = isinstance(item, (list, tuple, deque, dict, set, frozenset))
        if not is_collection or len(item) <= MAX_LENGTH:
            return False
        if isinstance(item, dict):
            item = item.values()
        return self._is_data or not _are_plain(item)


class _Restore:
    """Restores what `_Capture` has captured, in the same order."""

    def __init__(self):
        self._restored: list[Any] = []  # objects by their number
        self._ids: set[int] = set()

    def restore(self, item: Any, saved: Any, path: str) -> Any:
        """Return an item with its saved content: mostly the item itself, changed in place.

        Args:
            item: The current item; `_ABSENT` without one.
            saved: The captured pair, or None.
            path: Name of the item in messages, such as "Net.teachers.0".
        """
        if saved is None:
            if item is _ABSENT:
                raise ValueError(f"{path} is not there, and cannot be saved")
            return item
        kind, content = saved
        if kind == "iterator":
            raise ValueError(f"{path} is an iterator, whose position no checkpoint contains")
        if kind == "value":
            return content
        if kind == "enum":
            enum_class: Any = type(item)
            return enum_class[content]
        if kind == "set":
            return set(content)
        if kind == "frozenset":
            return frozenset(content)
        if kind == "tensor":
            return _filled_tensor(item, content)
        if kind == "array":
            return _filled_array(item, content.numpy())
        if kind == "again":
            return self._restored[content]
        return self._restore_parts(item, kind, content, path)

    def _restore_parts(
        self, item: Any, kind: str, content: list[tuple[Any, Any]], path: str
    ) -> Any:
        """Return a list, tuple, dict or object with its saved parts."""
        if _kind_of(item) != kind:
            if kind == "object":
                raise ValueError(f"{path} is another object than it was")
            item = {"list": list, "tuple": tuple, "dict": dict}[kind]()
        # Attributes may share a constant tuple and differ later. Tuples have no identity.
        if id(item) in self._ids and kind != "tuple":
            raise ValueError(f"{path} is another object than it was")
        self._ids.add(id(item))
        number = len(self._restored)
        self._restored.append(item)
        current = dict(_parts_of(item))
        parts = {}
        for name, part in content:
            parts[name] = self.restore(current.get(name, _ABSENT), part, f"{path}.{name}")
        if isinstance(item, tuple):
            self._restored[number] = _tuple_with(item, list(parts.values()))
            return self._restored[number]
        if isinstance(item, (list, deque)):
            item.clear()
            item.extend(parts.values())
        elif isinstance(item, dict):
            for name in current.keys() - parts.keys():
                del item[name]
            item.update(parts)
        else:
            for name, part in parts.items():
                _dict_of_attribute(item, name)[name] = part
        return item


def _kind_of(item: Any) -> str | None:
    """Return the kind of an item that has parts; None for other items."""
    for types, kind in _KINDS:
        if isinstance(item, types):
            return kind
    if isinstance(item, _IGNORED) or not hasattr(item, "__dict__"):
        return None
    is_of_library = type(item).__module__.split(".")[0] in _LIBRARIES
    if is_of_library and not isinstance(item, _CONTAINERS_OF_LIBRARIES):
        return None
    return "object"


def _parts_of(item: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a list, a dict or an object, each with its name."""
    if isinstance(item, (list, tuple, deque)):
        yield from enumerate(item)
        return
    if isinstance(item, dict):
        for name, value in item.items():
            if isinstance(name, (str, int)):
                yield name, value
        return
    for name, value in attributes_of(item).items():
        if name not in _BASE_ATTRIBUTES and not isinstance(value, _METHODS):
            yield name, value


def _are_plain(values: Any) -> bool:
    """Return True if all values are numbers, texts or None."""
    return all(type(value) in PLAIN_TYPES for value in values)


def _dict_of_attribute(item: Any, name: str) -> dict[str, Any]:
    """Return the dict in which an object keeps an attribute."""
    if isinstance(item, nn.Module):
        for part in MODULE_PARTS:
            attributes = vars(item).get(part, {})
            if name in attributes:
                return attributes
    return vars(item)


def _tuple_with(item: tuple, values: list[Any]) -> tuple:
    """Return a tuple of the same class with these values; the tuple itself if it has them."""
    has_values = len(values) == len(item)
    if has_values and all(new is old for new, old in zip(values, item, strict=True)):
        return item
    if hasattr(item, "_fields"):
        return type(item)(*values)
    return tuple(values)


@torch.no_grad()
def _filled_tensor(item: Any, saved: Tensor) -> Tensor:
    """Return a tensor with the saved values: the item itself if shape and type are the same."""
    if not isinstance(item, Tensor):
        return saved
    is_same_kind = item.shape == saved.shape and item.dtype == saved.dtype
    if is_same_kind and not item.is_inference():
        return item.copy_(saved)
    return saved.to(item.device)


def _filled_array(item: Any, saved: np.ndarray) -> np.ndarray:
    """Return an array with the saved values: the item itself if it has the same shape."""
    if isinstance(item, np.ndarray) and item.flags.writeable and item.shape == saved.shape:
        item[...] = saved
        return item
    return saved
