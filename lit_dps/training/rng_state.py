"""Saves and restores the states of random number generators, so that a run draws the same again.

For example, a data set that augments images may keep `self.rng = np.random.default_rng(0)`. After a
resume it has to draw the numbers that follow the last saved ones. Lightning's checkpoint contains
no generator. The functions below handle the global generators of torch, NumPy and Python, and
those that objects keep in attributes.

A state consists of plain numbers, lists and tensors, so that reading a file executes no code.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lit_dps.pruning.attributes import GENERATORS, walk_attributes


def capture(*owners: Any) -> dict[str, Any]:
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


def restore(state: dict[str, Any], *owners: Any) -> None:
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


@contextmanager
def preserve_rng_state(*owners: Any, seed: int | None = None) -> Iterator[None]:
    """Restore, at the end of the block, the global generators and those that the owners keep.

    Args:
        owners: Objects that may keep generators.
        seed: Seed of the global generators within the block; by default they keep their states.
    """
    states_before = [(generator, _state(generator)) for generator in generators_in(*owners)]
    global_before = capture()
    try:
        if seed is not None:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
        yield
    finally:
        restore(global_before)
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
