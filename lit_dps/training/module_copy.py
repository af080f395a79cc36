"""A copy of a module on which training steps leave no trace in the module itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import CellType, FunctionType
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

import lit_dps.training.lightning_private as lightning_private

_STRUCTURE = ("_modules", "_parameters", "_buffers")


def copy_of(module: LightningModule) -> LightningModule:
    """A module of its own parameters, buffers, attributes and generators, equal to the bit, that logs nothing.

    Functions that it keeps, hooks say, refer to the copy where they refer to the module or to what it keeps. It shares
    the trainer, and what cannot be copied, such as a lock or an open file.
    """
    memo: dict[int, Any] = {id(shared): shared for shared in lightning_private.owners_of(module)}
    cells: list[tuple[CellType, CellType]] = []
    for value in _kept(module):
        if isinstance(value, FunctionType) and value.__closure__:
            memo[id(value)] = _rebound(value, cells)
        elif isinstance(value, Tensor) and value.grad_fn is not None:  # what is left from a backward pass
            memo[id(value)] = value.detach().clone()
    for part in module.modules():
        for key, value in vars(part).items():
            if key not in _STRUCTURE and id(value) not in memo:
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:  # whatever its class raises: it is shared
                    memo[id(value)] = value
    twin = copy.deepcopy(module, memo)
    for old, new in cells:
        new.cell_contents = memo.get(id(old.cell_contents), old.cell_contents)
    twin.trainer = lightning_private.owners_of(module)[0]  # Lightning's own copies forget it
    twin.__dict__["log"] = _log_nothing
    return twin


def _kept(module: LightningModule) -> Iterator[Any]:
    """What the parts of a module keep among their attributes, and in dicts and lists among them."""
    for part in module.modules():
        for key, value in vars(part).items():
            if key not in _STRUCTURE:
                yield value
                if isinstance(value, dict):
                    yield from value.values()
                elif isinstance(value, (list, tuple)):
                    yield from value


def _rebound(function: FunctionType, cells: list[tuple[CellType, CellType]]) -> FunctionType:
    """A function with variables of its own in place of those that it encloses; adds the pairs of both to `cells`."""
    own = tuple(CellType() for _ in function.__closure__)
    cells.extend(zip(function.__closure__, own, strict=True))
    new = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, own)
    new.__kwdefaults__, new.__dict__ = function.__kwdefaults__, dict(function.__dict__)
    return new


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass
