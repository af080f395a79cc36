"""Saves and restores what Lightning's checkpoint leaves out: attributes, random number generators.

Lightning saves parameters and persistent buffers. But a module may keep `self.loss_weight = 0.9`
and multiply it by 0.99 after each epoch, or keep a mean teacher in `self.teachers = [network]`.
After a resume, both would begin with their initial values, and the run would differ from an
uninterrupted one.

`capture_attributes` walks through the attributes of such owners and returns a tree of pairs
(kind, content), made of plain numbers and tensors only: `{"loss_weight": 0.5}` becomes
`("dict dict", [("loss_weight", ("value", 0.5))])`. The second word of the kind is the class.
Reading a file with it executes no code.
`restore_attributes` walks through the attributes of new owners in the same order. It changes
objects in place where it can, because other objects may refer to them.

`capture_rng_state` saves the global generators of torch, NumPy and Python, and the generators that
objects keep in attributes, such as `self.rng = np.random.default_rng(0)` of a data set that
augments images. After a resume they draw the numbers that follow the last saved ones.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from io import IOBase
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn

from lit_dps.pruning.mask import (
    GENERATORS,
    MAX_LENGTH,
    walk_attributes,
)
from lit_dps.training.attribute_parts import (
    PLAIN_TYPES,
    are_plain,
    are_representable,
    device_type_of,
    dict_of_attribute,
    filled_array,
    filled_tensor,
    has_kind,
    keys_by_plain_key,
    kind_and_class,
    kind_of,
    parts_of,
    plain_key,
    restored_key,
    tuple_with,
)

# Classes whose empty objects can be made anew. Others need arguments, such as a deque.
_NEW_CONTAINERS: dict[str, Any] = {
    "list": list,
    "tuple": tuple,
    "dict": dict,
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
    "torch.Size": torch.Size,
}
_ABSENT = object()

# Limits of a long collection that is saved, so that a checkpoint takes less than a second.
MAX_PARTS = 100_000
MAX_BYTES = 1 << 26


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
    """Set all generators to a state from `capture_rng_state`.

    Raises:
        ValueError: if the owners keep other generators than at the time of `capture_rng_state`.
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
    cannot be saved. A collection above `MAX_PARTS`, or with keys that no checkpoint can contain,
    has the kind "uncaptured". In a data module, such collections are left out.

    Returns:
        The state of each owner, or None if it is not captured. A state has three elements: kind,
        content, and the type of the owner's device, or None.
    """
    walk = _Capture(owners)
    return list(map(walk.capture_owner, owners))


def restore_attributes(state: list[Any], *owners: Any, is_resume: bool = False) -> None:
    """Set attributes to a state from `capture_attributes`; tensors are changed in place.

    Args:
        state: The state.
        owners: The owners.
        is_resume: Whether the owners are new. Otherwise, uncaptured collections stay as they are.

    Raises:
        ValueError: if an object is missing, is not the object that it was, or is an iterator; if a
            new owner had an uncaptured collection; if a new owner is on another kind of device
            and had its former device as a key.
    """
    walk = _Restore(is_resume)
    for owner, saved in zip(owners, state, strict=True):
        walk.restore_owner(owner, saved)


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
        captured = self._capture(owner)
        if captured is None:
            return None
        return (*captured, device_type_of(owner))

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
        kind = kind_of(item)
        if kind is None:
            return None
        if not self._can_capture(item, kind):
            if self._is_data:
                return None
            collection: Any = item
            return "uncaptured", f"a {type(item).__name__} of {len(collection)} elements"
        if kind in ("set", "frozenset"):
            return kind, list(map(plain_key, item))
        if id(item) in self._numbers:
            return "again", self._numbers[id(item)]
        self._numbers[id(item)] = len(self._objects)
        self._objects.append(item)
        if kind == "list" and are_plain(item):
            # Lists of thousands of numbers are common, so they have a fast path.
            values = [(i, ("value", value)) for i, value in enumerate(item)]
            return kind_and_class(item, kind), values
        if kind == "dict" and self._is_data:
            # Other keys of data, such as pairs of a split and a device, are those of caches.
            parts = [part for part in parts_of(item) if isinstance(part[0], (str, int))]
            return kind, [(name, self._capture(value)) for name, value in parts]
        parts = [(name, self._capture(value)) for name, value in parts_of(item)]
        return kind_and_class(item, kind), parts

    def _capture_tensor(self, item: Tensor | np.ndarray) -> Any:
        if self._is_data or id(item) in self._saved_by_lightning:
            return None
        if isinstance(item, Tensor):
            return f"tensor {item.device.type}", item.detach().clone()
        if item.dtype.kind not in "biufc":
            return None
        return "array", torch.from_numpy(item.copy())

    def _can_capture(self, item: Any, kind: str) -> bool:
        """Return True if a collection is short enough, and if its keys can be saved."""
        if kind == "object":
            return True
        if kind in ("set", "frozenset"):
            is_builtin = type(item) in (set, frozenset)
            return is_builtin and are_representable(item) and not self._is_long(item)
        # Data keep what they always kept: the values of other keys.
        if kind == "dict" and not self._is_data and not are_representable(item):
            return False
        return not self._is_long(item)

    def _is_long(self, item: Any) -> bool:
        """Return True for a long collection, unless a module keeps it and it is small to save."""
        if len(item) <= MAX_LENGTH:
            return False
        if self._is_data:
            return True
        values = item.values() if isinstance(item, dict) else item
        return not are_plain(values) and not self._is_small(item)

    def _is_small(self, item: Any) -> bool:
        """Return True if a collection has at most `MAX_PARTS` parts, at any depth, and `MAX_BYTES`.

        A part that occurs twice counts twice.
        """
        remaining = [item]
        parts = size = 0
        while remaining:
            each = remaining.pop()
            if isinstance(each, (Tensor, np.ndarray)):
                if id(each) not in self._saved_by_lightning:
                    size += each.nbytes
            elif type(each) not in PLAIN_TYPES and kind_of(each) is not None:
                inner = each
                if isinstance(each, dict):
                    inner = each.values()
                elif kind_of(each) == "object":
                    inner = dict(parts_of(each)).values()
                parts += len(inner)
                if parts <= MAX_PARTS:
                    remaining.extend(inner)
            if parts > MAX_PARTS or size > MAX_BYTES:
                return False
        return True


class _Restore:
    """Restores what `_Capture` has captured, in the same order."""

    def __init__(self, is_resume: bool):
        self._is_resume = is_resume
        self._restored: list[Any] = []  # objects by their number
        self._ids: set[int] = set()
        self._device: str | None = None
        # The type of the device on which the owner was saved, if it is now on another one.
        self._former_device: str | None = None

    def restore_owner(self, owner: Any, saved: Any) -> None:
        """Restore an owner from its captured state, or None."""
        self._device = self._former_device = None
        # A former version saved no device.
        if saved is not None and len(saved) == 3:
            self._device = device_type_of(owner)
            if self._is_resume and self._device != saved[2]:
                self._former_device = saved[2]
            saved = saved[:2]
        self.restore(owner, saved, type(owner).__name__)

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
        if kind == "uncaptured":
            if self._is_resume or item is _ABSENT:
                raise ValueError(f"{path} is {content}, which no checkpoint contains")
            return item
        if kind == "value":
            return content
        if kind == "enum":
            enum_class: Any = type(item)
            return enum_class[content]
        if kind in ("set", "frozenset"):
            current = {}
            if isinstance(item, (set, frozenset)):
                current = keys_by_plain_key(item)
            former = self._former_device
            elements = [restored_key(each, current, path, former) for each in content]
            return set(elements) if kind == "set" else frozenset(elements)
        if kind.startswith("tensor"):
            device_type = kind.partition(" ")[-1]
            if device_type == self._former_device:
                device_type = self._device or ""
            return filled_tensor(item, content, device_type)
        if kind == "array":
            return filled_array(item, content.numpy())
        if kind == "again":
            return self._restored[content]
        return self._restore_parts(item, kind, content, path)

    def _restore_parts(
        self, item: Any, kind: str, content: list[tuple[Any, Any]], path: str
    ) -> Any:
        """Return a list, tuple, dict or object with its saved parts."""
        if not has_kind(item, kind):
            name = kind.split(" ")[-1]
            if name not in _NEW_CONTAINERS:
                if item is _ABSENT:
                    raise ValueError(f"{path} is missing, and was a {name}; set it in __init__")
                found = type(item).__qualname__
                raise ValueError(f"{path} is a {found}, and was a {name}; set it in __init__")
            item = _NEW_CONTAINERS[name]()
        # Attributes may share a constant tuple and differ later. Tuples have no identity.
        if id(item) in self._ids and not isinstance(item, tuple):
            raise ValueError(f"{path} is another object than it was")
        self._ids.add(id(item))
        number = len(self._restored)
        self._restored.append(item)
        current = dict(parts_of(item))
        parts = {}
        for name, part in content:
            parts[name] = self.restore(current.get(name, _ABSENT), part, f"{path}.{name}")
        if isinstance(item, tuple):
            self._restored[number] = tuple_with(item, list(parts.values()))
            return self._restored[number]
        if isinstance(item, (list, deque)):
            item.clear()
            item.extend(parts.values())
        elif isinstance(item, dict):
            keys = keys_by_plain_key(item)
            if kind == "dict":  # of data, or of a former version: other keys are not saved
                keys = {name: key for name, key in keys.items() if isinstance(name, (str, int))}
            _fill_dict(item, keys, parts, path, self._former_device)
        else:
            for name, part in parts.items():
                dict_of_attribute(item, name)[name] = part
        return item


def _fill_dict(item: dict, keys: dict, parts: dict, path: str, former_device: str | None) -> None:
    """Set the entries of `keys` in a dict, in order, to saved ones, which are by plain keys."""
    for plain in keys.keys() - parts.keys():
        del item[keys[plain]]
    restored = {}
    for plain, part in parts.items():
        restored[restored_key(plain, keys, path, former_device)] = part
    if [plain for plain in keys if plain in parts] != list(parts):
        for key in restored:
            item.pop(key, None)
    for key, part in restored.items():
        item[key] = part
