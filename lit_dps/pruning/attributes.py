"""Walks through the attributes of objects: the values that a module keeps, at any depth.

For example, `self.teacher = [network]` hides the parameters of a network in a list, where
`module.parameters()` does not find them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
MAX_LENGTH = 1000  # a longer list or dict contains examples, not settings
MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_IGNORED = (Trainer, type, ModuleType, FunctionType)
_LEAVES = (Tensor, np.ndarray, *GENERATORS)


def walk_attributes(*owners: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the values that objects keep as attributes, in lists and dicts, at any depth.

    Values are numbers, texts, tensors (also parameters and buffers), arrays, generators and all
    other objects without attributes. Trainers, classes, modules of Python and functions are
    skipped. Objects come breadth first, each once.

    Yields:
        The path of names to a value, such as ("teacher", 0, "weight"), and the value.
    """
    queue: list[tuple[tuple[Any, ...], Any]] = [((), owner) for owner in owners]
    seen: set[int] = set()
    for path, item in queue:  # the queue grows meanwhile
        if id(item) in seen or isinstance(item, _IGNORED):
            continue
        seen.add(id(item))
        parts = _parts_of(item)
        if parts is None:
            yield path, item
            continue
        for name, value in parts.items():
            queue.append(((*path, name), value))


def _parts_of(item: Any) -> dict[Any, Any] | None:
    """Return the parts of a list, a dict or an object by name; None if it has no parts."""
    if isinstance(item, (list, tuple, dict)):
        if len(item) > MAX_LENGTH:
            return {}
        if isinstance(item, dict):
            return item
        return dict(enumerate(item))
    if isinstance(item, _LEAVES) or not hasattr(item, "__dict__"):
        return None
    return attributes_of(item)


def attributes_of(item: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, with the parameters and parts of a module."""
    attributes = dict(vars(item))
    if isinstance(item, nn.Module):
        for part in MODULE_PARTS:
            attributes.update(attributes.pop(part, {}))
    return attributes


def hidden_tensors(
    network: nn.Module, keepers: Mapping[str, Any] | None = None
) -> dict[str, Tensor]:
    """Return tensors of real numbers that a network keeps beside parameters and buffers.

    Args:
        network: The network.
        keepers: Further objects that may keep tensors, by the name that their paths begin with.

    Returns:
        The tensors by path, such as `teacher.0.weight`.
    """
    registered = {id(tensor) for tensor in (*network.parameters(), *network.buffers())}
    hidden = {}
    for path, value in walk_attributes(network, keepers or {}):
        is_hidden = isinstance(value, Tensor) and id(value) not in registered
        if is_hidden and value.is_floating_point():
            hidden[".".join(map(str, path))] = value
    return hidden
