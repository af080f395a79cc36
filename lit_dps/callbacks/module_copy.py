"""A copy of a module on which training steps leave no trace in the module itself."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

_STRUCTURE = ("_modules", "_parameters", "_buffers")


def copy_of(module: LightningModule) -> LightningModule:
    """A module of its own parameters, buffers, attributes and generators, equal to the bit, that logs nothing.

    It shares the trainer, and what cannot be copied, such as a lock or an open file.
    """
    memo: dict[int, Any] = {id(shared): shared for shared in (module._trainer, module._fabric)}
    for part in module.modules():
        for key, value in vars(part).items():
            if key not in _STRUCTURE and id(value) not in memo:
                _prepare(value, memo)
    twin = copy.deepcopy(module, memo)
    twin.trainer = module._trainer  # Lightning's own copies forget it
    twin.__dict__["log"] = _log_nothing
    return twin


def _prepare(value: Any, memo: dict[int, Any]) -> None:
    """Notes how a value is copied that `deepcopy` cannot copy: what is left from a backward pass, or any object."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        memo[id(value)] = value.detach().clone()
        return
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:  # whatever its class raises: it is shared
        memo[id(value)] = value


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    pass
