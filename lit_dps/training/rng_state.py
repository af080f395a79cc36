"""States of random number generators: the global ones of torch, NumPy and Python, and those that
objects keep.

As plain numbers and tensors, so that a file of them can be read without executing anything.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer

KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
LEAVES = (torch.Tensor, np.ndarray, Trainer, type, ModuleType, FunctionType, random.SystemRandom)
LONG = 1000  # a longer list is one of examples


def capture(*owners: Any) -> dict[str, Any]:
    """The states of the global generators, and of those that the owners keep."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": _plain(np.random.get_state(legacy=False)),
        "python": random.getstate(),
        "kept": [_state(generator) for generator in generators_in(*owners)],
    }


def restore(state: dict[str, Any], *owners: Any) -> None:
    """Sets all generators as they were when `capture` was asked of owners alike.

    Raises:
        ValueError: if the owners keep more or fewer generators, or others.
    """
    torch.set_rng_state(
        state["torch"].cpu()
    )  # a file may have been read onto a GPU, with all that is in it
    if state["cuda"]:
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    for generator, kept in zip(generators_in(*owners), state["kept"], strict=True):
        _set(generator, kept)


@contextmanager
def preserve_rng_state(*owners: Any, seed: int | None = None) -> Iterator[None]:
    """In here what is drawn leaves no trace in the global generators, nor in those that the owners
    keep.

    With a seed the global generators begin from it: torch's, NumPy's and Python's.
    """
    kept = [(generator, _state(generator)) for generator in generators_in(*owners)]
    state = capture()
    try:
        if seed is not None:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
        yield
    finally:
        restore(state)
        for generator, before in kept:
            _set(generator, before)


def generators_in(*owners: Any) -> list[Any]:
    """The generators that objects keep among their attributes, lists and dicts, or those of such
    objects in turn."""
    return _kept(KINDS, owners)


def tensors_in(*owners: Any) -> list[torch.Tensor]:
    """Return the tensors of some objects, found as by `generators_in`."""
    return _kept((torch.Tensor, torch.nn.Parameter), owners)


def numeric_arrays_in(*owners: Any) -> list[np.ndarray]:
    """Return the NumPy arrays of numbers of some objects, and contiguous tensors as bytes.

    They are found as by `generators_in`.
    """
    arrays = [array for array in _kept((np.ndarray,), owners) if array.dtype.kind in "biufc"]
    for tensor in tensors_in(*owners):
        if (
            tensor.device.type == "cpu"
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
        ):
            arrays.append(tensor.detach().view(-1).view(torch.uint8).numpy())
    return arrays


def _kept(kinds: tuple[type, ...], owners: Sequence[Any]) -> list[Any]:
    found, seen, queue = [], set(), list(owners)
    for item in queue:  # grows on the way
        if id(item) in seen or (isinstance(item, LEAVES) and type(item) not in kinds):
            continue
        seen.add(id(item))
        if isinstance(item, kinds):
            found.append(item)
        elif isinstance(item, (list, tuple, dict)):
            if len(item) <= LONG:
                queue.extend(item.values() if isinstance(item, dict) else item)
        else:
            queue.extend(getattr(item, "__dict__", {}).values())
    return found


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return generator.getstate()


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state.cpu() if isinstance(state, torch.Tensor) else state)


def _plain(state: Any) -> Any:
    """NumPy's arrays as lists."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if isinstance(state, (np.ndarray, np.generic)) else state
