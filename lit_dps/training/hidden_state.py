"""What modules and data keep beside what a checkpoint has of them, and put back: counters,
averages, hidden networks.

Lightning saves parameters and persistent buffers. A loss weight in a Python number, a mean teacher
in a list, the sums of a metric in training would begin from nothing where a run goes on, and its
steps would not be an unbroken one's.
"""

from __future__ import annotations

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

from lit_dps.training.rng_state import KINDS

LONG = 1000  # a longer list is one of examples
PLAIN = (bool, int, float, complex, str, type(None))
METHODS = (FunctionType, MethodType, partial)  # strategies put some on a module
LEFT = (
    *METHODS,
    Trainer,
    Optimizer,
    LRScheduler,
    *KINDS,
    type,
    ModuleType,
)  # fixed, or saved by those who own them
HOLDERS = (nn.Module, LightningDataModule, SimpleNamespace, Namespace)
LIBRARIES = {
    *sys.stdlib_module_names,
    "torch",
    "lightning",
    "numpy",
}  # loggers, threads, loaders: not to be moved
PARTS = ("_parameters", "_buffers", "_modules")
_OF_THE_BASE = {
    *vars(LightningModule()),
    *vars(LightningDataModule()),
    "_hparams",
    "_hparams_initial",
} - {"training"}
_ABSENT = object()


def capture_attributes(*owners: Any) -> list[Any]:
    """The state of attributes, in lists, dicts and objects in turn, as plain numbers and tensors.

    That are numbers, texts, members of an Enum, and of all but data modules tensors and arrays too,
    as data are long. What `state_dict` has of a module is left out. Attributes of other kinds,
    which nobody can save, are left alone, and those of the standard library, of torch and of
    Lightning (loggers, threads, loaders).
    """
    walk = _Walk(owners)
    return [walk.of(owner).capture(owner) for owner in owners]


def restore_attributes(state: list[Any], *owners: Any) -> None:
    """Sets the attributes as they were when `capture_attributes` was asked of owners alike; tensors
    in place.

    Raises:
        ValueError: if an object is missing, or another one than it was, or one is an iterator.
    """
    walk = _Walk(owners)
    for owner, saved in zip(owners, state, strict=True):
        walk.of(owner).restore(owner, saved, type(owner).__name__)


@contextmanager
def unchanged_attributes(*owners: Any) -> Iterator[None]:
    """Restore, at the end of the block, attributes that its code changed; delete added ones.

    Raises:
        ValueError: as `restore_attributes`.
    """
    before = capture_attributes(*owners)
    names = [set(vars(owner)) for owner in owners]
    try:
        yield
    finally:
        for owner, known in zip(owners, names, strict=True):
            for name in vars(owner).keys() - known:
                del vars(owner)[name]
        if not equal_states(capture_attributes(*owners), before):
            restore_attributes(before, *owners)


def equal_states(first: Any, second: Any) -> bool:
    """Return True if two captured states are equal. NaN equals NaN; tensors are compared by
    element."""
    try:
        if first == second:  # fast for lists of thousands of numbers
            return True
    except (RuntimeError, ValueError):  # a comparison of several elements has no truth value
        pass
    return _equal(first, second)


def _equal(first: Any, second: Any) -> bool:
    """Return True if two captured states are equal, compared by element."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            equal_states(first[key], second[key]) for key in first
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal_states, first, second))
    if isinstance(first, float) and first != first:
        return second != second
    return bool(first == second)


class _Walk:
    """One way through all that owners keep, the same to save it and to put it back."""

    def __init__(self, owners: tuple[Any, ...]):
        saved = [o.state_dict(keep_vars=True).values() for o in owners if isinstance(o, nn.Module)]
        self.elsewhere = {
            id(value) for values in saved for value in values if isinstance(value, Tensor)
        }
        self.numbers: dict[int, int] = {}  # of objects, by id
        self.met: list[Any] = []  # in the order of their numbers
        self.tensors = True

    def of(self, owner: Any) -> _Walk:
        """The walk, on its way through an owner; tensors of data are examples, and left alone."""
        self.tensors = not isinstance(owner, LightningDataModule)
        return self

    def capture(self, item: Any) -> Any:
        """A kind and what belongs to it; None for what is left alone."""
        if isinstance(item, Enum):
            return "enum", item.name
        item = item.item() if isinstance(item, np.generic) else item
        if type(item) in PLAIN:
            return "value", item
        if isinstance(item, (Tensor, np.ndarray)):
            return self._tensor(item)
        if (
            isinstance(item, Iterator) and not isinstance(item, IOBase) and self.tensors
        ):  # data's go on by the pass
            return "iterator", None
        kind = _kind(item)
        if kind is None or not self._short(item):
            return None
        if kind in ("set", "frozenset"):
            return (kind, list(item)) if all(type(value) in PLAIN for value in item) else None
        if id(item) in self.numbers:
            return "again", self.numbers[id(item)]
        self._meet(item)
        if kind == "list" and all(
            type(value) in PLAIN for value in item
        ):  # thousands of numbers are common
            return kind, [(i, ("value", value)) for i, value in enumerate(item)]
        return kind, [(name, self.capture(value)) for name, value in _parts(item)]

    def _tensor(self, item: Tensor | np.ndarray) -> Any:
        if not self.tensors or id(item) in self.elsewhere:
            return None
        if isinstance(item, Tensor):
            return "tensor", item.detach().clone()
        return ("array", torch.from_numpy(item.copy())) if item.dtype.kind in "biufc" else None

    def _short(self, item: Any) -> bool:
        if not isinstance(item, (list, tuple, deque, dict, set, frozenset)) or len(item) <= LONG:
            return True
        return self.tensors and all(
            type(v) in PLAIN for v in (item.values() if isinstance(item, dict) else item)
        )

    def _meet(self, item: Any) -> None:
        self.numbers[id(item)] = len(self.met)
        self.met.append(item)

    def restore(self, item: Any, saved: Any, path: str) -> Any:
        """What is to stand in the place of `item`, which is mostly itself."""
        if saved is None:
            if item is _ABSENT:
                raise ValueError(f"{path} is not there, and cannot be saved")
            return item
        kind, content = saved
        if kind == "iterator":
            raise ValueError(f"{path} is an iterator, whose place is in no checkpoint")
        if kind == "value":
            return content
        if kind == "enum":
            return type(item)[content]
        if kind in ("set", "frozenset"):
            return set(content) if kind == "set" else frozenset(content)
        if kind in ("tensor", "array"):
            return _filled(item, content, kind)
        if kind == "again":
            return self.met[content]
        if _kind(item) != kind:
            item = {"list": list, "tuple": tuple, "dict": dict}.get(kind, object)()
        if id(item) in self.numbers or _kind(item) != kind:
            raise ValueError(f"{path} is another object than it was")
        self._meet(item)
        return self._put(item, content, path)

    def _put(self, item: Any, saved: list[tuple[Any, Any]], path: str) -> Any:
        """Puts the parts that were saved into a list, a dict or an object."""
        now = dict(_parts(item))
        parts = {
            name: self.restore(now.get(name, _ABSENT), part, f"{path}.{name}")
            for name, part in saved
        }
        if isinstance(item, tuple):
            if len(parts) == len(now) and all(part is now[name] for name, part in parts.items()):
                return item
            return (
                type(item)(*parts.values()) if hasattr(item, "_fields") else tuple(parts.values())
            )
        if isinstance(item, (list, deque)):
            item.clear()
            item.extend(parts.values())
        elif isinstance(item, dict):
            for name in now.keys() - parts.keys():
                del item[name]
            item.update(parts)
        else:
            for name, part in parts.items():
                _home(item, name)[name] = part
        return item


def _kind(item: Any) -> str | None:
    kinds = {
        tuple: "tuple",
        (list, deque): "list",
        dict: "dict",
        set: "set",
        frozenset: "frozenset",
    }
    found = next((kind for types, kind in kinds.items() if isinstance(item, types)), None)
    if found or isinstance(item, LEFT) or not hasattr(item, "__dict__"):
        return found
    return (
        "object"
        if isinstance(item, HOLDERS) or type(item).__module__.split(".")[0] not in LIBRARIES
        else None
    )


def _parts(item: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a list, a dict or an object, each with its name."""
    if isinstance(item, (list, tuple, deque)):
        yield from enumerate(item)
    elif isinstance(item, dict):
        yield from ((name, value) for name, value in item.items() if isinstance(name, (str, int)))
    else:
        for part in PARTS if isinstance(item, nn.Module) else ():
            yield from vars(item).get(part, {}).items()
        own = ((name, value) for name, value in vars(item).items() if name not in _OF_THE_BASE)
        yield from ((name, value) for name, value in own if not isinstance(value, METHODS))


def _home(item: Any, name: str) -> dict[str, Any]:
    """Where an object keeps an attribute."""
    parts = [vars(item).get(part, {}) for part in PARTS] if isinstance(item, nn.Module) else []
    return next((part for part in parts if name in part), vars(item))


@torch.no_grad()
def _filled(item: Any, saved: Tensor, kind: str) -> Any:
    """The tensor or array in whose place another one was saved, with its values; a new one if it
    has another shape."""
    if kind == "array":
        saved = saved.numpy()
        if not (
            isinstance(item, np.ndarray) and item.flags.writeable and item.shape == saved.shape
        ):
            return saved
        item[...] = saved
        return item
    if not isinstance(item, Tensor):
        return saved
    alike = (item.shape, item.dtype) == (saved.shape, saved.dtype) and not item.is_inference()
    return item.copy_(saved) if alike else saved.to(item.device)
